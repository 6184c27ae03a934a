"""Benchmarks of codecs, deltas and step diffs: bytes and processor time."""
