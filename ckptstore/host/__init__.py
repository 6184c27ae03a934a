"""The process and its memory: aligned buffers, threads, signals, the interpreter's end, crash points, warnings.

Knows nothing of stores. Imports `ckptstore.formats` and `ckptstore.errors` alone.
"""
