"""Runs the version that froze format 1 beside the working tree: both work in turns on the same store.

``REVISION`` names the commit. `installing` builds a wheel of it, once, below ``.cache/frozen``. `interleaving` starts a
process of either version (`worker`), and lets them train, tag, merge, compact and collect in turns, chosen by a seed:

    python -m tools.frozen --operations 60 --seed 3
"""
