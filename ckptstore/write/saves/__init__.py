"""Keeps track of saves: which steps are taken, in flight or lost, what becomes of each save, and what it costs.

Imports `log` and the rooms below it.
"""
