"""Chains of deltas and replayed steps: what restores each tensor of a plan, chunk by chunk.

Imports `segments` and the rooms below it.
"""
