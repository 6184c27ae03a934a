"""Persistent memory under power cuts and kills: lines of 64 bytes are pending until a fence, and the store keeps its
promises; without one of its fences or syncs it breaks them."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ckptstore.backends.base import SegmentSink
from ckptstore.backends.local_disk.local import LocalBackend
from ckptstore.backends.local_disk.pmem import PmemBackend
from ckptstore.errors import KeyNotFoundError, StorageError
from ckptstore.host.pages import BLOCK
from tests.backends.backend_conformance import filled
from tests.forms import long_only, short_or
from tools.crash import faultsweep, killcuts, kills, states
from tools.crash.disk import LINE, Drain, Store
from tools.crash.domain import Domain
from tools.crash.enumerate import crash_states
from tools.crash.faults import Fault, FaultyPosix, sync_fails, sync_forgotten
from tools.crash.killcuts import LINKS
from tools.crash.media import backend_on, obstacle
from tools.crash.recording import RecordingPosix
from tools.crash.scenario import Violation

SHARED_MEMORY = Path("/dev/shm")
MODES = ("pmem", "pmem-msync")
SAMPLED = ("pmem", pytest.param("pmem-msync", marks=long_only))
"""For the slow tests. Without libpmem all of them use msync."""
ROOT = "/data/store"
SEGMENT = bytes(filled(3 * BLOCK))
SIZE = 2 * BLOCK + 5


# The crashes of the model


def mapped(size: int) -> tuple[RecordingPosix, Domain, int, memoryview]:
    """A synced file of zeros, mapped."""
    posix = RecordingPosix()
    fd = posix.open("/x", os.O_RDWR | os.O_CREAT)
    posix.fallocate(fd, size)
    posix.fsync(fd)
    posix.fsync(posix.open("/", os.O_RDONLY | os.O_DIRECTORY))
    posix.acknowledge("made")
    return posix, Domain(posix), fd, posix.map_shared(fd, 0, size, sync=False)


def endings(posix: RecordingPosix) -> set[bytes]:
    """The possible contents of the file after cuts from the present on; whether "made" is acknowledged by then does not
    matter."""
    found = [state for state in crash_states(posix) if state.acknowledged]
    assert all(state.exhaustive for state in found)
    return {blob.data for state in found for path, blob in state.image.walk() if blob is not None}


def lines(*kinds: int) -> bytes:
    return b"".join(bytes([kind]) * LINE for kind in kinds)


def test_any_subset_of_the_lines_of_a_store_may_be_there() -> None:
    posix, domain, _, memory = mapped(2 * LINE)
    domain.copy(memory, memoryview(bytearray(lines(1, 2))))
    assert endings(posix) == {lines(one, two) for one in (0, 1) for two in (0, 2)}


@pytest.mark.parametrize("by", ["copy", "view"])
def test_only_a_fence_makes_stores_certain_and_a_sync_of_the_file_does_not(by: str) -> None:
    posix, domain, fd, memory = mapped(LINE)
    if by == "copy":
        domain.copy(memory, memoryview(bytearray(lines(1))))
    else:
        memory[:] = lines(1)
    posix.fdatasync(fd)
    assert endings(posix) == {lines(0), lines(1)}
    posix.acknowledge("now")
    domain.flush(memory)
    domain.drain()
    assert posix.history[-1] == Drain(frozenset({1}))
    posix.acknowledge("drained")
    assert {state.image.digest() for state in crash_states(posix) if "drained" in state.acknowledged} == {
        posix.image().digest()
    }


def test_a_fence_waits_for_the_stores_of_its_own_thread_alone() -> None:
    posix, domain, _, memory = mapped(LINE)
    with ThreadPoolExecutor(1) as other:
        other.submit(domain.copy, memory, memoryview(bytearray(lines(1)))).result()
        domain.drain()
        domain.flush(memory)  # they are in the other's buffers, in no cache
        domain.drain()
        assert endings(posix) == {lines(0), lines(1)}
        other.submit(domain.drain).result()
    posix.acknowledge("drained")
    assert posix.history[-2] == Drain(frozenset({1}))


def test_a_flush_covers_its_lines_and_no_others() -> None:
    posix, domain, _, memory = mapped(3 * LINE)
    memory[:] = lines(1, 2, 3)
    domain.flush(memory[LINE : LINE + 1])
    domain.drain()
    posix.acknowledge("drained")
    certain = [state for state in crash_states(posix) if "drained" in state.acknowledged]
    found = {blob.data for state in certain for _, blob in state.image.walk() if blob is not None}
    assert found == {lines(one, 2, three) for one in (0, 1) for three in (0, 3)}


def test_a_drain_saves_no_length() -> None:
    posix = RecordingPosix()
    fd = posix.open("/x", os.O_RDWR | os.O_CREAT)
    posix.fsync(posix.open("/", os.O_RDONLY | os.O_DIRECTORY))
    posix.acknowledge("made")
    posix.fallocate(fd, LINE)
    domain = Domain(posix)
    domain.copy(posix.map_shared(fd, 0, LINE, sync=False), memoryview(bytearray(lines(1))))
    domain.drain()
    posix.acknowledge("drained")
    last = [state for state in crash_states(posix) if "drained" in state.acknowledged]
    assert {blob.data for state in last for _, blob in state.image.walk() if blob is not None} == {b"", lines(1)}


def test_data_of_a_failed_msync_stays_in_doubt() -> None:
    posix, _, fd, memory = mapped(LINE)
    memory[:] = lines(1)
    with pytest.raises(OSError, match="Input/output"):
        FaultyPosix(posix, sync_fails()).msync(memory)
    posix.msync(memory)
    posix.fsync(fd)
    assert endings(posix) == {lines(0), lines(1)}


# Enumeration of the backend's states


def write(sink: SegmentSink) -> None:
    """Three blocks by three threads, from the last to the first."""
    for begin in (2 * BLOCK, BLOCK, 0):
        with ThreadPoolExecutor(1) as thread:
            thread.submit(sink.write, begin, memoryview(SEGMENT)[begin : begin + BLOCK]).result()


def fill(sink: SegmentSink) -> None:
    """The same through views; the last one is left for `seal` to make durable."""
    for begin in (0, BLOCK, 2 * BLOCK):
        view = sink.map(begin, BLOCK)
        assert view is not None
        view[:] = SEGMENT[begin : begin + BLOCK]
        if begin < 2 * BLOCK:
            sink.persist(begin, BLOCK)


def scenario(backend: LocalBackend, acknowledge: Callable[[str], None], write: Callable[[SegmentSink], None]) -> None:
    """A segment and the slot that names it, in a store that is new to the disk."""
    sink = backend.open_sink("seg/0/a", 2 * BLOCK)  # too low a guess
    write(sink)
    sink.seal(SIZE)
    acknowledge("seg/0/a")
    backend.create("log/0", b"slot " * 100)
    acknowledge("log/0")


def violations(recording: RecordingPosix) -> list[str]:
    found = []
    for state in crash_states(recording, limit=300):
        survivor = LocalBackend(ROOT, state.mount())
        for key in map(str, state.acknowledged):
            try:
                data = survivor.get(key)
            except KeyNotFoundError:
                found.append(f"{key} is gone\n{state.explain()}")
                continue
            if data != (SEGMENT[:SIZE] if key.startswith("seg") else b"slot " * 100):
                found.append(f"{key} is damaged\n{state.explain()}")
    return found


def run(
    medium: str,
    *chosen: Fault,
    write: Callable[[SegmentSink], None] = write,
    forgets: frozenset[str] = frozenset(),
) -> tuple[RecordingPosix, FaultyPosix]:
    recording = RecordingPosix()
    posix = FaultyPosix(recording, *chosen)
    scenario(backend_on(medium, ROOT, posix, recording, forgets), recording.acknowledge, write)
    return recording, posix


@pytest.mark.parametrize("write", [write, fill])
@pytest.mark.parametrize("medium", MODES)
def test_the_backend_keeps_every_promise_in_every_crash_state(medium: str, write: Any) -> None:
    recording, _ = run(medium, write=write)
    assert any(isinstance(operation, Store) for operation in recording.history)
    assert violations(recording) == []


SYNCS = 9
"""/, /data, the store twice and seg/ for the names of folders; file and folder of a segment and a slot."""


@pytest.mark.parametrize("medium", MODES)
def test_the_scenario_makes_as_many_syncs_as_the_tests_below_forget(medium: str) -> None:
    _, posix = run(medium)
    assert posix.calls["fsync"] + posix.calls["fdatasync"] == SYNCS
    assert posix.calls["msync"] == (0 if medium == "pmem" else 2), "one for each mapping"


@pytest.mark.parametrize("nth", range(1, SYNCS + 1))
def test_every_sync_is_needed_beside_the_fences(nth: int) -> None:
    recording, _ = run("pmem", sync_forgotten(nth))
    assert violations(recording) != []


@pytest.mark.parametrize("nth", range(1, SYNCS + 3))
def test_every_sync_and_msync_is_needed(nth: int) -> None:
    recording, _ = run("pmem-msync", sync_forgotten(nth))
    assert violations(recording) != []


@pytest.mark.parametrize(
    ("forgotten", "write"), [("drain", write), ("drain", fill), ("flush", fill)], ids=["copied", "mapped", "cached"]
)
def test_without_fences_or_flushes_a_segment_is_damaged(forgotten: str, write: Any) -> None:
    recording, _ = run("pmem", write=write, forgets=frozenset({forgotten}))
    assert any("seg/0/a is damaged" in text for text in violations(recording))


def test_one_fence_by_the_thread_that_seals_is_not_enough() -> None:
    """This is the reason for the fence in `write`: PCcheck says so, and several threads write a segment."""
    recording = RecordingPosix()

    class LateFence(Domain):
        def drain(self) -> None:
            """Except by the threads that write."""

    domain = LateFence(recording)

    class Sealing(FaultyPosix):
        def fdatasync(self, fd: int) -> None:
            Domain.drain(domain)
            super().fdatasync(fd)

    backend = PmemBackend(ROOT, Sealing(recording), library=lambda: domain)
    scenario(backend, recording.acknowledge, write)
    assert any("seg/0/a is damaged" in text for text in violations(recording))


@pytest.mark.parametrize("medium", MODES)
def test_persisted_data_is_on_the_medium_before_the_segment_is_sealed(medium: str) -> None:
    """Work that can be done while the trainer continues is not left for the end."""
    recording = RecordingPosix()
    sink = backend_on(medium, ROOT, recording, recording).open_sink("seg/0/a", BLOCK)
    view = sink.map(0, 3 * BLOCK)  # across the end of what was expected
    assert view is not None
    view[:] = SEGMENT
    before = len(recording.history)
    sink.persist(BLOCK, 2 * BLOCK)
    after = recording.history[before:]
    drained = frozenset[int]().union(*(operation.stores for operation in after if isinstance(operation, Drain)))
    stores = [operation for operation in recording.history if isinstance(operation, Store)]
    assert {store.number for store in stores if store.offset >= BLOCK} <= drained
    assert sum(len(store.data) for store in stores if store.number in drained) == 2 * BLOCK
    sink.abort()


@pytest.mark.parametrize("medium", MODES)
def test_a_segment_whose_sync_failed_is_never_sealed(medium: str) -> None:
    recording = RecordingPosix()
    calls = frozenset({"fdatasync" if medium == "pmem" else "msync"})
    posix = FaultyPosix(recording, Fault(calls, code=5))
    sink = backend_on(medium, ROOT, posix, recording).open_sink("seg/0/a", BLOCK)
    sink.write(0, filled(BLOCK))
    for _ in range(2):
        with pytest.raises(StorageError):
            sink.seal(BLOCK)
    assert sum(posix.calls[name] for name in calls) == 1, "a failed sync is not repeated"
    sink.abort()
    assert not recording.mapped


# A store's life: short forms of the tools


@pytest.mark.slow
@pytest.mark.parametrize("medium", MODES)
def test_every_state_after_a_power_cut_keeps_its_promises(medium: str) -> None:
    done = states.explore(limit=short_or(2, 4), medium=medium)
    assert done.states > 100
    assert done.restored > done.states


@pytest.mark.slow
def test_a_store_that_does_not_drain_is_caught() -> None:
    with pytest.raises(Violation):
        states.explore(limit=40, medium="pmem", forgets=frozenset({"drain"}))


@pytest.mark.slow
def test_a_store_that_does_not_msync_is_caught() -> None:
    with pytest.raises(Violation):
        states.explore(limit=40, medium="pmem-msync", broken=Fault(frozenset({"msync"}), times=None))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ckptstore.LostStepsWarning")
@pytest.mark.parametrize("medium", MODES)
def test_a_successor_of_a_killed_writer_loses_nothing_in_a_power_cut(medium: str) -> None:
    for life, folds in ((4, True), (13, False)):
        died, after, restored = killcuts.kill_then_cut(life, limit=2, calls=LINKS, folds=folds, medium=medium)
        assert died
        assert after
        assert restored


@pytest.mark.slow
@pytest.mark.parametrize("medium", SAMPLED)
def test_faults_surface_and_lose_nothing(medium: str) -> None:
    done = faultsweep.sweep(every=short_or(397, 97), cuts=short_or(1, 2), medium=medium)
    assert set(done.injected) == set(faultsweep.KINDS)
    assert done.surfaced["StorageError"] > 0
    assert done.states > 0


@pytest.fixture
def shared() -> Iterator[Path]:
    if not SHARED_MEMORY.is_dir():
        pytest.skip("no tmpfs here")
    folder = SHARED_MEMORY / f"ckptstore-test-{uuid.uuid4().hex}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ckptstore.LostStepsWarning")
@pytest.mark.parametrize("medium", SAMPLED)
def test_sigkill_at_crash_points(medium: str, shared: Path) -> None:
    if (why := obstacle(medium)) is not None:
        pytest.skip(why)
    kill_count = short_or(12, 24)
    done = kills.sweep(kill_count, folder=shared, medium=medium)
    assert {"save.first-block", "save.before-header", "save.before-seal", "save.sealed"} <= set(done.points)
    assert done.kills == kill_count
    assert done.restored > 0
