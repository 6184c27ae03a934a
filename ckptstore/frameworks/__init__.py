"""The engine's only torch: tensors and their digests, files that torch wrote, what decides a run's bits.

Others come here through `bridge`, which imports torch only where the caller has. Imports `formats` and `host`.
"""
