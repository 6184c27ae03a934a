"""Decides how each checkpoint is stored: as a full, a delta or a step diff. Nothing here reads or writes.

Imports `formats`, `host` and `errors`.
"""
