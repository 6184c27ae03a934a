"""Reports on checkpoints and runs: lineage, inspection, comparison, cost of restoring.

Only reads stores. It imports `restore` and the rooms below it.
"""
