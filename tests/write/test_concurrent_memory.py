"""Saves in flight in bounded memory: how much they use, that it is returned, that it is prepared in advance."""

from __future__ import annotations

import threading
import uuid
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore import SaveMetrics
from ckptstore.formats.sources import NumpySource
from ckptstore.formats.states.state import FlatState
from ckptstore.host.arenas import LEAST
from tests.waiting import once_it_waits
from tests.write import inside
from tests.write.medium import MIB, Medium, check, run, weights


@pytest.fixture
def store() -> ckptstore.Store:
    return ckptstore.open(f"memory://{uuid.uuid4().hex}", create=True)


class TestMemory:
    def test_it_is_the_bound(self, store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
        """With a state several times as large. Training waits for the medium, and the waiting time is reported."""
        medium = Medium(monkeypatch, 3)
        told: list[SaveMetrics] = []
        with store.writer(max_in_flight=2, memory=LEAST, poll_seconds=None, on_metrics=told.append) as writer:
            memory = inside.memory(writer)
            for step in (1, 2):
                state = weights(step, 5)
                once_it_waits(threading.current_thread(), "Arenas.take", medium.may[step - 1].set, later=0.05)
                writer.save_async(state, step)
                for array in state.values():
                    array[:] = -1
            assert memory.held <= LEAST
            writer.wait()
            assert memory.used == 0
            assert 32 * MIB <= memory.most <= LEAST
        check(store, 1, 2, units=5)
        assert all(0.02 < one.waited <= one.stall < one.durable for one in told)

    def test_with_memory_for_all_no_save_waits_for_the_medium(
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
        assert found[LEAST] < LEAST + 48 * MIB  # and the memory of hashing: about 10

    def test_it_waits_no_more_when_the_medium_is_gone(
        self, store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The copy ends there: its bytes have no destination. The save reports it, once."""
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
        """The copying thread reports it, though the lane that waits for it may see it first."""

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
