"""The main demo: a GPT that is killed again and again, saves every step, and ends bit-identical.

``python -m tools.demo`` trains a reference run without a store, then the same run with a checkpoint of every step
through ckptstore under repeated SIGKILLs, and compares the two bit for bit. docs/demo.md explains the results.
"""
