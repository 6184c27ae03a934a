"""Reports on checkpoints and runs: lineage, inspection, comparison, cost of restoring.

Only reads stores. Imports `restore` and the rooms below it.
"""
