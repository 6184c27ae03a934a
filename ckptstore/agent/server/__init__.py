"""The agent's process: it serves one trainer, keeps states in shared memory, and saves them with a writer.

Imports `protocol`, `store`, `write` and what is below; not `client`.
"""
