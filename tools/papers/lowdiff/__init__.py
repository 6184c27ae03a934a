"""LowDiff, section VIII: Experiments 1 to 10 and Table I."""
