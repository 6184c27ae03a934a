"""The main job: a GPT that is killed again and again, checkpoints every step, and ends up bit-identical.

``python -m tools.demo`` trains a reference run without a store, then the same run with a checkpoint of every step
through ckptstore while SIGKILL strikes, and compares the two bit for bit. docs/demo.md explains what it shows.
"""
