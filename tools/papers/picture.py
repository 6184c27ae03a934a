"""PNGs of figures, with matplotlib (the extra ``bench``, ``plot`` or ``test``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tools.papers.result import Figure

__all__ = ["draw"]

_COLORS: Final = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#4b5563", "#be185d", "#65a30d")
_PAPER: Final = "#c4c4cc"


def draw(figures: Sequence[Figure], title: str, path: Path) -> None:
    """Write the panels below each other."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    sheet, panels = pyplot.subplots(
        len(figures), 1, figsize=(9, 3.4 * len(figures) + 0.4), squeeze=False, layout="constrained"
    )
    for panel, figure in zip(panels[:, 0], figures, strict=True):
        (_bars if figure.kind == "bars" else _lines)(panel, figure)
        if figure.limit is not None:
            panel.axhline(figure.limit, color="#52525b", linestyle="--", linewidth=1)
        panel.set_title(figure.title, loc="left", fontsize=10)
        panel.set_xlabel(figure.x)
        panel.set_ylabel(figure.y)
        if "y" in figure.log:
            panel.set_yscale("log")
        if "x" in figure.log and figure.kind == "lines":
            panel.set_xscale("log")
        panel.spines[["top", "right"]].set_visible(False)
        if len(figure.series) > 1:
            panel.legend(fontsize=8, frameon=False)
    sheet.suptitle(title, fontsize=11)
    sheet.savefig(path, dpi=120)
    pyplot.close(sheet)


def _color(name: str, place: int) -> str:
    return _PAPER if name.startswith("paper") else _COLORS[place % len(_COLORS)]


def _bars(panel: Any, figure: Figure) -> None:
    width = 0.8 / len(figure.series)
    for place, (name, values) in enumerate(figure.series.items()):
        shift = (place - (len(figure.series) - 1) / 2) * width
        spots = [group + shift for group, value in enumerate(values) if value is not None]
        heights = [value for value in values if value is not None]
        panel.bar(spots, heights, width, label=name, color=_color(name, place))
        for spot, height in zip(spots, heights, strict=True):
            panel.annotate(f"{height:.3g}", (spot, height), (0, 1), textcoords="offset points", ha="center", fontsize=6)
    panel.set_xticks(range(len(figure.at)), [str(one) for one in figure.at], fontsize=8)


def _lines(panel: Any, figure: Figure) -> None:
    for place, (name, values) in enumerate(figure.series.items()):
        spots = [(at, value) for at, value in zip(figure.at, values, strict=True) if value is not None]
        style = "--" if name.startswith("paper") else "-"
        panel.plot(*zip(*spots, strict=True), style, marker="o", markersize=3, label=name, color=_color(name, place))
