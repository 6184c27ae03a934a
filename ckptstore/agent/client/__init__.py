"""The trainer's side: it starts or finds an agent, fills the agent's buffers, and offers a `Writer`.

Imports `protocol`, `store`, `write` and what is below; not `server`.
"""
