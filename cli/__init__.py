"""The ``ckpt`` command: arguments in, text or JSON out. What it shows is computed by libraries of the engine.

Imports `analysis`, `doctor`, `tuning` and what is below them.
"""
