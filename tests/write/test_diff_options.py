"""The options of step diffs: deltas between, sums of gradients, a controller; lossy steps are marked."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import DiffOptions
from ckptstore.formats import optim
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.records import CheckpointEntry, Encoding
from ckptstore.formats.sources import NumpySource
from ckptstore.log.checkpoint_info import describe_checkpoint
from ckptstore.store import verify
from ckptstore.tuning import Configuration, Controller, Job, best
from ckptstore.write.capture.snapshot import SnapshotPool
from ckptstore.write.saves import job
from tests.store.states import same
from tests.write.trainer import ADAM, SIZES, Trainer


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
    """Where a full is due, `deltas` decides its kind."""
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


def test_gradients_that_are_summed_up(tmp_path: Path) -> None:
    """One checkpoint for a batch; everywhere it is marked as not being training's state."""
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


@pytest.mark.parametrize("how", ["state", "copy", "interrupted"])
def test_a_sum_does_not_continue_without_a_step_whose_save_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Its gradient is in no sum: the checkpoint after it is a full."""
    trainer, truth = Trainer(), {}
    store = ckptstore.open(tmp_path / "store", create=True)

    def failed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt if how == "interrupted" else MemoryError("no memory")

    with store.writer(diffs=DiffOptions(batch=9, seconds=None, accumulate="sum")) as writer:
        for step in range(1, 7):
            trainer.train()
            truth[step] = trainer.frozen()
            if step != 4:
                writer.save_async(trainer.state(), step, updates=trainer.updates())
                continue
            with monkeypatch.context() as patched:
                state = trainer.state()
                if how == "state":
                    state["odd"] = object()
                elif how == "copy":
                    patched.setattr(SnapshotPool, "placed", failed)
                else:
                    patched.setattr(job.SaveJob, "result", failed)
                with pytest.raises((ckptstore.UnsupportedStateError, MemoryError, KeyboardInterrupt)):
                    (writer.save if how == "interrupted" else writer.save_async)(state, 4, updates=trainer.updates())
    found = [(info.step, info.kind) for info in store.checkpoints()]
    if how != "interrupted":  # otherwise it may have been stored before the wait for it ended
        assert found == [(1, "full"), (3, "gradient"), (5, "full"), (6, "gradient")]
    assert (5, "full") in found
    same(truth[5], store.load(5))


def test_a_controller_decides_how_often(tmp_path: Path) -> None:
    """The LowDiff model, with the measured cost of fulls here, changes full_every and batch; every step stays
    restorable."""
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
    assert gaps[0] > 6  # the first full has already reported it
    assert controller.configuration.interval > 12
    assert controller.job.bandwidth != job.bandwidth
    for step, state in truth.items():
        same(state, store.load(step))


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
    """One tensor cannot be two slots of a rule: the encoder would store it twice, and a reader refuse it."""
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
    """It is a full, which no gradient explains; a copy would use memory that has never been touched."""
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
