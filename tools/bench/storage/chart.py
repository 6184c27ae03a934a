"""The chart of a benchmark run: one panel for each phase, bars are medians, whiskers are quartiles."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tools.bench.storage.report import Row, by_phase, quartiles

_TITLES = {
    "save": "Save to durable (dark: the call blocks)",
    "cold": "Cold load, every byte touched",
    "warm": "Warm load, every byte touched",
}
_OURS, _OTHERS, _RAW = "#2563eb", "#9ca3af", "#d4d4d8"


def _color(row: Row) -> str:
    if row.method.startswith("ckptstore"):
        return _OURS
    return _RAW if row.method.startswith("raw") else _OTHERS


def draw(rows: Sequence[Row], title: str, path: Path) -> None:
    """Write the chart as a PNG. Rows without samples are left out."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    phases = {phase: shown for phase, kept in by_phase(rows).items() if (shown := [row for row in kept if row.samples])}
    if not phases:
        return
    figure, panels = pyplot.subplots(
        len(phases),
        1,
        figsize=(9, sum(0.9 + 0.36 * len(kept) for kept in phases.values())),
        height_ratios=[1.5 + len(kept) for kept in phases.values()],
        squeeze=False,
        layout="constrained",
    )
    for panel, (phase, kept) in zip(panels[:, 0], phases.items(), strict=True):
        shown = sorted(kept, key=lambda row: row.seconds, reverse=True)
        medians = [row.seconds for row in shown]
        spread = [quartiles([sample["seconds"] for sample in row.samples]) for row in shown]
        whiskers = [
            [middle - low for middle, (low, _) in zip(medians, spread, strict=True)],
            [high - middle for middle, (_, high) in zip(medians, spread, strict=True)],
        ]
        labels = [row.label for row in shown]
        panel.barh(labels, medians, xerr=whiskers, color=[_color(row) for row in shown], capsize=2, ecolor="#52525b")
        if phase == "save":
            stalls = [row.median("stall_s") or 0.0 for row in shown]
            panel.barh(labels, stalls, height=0.25, color="#111827")
        for place, seconds in enumerate(medians):
            panel.annotate(
                f"{seconds:.3f} s",
                (max(seconds, spread[place][1]), place),
                (4, 0),
                textcoords="offset points",
                va="center",
            )
        panel.set_title(_TITLES[phase], loc="left", fontsize=10)
        panel.set_xlim(0, max(high for _, high in spread) * 1.15)
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1, 0].set_xlabel("seconds, median and quartiles")
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
