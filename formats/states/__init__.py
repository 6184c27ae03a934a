"""States: nested training state as a typed tree and named tensors, of one process or many ranks (SPEC.md 3).

Imports `segment_files` and modules of `formats`.
"""
