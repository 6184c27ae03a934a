"""Strategy ``replica``: the agent repeats the optimizers' steps from the gradients.

Imports what `training` does.
"""
