"""What trainer and agent share: their messages, shared memory, where an agent is found, what they make of a state.

Imports `write` and what is below it; neither `client` nor `server`.
"""
