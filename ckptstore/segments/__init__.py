"""Segments on a medium: blocks streamed into one, plain and packed ones written, chunks read and verified.

Knows files and bytes, neither checkpoints nor chains. Imports `log` and what is below it.
"""
