"""What is done to a store as a whole: gc, verification, merging.

Three rooms that do not know each other. Import `write` and what is below it.
"""
