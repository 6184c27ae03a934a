"""What people are told about checkpoints: lineage, inspection, comparison, cost of restoring.

Reads only. Imports `restore` and what is below it.
"""
