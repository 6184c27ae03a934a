"""Simulations of jobs that no machine here can hold: goodput under failures, and commits of thousands of ranks.

`model` trains, fails and restores by measured costs; `traces` has times of failures. `life` is one life of a real job,
which is killed; `kills` has a job live again and again, and `agreement` says how far the model is off. `world` gives
threads one virtual clock, and `ranks` lets thousands of real `RankWriter`s of this product commit over a mailbox and a
bucket that count.
"""
