"""SIGKILL of training scripts that use a `Checkpointer`, at random: they end in the bits of one that nobody killed.

``python -m tools.kills.shim_kills --help``. The script is `script`, a life `lives`, what is promised `sweeps`.
"""

from tools.kills.shim_kills.digests import digest

__all__ = ["digest"]
