"""All code that uses torch: tensors and their digests, files that torch wrote, the settings that determine bits.

Other rooms use it through `bridge`, which imports torch only if the caller has. Imports `formats` and `host`.
"""
