"""What works on this machine and on this medium, what is slow, and what to do about it (``ckpt doctor``).

Imports `store` and what is below it; torch through `frameworks.bridge` alone.
"""
