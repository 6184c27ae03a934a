"""Segments on a medium: writes plain and packed ones from streamed blocks, reads and verifies their chunks.

Handles files and bytes, but neither checkpoints nor chains. Imports `log` and the rooms below it.
"""
