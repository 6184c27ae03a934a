"""The script's state: gathered from its objects, and copied by plan while only bits change.

Imports what `training` does.
"""
