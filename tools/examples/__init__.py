"""Typical training scripts, before and after: docs/checkpointer.md shows the changes."""
