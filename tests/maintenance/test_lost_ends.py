"""A log whose end is lost, with a term that has segments: nobody drops checkpoints by it, or copies it elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import CorruptLogError
from ckptstore.store import Store


def filled(place: Path) -> Store:
    """Steps 1 to 3 of term 1; of term 2 only a segment is left."""
    store = ckptstore.open(place)
    for steps in ((1, 2, 3), (4,)):
        before = set(place.glob("log/*"))
        with store.writer(poll_seconds=None) as writer:
            for step in steps:
                writer.save({"w": np.full(100, step)}, step)
    for slot in set(place.glob("log/*")) - before:
        slot.unlink()
    return ckptstore.open(place)


@pytest.mark.parametrize(
    "call",
    [
        lambda store, _: store.prune("last:1", take_over=True),
        lambda store, _: store.compact(max_depth=1, take_over=True),
        lambda store, place: store.copy(place / "copy"),
        lambda store, place: store.sync(place / "remote"),
    ],
    ids=["prune", "compact", "copy", "sync"],
)
def test_operations_that_need_the_whole_log_are_refused(tmp_path: Path, call: Callable[[Store, Path], Any]) -> None:
    store = filled(tmp_path / "run")
    with pytest.raises(CorruptLogError, match="damaged"):
        call(store, tmp_path)
    assert [info.ref for info in store.checkpoints()] == ["1@1", "2@1", "3@1"]
    assert not list(tmp_path.glob("*/FORMAT"))[1:]
