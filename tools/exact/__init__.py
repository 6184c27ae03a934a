"""Restores and resumes a real training run in step diffs at random steps, and compares the bits."""
