"""Follows a run: restores each new checkpoint from the previous one, which is kept in memory, and yields it.

Never writes to the store, except pins. Imports `restore` and the rooms below it, and `exchange` for files.
"""
