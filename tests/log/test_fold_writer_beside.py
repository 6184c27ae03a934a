"""A writer folds beside its saves: they wait for no fold, and no fold makes one fail."""

from __future__ import annotations

import multiprocessing
import threading
import time
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore.backends.local_disk.local import LocalBackend
from ckptstore.backends.memory import MemoryBackend
from ckptstore.errors import StorageError
from ckptstore.formats.history.records import fold_of
from ckptstore.log import fold_writer
from ckptstore.store import Store

DUE = 64
"""Slots after which a small store is folded."""


class Slow(MemoryBackend):
    """A medium on which the creation of a fold waits until the test releases it; it may fail, too."""

    def __init__(self) -> None:
        super().__init__(uuid.uuid4().hex)
        self.may_go_on = threading.Event()
        self.begun = threading.Semaphore(0)
        self.under_way = 0
        self.most_under_way = 0
        self.tries = 0
        self.failing: Exception | None = None

    def create(self, key: str, data: bytes) -> None:
        if not key.startswith("fold/"):
            super().create(key, data)
            return
        self.tries += 1
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        self.begun.release()
        assert self.may_go_on.wait(200)
        self.under_way -= 1
        if self.failing is not None:
            raise self.failing
        super().create(key, data)

    def folds(self) -> list[int]:
        return sorted(place[0] for key in self.list("fold/") if (place := fold_of(key)))


def save(writer: ckptstore.Writer, first: int, last: int) -> None:
    for step in range(first, last + 1):
        writer.save({"step": step}, step)


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_saves_do_not_wait_for_a_fold() -> None:
    medium = Slow()
    with Store(medium).writer(poll_seconds=None) as writer:
        save(writer, 1, DUE)
        assert medium.begun.acquire(timeout=120)
        save(writer, DUE + 1, 4 * DUE)  # two more are due meanwhile
        assert Store(medium).checkpoint("latest").step == 4 * DUE
        assert medium.folds() == []
        assert (medium.tries, medium.most_under_way) == (1, 1)
        medium.may_go_on.set()
        until(medium.folds)
        save(writer, 4 * DUE + 1, 4 * DUE + 2)  # the next one begins
    assert medium.most_under_way == 1
    first, second = medium.folds()
    assert first < DUE + 3 < second
    assert Store(medium).view().fold_seq == second


def test_closing_waits_for_a_fold_under_way() -> None:
    medium = Slow()
    with Store(medium).writer(poll_seconds=None) as writer:
        save(writer, 1, DUE)
        assert medium.begun.acquire(timeout=120)
        threading.Timer(0.2, medium.may_go_on.set).start()
    assert len(medium.folds()) == 1


def test_closing_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    medium = Slow()
    monkeypatch.setattr(fold_writer.FoldThread.finish, "__defaults__", (0.1,))
    with Store(medium).writer(poll_seconds=None) as writer:
        save(writer, 1, DUE)
        assert medium.begun.acquire(timeout=120)
    assert medium.folds() == []  # it is still in progress
    medium.may_go_on.set()
    until(medium.folds)  # a late fold is as true as any other


@pytest.mark.parametrize("error", [StorageError("the disk is full"), ValueError("a bug")], ids=["medium", "bug"])
def test_a_failed_fold_fails_no_save_and_is_reported(error: Exception) -> None:
    medium = Slow()
    medium.may_go_on.set()
    medium.failing = error
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with Store(medium).writer(poll_seconds=None) as writer:
            save(writer, 1, DUE)
            until(lambda: medium.tries == 1 and not medium.under_way)
            save(writer, DUE + 1, DUE + DUE // 2)
            assert medium.tries == 1  # not with every save
            medium.failing = None
            save(writer, 2 * DUE, 3 * DUE)
    assert [str(one.message).rpartition(": ")[2] for one in said if "upkeep" in str(one.message)] == [str(error)]
    assert medium.folds()
    assert Store(medium).load() == {"step": 3 * DUE}


def test_a_failure_is_reported_on_closing_at_the_latest() -> None:
    medium = Slow()
    medium.failing = StorageError("the disk is full")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with Store(medium).writer(poll_seconds=None) as writer:
            save(writer, 1, DUE)
            assert medium.begun.acquire(timeout=120)
            medium.may_go_on.set()
    assert any("the disk is full" in str(one.message) for one in said)


def test_a_fold_of_a_term_that_was_fenced_meanwhile_is_true() -> None:
    medium = Slow()
    writer = Store(medium).writer(poll_seconds=None)
    save(writer, 1, DUE)
    assert medium.begun.acquire(timeout=120)
    with Store(medium).writer(parent=3, poll_seconds=None) as newer:
        newer.save({"step": -1}, 4)
        with pytest.raises(ckptstore.FencedError):
            writer.save({"step": 0}, 10_000)
        before = Store(medium).view().catalog
        medium.may_go_on.set()
        writer.close()
        late = min(medium.folds())
        for key in medium.list("fold/"):
            if not key.startswith(f"fold/{late:020d}"):
                medium.delete(key)  # the newer writer's
        view = Store(medium).view()
        assert view.fold_seq == late < DUE
        assert view.catalog == before
        newer.save({"step": -2}, 5)
    assert Store(medium).load() == {"step": -2}


def test_after_a_fence_no_fold_is_begun() -> None:
    medium = Slow()
    writer = Store(medium).writer(poll_seconds=None)
    save(writer, 1, DUE - 2)
    Store(medium).writer(poll_seconds=None).close()
    for step in range(1000, 1003):
        with pytest.raises(ckptstore.FencedError):
            writer.save({}, step)
    medium.may_go_on.set()
    writer.close()
    assert medium.tries == 0


def test_a_fork_during_a_fold_neither_waits_nor_folds(tmp_path: Path) -> None:
    class SlowFolder(LocalBackend):
        may_go_on = threading.Event()
        begun = threading.Event()

        def create(self, key: str, data: bytes) -> None:
            if key.startswith("fold/"):
                self.begun.set()
                assert self.may_go_on.wait(200)
            super().create(key, data)

    medium = SlowFolder(tmp_path / "store")
    with Store(medium).writer(poll_seconds=None) as writer:
        save(writer, 1, DUE)
        assert medium.begun.wait(120)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python's own, about forks and threads
            child = multiprocessing.get_context("fork").Process(target=_leave, args=(writer,), daemon=True)
            child.start()
        child.join(120)
        if child.exitcode is None:
            child.kill()
        assert child.exitcode == 0
        assert medium.list("fold/") == []
        medium.may_go_on.set()
    assert len(medium.list("fold/")) == 1


def _leave(writer: ckptstore.Writer) -> None:
    with pytest.raises(ckptstore.WriterClosedError, match="fork"):
        writer.save({}, 9)
    writer.close()
