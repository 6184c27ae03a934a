"""Bytes <-> arrays: segment container, log records, codecs, state flattening. Pure functions: no I/O, no torch.

The normative description of everything here is ``SPEC.md`` beside this file.
"""
