"""Benchmarks of training loops that save: what each strategy costs, what a kill loses."""
