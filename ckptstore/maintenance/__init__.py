"""Maintains a store as a whole: gc, verification, merging.

Imports `write` and the rooms below it.
"""
