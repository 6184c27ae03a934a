"""Plot a store's growth: stored bytes over steps, by kind, and a metric from its metadata such as the loss."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ckptstore.analysis.report_plots import STYLE
from ckptstore.errors import MissingDependencyError, UsageError
from ckptstore.formats.history.rule_rankings import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ckptstore.reports.store_stats import StoreStats

__all__ = ["draw_growth"]

_KINDS: Final = {"full": "#0072B2", "delta": "#D55E00", "gradient": "#009E73", "held": "#c5cad1"}
_NAMES: Final = {"gradient": "step diff"}
"""Names of kinds in the plot that differ from the format's names."""
_LINES: Final = ("#22272e", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_DOTS: Final = 200
"""Maximum number of points that are drawn with dots."""
_WIDE: Final = 50
"""A metric that changes by more than this factor gets a logarithmic axis."""
_TOLD_APART: Final = 8
"""Maximum number of terms that the legend names."""
_UNITS: Final = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))
_SUFFIXES: Final = (".svg", ".png", ".pdf")


def draw_growth(found: StoreStats, path: str | os.PathLike[str], metric: str = "loss") -> None:
    """Draw the stored bytes of a store's checkpoints, by kind, and a metric of them.

    Args:
        path: the picture: ``.svg``, ``.png`` or ``.pdf``; an existing file is replaced.
        metric: name of a number in the metadata (or in their ``metrics``); drawn if any checkpoint has it.

    Raises:
        UsageError: another suffix, or there is no checkpoint.
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
    rated: dict[int, list[tuple[int, float]]] = {}
    for info in infos:
        if (value := number(info.metadata, metric)) is not None:
            rated.setdefault(info.term, []).append((info.step, value))
    with rc_context(STYLE):
        figure = Figure(figsize=(8.4, 5.6 if rated else 3.4), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(2 if rated else 1, 1, squeeze=False, sharex=True).ravel()
        _bytes_over_steps(axes[0], found.steps, infos[-1].step)
        if rated:
            _metric_over_steps(axes[1], rated, metric)
        axes[-1].set_xlabel("step")
        figure.savefig(out, facecolor="white")


def _bytes_over_steps(axes: Axes, stored: Sequence[tuple[int, str, int]], last: int) -> None:
    """Draw what was stored up to each step, and on to the `last`. A batch counts at its first step."""
    stored = [*stored, (max([last, *(step for step, _, _ in stored)]), "full", 0)]
    steps = [step for step, _, _ in stored]
    there = {kind for _, kind, size in stored if size}
    kinds = [kind for kind in _KINDS if kind in there] + sorted(there - set(_KINDS))
    total = sum(size for _, _, size in stored)
    scale, unit = next((one for one in _UNITS if total >= one[0]), _UNITS[-1])
    layers = [list(accumulate(size / scale if one == kind else 0.0 for _, one, size in stored)) for kind in kinds]
    names = [_NAMES.get(kind, kind) for kind in kinds]
    colours = [_KINDS.get(kind, "#999999") for kind in kinds]
    axes.stackplot(steps, layers, labels=names, colors=colours, step="post")
    text = f"{total / scale:.3g}" if total < 1000 * scale else f"{total / scale:,.0f}"
    axes.set_title(f"{text} {unit} stored up to step {steps[-1]:,}")
    axes.set_ylabel(unit)
    axes.legend(loc="upper left")


def _metric_over_steps(axes: Axes, rated: Mapping[int, Sequence[tuple[int, float]]], metric: str) -> None:
    """Draw a line for each term, because forked terms have the same steps."""
    values = [value for points in rated.values() for _, value in points]
    marker = "." if len(values) < _DOTS else ""
    for order, (term, points) in enumerate(sorted(rated.items())):
        axes.plot(*zip(*points, strict=True), color=_LINES[order % len(_LINES)], marker=marker, label=f"term {term}")
    if min(values) > 0 and max(values) > _WIDE * min(values):
        axes.set_yscale("log")
    axes.set_title(metric if len(rated) == 1 else f"{metric}, a line for each term")
    if 1 < len(rated) <= _TOLD_APART:
        axes.legend(loc="upper right", ncols=2)
