"""The progress of a restore: logical bytes of the requested tensors, each once, however they are stored and read."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import DeltaOptions, DiffOptions
from tests.write.trainer import fill

SIZE = (5 << 20) + 12  # no whole chunks


class Told:
    """A `Progress` that checks its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []
        self._lock = threading.Lock()

    def __call__(self, done: int, total: int) -> None:
        assert self._lock.acquire(blocking=False), "two calls at a time"
        try:
            self.calls.append((done, total))
        finally:
            self._lock.release()

    def check(self, total: int) -> None:
        done = [one for one, _ in self.calls]
        assert {other for _, other in self.calls} == {total}
        assert done == sorted(done)
        assert done[-1] == total


def state(step: int) -> dict[str, Any]:
    large = np.arange(SIZE, dtype=np.float32)
    large[::7] += step
    tied = np.full(33, step, np.int64)
    return {"large": large, "a": {"tied": tied}, "b": {"tied": tied}, "none": np.zeros(0), "step": step}


TENSORS = 4 * SIZE + 8 * 33


def full(path: Path) -> ckptstore.Store:
    store = ckptstore.open(path, create=True)
    with store.writer(parent=None, poll_seconds=None) as writer:
        writer.save(state(1), step=1)
    return store


def chain(path: Path) -> ckptstore.Store:
    store = ckptstore.open(path, create=True)
    with store.writer(parent=None, poll_seconds=None, deltas=DeltaOptions(interval=2)) as writer:
        for step in range(1, 5):
            writer.save(state(step), step=step)
    assert [info.kind for info in store.checkpoints()] == ["full", "delta", "delta", "delta"]
    return store


@pytest.mark.parametrize("options", [{}, {"verify": False}, {"threads": 1}], ids=str)
@pytest.mark.parametrize("stored", [full, chain])
def test_new_memory(tmp_path: Path, stored: Any, options: dict[str, Any]) -> None:
    told = Told()
    stored(tmp_path / "s").load(framework="numpy", progress=told, **options)
    told.check(TENSORS)


@pytest.mark.parametrize("stored", [full, chain])
def test_into(tmp_path: Path, stored: Any) -> None:
    told = Told()
    stored(tmp_path / "s").load(into=state(0), progress=told)
    told.check(TENSORS)


@pytest.mark.parametrize("verify", [True, False])
def test_mapped(tmp_path: Path, verify: bool) -> None:
    told = Told()
    full(tmp_path / "s").load(framework="numpy", mmap=True, verify=verify, progress=told)
    told.check(TENSORS)


@pytest.mark.parametrize("stored", [full, chain])
def test_selection(tmp_path: Path, stored: Any) -> None:
    told = Told()
    stored(tmp_path / "s").load(select=["a.*", "b.tied"], framework="numpy", progress=told)
    told.check(8 * 33)  # a tied tensor once


@pytest.mark.parametrize(
    ("select", "meant"), [(None, ""), ("master.wide", "master.wide"), (["m.*", "model.*"], ("m.", "model."))], ids=str
)
@pytest.mark.parametrize("into", [False, True])
def test_optimizer_steps_and_what_is_derived_from_them(tmp_path: Path, into: bool, select: Any, meant: Any) -> None:
    """Also if tensors are restored together that were not all requested."""
    store, truth = fill(tmp_path / "store", DiffOptions(full_every=9, batch=3), 7)
    given = {"into": truth[3]} if into else {"framework": "numpy"}
    told = Told()
    store.load(7, select=select, progress=told, **given)
    told.check(sum(tensor.nbytes for name, tensor in store.tensors(7).items() if name.startswith(meant)))


def test_verifying_ends_at_its_total(tmp_path: Path) -> None:
    for deep in (False, True):
        told = Told()
        assert chain(tmp_path / str(deep)).verify(deep=deep, progress=told).ok
        done, total = told.calls[-1]
        assert done == total
        assert (total > 4 * TENSORS) == deep  # decoded bytes are counted as well
