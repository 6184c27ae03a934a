"""Compares a checkpoint with the script's objects, and restores it into them.

Imports what `training` does.
"""
