"""Stores of the conformance set whose tensors are stored in shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import ckptstore
from ckptstore.formats.codecs import Derive, Sub, Xor
from ckptstore.formats.segment_files.boxes import Box
from tools.golden.shard_stores import Array, Piece, ShardStore, by_rank, columns, cut, rows

__all__ = ["broken", "shards"]


def _numbers(shape: tuple[int, ...], step: int) -> Array:
    count = int(np.prod(shape))
    return ((np.arange(count) * 37 + 11 * step) % 1009).astype("<f4").reshape(shape) / np.float32(7)


def shards(folder: Path) -> None:
    """Fulls and deltas of three ranks, cut by rows, by columns and without a grid; rounded copies; ranks' values."""
    made = ShardStore(ckptstore.open(folder, create=True))
    grid = [Box((0, 0), (2, 5)), Box((2, 0), (4, 3)), Box((2, 3), (4, 2))]
    old, wide, other = _numbers((6, 5), 1), _numbers((3, 9), 1), np.arange(7)

    def pieces(new: Array, **more: Any) -> list[list[Piece]]:
        copies = cut("copy", new.astype("<f2"), grid, codec=Derive("F16"), base=new, params={"of": "w"})
        return by_rank(
            cut("w", new, grid, **more),
            copies,
            cut("wide", wide, columns(wide.shape, 3)),
            cut("complex", wide[:2].astype("<c8"), rows((2, 9), 2)),
            [Piece("whole", other)],
        )

    tree: dict[str, Any] = {name: {"$t": name} for name in ("w", "copy", "wide", "complex", "whole")}
    tree["seed"] = {"$ranks": [[0, 1, 0], [5, 6]]}
    made.commit(1, pieces(old), tree)
    for step, codec in ((2, Xor(4)), (3, Sub(4))):
        new = _numbers((6, 5), step)
        made.commit(step, pieces(new, codec=codec, base=old), tree, base=step - 1)
        old = new
    made.commit(4, by_rank(cut("w", old, rows(old.shape, 2)), cut("one", old, [Box.whole(old.shape)])))


def broken(folder: Path) -> None:
    """Shards that overlap, that omit elements, of two dtypes, twice, without elements, beside the whole tensor."""
    made = ShardStore(ckptstore.open(folder, create=True))
    whole = _numbers((4, 3), 1)
    made.commit(1, by_rank(cut("w", whole, rows((4, 3), 2))))
    first = Piece("w", whole[:2], (4, 3), (0, 0))
    others = [
        Piece("w", whole[1:], (4, 3), (1, 0)),
        Piece("w", whole[3:], (4, 3), (3, 0)),
        Piece("w", whole[2:].astype("<f8"), (4, 3), (2, 0)),
        Piece("w", whole[:2], (4, 3), (0, 0)),
        Piece("w", whole[2:], (5, 3), (2, 0)),
        Piece("w", whole),
    ]
    for step, other in enumerate(others, 2):
        made.commit(step, [[first], [other]])
    made.commit(8, [[first], [Piece("w", whole[2:], (4, 3), (2, 0))], [Piece("w", whole[:0], (4, 3), (4, 0))]])
    delta = cut("w", whole, columns((4, 3), 3), codec=Xor(4), base=whole)
    made.commit(9, by_rank(delta), base=1)
