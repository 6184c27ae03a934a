"""Benchmarks: saving and loading against the common tools and the raw disk, and how fast the command starts."""
