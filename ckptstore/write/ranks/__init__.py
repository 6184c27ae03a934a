"""Checkpoints of many ranks: which rank writes what, the messages between ranks, and rank 0, which commits.

Used by `store`. Imports its siblings `rank_writer_factory`, `ledger` and `snapshot`, and what is below `write`.
"""
