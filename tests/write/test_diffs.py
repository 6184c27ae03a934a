"""Step diffs through the store: every step of every batch comes back bit for bit, whatever it holds."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ckptstore
from ckptstore import DiffOptions, Update
from ckptstore.formats import optim
from ckptstore.formats.catalog import Catalog
from ckptstore.formats.records import CheckpointEntry, Encoding
from ckptstore.formats.sources import NumpySource
from ckptstore.log.change import Change
from ckptstore.log.checkpoint_info import describe_checkpoint
from ckptstore.reports.restore_explanation import explain
from ckptstore.store import verify
from ckptstore.tuning import Configuration, Controller, Job, best
from tests.store.states import same
from tests.write.held import hold

ADAM = optim.AdamW(beta1=0.9, beta2=0.95, weight_decay=0.1)
SIZES = {"wide": (300, 700), "bias": (700,), "norm": (3,), "one": (1,)}


class Trainer:
    """Training as far as a store can tell: parameters that AdamW moves, a bf16 copy, buffers, counters."""

    def __init__(self, seed: int = 0, sizes: dict[str, tuple[int, ...]] = SIZES) -> None:
        self.rng = np.random.default_rng(seed)
        self.step = 0
        self.weights = {name: self.rng.normal(0, 0.02, shape).astype("<f4") for name, shape in sizes.items()}
        self.m = {name: np.zeros(shape, "<f4") for name, shape in sizes.items()}
        self.v = {name: np.zeros(shape, "<f4") for name, shape in sizes.items()}
        self.buffer = np.zeros(40)
        self.gradients: dict[str, Any] = {}

    def state(self) -> dict[str, Any]:
        copy = {name: weight.astype(ml_dtypes.bfloat16) for name, weight in self.weights.items()}
        state = {"model": copy, "master": self.weights, "m": self.m, "v": self.v, "buffer": self.buffer}
        return {**state, "step": self.step, "rng": self.rng.bit_generator.state}

    def frozen(self) -> dict[str, Any]:
        """The state as it is now, for comparison."""
        return {
            name: {key: array.copy() for key, array in part.items()} if name in ("model", "master", "m", "v") else part
            for name, part in self.state().items()
        } | {"buffer": self.buffer.copy()}

    def train(self, keep: float | None = None) -> None:
        """One step; with `keep` the largest share of each gradient alone."""
        self.step += 1
        rule = ADAM.rule(self.numbers())
        for name, weight in self.weights.items():
            gradient = self.rng.normal(0, 1e-3, weight.shape).astype("<f4")
            self.gradients[name] = NumpySource(gradient)
            if keep is not None:
                flat = gradient.reshape(-1)
                where = np.sort(np.argsort(-np.abs(flat))[: max(1, int(keep * flat.size))])
                sparse = optim.SparseGradient(where, flat[where], flat.size)
                self.gradients[name] = sparse
                gradient = sparse.dense()
            optim.advance(rule, [weight, self.m[name], self.v[name]], gradient)
        self.buffer[self.step % 40] += self.rng.normal()

    def numbers(self) -> optim.Step:
        return optim.Step(count=max(1, self.step), lr=1e-3 / (1 + self.step), clip=0.7)

    def updates(self, gradients: bool = True) -> list[Update]:
        return [
            Update(
                (f"master.{name}", f"m.{name}", f"v.{name}"),
                ADAM,
                self.numbers(),
                self.gradients[name] if gradients else None,
            )
            for name in self.weights
        ]


def fill(path: Path, options: DiffOptions, steps: int, **how: Any) -> tuple[ckptstore.Store, dict[int, Any]]:
    trainer, truth = Trainer(), {}
    store = ckptstore.open(path, create=True)
    with store.writer(diffs=options) as writer:
        for step in range(1, steps + 1):
            trainer.train(how.get("keep"))
            truth[step] = trainer.frozen()
            updates = trainer.updates(how.get("gradients", True))
            writer.save_async(trainer.state(), step, updates=updates)
    return store, truth


@pytest.mark.parametrize("how", [{}, {"gradients": False}, {"keep": 0.02}], ids=["dense", "none", "sparse"])
@pytest.mark.parametrize("batch", [1, 4])
def test_every_step_comes_back(tmp_path: Path, batch: int, how: dict[str, Any]) -> None:
    store, truth = fill(tmp_path / "store", DiffOptions(full_every=8, batch=batch), 19, **how)
    kinds = [info.kind for info in store.checkpoints()]
    assert [step for step, kind in enumerate(kinds, 1) if kind == "full"] == [1, 9, 17]
    assert set(kinds) == {"full", "gradient"}
    for step, state in truth.items():
        same(state, store.load(step))
    report = verify(store)
    assert report.ok
    assert len(report.restorable) == 19


def test_what_it_costs(tmp_path: Path) -> None:
    """All bytes of a segment counted, per number of the parameters (96 bits as they are)."""
    numbers = sum(weight.size for weight in Trainer().weights.values())
    for how, most in (({}, 29.0), ({"gradients": False}, 31.0), ({"keep": 0.01}, 1.6)):
        store, _ = fill(tmp_path / str(most), DiffOptions(batch=10), 11, **how)
        stored = [8 * info.stored / numbers for info in store.checkpoints() if info.kind == "gradient"]
        assert sum(stored) / len(stored) < most, how
        sizes = {entry.id: entry.size for entry, _ in store.describe(11)}
        assert sum(info.stored for info in store.checkpoints()) == sum(sizes.values())


def test_a_batch_is_one_segment(tmp_path: Path) -> None:
    store, _ = fill(tmp_path / "store", DiffOptions(batch=5), 12)
    described = store.describe(12)
    assert [doc.steps for _, doc in described] == [(1,), (2, 3, 4, 5, 6), (7, 8, 9, 10, 11), (12,)]
    for _, doc in described[1:]:
        assert doc.kind == "gradient"
        below = [told.base for told in doc.encodings.values()]
        assert [base and base.node for base in below] == [(1, step - 1) for step in doc.steps]
    digests = {
        step: {entry.digest is not None for entry in held.values()} for step, held in described[1][1].tensors.items()
    }
    assert digests == {2: {False}, 3: {False}, 4: {False}, 5: {False}, 6: {True}}


def test_the_plan_counts_what_is_replayed(tmp_path: Path) -> None:
    store, _ = fill(tmp_path / "store", DiffOptions(batch=4), 4)
    plan = explain(store.journal, 4, select="m.wide")
    assert [(step.kind, step.tensors) for step in plan.steps] == [("full", 3), *[("gradient", 3)] * 3]
    assert [step.bytes_decoded for step in plan.steps] == [0, *[12 * 210_000] * 3]
    held = {step: doc.tensors[step] for _, doc in store.describe(4) for step in doc.steps}
    assert plan.steps[2].bytes_read == held[3]["master.wide"].stored


def test_small_parameters_are_coded_as_one(tmp_path: Path) -> None:
    store, _ = fill(tmp_path / "store", DiffOptions(), 2)
    entries = store.tensors(2)
    leaders = {name for name, entry in entries.items() if entry.codec == "step" and "leader" not in entry.params}
    assert len(leaders) == 2
    assert entries["m.norm"].params == {"leader": "master.bias"}
    assert entries["m.norm"].stored == 0
    assert entries["model.wide"].codec == "derive"


def test_one_tensor_is_restored_with_what_it_needs_only(tmp_path: Path) -> None:
    store, truth = fill(tmp_path / "store", DiffOptions(batch=3), 7)
    found = store.load(7, select="v.wide")
    assert np.array_equal(found["v"]["wide"], truth[7]["v"]["wide"])
    for name in ("master.norm", "m.wide", "model.bias", "model.wide"):
        part, _, key = name.partition(".")
        assert bytes(store.read_tensor(7, name)) == truth[7][part][key].tobytes()
        assert b"".join(bytes(data) for _, data in store.chunks(7, name)) == truth[7][part][key].tobytes()


def test_restoring_in_place(tmp_path: Path) -> None:
    store, truth = fill(tmp_path / "store", DiffOptions(batch=3), 7)
    target = Trainer(seed=5).state()
    found = store.load(6, into=target)
    same(truth[6], found)
    assert found["m"]["wide"] is target["m"]["wide"]


def test_tensors_of_many_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunk k of a slot needs chunk k of the others; more than one segment holds a batch when it is large."""
    from ckptstore.write.steps import batch_segments, batcher

    monkeypatch.setattr(
        batcher, "write_batch", lambda *args, **more: batch_segments.write_batch(*args, **more, limit=1 << 14)
    )
    trainer = Trainer(sizes={"large": (4_300_001,), "small": (11,)})
    store = ckptstore.open(tmp_path / "store", create=True)
    with store.writer(diffs=DiffOptions(batch=2)) as writer:
        for step in range(1, 4):
            trainer.train(0.001)
            writer.save_async(trainer.state(), step, updates=trainer.updates())
        truth = trainer.frozen()
    assert len(store.checkpoint(3).segments) > 1
    same(truth, store.load(3))
    data = b"".join(bytes(data) for _, data in store.chunks(3, "m.large"))
    assert data == truth["m"]["large"].tobytes()


@np.errstate(all="ignore")
def test_nothing_that_is_said_of_a_step_is_believed(tmp_path: Path) -> None:
    """Wrong settings, wrong gradients, wrong names, parameters that change by themselves: bytes, never bits."""
    trainer, truth = Trainer(), {}
    store = ckptstore.open(tmp_path / "store", create=True)
    rng = np.random.default_rng(1)
    with store.writer(diffs=DiffOptions(batch=4)) as writer:
        for step in range(1, 14):
            trainer.train()
            updates = trainer.updates()
            if step == 3:
                updates = [replace(one, step=replace(one.step, lr=7.0)) for one in updates]
            if step == 4:
                updates = [replace(one, gradient=NumpySource(np.ones(3, "<f4"))) for one in updates]
            if step == 5:
                updates = [replace(one, slots=("nothing", *one.slots[1:])) for one in updates]
            if step == 6:
                updates = [replace(one, slots=one.slots[::-1]) for one in updates] + updates
            if step == 7:
                patterns = rng.integers(0, 1 << 32, trainer.weights["wide"].shape, np.uint32)
                trainer.weights["wide"][...] = patterns.view("<f4")
            if step == 8:
                trainer.m["bias"] = np.full(5, np.nan, "<f4")  # another shape
            if step == 9:
                trainer.m["bias"] = np.zeros(700, "<f4")
            if step == 10:
                updates = [replace(one, step=replace(one.step, skipped=True)) for one in updates]
            if step == 11:
                updates = [replace(one, gradient=None) for one in updates[:2]]
            if step == 12:
                del trainer.weights["norm"], trainer.m["norm"], trainer.v["norm"]
            truth[step] = trainer.frozen()
            writer.save_async(trainer.state(), step, updates=updates)
            if step == 8:
                trainer.m["bias"] = np.zeros(700, "<f4")
    for step, state in truth.items():
        same(state, store.load(step))
        same(state["v"], store.load(step, select="v.*")["v"])


def test_save_writes_what_waits(tmp_path: Path) -> None:
    trainer = Trainer()
    store = ckptstore.open(tmp_path / "store", create=True)
    with store.writer(diffs=DiffOptions(batch=100, seconds=None)) as writer:
        pending = []
        for step in range(1, 5):
            trainer.train()
            pending.append(writer.save_async(trainer.state(), step, updates=trainer.updates()))
        assert pending[0].result().kind == "full"
        assert not any(one.done() for one in pending[1:])
        assert [info.step for info in store.checkpoints()] == [1]
        trainer.train()
        info = writer.save(trainer.state(), 5, updates=trainer.updates())
        assert all(one.done() for one in pending)
        assert [one.result().segments for one in pending[1:]] == [info.segments] * 3
        assert [info.step for info in store.checkpoints()] == [1, 2, 3, 4, 5]
        trainer.train()
        last = writer.save_async(trainer.state(), 6)
        writer.wait()
        assert last.done()
        trainer.train()
        writer.save_async(trainer.state(), 7, updates=trainer.updates())
    assert len(store.checkpoints()) == 7


def test_who_asks_for_a_step_does_not_wait_for_its_batch(tmp_path: Path) -> None:
    trainer = Trainer()
    store = ckptstore.open(tmp_path / "store", create=True)
    with store.writer(diffs=DiffOptions(batch=100, seconds=None), poll_seconds=None) as writer:

        def save() -> ckptstore.PendingSave:
            trainer.train()
            return writer.save_async(trainer.state(), trainer.step, updates=trainer.updates())

        first, second = save(), save()
        assert first.result(60).kind == "full"
        writer.poll()
        assert not second.done(), "only what it is asked for is written"
        third = save()
        assert second.result(60).segments == third.result(60).segments
        assert third.result(60).step == 3
        fourth = save()
        with pytest.raises(TimeoutError):
            fourth.result(0)
        assert fourth.result(60).step == 4
        fifth = save()
        writer.tag("five", 5)
        assert fifth.done()
        assert store.checkpoint("tag:five").step == 5
        sixth = save()
        writer.tag("one", 1)
        assert not sixth.done(), "the batch has nothing to do with step 1"
        assert store.checkpoint("tag:one").step == 1


@pytest.mark.parametrize("memory", [None, 128 << 20])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_step_diff_cannot_be_cancelled(tmp_path: Path, batch: int, memory: int | None) -> None:
    """The next one is compressed against it. What answers that it is cancelled must not be stored."""
    store = ckptstore.open(tmp_path / "store", create=True)
    trainer, truth = Trainer(), {}
    with store.writer(diffs=DiffOptions(batch=batch), max_in_flight=8, memory=memory, poll_seconds=None) as writer:
        gate = hold(store, writer)
        if memory is not None:
            gate.set()  # a save returns when it is compressed
        saves = []
        for step in range(1, 6):
            trainer.train()
            truth[step] = trainer.frozen()
            saves.append(writer.save_async(trainer.state(), step, updates=trainer.updates()))
        assert [save.cancel() for save in saves] == [False] * 5
        gate.set()
        assert [save.result(60).step for save in saves] == [1, 2, 3, 4, 5]
    for step, state in truth.items():
        same(state, store.load(step))


def test_a_tag_of_a_step_whose_batch_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptstore.write.steps import batcher

    trainer = Trainer()
    store = ckptstore.open(tmp_path / "store", create=True)

    def broken(*_: Any, **__: Any) -> Any:
        raise ckptstore.StorageError("the disk is gone")

    with store.writer(diffs=DiffOptions(batch=100, seconds=None)) as writer:
        for step in (1, 2):
            trainer.train()
            writer.save_async(trainer.state(), step, updates=trainer.updates())
        monkeypatch.setattr(batcher, "write_batch", broken)
        with pytest.raises(ckptstore.StorageError, match="the disk is gone"):
            writer.tag("two", 2)
        writer.wait()  # who tagged was told
        with pytest.raises(ckptstore.CheckpointNotFoundError, match="no checkpoint of step 2"):
            writer.tag("two", 2)


def test_a_batch_waits_no_longer_than_its_time(tmp_path: Path) -> None:
    trainer = Trainer()
    store = ckptstore.open(tmp_path / "store", create=True)
    with store.writer(diffs=DiffOptions(batch=100, seconds=0.2)) as writer:
        for step in range(1, 4):
            trainer.train()
            last = writer.save_async(trainer.state(), step, updates=trainer.updates())
        deadline = time.monotonic() + 60
        while not last.done() and time.monotonic() < deadline:  # asking for the result would write it at once
            time.sleep(0.01)
        assert last.done()
        assert last.result().step == 3


def test_a_failed_batch_fails_each_of_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptstore.write.steps import batcher

    trainer, truth = Trainer(), {}
    store = ckptstore.open(tmp_path / "store", create=True)

    def broken(*_: Any, **__: Any) -> Any:
        raise ckptstore.StorageError("the disk is gone")

    with store.writer(diffs=DiffOptions(batch=100, seconds=None)) as writer:
        pending = []
        for step in range(1, 5):
            trainer.train()
            truth[step] = trainer.frozen()
            pending.append(writer.save_async(trainer.state(), step, updates=trainer.updates()))
        pending[0].result()
        with monkeypatch.context() as patched:
            patched.setattr(batcher, "write_batch", broken)
            with pytest.raises(ckptstore.StorageError, match="the disk is gone") as caught:
                writer.wait()
        assert caught.value.__notes__ == ["steps 2 to 4, which waited for their batch, were not saved"]
        writer.wait()  # does not say it again
        for one in pending[1:]:
            with pytest.raises(ckptstore.StorageError):
                one.result()
        # Nothing is coded against a step that does not exist: a full, and the steps may be tried again.
        for step in (4, 5):
            truth[step] = trainer.frozen()
            writer.save_async(trainer.state(), step, updates=trainer.updates())
            trainer.train()
    assert [(info.step, info.kind) for info in store.checkpoints()] == [(1, "full"), (4, "full"), (5, "gradient")]
    for step in (1, 4, 5):
        same(truth[step], store.load(step))


def test_a_term_that_was_not_closed_says_what_may_be_missing(tmp_path: Path) -> None:
    trainer = Trainer()
    store = ckptstore.open(tmp_path / "store", create=True)
    first = store.writer(diffs=DiffOptions(batch=50, seconds=None))
    for step in range(1, 6):
        trainer.train()
        first.save_async(trainer.state(), step, updates=trainer.updates())
    first.wait()
    trainer.train()
    lost = first.save_async(trainer.state(), 6, updates=trainer.updates())
    with pytest.warns(ckptstore.LostStepsWarning, match=r"term 1 ended without closing: up to 50 steps after 5 .* 5@1"):
        second = store.writer(diffs=DiffOptions(batch=50))
    with pytest.raises(ckptstore.FencedError):
        first.close()
    with pytest.raises(ckptstore.FencedError):
        lost.result()
    second.save(trainer.state(), 6)
    second.close()
    with store.writer() as third:  # no warning: the second was closed
        assert third.parent is not None
        assert third.parent.step == 6


def test_going_back_on_purpose_loses_nothing(tmp_path: Path) -> None:
    """Whoever names an earlier checkpoint knows that there are later ones."""
    trainer = Trainer()
    store = ckptstore.open(tmp_path / "store", create=True)
    with store.writer(diffs=DiffOptions(batch=50, seconds=None)) as first:
        for step in range(1, 6):
            trainer.train()
            first.save_async(trainer.state(), step, updates=trainer.updates())
        first.wait()
        assert not store.view().catalog.terms[1].extra, "it was not closed"
        store.writer(parent=2).close()  # warnings are errors
        store.writer(parent="4@1").close()
        with pytest.warns(ckptstore.LostStepsWarning, match="up to 50 steps after 5 "):
            store.writer(parent="5@1").close()


@pytest.fixture
def settle() -> Iterator[Callable[[], None]]:
    """What a scheduler does some seconds before it kills: every writer writes what waits, and says nothing is missing.

    Until a writer is opened afterwards, a second one is nobody's.
    """
    settled: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: settled.append(number))

    def send() -> None:
        settled.clear()
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + 120
        while not settled:  # the writers' handler sends it on when everything is written
            assert time.monotonic() < deadline
            time.sleep(0.005)

    yield send
    signal.signal(signal.SIGTERM, before)


def test_a_settled_term_that_goes_on_is_not_closed(tmp_path: Path, settle: Callable[[], None]) -> None:
    trainer = Trainer()
    store = ckptstore.open(tmp_path / "store", create=True)

    def save(writer: ckptstore.Writer) -> None:
        trainer.train()
        writer.save_async(trainer.state(), trainer.step, updates=trainer.updates())

    options = DiffOptions(batch=3, seconds=None)
    first = store.writer(diffs=options)
    save(first)
    save(first)
    settle()
    second = store.writer(diffs=options)  # no warning: everything is there
    save(second)
    save(second)
    settle()
    save(second)
    save(second)
    save(second)
    second.wait()
    save(second)
    with pytest.warns(ckptstore.LostStepsWarning, match="up to 3 steps after 7"):
        third = store.writer(diffs=options)
    for writer in (first, second):
        with contextlib.suppress(ckptstore.FencedError):
            writer.close()
    third.close()


def test_requests_are_answered_with_nothing_waiting(tmp_path: Path) -> None:
    """Retiring the full on which steps that wait are built must be refused, not granted first."""
    from ckptstore.log import requests

    trainer = Trainer()
    store = ckptstore.open(tmp_path / "store", create=True)
    with store.writer(diffs=DiffOptions(batch=100, seconds=None), poll_seconds=None) as writer:
        for step in range(1, 4):
            trainer.train()
            last = writer.save_async(trainer.state(), step, updates=trainer.updates())
        writer.poll()
        catalog = store.view().catalog
        segments = catalog.encodings[1, 1][0].segments
        asked = requests.post(store.journal, 1, "test", Change(retires=((1, 1),), drops=tuple(segments)))
        writer.poll()
        assert last.done()
        found = requests.outcome(store.view().catalog, asked)
        assert found.answer == "refused"
    same(trainer.frozen(), store.load(3))


def test_a_step_that_was_retired_is_not_built_on(tmp_path: Path) -> None:
    """All that there is was retired and dropped by a request: the next step begins anew."""
    from ckptstore.log import requests

    trainer = Trainer()
    store = ckptstore.open(tmp_path / "store", create=True)
    kinds = []
    with store.writer(diffs=DiffOptions(), poll_seconds=None) as writer:
        for step in range(1, 5):
            trainer.train()
            kinds.append(writer.save(trainer.state(), step, updates=trainer.updates()).kind)
            if step == 2:
                change = Change(retires=((1, 1), (1, 2)), drops=tuple(store.view().catalog.segments))
                asked = requests.post(store.journal, 1, "test", change)
                writer.poll()
                assert requests.outcome(store.view().catalog, asked).answer == "accepted"
    assert kinds == ["full", "gradient", "full", "gradient"]
    same(trainer.frozen(), store.load(4))


def test_options_are_checked() -> None:
    for wrong in (
        {"full_every": 0},
        {"batch": 0},
        {"batch": 2.5},
        {"full_every": "auto"},
        {"seconds": 0.0},
        {"batch_bytes": -1},
    ):
        with pytest.raises(ckptstore.UsageError, match=next(iter(wrong))):
            DiffOptions(**wrong)  # type: ignore[arg-type]


def test_deltas_between_which_steps_are(tmp_path: Path) -> None:
    """Where a full is due, `deltas` decides what it is."""
    trainer, truth = Trainer(), {}
    store = ckptstore.open(tmp_path / "store", create=True)
    with store.writer(deltas=1, diffs=DiffOptions(full_every=3)) as writer:
        for step in range(1, 11):
            trainer.train()
            truth[step] = trainer.frozen()
            writer.save_async(trainer.state(), step, updates=trainer.updates())
    kinds = [info.kind for info in store.checkpoints()]
    assert kinds[:6] == ["full", "gradient", "gradient", "delta", "gradient", "gradient"]
    for step, state in truth.items():
        same(state, store.load(step))


def test_saves_of_several_threads(tmp_path: Path) -> None:
    """Steps are coded in the order of the calls, each against the one before."""
    trainer, truth = Trainer(), {}
    store = ckptstore.open(tmp_path / "store", create=True)
    lock = threading.Lock()
    with store.writer(diffs=DiffOptions(batch=3), max_in_flight=3) as writer:

        def work() -> None:
            for _ in range(4):
                with lock:
                    trainer.train()
                    truth[trainer.step] = trainer.frozen()
                    writer.save_async(trainer.state(), trainer.step, updates=trainer.updates())

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for step, state in truth.items():
        same(state, store.load(step))


def test_a_wrong_state_digest_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest is training's word on what a replay has to lead to; chunk hashes are the coder's."""
    from ckptstore.formats import digest
    from ckptstore.write.steps import resident_step

    def spoiled(source: Any) -> int:
        return digest.digest(source.view()) ^ (source.nbytes == 12)  # the tensors named "norm"

    with monkeypatch.context() as patched:
        patched.setattr(resident_step, "_digest", spoiled)
        store, truth = fill(tmp_path / "store", DiffOptions(batch=3), 7)
    with pytest.raises(
        ckptstore.CorruptSegmentError, match=r"tensor '\w+.norm': its state digest is not that of step 4"
    ):
        store.load(4)
    with pytest.raises(ckptstore.CorruptSegmentError, match="state digest"):
        store.load(4, into=Trainer().state())
    same(truth[6], store.load(6))  # in the middle of a batch: no digest
    same(truth[4]["v"]["wide"], store.load(4, select="v.wide")["v"]["wide"])


def test_the_first_wrong_step_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay that goes wrong says where, not only that the end is wrong."""
    store, truth = fill(tmp_path / "store", DiffOptions(batch=3), 9)
    decode = optim.decode
    fifth = ADAM.rule(optim.Step(count=5, lr=1e-3 / 6, clip=0.7)).params

    def wrong(links: Any, state: Any) -> None:
        for link in links:
            decode([link], state)
            if link.rule.params == fifth and len(state[0]) > 1000:
                state[1].view("<u4")[7] ^= 1 << 20

    monkeypatch.setattr(optim, "decode", wrong)
    same(truth[4], store.load(4))
    with pytest.raises(ckptstore.CorruptSegmentError, match=r"saved in step 5; the steps before it are right"):
        store.load(9)


def test_gradients_that_are_summed_up(tmp_path: Path) -> None:
    """One checkpoint for a batch; everything about it says that it is not what training had."""
    trainer, truth = Trainer(), {}
    store = ckptstore.open(tmp_path / "store", create=True)
    summed: dict[str, Any] = {}
    expected: dict[str, list[Any]] = {}
    with store.writer(diffs=DiffOptions(batch=4, accumulate="sum")) as writer:
        pending = []
        for step in range(1, 10):
            trainer.train(0.02)
            truth[step] = trainer.frozen()
            pending.append(writer.save_async(trainer.state(), step, updates=trainer.updates()))
            if step == 1:
                expected = {name: [truth[1][part][name].copy() for part in ("master", "m", "v")] for name in SIZES}
            if 1 < step <= 5:
                for name, gradient in trainer.gradients.items():
                    scaled = gradient.dense() * np.float32(0.7)
                    summed[name] = summed[name] + scaled if name in summed else scaled
        assert [one.result().step for one in pending] == [1, 5, 5, 5, 5, 9, 9, 9, 9]
    assert [(info.step, info.kind, info.lossy) for info in store.checkpoints()] == [
        (1, "full", False),
        (5, "gradient", True),
        (9, "gradient", True),
    ]
    same(truth[1], store.load(1))
    with pytest.warns(ckptstore.LossyWarning, match="5@1 is lossy"):
        found = store.load(5)
    rule = ADAM.rule(optim.Step(count=5, lr=1e-3 / 6))
    for name, state in expected.items():
        optim.advance(rule, state, summed[name])
        for part, array in zip(("master", "m", "v"), state, strict=True):
            assert array.tobytes() == found[part][name].tobytes()
    same(truth[5]["buffer"], found["buffer"])
    same(truth[5]["rng"], found["rng"])
    assert verify(store).ok
    with pytest.warns(ckptstore.LossyWarning):
        store.load(9)


def test_a_sum_needs_every_gradient(tmp_path: Path) -> None:
    trainer = Trainer()
    store = ckptstore.open(tmp_path / "store", create=True)
    with store.writer(diffs=DiffOptions(batch=4, accumulate="sum")) as writer:
        writer.save(trainer.state(), 1)
        trainer.train()
        with pytest.raises(ckptstore.UsageError, match=r"there is none of 'master\.wide'"):
            writer.save(trainer.state(), 2, updates=trainer.updates(gradients=False))
        writer.save_async(trainer.state(), 3, updates=trainer.updates())
        trainer.train()
        with pytest.raises(ckptstore.UsageError, match="saved without updates="):
            writer.save(trainer.state(), 4)
        writer.save_async(trainer.state(), 5, updates=trainer.updates())
    assert [info.step for info in store.checkpoints()] == [1, 3, 5]


def test_a_controller_decides_how_often(tmp_path: Path) -> None:
    """The LowDiff model, told what fulls take here, moves full_every and batch; every step stays restorable."""
    job = Job(1e6, 1e9, mtbf=3600, iteration=0.5, load_full=0.01, merge_batch=0.001)
    controller = Controller(job, start=Configuration(interval=6, batch=2), writes=1)
    wanted = best(job.model())
    assert wanted.interval > 20
    trainer, truth = Trainer(), {}
    store = ckptstore.open(tmp_path / "store", create=True)
    with store.writer(diffs=DiffOptions(controller=controller, seconds=None)) as writer:
        for step in range(1, 31):
            trainer.train(0.01)
            truth[step] = trainer.frozen()
            writer.save_async(trainer.state(), step, updates=trainer.updates())
    fulls = [info.step for info in store.checkpoints() if info.kind == "full"]
    gaps = [after - before for before, after in pairwise(fulls)]
    assert fulls[0] == 1
    assert gaps == sorted(gaps)
    assert gaps[0] > 6  # the first full has told it already
    assert controller.configuration.interval > 12
    assert controller.job.bandwidth != job.bandwidth
    for step, state in truth.items():
        same(state, store.load(step))


def test_a_term_whose_last_batch_failed_is_not_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptstore.write.steps import batcher

    def broken(*_: Any, **__: Any) -> Any:
        raise ckptstore.StorageError("the disk is gone")

    trainer = Trainer()
    store = ckptstore.open(tmp_path / "store", create=True)
    writer = store.writer(diffs=DiffOptions(batch=9, seconds=None))
    for step in range(1, 4):
        trainer.train()
        writer.save_async(trainer.state(), step, updates=trainer.updates())
    monkeypatch.setattr(batcher, "write_batch", broken)
    with pytest.raises(ckptstore.StorageError):
        writer.close()
    with pytest.warns(ckptstore.LostStepsWarning, match="up to 9 steps after 1"):
        store.writer().close()


def test_lossy_marks_are_of_what_is_lossy_and_of_what_holds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment that holds one lossy step is lossy; the other steps in it are not."""
    from ckptstore.write.steps import batch_segments, batcher

    def mixed(backend: Any, steps: Any, draft: Any, **how: Any) -> Any:
        marked = [replace(one, lossy=one.step == 3) for one in steps]
        return batch_segments.write_batch(backend, marked, draft, **how)

    monkeypatch.setattr(batcher, "write_batch", mixed)
    trainer, store = Trainer(), ckptstore.open(tmp_path / "store", create=True)
    with store.writer(diffs=DiffOptions(full_every=9, batch=3, seconds=None)) as writer:
        for step in range(1, 8):
            trainer.train()
            writer.save_async(trainer.state(), step, updates=trainer.updates())
    assert [info.step for info in store.checkpoints() if info.lossy] == [3]
    marks = {doc.steps: doc.lossy for _, doc in store.describe(7)}
    assert marks == {(1,): False, (2, 3, 4): True, (5, 6, 7): False}
    assert [s for _, doc in store.describe(7) for s, encoding in doc.encodings.items() if encoding.lossy] == [3]
    store.load(2)
    with pytest.warns(ckptstore.LossyWarning, match="3@1 is lossy"):
        store.load(3)


def test_a_checkpoint_is_lossy_if_nothing_stored_gives_its_bits_back() -> None:
    entry = CheckpointEntry(1, 5, "0" * 32, 0.0, 1, 8)

    def edge(lossy: bool) -> Encoding:
        return Encoding((1, 5), "gradient", None, ("a" * 32,), lossy, 8)

    for marks, expected in (((True,), True), ((True, True), True), ((True, False), False), ((False,), False)):
        catalog = Catalog(checkpoints={(1, 5): entry}, encodings={(1, 5): tuple(map(edge, marks))})
        assert describe_checkpoint(catalog, entry).lossy == expected, marks


def test_an_update_that_names_a_slot_twice_is_left_out(tmp_path: Path) -> None:
    """One tensor cannot be two slots of a rule: the coder would store it twice, and a reader refuse it."""
    trainer, truth = Trainer(), {}
    store = ckptstore.open(tmp_path / "store", create=True)
    with store.writer(diffs=DiffOptions(full_every=9)) as writer:
        for step in range(1, 4):
            trainer.train()
            truth[step] = trainer.frozen()
            updates = trainer.updates()
            updates[0] = replace(updates[0], slots=("master.wide", "m.wide", "m.wide"))
            assert writer.save(trainer.state(), step, updates=updates).step == step
    assert [info.kind for info in store.checkpoints()] == ["full", "gradient", "gradient"]
    for step, state in truth.items():
        same(state, store.load(step))
    codecs = {name: tensor.codec for name, tensor in store.tensors(3).items()}
    assert {name for name, codec in codecs.items() if codec == "step"} == {
        f"{slot}.{name}" for slot in ("master", "m", "v") for name in ("bias", "norm", "one")
    }


def test_the_gradients_of_the_first_save_are_not_copied(tmp_path: Path) -> None:
    """It is a full, which no gradient explains; a copy would be made to memory that nobody has touched yet."""
    looked_at: list[int] = []

    class Watched(NumpySource):
        def view(self) -> Any:
            looked_at.append(trainer.step)
            return super().view()

        def read(self, offset: int, out: Any) -> None:
            looked_at.append(trainer.step)
            super().read(offset, out)

    trainer = Trainer()
    store = ckptstore.open(tmp_path)
    frozen = {}
    with store.writer(diffs=DiffOptions(full_every=10, batch=1)) as writer:
        for step in (1, 2, 3):
            trainer.train()
            updates = trainer.updates()
            watched = [
                replace(one, gradient=Watched(trainer.gradients[name].array))
                for name, one in zip(SIZES, updates, strict=True)
            ]
            writer.save_async(trainer.state(), step, updates=watched).result()
            frozen[step] = trainer.frozen()
    assert {2, 3} <= set(looked_at)
    assert 1 not in looked_at
    for step, state in frozen.items():
        same(store.load(step, framework="numpy"), state)
