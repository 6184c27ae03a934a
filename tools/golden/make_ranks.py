"""A store of the conformance set whose states differ over ranks: in keys, their order, lengths, kinds and values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import ckptstore
from ckptstore.formats.states import rank_trees
from ckptstore.formats.states.state import tensor_names
from tools.golden.shard_stores import Piece, ShardStore

__all__ = ["STATES", "ranks"]


def _t(name: str) -> dict[str, str]:
    return {"$t": name}


STATES: Sequence[Sequence[Any]] = (
    # Keys in different orders; keys of one rank alone before, between and behind the others.
    ({"a": _t("a"), "b": _t("b"), "stage0": _t("stage0")}, {"b": _t("b"), "a": _t("a"), "stage1": _t("stage1")}),
    ({"a0": _t("a0"), "b": _t("b"), "c": 1}, {"a1": _t("a1"), "b": _t("b"), "c": 1}),
    # Keys that are not text: 1, true and 1.0 are one key, as are tuples of them; an empty dict is a plain one.
    (
        {"state": {"$dict": [[0, _t("s.0")], [1, _t("s.1")]]}, "none": {}},
        {"state": {"$dict": [[2, _t("s.2")], [True, 7]]}, "none": {"$dict": [[5, _t("none.5")]]}},
        {"state": {"$dict": [[{"$tuple": [1, "x"]}, 3], ["a", 4]]}, "none": {"plain": {"$a": "plain"}}},
        {"state": {"$dict": [[{"$tuple": [1.0, "x"]}, 5], [1.0, 6], [{"$np": ["I64", "0200000000000000"]}, 8]]}},
    ),
    (
        {"o": {"$odict": {"a": 1, "b": _t("o.b")}}, "n": {"$counter": {"x": 1}}},
        {"n": {"$counter": [[3, 2], ["x", 5]]}, "o": {"$odict": [["b", _t("o.b")], [4, _t("o.4")]]}},
    ),
    # Lists of values are values; all other lists are united element by element.
    (
        {"l": [_t("l.0")], "p": [1, 2], "u": {"$tuple": [{"k": 1}, None]}, "i": {"$ints": ["list", "u1", "A" * 44]}},
        {
            "i": [_t("i.0"), 3],
            "u": {"$tuple": [{"m": _t("u.m")}, 2, {"$tuple": [_t("u.t")]}]},
            "p": [3, 4, 5],
            "l": [7, {"deep": [_t("l.1")]}],
        },
    ),
    # Different kinds: the node that holds a tensor leads, and nodes of its kind join it.
    (
        {"h": None, "k": {"x": 1}, "v": {"x": 1}, "s": {"$set": [1]}},
        {"s": {"$set": [2]}, "v": [1], "k": {"$tuple": [_t("k.0")]}, "h": {"w": _t("h.w")}},
        {"h": {"b": _t("h.b")}, "k": {"y": 2}, "v": {"y": 2}, "s": {"$set": [3]}},
        {"h": 4, "k": {"$tuple": [_t("k.0"), {"z": _t("k.1")}]}, "v": None, "s": {"$set": [1]}},
    ),
    # Tensors of each rank's own; members that some ranks lack.
    (
        {"w": _t("w"), "rng": _t("rng@0"), "only": 1},
        {"rng": _t("rng@1"), "w": _t("w")},
        {"w": _t("w"), "rng": _t("rng@2"), "late": {"$a": "late"}},
    ),
    ("one", "two"),
)
"""For each checkpoint the trees of its ranks."""


def ranks(folder: Path) -> None:
    """A checkpoint of each of `STATES`; then two whose trees no writer here makes."""
    made = ShardStore(ckptstore.open(folder, create=True))
    trees = [rank_trees.merge(states) for states in STATES]
    trees.append({"x": {"$ranks": [[None, None], [{"w": _t("w")}]]}, "y": {"$ranks": [[None, 1], [0, _t("w")]]}})
    trees.append({"$ranks": [[0, 1], [{"w": {"x": _t("w.x")}}, {"w": [_t("w.0")]}]]})  # w.0 is in no union
    for step, tree in enumerate(trees, 1):
        pieces = [Piece(name, np.arange(step, step + len(name))) for name in tensor_names(tree)]
        made.commit(step, [pieces], tree)
