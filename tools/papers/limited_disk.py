"""A disk and a link to a peer that are as slow, in iterations, as a paper's: see `tools.baselines.medium`.

This machine's disk is faster in relation to its processor than the papers' disks were in relation to their GPUs. Where
a full takes a small part of an iteration, every way to save costs the same, nothing. So experiments limit it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final
from unittest import mock

from tools.baselines.medium import DISK
from tools.bench.training.training_cases import ROOT

__all__ = ["Disk", "limited_to", "throttled"]

STARTUP: Final = "tools/baselines/limited"
"""The folder whose ``sitecustomize`` limits the disk of every process that starts, agents included."""


@dataclass(frozen=True, slots=True)
class Disk:
    """A limit of the disk's rate, and of the link to a peer, in bytes a second; None: as they are.

    Attributes:
        rate: of the channel that all streams share.
        stream: what one stream takes in addition.
        link: to a peer's memory.
    """

    rate: float | None = None
    stream: float = 0.0
    link: float = 0.0

    @property
    def text(self) -> str:
        """For the environment."""
        return "" if self.rate is None else f"{self.rate:.0f},{self.stream:.0f},{self.link:.0f}"


def limited_to(nbytes: float, iteration: float, save: float, copy: float, one_stream: float = 1.0) -> Disk:
    """The limit under which a full of `nbytes` takes as many iterations as a paper's.

    Args:
        iteration: seconds.
        save: iterations that one stream takes to write a full.
        copy: iterations that the link takes for a copy.
        one_stream: the part of the channel that one stream gets.
    """
    alone = nbytes / (save * iteration)
    rate = alone / one_stream
    stream = float("inf") if one_stream == 1.0 else 1 / (1 / alone - 1 / rate)
    return Disk(rate, stream, nbytes / (copy * iteration))


@contextlib.contextmanager
def throttled(disk: Disk) -> Iterator[None]:
    """Processes that start inside have that disk."""
    if not disk.text:
        yield
        return
    paths = [str(ROOT / STARTUP), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    with mock.patch.dict(os.environ, {DISK: disk.text, "PYTHONPATH": os.pathsep.join(paths)}):
        yield
