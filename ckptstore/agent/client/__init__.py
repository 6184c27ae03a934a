"""The trainer's side: it starts or finds an agent, fills its buffers, and is a `Writer`.

Imports `protocol`, `store`, `write` and what is below; not `server`.
"""
