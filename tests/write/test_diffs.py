"""Step diffs through the store: every step of every batch is restored bit for bit, whatever it holds."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import DiffOptions
from ckptstore.formats import optim
from ckptstore.formats.codecs import SMALL_POLICY
from ckptstore.formats.sources import NumpySource
from ckptstore.reports.restore_explanation import explain
from ckptstore.store import verify
from tests.store.states import same
from tests.write.trainer import ADAM, Trainer, fill


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


def test_the_stored_bytes(tmp_path: Path) -> None:
    """All bytes of a segment counted, per number of the parameters (96 bits uncompressed)."""
    numbers = sum(weight.size for weight in Trainer().weights.values())
    for how, most in (({}, 29.0), ({"gradients": False}, 31.0), ({"keep": 0.01}, 1.6)):
        store, _ = fill(tmp_path / str(most), DiffOptions(batch=10), 11, **how)
        stored = [8 * info.stored / numbers for info in store.checkpoints() if info.kind == "gradient"]
        assert sum(stored) / len(stored) < most, how
        sizes = {entry.id: entry.size for entry, _ in store.describe(11)}
        assert sum(info.stored for info in store.checkpoints()) == sum(sizes.values())


@pytest.mark.parametrize("gradients", [True, False])
def test_the_fewest_bytes(tmp_path: Path, gradients: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy with contexts: encodings with scales, here even where they do not pay; every step comes back."""

    def scaled(*args: Any, small: bool) -> optim.StepChoice:
        assert small
        return next(one for one in optim.evaluate(*args, small=small) if one.encoding in optim.SCALED)

    monkeypatch.setattr(optim, "choose", scaled)
    store, truth = fill(tmp_path / "store", DiffOptions(batch=4, policy=SMALL_POLICY), 4, gradients=gradients)
    for step, state in truth.items():
        same(state, store.load(step))
    entries = [entry for _, doc in store.describe(4) for held in doc.tensors.values() for entry in held.values()]
    used = {entry.params["encoding"] for entry in entries if "encoding" in entry.params}
    assert used & {*optim.SCALED}, used


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
    assert [step.bytes_decoded for step in plan.steps] == [0, *[12 * 102 * 700] * 3]
    held = {step: doc.tensors[step] for _, doc in store.describe(4) for step in doc.steps}
    assert plan.steps[2].bytes_read == held[3]["master.wide"].stored


def test_small_parameters_are_encoded_as_one(tmp_path: Path) -> None:
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
    """Chunk k of a slot needs chunk k of the others; a large batch takes more than one segment."""
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
def test_no_claim_about_a_step_changes_bits(tmp_path: Path) -> None:
    """Wrong settings, wrong gradients, wrong names, parameters that change otherwise: they cost bytes, never bits."""
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


def test_saves_of_several_threads(tmp_path: Path) -> None:
    """Steps are encoded in the order of the calls, each against the one before."""
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
    """The digest is training's claim about the result of a replay; chunk hashes are the encoder's."""
    from ckptstore.formats import digest
    from ckptstore.write.steps import resident_step

    def spoiled(images: Any) -> list[int]:
        return [digest.digest(image) ^ (image.nbytes == 12) for image in images]  # the tensors named "norm"

    with monkeypatch.context() as patched:
        patched.setattr(resident_step, "_digests", spoiled)
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
    """A failed replay names the first wrong step, not only the last."""
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
