"""The ``ckpt`` command: parses arguments and prints text or JSON.

Libraries of the engine compute what it prints. Imports `analysis`, `doctor`, `tuning` and the rooms below them.
"""
