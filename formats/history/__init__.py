"""The history of a store: records of its log, the catalog they make, folds, retention rules (SPEC.md 6 to 9)."""
