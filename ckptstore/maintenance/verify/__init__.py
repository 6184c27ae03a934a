"""Is everything in the store what was written, and can every checkpoint be restored?

`verification` asks, the other modules know one answer each. Imports what `maintenance` may.
"""
