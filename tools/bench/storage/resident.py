"""Measures the memory of a writer over many saves: ``python -m tools.bench.storage.resident --saves 20000``.

One process saves a small state again and again, with retention rules, gradient-free deltas or fulls, and occasional gc,
and reads its own resident size between saves. Of the past a writer keeps only the catalog: under rules it stays as long
as the checkpoints that they keep. The last line says how many bytes each save has left behind, over the second half of
them.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click
import numpy as np

import ckptstore
from tools.bench.storage.catalog import resident

__all__ = ["Reading", "left_per_save", "readings"]

RULES: Final = ("last:50", "every:1000", "best:loss:3")
_GC_EVERY: Final = 500

Reading = tuple[int, int, int]
"""Saves done, resident bytes of the process, checkpoints in the store."""


def readings(folder: Path, saves: int, every: int) -> Iterator[Reading]:
    """Save, and from time to time report the memory."""
    state = {"weight": np.zeros(2000, np.float32), "step": 0}
    with ckptstore.open(folder) as store, store.writer(keep=RULES, deltas=10, poll_seconds=None) as writer:
        for step in range(1, saves + 1):
            state["weight"][step % 2000] = step
            state["step"] = step
            writer.save(state, step, metadata={"loss": 1.0 / step})
            if step % _GC_EVERY == 0:
                store.gc()
            if step % every == 0:
                gc.collect()
                yield step, resident(), len(store.checkpoints())


def left_per_save(found: list[Reading]) -> float:
    """Bytes that a save leaves behind in memory, by the second half of the readings (least squares)."""
    half = found[len(found) // 2 :]
    slope, _ = np.polyfit([saves for saves, _, _ in half], [nbytes for _, nbytes, _ in half], 1)
    return float(slope)


@click.command()
@click.option("--saves", default=20_000, type=click.IntRange(min=40))
@click.option("--dir", "folder", type=click.Path(path_type=Path, file_okay=False), help="Where the store is made.")
def main(saves: int, folder: Path | None) -> None:
    """Save many times, and say how much memory that takes."""
    found: list[Reading] = []
    click.echo("  saves  resident MB  checkpoints")
    with tempfile.TemporaryDirectory(prefix="ckptstore-resident-", dir=folder) as place:
        for reading in readings(Path(place) / "store", saves, max(1, saves // 20)):
            found.append(reading)
            click.echo(f"{reading[0]:>7,} {reading[1] / 1e6:>12.1f} {reading[2]:>12,}")
    click.echo(f"each of the last {saves - found[len(found) // 2][0]:,} saves left {left_per_save(found):.0f} B behind")


if __name__ == "__main__":
    main()
