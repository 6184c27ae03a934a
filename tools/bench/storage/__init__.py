"""Benchmarks of the store: saving and loading, media, long histories, memory, and how fast the command starts."""
