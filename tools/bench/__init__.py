"""Benchmarks: saving and loading compared with the common tools and the raw disk, and the start time of the command."""
