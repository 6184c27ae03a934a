"""States of ranks, whole and in shards, and their comparison."""

from __future__ import annotations

from typing import Any

import numpy as np

from ckptstore import (
    RankOptions,
)
from ckptstore.formats.sources import BoxSource, NumpySource
from ckptstore.formats.states.state import FlatState

PATIENT = RankOptions(timeout=120, per_rank="rng.*")


def state(rank: int, step: int = 1) -> dict[str, Any]:
    """A replicated model, the rank's own random state, and values that differ."""
    random = np.random.default_rng(7)
    return {
        "model": {f"w{number}": random.random((number + 1, 50)).astype(np.float32) for number in range(6)},
        "step": step,
        "rng": {"numpy": np.arange(8) + rank},
        "loader": {"position": 100 * rank},
    }


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, np.ndarray):
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    else:
        assert one == other


def sharded(whole: np.ndarray[Any, Any], rows: slice, columns: slice = slice(None)) -> FlatState:
    """The state {"w": whole}, of which this rank has a box."""
    part = np.ascontiguousarray(whole[rows, columns])
    offset = (rows.start or 0, columns.start or 0)
    return FlatState({"w": {"$a": "w"}}, {"w": BoxSource(NumpySource(part), part.shape, 0, whole.shape, offset)})
