"""What trainer and agent share: messages, shared memory, the agent's address, the layout and hash of a state.

Imports `write` and what is below it; neither `client` nor `server`.
"""
