"""Chains of deltas and replayed steps: what restores each tensor of a plan, chunk by chunk."""
