"""Diffs that are reordered, missing, repeated or of another run, under valid hashes: errors, never wrong bits."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore import DiffOptions
from ckptstore.errors import CorruptSegmentError
from ckptstore.formats import checksums, jsontext
from ckptstore.formats.segment_files.segment import SegmentDoc, TensorEntry
from ckptstore.segments import packed_segments
from ckptstore.write import delta_encoding
from ckptstore.write.policy.delta_options import DeltaOptions
from ckptstore.write.steps import batch_segments, batcher, resident_step
from ckptstore.write.steps.step_encoding import EncodedStep
from tests.store.states import same
from tests.write.trainer import Trainer

STEPS = 6  # a full, and five diffs in one segment
Forge = Callable[..., "Forged"]


@dataclass(frozen=True, slots=True)
class Forged:
    store: ckptstore.Store
    truth: dict[int, Any]

    def intact(self, *steps: int) -> None:
        for step in steps:
            same(self.truth[step], self.store.load(step))

    def refused(self, *steps: int, says: tuple[str, ...]) -> None:
        """The whole state is refused; a part may be restored with the right bits, never others. It always ends."""
        for step in steps:
            with pytest.raises(CorruptSegmentError) as caught:
                self.store.load(step)
            for word in says:
                assert word in str(caught.value), (step, word, str(caught.value))
            for part in ("master", "m", "v"):
                with contextlib.suppress(CorruptSegmentError):
                    same(self.truth[step][part], self.store.load(step, select=f"{part}.*")[part])
                with contextlib.suppress(CorruptSegmentError):
                    found = b"".join(bytes(data) for _, data in self.store.chunks(step, f"{part}.wide"))
                    assert found == self.truth[step][part]["wide"].tobytes()
            with contextlib.suppress(CorruptSegmentError):
                self.store.load(step, verify=False)


@pytest.fixture
def forge(monkeypatch: pytest.MonkeyPatch) -> Forge:
    """Stores a run whose diffs are replaced, or described wrongly; all hashes fit."""

    def forged(
        steps: Callable[[dict[int, EncodedStep]], None] = lambda _: None,
        doc: Callable[[SegmentDoc], SegmentDoc] = lambda doc: doc,
        gradients: bool = True,
    ) -> Forged:
        write, encode = batch_segments.write_batch, packed_segments.encode_packed

        def writes(backend: Any, coded: list[EncodedStep], draft: SegmentDoc, **how: Any) -> Any:
            by_number = {one.step: one for one in coded}
            steps(by_number)
            return write(backend, list(by_number.values()), draft, **{**how, "times": [0.0] * len(by_number)})

        monkeypatch.setattr(batcher, "write_batch", writes)
        monkeypatch.setattr(packed_segments, "encode_packed", lambda draft, *rest: encode(doc(draft), *rest))
        trainer, truth = Trainer(), {}
        store = ckptstore.open(f"memory://{uuid.uuid4().hex}")
        with store.writer(diffs=DiffOptions(batch=STEPS - 1, seconds=None), poll_seconds=None) as writer:
            for step in range(1, STEPS + 1):
                trainer.train()
                truth[step] = trainer.frozen()
                writer.save_async(trainer.state(), step, updates=trainer.updates(gradients))
        return Forged(store, truth)

    return forged


def with_entries(doc: SegmentDoc, step: int, *entries: TensorEntry) -> SegmentDoc:
    held = {**doc.tensors[step], **{entry.name: entry for entry in entries}}
    return replace(doc, tensors={**doc.tensors, step: held})


def payloads_from(step: EncodedStep, other: EncodedStep) -> EncodedStep:
    """`step` with the stored bytes of `other`; its expected result stays."""
    units = tuple(
        tuple(
            replace(
                mine,
                chunks=tuple(
                    replace(own, payload=foreign.payload)
                    for own, foreign in zip(mine.chunks, theirs.chunks, strict=True)
                ),
            )
            if mine.codec == "step"
            else mine
            for mine, theirs in zip(unit, there, strict=True)
        )
        for unit, there in zip(step.units, other.units, strict=True)
    )
    return replace(step, units=units)


@pytest.mark.parametrize("gradients", [True, False], ids=["replayed", "predicted"])
def test_two_diffs_in_the_other_order(forge: Forge, gradients: bool) -> None:
    def swap(coded: dict[int, EncodedStep]) -> None:
        coded[3], coded[4] = payloads_from(coded[3], coded[4]), payloads_from(coded[4], coded[3])

    found = forge(steps=swap, gradients=gradients)
    found.intact(1, 2)
    found.refused(3, 4, 5, 6, says=("step 3", "tensor 'master.", "the steps before it are right"))


def test_a_diff_repeated(forge: Forge) -> None:
    def repeat(coded: dict[int, EncodedStep]) -> None:
        coded[5] = payloads_from(coded[5], coded[4])

    found = forge(steps=repeat)
    found.intact(1, 2, 3, 4)
    found.refused(5, 6, says=("step 5", "tensor 'master."))


def test_whole_steps_in_the_other_order(forge: Forge) -> None:
    """Each is consistent, and is not the one that the log names."""

    def swap(coded: dict[int, EncodedStep]) -> None:
        third, fourth = coded[3], coded[4]
        coded[3], coded[4] = replace(third, units=fourth.units), replace(fourth, units=third.units)

    found = forge(steps=swap)
    found.intact(1, 2)
    for step in (3, 4):
        found.refused(step, says=(f"{step}@1", "another state than the log"))
    found.refused(5, 6, says=("step 3", "tensor 'master."))


def test_a_diff_left_out(forge: Forge) -> None:
    """Step 4's part of its tensors is gone: no later step may skip it."""

    def drop(coded: dict[int, EncodedStep]) -> None:
        coded[4] = replace(coded[4], units=())

    found = forge(steps=drop)
    found.intact(1, 2, 3)
    found.refused(4, says=("4@1",))
    found.refused(5, 6, says=("base", "tensor"))


def test_one_tensor_of_a_group_left_out(forge: Forge) -> None:
    def drop(coded: dict[int, EncodedStep]) -> None:
        units = [tuple(one for one in unit if one.spec.name != "v.wide") for unit in coded[4].units]
        coded[4] = replace(coded[4], units=tuple(units))

    found = forge(steps=drop)
    found.intact(1, 2, 3)
    found.refused(4, 5, 6, says=("step 4", "'v.wide'"))


@pytest.mark.parametrize("base", ["gone", "other shape"])
def test_a_tensor_moved_along_that_the_state_does_not_name(monkeypatch: pytest.MonkeyPatch, base: str) -> None:
    """Steps move it all the same: so its base must be there, and fit."""
    encode_step, append = resident_step.encode_step, delta_encoding.append_tensor

    def nameless(*arguments: Any, **options: Any) -> EncodedStep:
        coded = encode_step(*arguments, **options)
        tree = {name: part for name, part in coded.tree.items() if name != "v"}
        parts = [
            (one.spec.name, one.spec.dtype, one.spec.shape, one.hash)
            for unit in coded.units
            for one in unit
            if not one.spec.name.startswith("v.")
        ]
        return replace(coded, tree=tree, state=checksums.state_hash(jsontext.dumps(tree), parts))

    def described(*arguments: Any) -> TensorEntry:
        entry = append(*arguments)
        if entry.name != "v.wide":
            return entry
        return replace(entry, name="v.gone") if base == "gone" else replace(entry, shape=entry.shape[::-1])

    trainer = Trainer()
    store = ckptstore.open(f"memory://{uuid.uuid4().hex}")
    packed = DeltaOptions(interval=100, compress_fulls=True)
    with store.writer(deltas=packed, diffs=DiffOptions(batch=1), poll_seconds=None) as writer:
        monkeypatch.setattr(delta_encoding, "append_tensor", described)
        monkeypatch.setattr(resident_step, "encode_step", nameless)
        for step in (1, 2):
            trainer.train()
            writer.save_async(trainer.state(), step, updates=trainer.updates())
    says = "has no tensor 'v.wide'" if base == "gone" else "'v.wide': its base has another shape"
    for verify in (True, False):
        with pytest.raises(CorruptSegmentError, match=says):
            store.load(2, verify=verify)


def test_a_step_by_another_rule(forge: Forge) -> None:
    """Another learning rate, by one bit: the corrections of the right one now mislead."""

    def tamper(coded: dict[int, EncodedStep]) -> None:
        units = list(coded[4].units)
        (place,) = [number for number, unit in enumerate(units) if unit[0].spec.name == "master.wide"]
        params = units[place][0].params
        rule = {**params["rule"], "rate": params["rule"]["rate"] ^ 1}
        units[place] = (replace(units[place][0], params={**params, "rule": rule}), *units[place][1:])
        coded[4] = replace(coded[4], units=tuple(units))

    found = forge(steps=tamper)
    found.intact(1, 2, 3)
    found.refused(4, 5, 6, says=("step 4", "'master.wide'", "the steps before it are right"))


def test_a_wrong_digest(forge: Forge) -> None:
    """The last step of a batch has the state digest of every tensor, and replay is compared with it."""

    def tamper(doc: SegmentDoc) -> SegmentDoc:
        if STEPS not in doc.tensors:
            return doc
        entry = doc.tensors[STEPS]["v.bias"]
        assert entry.digest is not None
        return with_entries(doc, STEPS, replace(entry, digest=entry.digest ^ 1))

    found = forge(doc=tamper)
    found.intact(1, 2, 3, 4, 5)
    found.refused(STEPS, says=("'v.bias'", "digest", f"step {STEPS}"))
    same(found.truth[STEPS], found.store.load(STEPS, verify=False))


def test_a_wrong_hash_of_a_result(forge: Forge) -> None:
    """The log has the hash of a step's whole state; the steps that follow do not depend on it."""

    def tamper(doc: SegmentDoc) -> SegmentDoc:
        entry = doc.tensors[4]["m.wide"]
        chunks = tuple(replace(chunk, decoded_hash="0" * len(chunk.decoded_hash or "")) for chunk in entry.chunks)
        return with_entries(doc, 4, replace(entry, chunks=chunks))

    found = forge(doc=tamper)
    found.intact(1, 2, 3, 5, 6)
    found.refused(4, says=("4@1", "another state than the log"))


def test_a_damaged_payload(forge: Forge, tmp_path: Path) -> None:
    """The error names the step whose payload it is, for every step that needs it."""
    trainer, truth = Trainer(), {}
    store = ckptstore.open(tmp_path / "store")
    with store.writer(diffs=DiffOptions(batch=STEPS - 1), poll_seconds=None) as writer:
        for step in range(1, STEPS + 1):
            trainer.train()
            truth[step] = trainer.frozen()
            writer.save_async(trainer.state(), step, updates=trainer.updates())
    (entry,) = [entry for entry, doc in store.describe(STEPS) if doc.kind == "gradient"]
    chunk = store.tensors(4)["master.wide"].chunks[0]
    with (tmp_path / "store" / entry.key).open("r+b") as file:
        file.seek(chunk.offset + chunk.length // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 16]))
    found = Forged(ckptstore.open(tmp_path / "store"), truth)
    found.intact(1, 2, 3)
    found.refused(4, 5, 6, says=("'master.wide'", "checksum mismatch"))
    report = ckptstore.verify(found.store)
    assert not report.ok
