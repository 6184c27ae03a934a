"""What the papers compare themselves with, as real code: each saves a training loop and restores it after a SIGKILL.

`strategy` is the interface, `catalog` lists the baselines. CheckFreq, Gemini, GPM and difference checkpointing are
implemented as their papers describe the mechanism; none of their code is used. ``python -m tools.papers baselines``
kills and restores each.
"""
