"""A run for weeks, in short: a trainer that saves every step under rules of retention, upkeep and readers beside it.

`python -m tools.long_run --help`. The set that is promised in the end is worked out here, not by the product.
"""
