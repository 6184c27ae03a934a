"""A log that is made again elsewhere: slots that a crash, a failed sync or another process may remove do not count."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Iterator

import numpy as np
import pytest

import ckptstore
from ckptstore.backends.local_disk.local import LocalBackend
from ckptstore.backends.memory import MemoryBackend
from ckptstore.errors import StorageError
from ckptstore.formats.history.records import OpenRecord, slot_key
from ckptstore.log import fold_writer
from ckptstore.log.log_copy import CopyOrigin, LogCopy, TakenError
from ckptstore.maintenance.copies.store_copy import copy
from ckptstore.store import Store
from tests.log.log_world import World, full
from tools.crash.disk import Image
from tools.crash.enumerate import crash_states
from tools.crash.faults import SYNCS, FaultyPosix, sync_fails
from tools.crash.killcuts import LINKS, Killed, MortalPosix
from tools.crash.recording import RecordingPosix

PLACE = "/data/copy"


def test_a_record_where_a_slot_was_folded_away_is_none() -> None:
    """Two processes make one log in a bucket. The slot that the slower one adds has the number of a deleted slot."""
    world = World(every=4)
    origin = CopyOrigin(world.fmt, "copy", "all")
    fast = LogCopy(world, origin)
    fast.open(OpenRecord(1, None, secrets.token_hex(16), 0.0))
    slow = LogCopy(world, origin)
    for step in range(1, 13):
        fast.commit(full(1, step))
        if step % 6 == 0:
            fold_writer.fold(world.journal, fast.view())
    fold_writer.trim(world.journal, fast.view())
    assert not {slot_key(1), slot_key(2)} & set(world.list("log/"))
    with pytest.raises(TakenError, match="was deleted"):
        slow.commit(full(1, 99))


def state(step: int) -> dict[str, object]:
    return {"w": np.full(9, step), "step": step}


@pytest.fixture
def source() -> Iterator[Store]:
    store = ckptstore.open(f"memory://{uuid.uuid4().hex}", create=True)
    with store.writer(poll_seconds=None) as writer:
        writer.save(state(1), 1)
    yield store
    MemoryBackend.forget(store.url.removeprefix("memory://"))


@pytest.fixture
def made(source: Store) -> Iterator[Image]:
    """A disk with a copy of the store, which has saved one more step since, and reports nothing after that."""
    disk = RecordingPosix()
    copy(source.journal, LocalBackend(PLACE, disk))
    with source.writer(poll_seconds=None) as writer:
        writer.save(state(2), 2)
        yield disk.image()


def check_cuts(disk: RecordingPosix) -> None:
    """Check that both steps are there, wherever the power is cut from now on."""
    begin = len(disk.history)
    disk.acknowledge("both")
    for cut in crash_states(disk, limit=20, begin=begin):
        if cut.acknowledged:
            store = Store(LocalBackend(PLACE, cut.mount()))
            assert [info.step for info in store.checkpoints()] == [1, 2], cut.explain()
            assert store.load(2, framework="numpy")["step"] == 2


def test_slots_of_a_killed_copy_are_made_durable_before_they_count(source: Store, made: Image) -> None:
    """Its last slot is visible, and a power cut removes it."""
    killed = True
    kills = 0
    while killed:
        disk = RecordingPosix(made)
        killed = False
        try:
            copy(source.journal, LocalBackend(PLACE, MortalPosix(disk, kills + 1, LINKS)))
        except Killed:
            killed = True
            kills += 1
        copy(source.journal, LocalBackend(PLACE, disk))
        check_cuts(disk)
    assert kills > 1


def test_a_slot_that_is_there_although_its_sync_failed_is_not_taken_for_durable(source: Store, made: Image) -> None:
    counted = FaultyPosix(RecordingPosix(made))
    copy(source.journal, LocalBackend(PLACE, counted))
    failed = 0
    for nth in range(1, sum(counted.calls[name] for name in SYNCS) + 1):
        disk = RecordingPosix(made)
        try:
            copy(source.journal, LocalBackend(PLACE, FaultyPosix(disk, sync_fails(nth))))
        except StorageError:
            failed += 1
        else:
            check_cuts(disk)
    assert failed > 2
