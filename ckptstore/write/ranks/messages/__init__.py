"""Messages between ranks: the key-value store that carries them, their contents, and the ranks that did not answer.

Used by `write.ranks`. Imports `write.policy.orders` and what is below `write`.
"""
