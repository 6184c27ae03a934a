"""What the optimizers did in a step: noted by hooks, explained to the writer of step diffs.

Imports what `training` does.
"""
