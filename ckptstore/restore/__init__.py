"""From a REF to tensors: the cheapest plan, chains of deltas and replayed steps, `load`.

Never writes. Imports `segments` and the rooms below it.
"""
