"""Two tiers: a store near its writer, and a remote one of the same run, whose log decides terms.

Drains, terms in both, what comes back. Imports `maintenance`, `write` and what is below it.
"""
