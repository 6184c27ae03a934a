"""A short version of a run for weeks: a trainer that saves every step under retention rules, with upkeep and readers.

`python -m tools.long_run --help`. The set of checkpoints promised at the end is computed here, not by the product.
"""
