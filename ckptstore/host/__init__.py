"""The process and its memory: aligned buffers, threads, signals, interpreter exit, crash points, warnings.

Does not know about stores. Imports only `ckptstore.formats` and `ckptstore.errors`.
"""
