"""Segments: safetensors files that describe themselves, and how tensors are placed in them (SPEC.md 5).

Imports `history`, `optim` and modules of `formats`.
"""
