"""Segments: safetensors files that describe themselves, plain or packed, and how tensors lie in them (SPEC.md 5)."""
