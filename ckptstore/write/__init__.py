"""From tensors to a committed checkpoint: snapshot, compression, deltas, batches of steps, the committer, the writer.

Imports `restore` (a base may have to be read back) and what is below it.
"""
