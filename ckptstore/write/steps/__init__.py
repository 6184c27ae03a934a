"""Step diffs: the updates of optimizers, compressed step by step, batched and written.

Used by the committer. Imports its siblings `snapshot`, `step_encoding` and `deltas`, and what is below `write`.
"""
