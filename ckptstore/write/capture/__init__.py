"""Copies states to host memory, so that training continues while they are stored.

Imports `segments`, `frameworks` and the rooms below them.
"""
