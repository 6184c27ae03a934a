"""Two tiers: a store near its writer, and a remote store of the same run whose log decides which terms exist.

Drains, opens terms in both tiers, and restores from the remote. Imports `maintenance`, `write` and the rooms below.
"""
