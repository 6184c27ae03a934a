"""Saves in flight that are cancelled or killed: acknowledged checkpoints stay, and nothing else is left."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore.host.arenas import LEAST
from tests.forms import in_turn
from tests.write.medium import Medium, check, taken, weights


@pytest.fixture
def store() -> ckptstore.Store:
    return ckptstore.open(f"memory://{uuid.uuid4().hex}", create=True)


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
            writer.wait()  # the caller of cancel has the answer
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

    def test_of_one_that_is_given_up_no_more_is_written(
        self, store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """All of it is copied, and a part of that is on its way to the medium."""
        units, medium = 9, Medium(monkeypatch, 1)
        with store.writer(poll_seconds=None) as writer:
            pending = writer.save_async(weights(1, units), 1)
            assert medium.begun[0].wait(120)
            assert pending.cancel()
            medium.release()
            writer.wait()
            assert medium.blocks < units

    def test_one_that_waits_for_its_turn_is_never_begun(
        self, store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        medium = Medium(monkeypatch, 9)
        with store.writer(max_in_flight=1, poll_seconds=None) as writer, taken(writer, medium):
            assert writer.save_async(weights(2), 2).cancel()
            assert writer.save_async(weights(3), 3).cancel()  # its slot is free again
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
    """Acknowledged checkpoints are there, the newest is at least the last of them, and the next writer continues from
    it."""
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
