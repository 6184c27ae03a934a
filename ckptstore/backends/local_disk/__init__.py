"""Stores on file systems of this machine: local disks and persistent memory."""
