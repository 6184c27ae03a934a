"""Stores on file systems of this machine: local disks and persistent memory.

Imports modules of `backends`, and the rooms below them.
"""
