"""Python imports this as it starts, where this folder is on PYTHONPATH: `tools.baselines.medium` limits the disk.

So an agent, which a trainer starts as a process of its own, has the limited disk, too.
"""

from tools.baselines import medium

medium.limit()
