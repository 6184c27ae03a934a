"""Bytes <-> arrays: segment container, log records, codecs, state flattening. Pure functions: no I/O, no torch.

``SPEC.md`` beside this file describes all of it, normatively. Imports nothing of the engine but `errors`.
"""
