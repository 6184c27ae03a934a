"""Keeping up with a run: each new checkpoint restored from the one before, which is held in memory, and handed over.

Never writes to the store, but for pins. Imports `restore` and what is below it, and `exchange` for files.
"""
