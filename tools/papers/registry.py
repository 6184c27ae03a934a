"""The experiments, by name, without what they import: a listing must not import torch."""

from __future__ import annotations

import fnmatch
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tools.papers.result import Asked, Result

__all__ = ["EXPERIMENTS", "Experiment", "chosen"]


@dataclass(frozen=True, slots=True)
class Experiment:
    """One experiment.

    Attributes:
        name: what the command takes: the paper, and the number of the experiment or figure there.
        paper: LowDiff, PCcheck, LightCheck or XOR delta.
        figure: where it is in the paper.
        title: in a line.
        module: has ``run(asked) -> Result``.
        quick_seconds: about how long ``--quick`` takes on two idle cores.
    """

    name: str
    paper: str
    figure: str
    title: str
    module: str
    quick_seconds: int

    @property
    def heading(self) -> str:
        """The title of its picture."""
        return f"{self.paper}, {self.figure}: {self.title}"

    def run(self, asked: Asked) -> Result:
        """Run it."""
        found: Result = importlib.import_module(f"tools.papers.{self.module}").run(asked)
        return found


EXPERIMENTS: Final = (
    Experiment("lowdiff-7", "LowDiff", "Exp. 7, Table III", "Bytes of a checkpoint", "lowdiff.stored_bytes", 5),
)
"""In the order of the page."""


def chosen(names: Sequence[str]) -> list[Experiment]:
    """The experiments of names and globs (``all``, ``lowdiff-*``), in the order of the page.

    Raises:
        KeyError: a name that matches none.
    """
    found: list[Experiment] = []
    for name in names:
        pattern = "*" if name == "all" else name
        matching = [one for one in EXPERIMENTS if fnmatch.fnmatchcase(one.name, pattern)]
        if not matching:
            raise KeyError(name)
        found += matching
    return [one for one in EXPERIMENTS if one in found]
