"""Several fulls at once, in bounded memory: they overlap, none is lost or told twice, and nobody waits for nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import SaveMetrics
from ckptstore.backends.base import SegmentSink
from ckptstore.backends.memory import MemoryBackend
from ckptstore.formats.sources import NumpySource
from ckptstore.formats.state import FlatState
from ckptstore.host.arenas import LEAST
from ckptstore.log import requests
from ckptstore.log.change import Change
from ckptstore.store import Store
from tests.forms import in_turn
from tests.write import inside

MIB = 1 << 20


def weights(value: int, units: int = 1) -> dict[str, Any]:
    """A state of so many units of 16 MiB (or a small one) in which every number tells of its step."""
    size = 4 * MIB if units > 1 else 1000
    return {f"w{number}": np.full(size, value + number, np.float32) for number in range(units)}


class Medium:
    """A memory store whose segments are written when they may be, in the order in which they were begun.

    Attributes:
        begun: is set for the n-th segment when its first block is written.
        may: lets the n-th segment's blocks be written.
        fails: the n-th segment's blocks cannot be.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, segments: int, *, held: bool = True) -> None:
        self.begun = [threading.Event() for _ in range(segments)]
        self.may = [threading.Event() for _ in range(segments)]
        self.fails: set[int] = set()
        self.delay = 0.0
        self.opened = 0
        if not held:
            self.release()
        original = MemoryBackend.open_sink
        lock = threading.Lock()
        medium = self

        class Sink(SegmentSink):
            def __init__(self, inner: SegmentSink, number: int) -> None:
                self.inner = inner
                self.number = number

            def write(self, offset: int, data: memoryview) -> None:
                medium.begun[self.number].set()
                assert medium.may[self.number].wait(60)
                time.sleep(medium.delay)
                if self.number in medium.fails:
                    raise ckptstore.StorageError(28, f"no space for segment {self.number}")
                self.inner.write(offset, data)

            def seal(self, size: int) -> None:
                self.inner.seal(size)

            def abort(self) -> None:
                self.inner.abort()

        def open_sink(backend: MemoryBackend, key: str, size_hint: int) -> SegmentSink:
            with lock:
                medium.opened += 1
                return Sink(original(backend, key, size_hint), medium.opened - 1)

        monkeypatch.setattr(MemoryBackend, "open_sink", open_sink)

    def release(self) -> None:
        for one in self.may:
            one.set()


@pytest.fixture
def store() -> ckptstore.Store:
    return ckptstore.open(f"memory://{uuid.uuid4().hex}", create=True)


def check(store: ckptstore.Store, *steps: int, units: int = 1) -> None:
    assert [info.step for info in store.checkpoints()] == list(steps)
    for step in steps:
        loaded = store.load(step, framework="numpy")
        for name, array in weights(step, units).items():
            assert np.array_equal(loaded[name], array)
    assert ckptstore.verify(store).ok


@contextmanager
def taken(writer: ckptstore.Writer, medium: Medium) -> Iterator[None]:
    """A writer's one place is taken in the ``with``: by a save of step 1, which the medium holds up so long."""
    sync = threading.Thread(target=writer.save, args=(weights(1), 1))
    sync.start()
    try:
        assert medium.begun[0].wait(120)
        yield
    finally:
        medium.release()
        sync.join(120)


def run(script: str) -> str:
    """What a process of its own says."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


class TestTogether:
    def test_so_many_are_written_at_once(self, store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
        medium = Medium(monkeypatch, 4)
        with store.writer(max_in_flight=3, poll_seconds=None) as writer:
            pending = []
            for step in (1, 2, 3):
                pending.append(writer.save_async(weights(step), step))
                assert medium.begun[step - 1].wait(120)  # though none before it is written
            assert not any(one.done() for one in pending)
            fourth = threading.Thread(target=writer.save_async, args=(weights(4), 4))
            fourth.start()
            assert not medium.begun[3].wait(0.1)
            medium.release()
            fourth.join(120)
        check(store, 1, 2, 3, 4)

    @pytest.mark.parametrize("options", [{"deltas": 4}, {"diffs": ckptstore.DiffOptions()}], ids=["deltas", "diffs"])
    def test_what_is_coded_is_written_in_turn(
        self, store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
    ) -> None:
        """Each may build on the one before."""
        medium = Medium(monkeypatch, 3)
        with store.writer(max_in_flight=3, poll_seconds=None, **options) as writer:
            for step in (1, 2, 3):
                writer.save_async(weights(step), step)
            assert medium.begun[0].wait(120)
            assert not medium.begun[1].wait(0.1)
            medium.release()
        check(store, 1, 2, 3)
        assert [info.base for info in store.checkpoints()][1:] != [None, None]

    def test_a_newer_one_does_not_wait_and_stays_the_latest(
        self, store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        medium = Medium(monkeypatch, 3)
        with store.writer(max_in_flight=3, poll_seconds=None) as writer:
            old = writer.save_async(weights(1), 1)
            assert medium.begun[0].wait(120)
            new = writer.save_async(weights(2), 2)
            medium.may[1].set()
            assert new.result(120).step == 2
            assert not old.done()
            assert store.latest_step() == 2
            medium.release()
            assert old.result(120).step == 1
            assert store.latest_step() == 2
            assert writer.save_async(weights(3), 3).result(120).step == 3
        check(store, 1, 2, 3)
        with store.writer() as following:
            assert following.parent is not None
            assert following.parent.step == 3

    def test_what_comes_after_waits_for_all_of_them(
        self, store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A tag may name what is on its way, a new term begins with nothing left of the old one."""
        medium = Medium(monkeypatch, 9)
        with store.writer(max_in_flight=3, poll_seconds=None) as writer:
            for step in (1, 2):
                writer.save_async(weights(step), step)
            threading.Timer(0.1, medium.release).start()
            assert writer.tag("two", 2).step == 2
            pending = [writer.save_async(weights(step), step) for step in (3, 4)]
            writer.wait()
            assert all(one.done() for one in pending)
            pending = [writer.save_async(weights(step), step) for step in (5, 6)]
            writer.rollback(2)
            assert [one.result(0).ref for one in pending] == ["5@1", "6@1"]
            assert writer.save_async(weights(3), 3).result().ref == "3@2"
        assert store.checkpoint("tag:two").step == 2

    def test_one_that_fails_leaves_the_others_alone(
        self, store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        medium = Medium(monkeypatch, 4)
        medium.fails = {1}
        with store.writer(max_in_flight=3, poll_seconds=None) as writer:
            pending = []
            for step in (1, 2, 3):
                pending.append(writer.save_async(weights(step), step))
                assert medium.begun[step - 1].wait(120)
            medium.release()
            with pytest.raises(ckptstore.StorageError, match="no space for segment 1"):
                pending[1].result(120)
            assert [one.result(120).step for one in (pending[0], pending[2])] == [1, 3]
            writer.wait()  # who asked was told
        check(store, 1, 3)

    def test_one_that_waits_for_its_turn_when_the_term_ends_is_not_begun(
        self, store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nobody may drop segments of a term that is over."""
        medium = Medium(monkeypatch, 2)
        with store.writer(max_in_flight=1, poll_seconds=None) as writer, ThreadPoolExecutor(2) as others:
            first = others.submit(writer.save, weights(1), 1)
            assert medium.begun[0].wait(120)
            second = others.submit(writer.save, weights(2), 2)
            wait([second], 0.1)  # it waits by then; if not it is refused, for the same reason
            Store(store.backend).writer(poll_seconds=None).close()
            medium.release()
            for one in (first, second):
                with pytest.raises(ckptstore.FencedError):
                    one.result(120)
        assert medium.opened == 1

    def test_one_that_is_being_written_when_the_term_ends_is_given_up(
        self, store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        medium = Medium(monkeypatch, 2)
        with (
            store.writer(max_in_flight=2, memory=LEAST, poll_seconds=None) as writer,
            ThreadPoolExecutor(1) as other,
        ):
            first = writer.save_async(weights(1), 1)
            assert medium.begun[0].wait(120)
            second = other.submit(writer.save_async, weights(2, 5), 2)  # waits for memory, when some of it is copied
            assert medium.begun[1].wait(120)
            Store(store.backend).writer(poll_seconds=None).close()
            medium.may[0].set()
            with pytest.raises(ckptstore.FencedError):
                first.result(120)
            medium.release()
            with pytest.raises(ckptstore.FencedError):
                second.result(120).result(120)
        assert len(store.backend.list("seg/")) == 1

    def test_requests_are_answered_after_each(self, store: ckptstore.Store) -> None:
        with store.writer(max_in_flight=2, poll_seconds=None) as writer:
            first = writer.save(weights(1), 1)
            writer.wait()
            for step, save in ((2, writer.save), (3, writer.save_async)):
                asked = requests.post(store.journal, writer.term, "tag", Change(tags={f"t{step}": (first.term, 1)}))
                save(weights(step), step)
                writer.wait()
                assert requests.outcome(store.view().catalog, asked).answer == "accepted"
        assert store.checkpoint(1).tags == ("t2", "t3")

    def test_saves_of_both_kinds_from_many_threads(self, store: ckptstore.Store) -> None:
        """Steps come in order, everything else as it likes. Memory is short for all of them."""
        with store.writer(max_in_flight=3, memory=LEAST, poll_seconds=None, threads=1) as writer:
            lock, steps = threading.Lock(), iter(range(1, 9))

            def run(kind: int) -> None:
                for _ in range(2):
                    # Only one thread may give a step; what happens with it then is up to the writer's.
                    with lock:
                        step = next(steps)
                        state = weights(step, 3)
                        (writer.save if (step + kind) % 4 == 0 else writer.save_async)(state, step)
                        for array in state.values():
                            array[:] = -1

            threads = [threading.Thread(target=run, args=(kind,)) for kind in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
                assert not thread.is_alive()
        check(store, *range(1, 9), units=3)


def test_a_step_that_could_not_be_begun_may_be_given_again(
    store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not taken, and has no place."""

    def none(*_: object) -> None:
        raise MemoryError("no memory")

    with store.writer(max_in_flight=1, poll_seconds=None) as writer:
        with monkeypatch.context() as patched:
            patched.setattr("ckptstore.write.fulls.plan_units", none)
            with pytest.raises(MemoryError):
                writer.save_async(weights(1), 1)
        writer.save(weights(1), 1)
    check(store, 1)


def test_what_a_failed_save_has_begun_is_named_to_gc(store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the next commit: what is left of it on the medium need not wait for another term."""
    medium = Medium(monkeypatch, 9, held=False)
    medium.fails = {1}
    with store.writer(max_in_flight=1, poll_seconds=None) as writer:
        writer.save(weights(1), 1)
        with pytest.raises(ckptstore.StorageError):
            writer.save(weights(2), 2)
        assert len(store.view().catalog.dropped) == 0
        writer.save(weights(3), 3)
        assert len(store.view().catalog.dropped) == 1
    check(store, 1, 3)


class TestMemory:
    def test_it_is_the_bound(self, store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of a state several times as large, on a slow medium. Training waits, and is told how long."""
        medium = Medium(monkeypatch, 3, held=False)
        began = time.monotonic()
        weights(1, 1)
        medium.delay = 0.02 + 2 * (time.monotonic() - began)  # slower than this machine copies
        told: list[SaveMetrics] = []
        with store.writer(max_in_flight=2, memory=LEAST, poll_seconds=None, on_metrics=told.append) as writer:
            memory = inside.memory(writer)
            for step in (1, 2):
                state = weights(step, 5)
                writer.save_async(state, step)
                for array in state.values():
                    array[:] = -1
            assert memory.held <= LEAST
            writer.wait()
            assert memory.used == 0
            assert 32 * MIB <= memory.most <= LEAST
        check(store, 1, 2, units=5)
        assert all(0.02 < one.waited <= one.stall < one.durable for one in told)

    def test_with_room_for_all_nobody_waits_for_the_medium(
        self, store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        medium = Medium(monkeypatch, 2)
        told: list[SaveMetrics] = []
        with store.writer(max_in_flight=2, memory=8 * LEAST, poll_seconds=None, on_metrics=told.append) as writer:
            for step in (1, 2):
                writer.save_async(weights(step, 3), step)  # would wait for ever
            medium.release()
        assert all(one.waited < one.durable for one in told)
        check(store, 1, 2, units=3)

    def test_a_process_stays_that_small(self, tmp_path: Path) -> None:
        found = {}
        for memory in (LEAST, None):
            script = _PEAK.format(path=str(tmp_path / str(memory)), memory=memory)
            found[memory] = int(run(script))
        assert found[None] > 180 * MIB  # the copy of the state
        assert found[LEAST] < LEAST + 48 * MIB  # and what hashing it takes: about 10

    def test_it_waits_no_more_when_the_medium_is_gone(
        self, store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The copy ends there: its bytes have nowhere to go. The save says so, once."""
        medium = Medium(monkeypatch, 9, held=False)
        medium.fails = set(range(5))
        with store.writer(memory=LEAST, poll_seconds=None) as writer:
            for _ in range(4):
                with pytest.raises(ckptstore.StorageError, match="no space"):
                    writer.save_async(weights(1, 5), 1).result(120)
            writer.save_async(weights(1, 5), 1)
            with pytest.raises(ckptstore.StorageError, match="no space"):
                writer.wait()
            writer.save_async(weights(1, 5), 1).result(120)
            assert inside.memory(writer).used == 0
        check(store, 1, units=5)

    def test_closed_while_training_waits_for_memory(
        self, store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        medium = Medium(monkeypatch, 1)
        writer = store.writer(memory=LEAST, poll_seconds=None)
        raised: list[BaseException] = []

        def save() -> None:
            try:
                writer.save_async(weights(1, 5), 1)
            except ckptstore.WriterClosedError as error:
                raised.append(error)

        saving = threading.Thread(target=save)
        saving.start()
        assert medium.begun[0].wait(120)
        closing = threading.Thread(target=writer.close)
        closing.start()
        saving.join(120)
        assert not saving.is_alive()
        assert raised
        medium.release()
        closing.join(120)
        assert not closing.is_alive()
        assert store.checkpoints() == []

    @pytest.mark.parametrize("after", [1, 4])
    def test_interrupted_while_it_is_copied(
        self, store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch, after: int
    ) -> None:
        """Ctrl-C before its lane has begun, and after: nothing is in flight, its memory and its step are free."""
        with store.writer(memory=LEAST, poll_seconds=None) as writer:
            memory = inside.memory(writer)
            take, calls = memory.take, [0]

            def interrupted(*what: Any) -> Any:
                calls[0] += 1
                if calls[0] > after:
                    raise KeyboardInterrupt
                return take(*what)

            with monkeypatch.context() as patched:
                patched.setattr(memory, "take", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    writer.save_async(weights(1, 5), 1)
            writer.wait()
            assert memory.used == 0
            writer.save_async(weights(1, 5), 1).result(120)
        check(store, 1, units=5)

    @pytest.mark.parametrize("broken", ["w0", "w4"])
    def test_a_tensor_that_cannot_be_read(self, store: ckptstore.Store, broken: str) -> None:
        """Who copies says so, though the lane that waits for it may see it first."""

        class Broken(NumpySource):
            def view(self) -> Any:
                raise ZeroDivisionError

        sources = {name: (Broken if name == broken else NumpySource)(array) for name, array in weights(1, 5).items()}
        with store.writer(memory=LEAST, poll_seconds=None) as writer:
            for _ in range(4):
                with pytest.raises(ZeroDivisionError):
                    writer.save_async(FlatState(None, dict(sources)), 1)
            writer.wait()
            writer.save_async(weights(1, 5), 1)
        check(store, 1, units=5)

    @pytest.mark.parametrize(
        ("options", "complaint"),
        [
            ({"memory": LEAST - 1}, "memory: "),
            ({"memory": LEAST - 1, "deltas": 4}, "memory: "),
            ({"memory": LEAST, "deltas": 4, "diffs": ckptstore.DiffOptions()}, "memory: with deltas or with diffs"),
            ({"memory": LEAST, "deltas": ckptstore.DeltaOptions(memory=0)}, r"memory: not with DeltaOptions\(memory"),
            ({"memory": LEAST, "diffs": ckptstore.DiffOptions(accumulate="sum")}, "memory: not with DiffOptions"),
            ({"on_metrics": 3}, "on_metrics: 3"),
        ],
    )
    def test_bad_options(self, store: ckptstore.Store, options: dict[str, Any], complaint: str) -> None:
        with pytest.raises(ckptstore.UsageError, match=complaint):
            store.writer(**options)
        assert store.terms() == []


_PEAK = """
import numpy as np
import ckptstore

def peak():
    with open("/proc/self/status") as file:  # what resource says begins with the parent's
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))

state = {{f"w{{number}}": np.ones(4 << 20, np.float32) for number in range(12)}}  # 192 MiB
with ckptstore.open({path!r}, create=True).writer(memory={memory}, poll_seconds=None) as writer:
    writer.save_async({{"w": state["w0"][:100_000]}}, 1).result()
    before = peak()
    writer.save_async(state, 2).result()
    print(peak() - before)
"""


class TestPreparing:
    @pytest.mark.parametrize("options", [{}, {"deltas": 4}, {"memory": 3 * LEAST}], ids=["plain", "deltas", "memory"])
    def test_memory_is_touched_before_it_is_needed(self, tmp_path: Path, options: dict[str, Any]) -> None:
        wanted = min(128 * MIB, options.get("memory", 1 << 40))
        script = _PREPARED.format(path=str(tmp_path / "store"), options=options, wanted=wanted)
        prepared, faults, without = map(int, run(script).split())
        assert prepared > 0.9 * wanted
        assert faults < without / 2

    def test_a_second_time_and_a_closed_writer(self, store: ckptstore.Store) -> None:
        with store.writer(poll_seconds=None) as writer:
            for _ in range(3):
                writer.prepare(weights(1))
            with pytest.raises(ckptstore.UnsupportedStateError):
                writer.prepare({"f": print})
            writer.save_async(weights(1), 1)
            writer.prepare(weights(2, 3))
            writer.save_async(weights(2), 2)
        check(store, 1, 2)
        with pytest.raises(ckptstore.WriterClosedError):
            writer.prepare(weights(1))

    def test_a_parent_says_how_much(self, store: ckptstore.Store) -> None:
        with store.writer() as writer:
            writer.save(weights(1, 3), 1)
        for options, expected in ({}, 0), ({"max_in_flight": 2}, 48 * MIB), ({"memory": LEAST}, LEAST):
            with store.writer(poll_seconds=None, **options) as writer:
                memory = inside.memory(writer)
                held = memory.held
                assert held == expected or (expected and expected <= held < expected + MIB)
                writer.save_async(weights(writer.parent.step + 1, 3), writer.parent.step + 1)  # type: ignore[union-attr]
                writer.wait()
                assert memory.held <= max(2 * expected, 49 * MIB) + 2 * MIB


_PREPARED = """
import resource, sys, time
import numpy as np
import ckptstore

def resident():
    with open("/proc/self/statm") as file:
        _, pages, shared = file.read().split()[:3]
    return (int(pages) - int(shared)) * 4096

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def stall(writer, step):
    before = faults()
    writer.save_async(state, step)
    return faults() - before

state = {{f"w{{number}}": np.ones(4 << 20, np.float32) for number in range(8)}}  # 128 MiB
# Without huge pages every page that is not there is a fault that can be counted.
import mmap
mmap.MADV_HUGEPAGE = mmap.MADV_NOHUGEPAGE
with ckptstore.open({path!r}, create=True).writer(poll_seconds=None, **{options}) as writer:
    before = resident()
    writer.prepare(state)
    prepared, deadline = 0, time.monotonic() + 120
    while prepared <= 0.9 * {wanted} and time.monotonic() < deadline:  # it is touched in the background
        time.sleep(0.01)
        prepared = resident() - before
    time.sleep(0.2)
    first = stall(writer, 1)
with ckptstore.open({path!r}).writer(poll_seconds=None, **{options}) as writer:
    print(prepared, first, stall(writer, 2))
"""


class TestMetrics:
    def test_what_they_say(self, store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
        medium = Medium(monkeypatch, 3)
        told: list[SaveMetrics] = []
        with store.writer(max_in_flight=2, poll_seconds=None, on_metrics=told.append) as writer:
            first = writer.save_async(weights(1), 1)
            assert medium.begun[0].wait(120)
            second = writer.save_async(weights(5), 5)
            time.sleep(0.05)
            medium.release()
            infos = {1: first.result(120), 5: second.result(120)}
            writer.save(weights(7), 7)
        assert sorted(one.step for one in told) == [1, 5, 7]
        by = {one.step: one for one in told}
        assert (by[1].in_flight, by[5].in_flight, by[7].in_flight) == (1, 2, by[7].in_flight)
        assert (by[1].lag, by[5].lag) == (4, 0)
        assert {one.kind for one in told} == {"full"}
        assert (by[1].nbytes, by[1].stored) == (4000, infos[1].stored)
        assert by[1].durable >= 0.05
        assert by[1].waited < by[1].durable
        assert by[7].stall >= by[7].durable > 0
        assert by[7].rate == 4000 / by[7].durable
        assert {one.error for one in told} == {None}

    @pytest.mark.parametrize("options", [{"deltas": 4}, {"diffs": ckptstore.DiffOptions()}], ids=["deltas", "diffs"])
    def test_of_what_is_coded(self, store: ckptstore.Store, options: dict[str, Any]) -> None:
        told: list[SaveMetrics] = []
        with store.writer(poll_seconds=None, on_metrics=told.append, **options) as writer:
            for step in (1, 2):
                writer.save_async(weights(step), step)
            writer.save(weights(3), 3)
        assert [one.step for one in told] == [1, 2, 3]
        assert [one.kind for one in told] == [info.kind for info in store.checkpoints()]
        assert told[1].kind != "full"

    def test_of_a_failure(self, store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
        medium = Medium(monkeypatch, 2, held=False)
        medium.fails = {0, 1}
        told: list[SaveMetrics] = []
        with store.writer(poll_seconds=None, on_metrics=told.append) as writer:
            error = writer.save_async(weights(1), 1).exception(20)
            with pytest.raises(ckptstore.StorageError) as caught:
                writer.save(weights(2), 2)
            with pytest.raises(ckptstore.StepOrderError):
                writer.save(weights(2), -1)  # refused: that was no save
        assert [(one.step, one.kind, one.stored, one.error) for one in told] == [
            (1, None, 0, error),
            (2, None, 0, caught.value),
        ]

    def test_what_the_callback_raises_harms_nothing(self, store: ckptstore.Store) -> None:
        def bad(_: SaveMetrics) -> None:
            raise ZeroDivisionError("oh")

        writer = store.writer(poll_seconds=None, on_metrics=bad)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in (1, 2, 3):
                writer.save_async(weights(step), step)
            writer.close()
        assert len([one for one in caught if "on_metrics" in str(one.message)]) == 1
        check(store, 1, 2, 3)

    def test_the_callback_may_use_the_writer(self, store: ckptstore.Store) -> None:
        waited = []

        def told(metrics: SaveMetrics) -> None:
            if metrics.step == 1:
                writer.wait()
                waited.append(writer.tag("first", 1).step)

        with store.writer(poll_seconds=None, on_metrics=told) as writer:
            writer.save_async(weights(1), 1)
            writer.save_async(weights(2), 2)
            while not waited:
                time.sleep(0.01)
        check(store, 1, 2)


class TestCancelling:
    @pytest.mark.parametrize("options", [{}, {"deltas": 4}], ids=["fulls", "deltas"])
    def test_a_save_that_is_not_committed_is_given_up(
        self, store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
    ) -> None:
        medium = Medium(monkeypatch, 9)
        with store.writer(max_in_flight=2, poll_seconds=None, **options) as writer:
            pending = writer.save_async(weights(1), 1)
            assert medium.begun[0].wait(120)
            assert pending.cancel()
            assert pending.cancel()
            assert pending.cancelled()
            assert pending.done()
            with pytest.raises(CancelledError, match="step 1 was cancelled"):
                pending.result()
            medium.release()
            writer.wait()  # whoever cancels has been told
            again = writer.save_async(weights(1), 1)
            assert again.result(120).step == 1
            assert not again.cancel()
            assert not again.cancelled()
            writer.save(weights(2), 2)
            begun = {key.rpartition("/")[2].partition(".")[0] for key in store.backend.list("seg/")}
            catalog = store.view().catalog
            assert begun == set(catalog.segments) | catalog.dropped
            (gone,) = catalog.dropped
        assert sum(gone.encode() in store.backend.get(key) for key in store.backend.list("log/")) == 1
        check(store, 1, 2)

    def test_one_that_waits_for_its_turn_is_never_begun(
        self, store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        medium = Medium(monkeypatch, 9)
        with store.writer(max_in_flight=1, poll_seconds=None) as writer, taken(writer, medium):
            assert writer.save_async(weights(2), 2).cancel()
            assert writer.save_async(weights(3), 3).cancel()  # its place is free again
        check(store, 1)
        assert medium.opened == 1

    def test_giving_up_twice_gives_one_place_back(
        self, store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        medium = Medium(monkeypatch, 9)
        with store.writer(max_in_flight=1, poll_seconds=None) as writer:
            with taken(writer, medium):
                pending = writer.save_async(weights(2), 2)
                assert pending.cancel()
                assert pending.cancel()
                writer.save_async(weights(3), 3)
                fourth = threading.Thread(target=writer.save_async, args=(weights(4), 4))
                fourth.start()
                fourth.join(0.2)
                waits = fourth.is_alive()
            fourth.join(120)
        assert waits, "step 3 was in flight, and nothing else may be"
        check(store, 1, 3, 4)

    def test_a_gradient_diff_is_not(self, store: ckptstore.Store) -> None:
        with store.writer(diffs=ckptstore.DiffOptions(batch=9), poll_seconds=None) as writer:
            writer.save(weights(1), 1)
            pending = writer.save_async(weights(2), 2)
            writer.poll()
            assert not pending.cancel()
            assert not pending.done()
        check(store, 1, 2)

    def test_at_any_instant(self, store: ckptstore.Store) -> None:
        """It is durable, or it is cancelled: never both, never neither."""
        with store.writer(max_in_flight=3, poll_seconds=None) as writer:
            cancelled = []
            for step in range(1, 60):
                pending = writer.save_async(weights(step), step)
                time.sleep(step * 1e-4)
                cancelled.append(pending.cancel())
                if not cancelled[-1]:
                    pending.result(120)
        check(store, *(step for step, gone in enumerate(cancelled, 1) if not gone))


_KILLED = """
import sys
import numpy as np
import ckptstore
from ckptstore.host import crash_points
point, count = sys.argv[2], int(sys.argv[3])
store = ckptstore.open(sys.argv[1], create=True)
writer = store.writer(max_in_flight=3, poll_seconds=None, memory={memory})
crash_points.arm(point, count)
pending = []
for step in range(1, 40):
    state = {{"a": np.full(300_000, step, np.float32), "b": np.full(5 << 20, step, np.float32)}}
    pending.append((step, writer.save_async(state, step)))
    while pending and (len(pending) > 3 or pending[0][1].done()):
        done, save = pending.pop(0)
        save.result()
        print(done, flush=True)
print("survived", flush=True)
"""


KILLS = {"save.first-block": 9, "save.sealed": 4, "commit.before-create": 5, "create.linked": 5, "create.synced": 4}


@pytest.mark.parametrize(("point", "memory"), in_turn(list(KILLS), [LEAST, None]))
def test_a_kill_with_several_in_flight(tmp_path: Path, point: str, memory: int | None) -> None:
    """What was acknowledged is there, the newest is at least that, and the next writer goes on from it."""
    count = KILLS[point]
    command = [sys.executable, "-c", _KILLED.format(memory=memory), str(tmp_path / "store"), point, str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    acknowledged = [int(line) for line in done.stdout.split()]
    store = ckptstore.open(tmp_path / "store")
    found = [info.step for info in store.checkpoints()]
    assert set(acknowledged) <= set(found)
    latest = store.latest_step() or 0
    assert latest == max(found, default=0) >= max(acknowledged, default=0)
    for step in found:
        loaded = store.load(step, framework="numpy")
        assert (loaded["a"] == step).all()
        assert (loaded["b"] == step).all()
    with store.writer(max_in_flight=3) as writer:
        assert (writer.parent.step if writer.parent else 0) == latest
        writer.save_async(weights(latest + 1), latest + 1)
    assert store.latest_step() == latest + 1
    assert ckptstore.verify(store).ok


def test_a_large_state_divided_over_segments(store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is short, units that share pages, several segments: the bits are those that training had."""
    monkeypatch.setattr("ckptstore.backends.base.Backend.segment_bytes", 40 * MIB)
    rng = np.random.default_rng(0)
    state = {f"w{number}": rng.integers(0, 256, 5_000_001 + 997 * number, np.uint8) for number in range(24)}
    expected = {name: array.copy() for name, array in state.items()}
    with store.writer(memory=LEAST, poll_seconds=None) as writer:
        pending = writer.save_async(state, 1)
        for array in state.values():
            array[:] = 0
        assert len(pending.result().segments) > 2
    loaded = store.load(1, framework="numpy")
    assert all(np.array_equal(loaded[name], array) for name, array in expected.items())
    assert ckptstore.verify(store).ok


@pytest.mark.parametrize(
    ("how", "most"),
    [({}, 3), ({"deltas": ckptstore.DeltaOptions()}, 1), ({"diffs": ckptstore.DiffOptions()}, 1)],
    ids=["fulls", "deltas", "diffs"],
)
def test_a_small_state_needs_few_threads_and_a_large_one_gets_them(
    store: ckptstore.Store, how: dict[str, Any], most: int
) -> None:
    """Fulls: one thread commits, and one for each save in flight writes. What is compressed one thread does alone."""
    before = threading.active_count()
    with store.writer(max_in_flight=2, poll_seconds=None, **how) as writer:
        for step in range(1, 5):
            writer.save_async({"w": np.full(4096, step, np.float32)}, step)
        writer.wait()
        assert threading.active_count() - before <= most
        writer.save_async({"w": np.zeros(1 << 19, np.float32)}, 5)
        writer.wait()
        assert threading.active_count() - before > most
    for step in range(1, 5):
        assert (store.load(step, framework="numpy")["w"] == step).all()
