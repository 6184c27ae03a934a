"""Messages between ranks: the key-value store that carries them, what they say, and who did not answer.

Used by `write.ranks`. Imports `write.orders` and what is below `write`.
"""
