"""Verifies that everything in a store is what was written, and that every checkpoint can be restored.

`verification` is the entry; each other module does one check. Imports what `maintenance` may import.
"""
