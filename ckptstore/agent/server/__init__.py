"""The agent's process: it serves one trainer, keeps states in shared memory, and has a writer.

Imports `protocol`, `store`, `write` and what is below; not `client`.
"""
