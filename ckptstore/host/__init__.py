"""The process and its memory: aligned buffers, threads, signals, interpreter exit, crash points, warnings.

This room does not know about stores. It imports only `ckptstore.formats` and `ckptstore.errors`.
"""
