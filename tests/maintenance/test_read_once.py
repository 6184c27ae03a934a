"""Tags, retirements and rules read the log once; records between the reading and the commit count."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore.backends.memory import MemoryBackend
from ckptstore.errors import CheckpointNotFoundError, CorruptLogError, FencedError, UsageError
from ckptstore.formats.history.record_text import encode_format
from ckptstore.formats.history.records import FormatFile, slot_key
from ckptstore.host.caller_warnings import DamagedLogWarning
from ckptstore.log import fold_writer
from ckptstore.log.change_committer import ChangeRequester
from ckptstore.log.journal import Journal
from ckptstore.log.log_reader import read, same_history
from ckptstore.log.term import open_term
from ckptstore.store import Store

SAVED = 50


class Counting(MemoryBackend):
    """Counts its calls; `before` is called once, before the first slot is created."""

    def __init__(self, name: str, before: Callable[[], object] | None = None) -> None:
        super().__init__(name)
        self.asked: Counter[tuple[str, str]] = Counter()
        self.before = before

    def get(self, key: str, limit: int = 1 << 28) -> bytes:
        self.asked["get", key] += 1
        return super().get(key, limit)

    def list(self, prefix: str) -> list[str]:
        self.asked["list", prefix] += 1
        return super().list(prefix)

    def size(self, key: str) -> int:
        self.asked["size", key] += 1
        return super().size(key)

    def create(self, key: str, data: bytes) -> None:
        self.asked["create", key] += 1
        if key.startswith("log/") and self.before is not None:
            before, self.before = self.before, None
            before()
        super().create(key, data)


class Bucket(Counting):
    """Every look costs a request."""

    cheap_looks = False
    anchored = False


def state(step: int) -> dict[str, Any]:
    return {"w": np.full(4, step, np.float32)}


def fill(store: Store, *steps: int, **options: Any) -> None:
    with store.writer(poll_seconds=None, **options) as writer:
        for step in steps:
            writer.save(state(step), step)


@pytest.fixture
def name() -> Iterator[str]:
    name = uuid.uuid4().hex
    fill(ckptstore.open(f"memory://{name}"), *range(1, SAVED + 1))
    yield name
    MemoryBackend.forget(name)


CHANGES: dict[str, Callable[..., object]] = {
    "tag": lambda store, **how: store.tag("best", 3, **how),
    "untag": lambda store, **how: store.untag("first", **how),
    "retire": lambda store, **how: store.retire(7, 8, **how),
    "keep": lambda store, **how: store.keep("last:45", **how),
}


@pytest.mark.parametrize("backend", [Counting, Bucket])
@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_the_log_is_read_once(name: str, backend: type[Counting], asked: bool, change: str) -> None:
    other = ckptstore.open(f"memory://{name}")
    other.tag("first", 1, take_over=True)
    medium = backend(name)
    before = [key for key in medium.list("log/") if key.startswith("log/0")]
    medium.asked.clear()
    if asked:
        with other.writer(poll_seconds=0.01):
            CHANGES[change](Store(medium), timeout=60)
    else:
        CHANGES[change](Store(medium), take_over=True)
    assert medium.asked["list", "fold/"] == 1  # where every reading begins
    assert {key: medium.asked["get", key] for key in before[:-1]} == dict.fromkeys(before[:-1], 1)
    assert len(before) > SAVED
    # FORMAT, each slot, and a few looks at the end of the log for each answer that is waited for.
    assert medium.asked.total() < len(before) + (60 if asked else 20)


def test_a_checkpoint_retired_meanwhile_is_not_tagged(name: str) -> None:
    """Another process takes over between the reading and the OPEN: the change is planned again on the new state."""
    other = ckptstore.open(f"memory://{name}")
    store = Store(Counting(name, lambda: other.retire(3, take_over=True)))
    with pytest.raises(CheckpointNotFoundError, match="3@1 was retired meanwhile"):
        store.tag("best", 3, take_over=True)
    assert store.tags() == {}
    assert store.verify(deep=True).ok


def test_a_checkpoint_tagged_meanwhile_is_not_retired(name: str) -> None:
    other = ckptstore.open(f"memory://{name}")
    store = Store(Counting(name, lambda: other.tag("mine", 3, take_over=True)))
    with pytest.raises(UsageError, match="tag 'mine' names it"):
        store.retire(3, take_over=True)
    assert store.checkpoint(3).tags == ("mine",)


def test_a_checkpoint_saved_meanwhile_stays(name: str) -> None:
    other = ckptstore.open(f"memory://{name}")
    store = Store(Counting(name, lambda: fill(other, SAVED + 1, SAVED + 2)))
    assert store.tag("best", "latest", take_over=True).step == SAVED  # the latest when it was requested
    assert store.latest_step() == SAVED + 2
    assert store.verify(deep=True).ok


def test_slots_that_were_folded_away_meanwhile(name: str) -> None:
    """The slot that the OPEN was to take is absent again: a writer has filled it, folded the log, and deleted it."""
    name = f"{name}-folded"
    MemoryBackend(name).create("FORMAT", encode_format(FormatFile(run="a" * 32, anchor_every=4)))
    other = ckptstore.open(f"memory://{name}")
    writer = other.writer(poll_seconds=None)
    for step in (1, 2, 3, 4):
        writer.save(state(step), step)
    end = other.view().end

    def grow() -> None:
        for first in (10, 20, 30):
            for step in range(first, first + 9):
                writer.save(state(step), step)
            fold_writer.fold(other.journal, other.view())
        fold_writer.trim(other.journal, other.view())
        assert slot_key(end) not in other.backend.list("log/")

    store = Store(Counting(name, grow))
    assert store.tag("best", 2, take_over=True).ref == "2@1"
    assert store.latest_step() == 38
    assert store.checkpoint("tag:best").ref == "2@1"
    assert store.verify(deep=True).ok
    with pytest.raises(FencedError):
        writer.save(state(50), 50)


def test_the_end_of_the_log_is_looked_above(name: str) -> None:
    """No term is opened on a view whose end was not checked: slots may be lost there."""
    medium = Bucket(name)
    journal = Journal(medium)
    end = read(journal).end
    for lost in (end - 3, end - 2):
        medium.delete(slot_key(lost))
    short = read(journal)
    assert (short.end, short.looked_above) == (end - 3, False)
    with pytest.warns(DamagedLogWarning):
        term = open_term(journal, None, view=short)
    assert term.next_seq == end + 1
    assert term.catalog.damage == (end - 3, end - 2)


def test_a_change_looks_above_the_end_of_the_log(name: str) -> None:
    medium = Bucket(name)
    end = read(Journal(medium)).end
    for lost in (end - 3, end - 2):
        medium.delete(slot_key(lost))
    left = medium.list("log/")
    with pytest.warns(DamagedLogWarning), pytest.raises(CorruptLogError, match=f"log slot {end - 3} is damaged"):
        Store(medium).tag("best", "3@1", take_over=True)
    assert medium.list("log/") == left  # nothing was put into the gap


def test_a_requester_sees_that_an_older_copy_was_put_back(name: str) -> None:
    medium = Counting(name)
    with ckptstore.open(f"memory://{name}").writer(poll_seconds=None) as writer:
        writer.save(state(99), 99)
        journal = Journal(medium)
        requester = ChangeRequester(journal, 1.0, read(journal))
        assert requester.catalog().latest().step == 99  # type: ignore[union-attr]
        medium.delete(slot_key(requester.view.end - 1))
        assert 99 not in {step for _, step in requester.catalog().checkpoints}
        writer.close()


def test_a_slot_that_became_a_folder_is_another_history(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "run")
    fill(store, 1, 2)
    view = read(store.journal)
    assert same_history(store.journal, view) is True
    slot = tmp_path / "run" / slot_key(view.end - 1)
    slot.unlink()
    assert same_history(store.journal, view) is None
    slot.mkdir()
    assert same_history(store.journal, view) is False
