"""Messages between ranks: the key-value store that carries them, what they say, and who did not answer.

Used by `write.ranks`. Imports `write.policy.orders` and what is below `write`.
"""
