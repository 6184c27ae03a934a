"""Beyond the papers' clusters: goodput of 1 to 16,384 workers, and commits of thousands of ranks, simulated."""
