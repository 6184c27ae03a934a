"""SIGKILL of training scripts that use a `Checkpointer`, at random: they end with the bits of an undisturbed run.

``python -m tools.kills.shim_kills --help``. `script` has the script, `lives` runs it, `sweeps` checks the promises.
"""

from tools.kills.shim_kills.digests import digest

__all__ = ["digest"]
