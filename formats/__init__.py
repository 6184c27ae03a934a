"""Convert between bytes and arrays: segments, log records, codecs, state trees. Pure functions without I/O or torch.

``SPEC.md`` beside this file is the normative description. Imports nothing of the engine but `errors`.
"""
