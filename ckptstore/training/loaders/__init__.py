"""Data loaders whose batches are counted, and how a resumed run continues in an epoch.

Imports what `training` does.
"""
