"""Step diffs with errors beside them: memory, threads, signals, order, other optimizers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import DeltaOptions, DiffOptions, Update
from ckptstore.formats import optim
from ckptstore.host import sigterm
from ckptstore.restore.chains.replay import Program
from ckptstore.store import verify
from ckptstore.write.capture.snapshot import SnapshotPool
from tests.store.states import same
from tests.write.held import elsewhere, hold
from tests.write.inside import forget_open_writers
from tests.write.trainer import ADAM, Trainer


@pytest.mark.parametrize("accumulate", ["concatenate", "sum"])
def test_steps_that_overtake_each_other(tmp_path: Path, accumulate: Any) -> None:
    """Steps are accepted in ascending order; a thread that is slow to pass its optimizer's updates comes later."""
    trainer, truth = Trainer(), {}
    store = ckptstore.open(tmp_path / "store", create=True)
    with store.writer(diffs=DiffOptions(batch=4, accumulate=accumulate), max_in_flight=2) as writer:
        pending = []

        def save(step: int) -> None:
            trainer.train()
            truth[step] = trainer.frozen()
            pending.append(writer.save_async(trainer.state(), step, updates=trainer.updates()))

        def slow(_: Any) -> Any:
            updates = trainer.updates()
            elsewhere(lambda: save(6))
            return updates

        save(3)
        save(4)
        trainer.train()
        truth[5] = trainer.frozen()
        pending.append(writer.save_async(trainer.state(), 5, updates=slow))
        save(7)
        writer.wait()
        for one in pending:
            one.result()
    assert verify(store).ok
    assert {3, 7} <= {info.step for info in store.checkpoints()}
    if accumulate == "concatenate":
        for step, state in truth.items():
            if step != 5:  # its tensors had changed when they were copied
                same(state, store.load(step))


def test_another_optimizer_takes_over(tmp_path: Path) -> None:
    """AdamW's arithmetic was recognized, which SGD does not have."""
    rng, store = np.random.default_rng(0), ckptstore.open(tmp_path / "store", create=True)
    w, m, v = (np.zeros((300, 300), "<f4") for _ in range(3))
    w += rng.normal(size=w.shape).astype("<f4")
    sgd = optim.SGD(momentum=0.9)
    assert set(sgd.variants) < set(ADAM.variants)
    with store.writer(diffs=DiffOptions(batch=2)) as writer:
        writer.save_async({"w": w, "m": m, "v": v}, 0)
        for count in range(1, 7):
            numbers = optim.Step(count=count, lr=1e-3)
            gradient = rng.normal(size=w.shape).astype("<f4")
            if count < 4:
                optim.advance(ADAM.rule(numbers, "divide"), [w, m, v], gradient)
                update = Update(("w", "m", "v"), ADAM, numbers)
            else:
                optim.advance(sgd.rule(numbers), [w, m], gradient)
                update = Update(("w", "m"), sgd, numbers)
            writer.save_async({"w": w, "m": m, "v": v}, count, updates=[update])
    same({"w": w, "m": m, "v": v}, store.load(6))


def test_no_memory_for_a_copy_of_a_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The full is durable, and stays a base of deltas: its memory is not reused."""
    trainer, truth = Trainer(), {}
    store = ckptstore.open(tmp_path / "store", create=True)
    copy, fail = SnapshotPool.copy, threading.Event()

    def failing(self: SnapshotPool, flat: Any, *how: Any, queued: bool = False, without: Any = ()) -> Any:
        # The copies that save_async takes are queued; the copy of a full is not.
        if fail.is_set() and not queued and flat.tree is not None:
            raise MemoryError
        return copy(self, flat, *how, queued=queued, without=without)

    monkeypatch.setattr(SnapshotPool, "copy", failing)
    with store.writer(deltas=DeltaOptions(interval=2), diffs=DiffOptions(full_every=2)) as writer:
        for step in range(1, 9):
            trainer.train()
            truth[step] = trainer.frozen()
            fail.set() if step < 4 else fail.clear()
            assert writer.save_async(trainer.state(), step, updates=trainer.updates()).result().step == step
    for step, state in truth.items():
        same(state, store.load(step))
    assert {info.kind for info in store.checkpoints()} == {"full", "delta", "gradient"}


def test_no_thread_for_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, truth = Trainer(), {}
    store = ckptstore.open(tmp_path / "store", create=True)

    def no_thread(_: Any) -> None:
        raise RuntimeError("can't start new thread")

    with store.writer(diffs=DiffOptions(batch=4, seconds=60)) as writer:
        for step in range(1, 8):
            trainer.train()
            truth[step] = trainer.frozen()
            with monkeypatch.context() as patched:
                if step < 4:
                    patched.setattr(threading.Timer, "start", no_thread)
                one = writer.save_async(trainer.state(), step, updates=trainer.updates())
                if step < 4:
                    assert one.result(60).step == step  # no call will return to it: it is written at once
    for step, state in truth.items():
        same(state, store.load(step))


def test_progress_that_raises_stops_a_save_before_anything_is_written(tmp_path: Path) -> None:
    trainer, store = Trainer(), ckptstore.open(tmp_path / "store", create=True)

    def stop(_done: int, _total: int) -> None:
        raise ZeroDivisionError

    with store.writer(diffs=DiffOptions(batch=4)) as writer:
        writer.save(trainer.state(), 1)
        trainer.train()
        with pytest.raises(ZeroDivisionError):
            writer.save(trainer.state(), 2, updates=trainer.updates(), progress=stop)
        assert [info.step for info in store.checkpoints()] == [1]
        writer.save(trainer.state(), 2, updates=trainer.updates())  # as nothing was saved, it may be tried again
    same(trainer.frozen(), store.load(2))


def test_sparse_gradients_may_change_when_save_async_returns(tmp_path: Path) -> None:
    trainer, store = Trainer(), ckptstore.open(tmp_path / "store", create=True)
    with store.writer(diffs=DiffOptions(batch=4, seconds=None)) as writer:
        writer.save_async(trainer.state(), 0)
        for step in range(1, 5):
            trainer.train(0.02)
            gate = hold(store, writer)
            try:
                writer.save_async(trainer.state(), step, updates=trainer.updates())
                for gradient in trainer.gradients.values():
                    gradient.indices[:] = 1 << 40
                    gradient.values[:] = np.nan
            finally:
                gate.set()
    same(trainer.frozen(), store.load(4))
    assert sum(info.stored for info in store.checkpoints() if info.kind == "gradient") < 100_000


def test_a_sum_without_one_of_its_steps_goes_no_further(tmp_path: Path) -> None:
    trainer, store = Trainer(), ckptstore.open(tmp_path / "store", create=True)
    with store.writer(diffs=DiffOptions(batch=4, accumulate="sum")) as writer:
        pending = []
        for step in range(1, 6):
            trainer.train()
            pending.append(writer.save_async(trainer.state(), step, updates=trainer.updates(step != 3)))
            if step == 3:
                with pytest.raises(ckptstore.UsageError):
                    pending.pop().result()
    assert [(info.step, info.kind) for info in store.checkpoints()] == [
        (1, "full"),
        (2, "gradient"),
        (4, "full"),
        (5, "gradient"),
    ]


CHAINED = """
import os, signal, sys, time
import ckptstore
from tests.write.trainer import Trainer

trainer, store = Trainer(), ckptstore.open(sys.argv[1], create=True)
calls = []
if sys.argv[2] == "flag":
    signal.signal(signal.SIGTERM, lambda *_: calls.append("first"))
writer = store.writer(diffs=ckptstore.DiffOptions(batch=50, seconds=None), poll_seconds=None)
before = signal.getsignal(signal.SIGTERM)

def later(number, frame):
    calls.append("later")
    before(number, frame)

signal.signal(signal.SIGTERM, later)
for step in range(1, 6):
    trainer.train()
    last = writer.save_async(trainer.state(), step, updates=trainer.updates())
os.kill(os.getpid(), signal.SIGTERM)
while not last.done():
    time.sleep(0.01)
end = time.monotonic() + 120
while len(calls) < 3 and time.monotonic() < end:
    time.sleep(0.01)
time.sleep(0.5)  # nothing more comes
print(*calls, flush=True)
writer.close()
"""


@pytest.mark.parametrize("kind", ["default", "flag"])
def test_a_handler_of_sigterm_that_calls_the_one_before(tmp_path: Path, kind: str) -> None:
    """As some training frameworks do: the signal must not be sent again for ever."""
    environment = {"CKPTSTORE_KERNELS": "numpy", "PATH": os.defpath}
    done = subprocess.run(
        [sys.executable, "-c", CHAINED, str(tmp_path / "store"), kind],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=Path(__file__).resolve().parents[2],
        timeout=240,
    )
    if kind == "default":
        assert done.returncode == -signal.SIGTERM, done.stderr
    else:
        assert (done.returncode, done.stdout.split()) == (0, ["later", "later", "first"]), done.stderr
    assert [info.step for info in ckptstore.open(tmp_path / "store").checkpoints()] == [1, 2, 3, 4, 5]


def test_a_writer_that_cannot_settle_leaves_the_others_their_signal(tmp_path: Path) -> None:
    """Whatever its error; the order of the writers is undefined."""

    class Broken:
        def _settle(self) -> None:
            settled.append(self)
            raise RuntimeError("no thread to be had")

    settled: list[Broken] = []
    handed_on = threading.Event()
    forget_open_writers()
    original = signal.signal(signal.SIGTERM, lambda *_: handed_on.set())
    writers, pending, broken = [], [], [Broken(), Broken()]
    try:
        for number in range(2):
            trainer, store = Trainer(), ckptstore.open(tmp_path / str(number), create=True)
            writer = store.writer(diffs=DiffOptions(batch=50, seconds=None), poll_seconds=None)
            writers.append(writer)
            pending.append([writer.save_async(trainer.state(), step) for step in (1, 2)])
            sigterm.watch(broken[number])
        os.kill(os.getpid(), signal.SIGTERM)
        assert handed_on.wait(120)
        for one in pending:
            assert one[1].result(120).step == 2
        assert set(settled) == set(broken)
    finally:
        for one in broken:
            sigterm.forget(one)
        for writer in writers:
            writer.close()
        signal.signal(signal.SIGTERM, original)


def test_a_handler_of_sigterm_that_took_the_place_of_ours(tmp_path: Path) -> None:
    """It stays when the last writer is closed; the next writer is covered all the same."""
    store = ckptstore.open(tmp_path / "store", create=True)
    original = signal.getsignal(signal.SIGTERM)
    other = lambda *_: None  # noqa: E731
    try:
        with store.writer(diffs=DiffOptions(batch=4)):
            signal.signal(signal.SIGTERM, other)
        assert signal.getsignal(signal.SIGTERM) is other
        with store.writer(diffs=DiffOptions(batch=4)):
            assert signal.getsignal(signal.SIGTERM) is not other
        assert signal.getsignal(signal.SIGTERM) is other
    finally:
        signal.signal(signal.SIGTERM, original)


def test_copies_of_many_small_masters_replay_their_group_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(sizes={f"bias{number}": (64,) for number in range(20)})
    store = ckptstore.open(tmp_path / "store", create=True)
    with store.writer(diffs=DiffOptions(batch=4)) as writer:
        for step in range(1, 6):
            trainer.train()
            writer.save_async(trainer.state(), step, updates=trainer.updates())
    decode, calls = Program.decode, []
    monkeypatch.setattr(Program, "decode", lambda *args, **how: (calls.append(1), decode(*args, **how))[1])
    same(trainer.frozen()["model"], store.load(5, select="model.*")["model"])
    assert len(calls) == 1
