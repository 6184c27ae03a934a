"""Plot the wasted time over (full_every, batch) as a heat map. Needs matplotlib (the extra ``plot``)."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ckptstore.errors import MissingDependencyError, UsageError
from ckptstore.exchange.atomic_files import refuse_store
from ckptstore.tuning.optimum import Configuration, best
from ckptstore.tuning.wasted_time import Job, Model

__all__ = ["heat_map"]

_LEVELS = (1.02, 1.05, 1.1, 1.2, 1.5, 2.0, 3.0)
_CEILING = 5.0
"""Upper end of the colour scale, as a multiple of the minimum."""


def heat_map(job: Job, path: str | os.PathLike[str]) -> None:
    """Write a picture (format by suffix) of the wasted time as a multiple of the minimum, with the optimum marked.

    The colours (viridis) and the grey of full_every < batch are distinct with any colour vision; contour lines show the
    numbers.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        UsageError: matplotlib cannot write this suffix, or the path is inside a checkpoint store.
        OSError: the picture cannot be written.
    """
    refuse_store(Path(path).resolve())  # resolved, because the target of a link is overwritten
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("plots need matplotlib: pip install 'ckptstore[plot]'") from error
    model = job.model()
    optimum = best(model)
    least = model.total(optimum.interval, optimum.batch)
    intervals, batches = _axis(optimum.interval, 10), _axis(optimum.batch, 6)
    figure = Figure(figsize=(8, 5.4), layout="constrained")
    axes: Any = figure.add_subplot()
    mesh = _draw(axes, model, intervals, batches, least)
    _mark(axes, optimum, least)
    _label(axes, job, intervals, batches)
    _scale(figure.colorbar(mesh, ax=axes, extend="max", label="multiple of the least"))
    suffix = os.fspath(path).rpartition(".")[2].lower()
    if suffix not in (known := figure.canvas.get_supported_filetypes()):
        raise UsageError(
            f"{os.fspath(path)}: no picture of this kind can be drawn; there are {', '.join(sorted(known))}"
        )
    figure.savefig(path, dpi=150)


def _draw(axes: Any, model: Model, intervals: Sequence[float], batches: Sequence[float], least: float) -> Any:
    """Draw colours, contour lines, and grey over the impossible region -> the colours."""
    from matplotlib.colors import LogNorm
    from matplotlib.patheffects import withStroke

    cells = [[_ratio(model, n, b, least) for n in intervals] for b in batches]
    # Lines end at b = 1/f (one cell beyond it, under the grey), so that no label is in the impossible region.
    lined = [
        [c if b <= n * 1.05 else math.nan for n, c in zip(intervals, row, strict=True)]
        for b, row in zip(batches, cells, strict=True)
    ]
    axes.set_facecolor("0.85")
    mesh = axes.pcolormesh(
        intervals, batches, cells, norm=LogNorm(1, _CEILING), cmap="viridis_r", shading="gouraud", rasterized=True
    )
    lines = axes.contour(intervals, batches, lined, levels=_LEVELS, colors="black", linewidths=0.7, alpha=0.7)
    for label in axes.clabel(lines, fmt=lambda level: f"{level:g}x", fontsize=8):
        label.set_path_effects([withStroke(linewidth=2, foreground="white", alpha=0.7)])
    axes.fill_between(intervals, intervals, max(batches) * 2, color="0.85", linewidth=0, zorder=3)
    axes.set(xscale="log", yscale="log", xlim=(intervals[0], intervals[-1]), ylim=(batches[0], batches[-1]))
    if batches[-1] > intervals[0] * 1.5:
        axes.text(
            0.02,
            0.97,
            "batch > full_every: impossible",
            transform=axes.transAxes,
            va="top",
            fontsize=9,
            color="0.3",
            zorder=4,
        )
    return mesh


def _label(axes: Any, job: Job, intervals: list[float], batches: list[float]) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _position: f"{value:,g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.set_xticks(_ticks(intervals), minor=False)
    axes.set_yticks(_ticks(batches), minor=False)
    axes.set_xlabel("full_every: iterations from one full to the next")
    axes.set_ylabel("batch: diffs per write")
    axes.set_title(
        f"Wasted time, MTBF {_short(job.mtbf)}, full {job.full_bytes / 1e9:.3g} GB at {job.bandwidth / 1e9:.3g} GB/s"
    )


def _scale(bar: Any) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    bar.set_ticks([1, 1.1, 1.2, 1.5, 2, 3, 5])
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _position: f"{value:g}x"))
    bar.ax.yaxis.set_minor_formatter(NullFormatter())


def _mark(axes: Any, optimum: Configuration, least: float) -> None:
    """Mark the optimum with a star whose white rim shows on every colour, and write its numbers in a corner."""
    axes.plot(
        optimum.interval,
        optimum.batch,
        "*",
        markersize=16,
        color="#d55e00",
        markeredgecolor="white",
        linestyle="none",
        zorder=5,
        label=f"least: full_every = {optimum.interval:,}, batch = {optimum.batch:,}\n"
        f"wastes {least:.2%} of the time trained",
    )
    axes.legend(loc="lower right", framealpha=0.95, fontsize=9).set_zorder(6)


def _ratio(model: Model, interval: float, batch: float, least: float) -> float:
    return model.total(interval, min(batch, interval)) / least  # beyond b = 1/f: covered, yet smooth up to the edge


def _axis(middle: int, factor: int, points: int = 160) -> list[float]:
    """Real values in equal ratios around the optimum; never below 1."""
    low, high = max(1.0, middle / factor), max(4.0, middle * factor)
    return [low * math.exp(math.log(high / low) * index / (points - 1)) for index in range(points)]


def _ticks(values: list[float]) -> list[float]:
    decades = range(math.floor(math.log10(values[0])), math.ceil(math.log10(values[-1])) + 1)
    return [m * 10.0**d for d in decades for m in (1, 2, 5) if values[0] <= m * 10.0**d <= values[-1]]


def _short(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.3g} s"
