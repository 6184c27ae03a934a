"""Snapshots that copy each layer as soon as its update is done, while training continues.

Imports what `training` does.
"""
