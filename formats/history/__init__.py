"""The history of a store: records of its log, the catalog they make, folds, retention rules (SPEC.md 6 to 9).

Imports modules of `formats` that do not know about stores.
"""
