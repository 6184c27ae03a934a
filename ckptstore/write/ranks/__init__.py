"""Checkpoints of many ranks: who writes what, parts, the mailbox they travel by, one rank that commits them.

Used by `store`. Imports its siblings `rank_writer_factory`, `ledger` and `snapshot`, and what is below `write`.
"""
