"""Bytes and files over time, as a picture."""

from __future__ import annotations

import csv
from pathlib import Path

__all__ = ["plot"]


def plot(table: Path, picture: Path) -> None:
    """Plot ``sizes.csv`` as a picture (its suffix decides the format)."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    steps = [int(row["step"]) for row in rows]
    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 5), layout="constrained")
    above.plot(steps, [int(row["nbytes"]) / 1e6 for row in rows])
    above.set(ylabel="MB in live segments", ylim=(0, None))
    for name in ("objects", "slots", "segments", "checkpoints"):
        below.plot(steps, [int(row[name]) for row in rows], label=name)
    below.set(xlabel="newest step", ylabel="number", ylim=(0, None))
    below.legend()
    figure.savefig(picture)
    pyplot.close(figure)
