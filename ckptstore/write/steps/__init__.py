"""Step diffs: what optimizers did, coded step by step, batched, written.

Used by the committer. Imports its siblings `snapshot`, `step_encoding` and `deltas`, and what is below `write`.
"""
