"""Report what works on this machine and medium, what is slow, and what to do about it (``ckpt doctor``).

Imports `store` and the rooms below it; torch only through `frameworks.bridge`.
"""
