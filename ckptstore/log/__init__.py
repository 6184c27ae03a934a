"""The log of a store: READ, WRITER OPEN and COMMIT, folds, pins, requests, REFs (formats/SPEC.md 7 to 10).

Every module works on a `Journal`; none handles tensors. Imports `backends` and the rooms below it.
"""
