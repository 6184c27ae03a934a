"""The log of a store: READ, WRITER OPEN and COMMIT, folds, pins, requests, REFs (design: commit protocol).

`journal` is what all of it works on; nothing here touches tensors. Imports `backends` and what is below it.
"""
