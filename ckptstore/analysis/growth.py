"""A picture of a store: bytes over steps, by kind, and the loss where its metadata have one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ckptstore.analysis.plots import COLOURS, STYLE
from ckptstore.errors import MissingDependencyError, UsageError
from ckptstore.formats.ranking import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ckptstore.reports.stats import StoreStats

__all__ = ["draw_growth"]

_KINDS: Final = {"full": COLOURS["sub"], "delta": COLOURS["xor"], "gradient": COLOURS["sub-context"], "held": "#c5cad1"}
_SUFFIXES: Final = (".svg", ".png", ".pdf")


def draw_growth(found: StoreStats, path: str | os.PathLike[str], metric: str = "loss") -> None:
    """Draw what the checkpoints of a store take together, kind by kind, and a metric of them.

    Args:
        path: the picture: ``.svg``, ``.png`` or ``.pdf``; replaced if it is there.
        metric: name of a number in the metadata (or in their ``metrics``); drawn if any checkpoint has it.

    Raises:
        UsageError: another kind of picture, or there is no checkpoint.
        MissingDependencyError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    out = Path(path)
    if out.suffix.lower() not in _SUFFIXES:
        raise UsageError(f"{out}: a picture's name ends with {', '.join(_SUFFIXES)}")
    if not found.checkpoints:
        raise UsageError("there is no checkpoint to draw")
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise MissingDependencyError("--plot draws with matplotlib: pip install 'ckptstore[plot]'") from error
    infos = sorted(found.checkpoints, key=lambda info: (info.step, info.term))
    rated = [(info.step, value) for info in infos if (value := number(info.metadata, metric)) is not None]
    with rc_context(STYLE):
        figure = Figure(figsize=(8.4, 5.6 if rated else 3.4), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(2 if rated else 1, 1, squeeze=False, sharex=True).ravel()
        _bytes_over_steps(axes[0], found.steps)
        if rated:
            axes[1].plot([step for step, _ in rated], [value for _, value in rated], color="#22272e", marker=".")
            axes[1].set_title(metric)
        axes[-1].set_xlabel("step")
        figure.savefig(out, facecolor="white")


def _bytes_over_steps(axes: Axes, stored: Sequence[tuple[int, str, int]]) -> None:
    steps = [step for step, _, _ in stored]
    there = {kind for _, kind, _ in stored}
    kinds = [kind for kind in _KINDS if kind in there] + sorted(there - set(_KINDS))
    layers = [list(accumulate(size / 2**20 if one == kind else 0.0 for _, one, size in stored)) for kind in kinds]
    axes.stackplot(steps, layers, labels=kinds, colors=[_KINDS.get(kind, "#999999") for kind in kinds], step="post")
    axes.set_title("stored up to a step")
    axes.set_ylabel("MiB")
    axes.legend(loc="upper left")
