"""Keeps track of saves: which steps are taken, in flight or lost, and the outcome and cost of each save.

Imports `log` and the rooms below it.
"""
