"""States: nested training state as a typed tree and named tensors, of one process or of many ranks (SPEC.md 3)."""
