"""Golden optimizer steps: a plain segment with the states of one checkpoint, a packed one with the next as steps of
every rule, variant, encoding and form of gradient, and ``steps-1.json`` with the expected tensors of the second.

They pin the arithmetic of ``adam/1``, ``sgd/1`` and ``skip/1``: if it changed, these files could not be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ckptstore.formats import optim
from ckptstore.formats.checksums import chunk_hash
from ckptstore.formats.digest import digest
from ckptstore.formats.history.records import CheckpointId
from ckptstore.formats.segment_files.layout import TensorSpec
from ckptstore.formats.segment_files.segment import Chunk, SegmentDoc, TensorEntry, encode_plain, plan_plain, raw_entry
from ckptstore.formats.segment_files.segment_steps import StepEncoding
from ckptstore.formats.segment_files.step_codec import STEP, StepGroup, follower_params
from tools.golden.golden_set import GoldenSet, write
from tools.golden.make_segments import RUN, packed, state_of

BASE = "steps-1-base.safetensors"
STEPS = "steps-1.safetensors"

Arrays = list[np.ndarray]
_FIRST, _LATER = optim.Step(count=1, lr=1e-2), optim.Step(count=9, lr=1e-3, clip=0.37, loss_scale=1024.0)
_OPTIMIZERS: tuple[Any, ...] = (
    optim.AdamW(beta2=0.95, weight_decay=0.1),
    optim.Adam(weight_decay=0.1, amsgrad=True, maximize=True),
    optim.AdamW(beta1=0.2),
    optim.SGD(weight_decay=0.1, maximize=True),
    optim.SGD(momentum=0.9, dampening=0.3),
    optim.SGD(momentum=0.9, nesterov=True, weight_decay=0.05),
)
_EDGES = [0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0x7F800000, 0xFF800000, 0, 0x80000000, 1, 0x807FFFFF, 0x7F7FFFFF]


@dataclass(frozen=True)
class Example:
    """One group, before and after its step."""

    group: StepGroup
    old: Arrays
    new: Arrays
    payload: bytes

    def tensors(self, state: Arrays) -> dict[str, np.ndarray]:
        """The state by name: parameters that lie end to end are cut in halves."""
        members = self.group.members
        cut = len(state[0]) // len(members)
        return {
            name: part[number * cut : (number + 1) * cut]
            for number, member in enumerate(members)
            for name, part in zip(member, state, strict=True)
        }


def _numbers(seed: int, count: int, scale: float) -> np.ndarray:
    """Numbers that are the same on every machine."""
    whole = (np.arange(count, dtype=np.int64) * 7919 + seed * 104_729) % 2003 - 1001
    return (whole.astype("<f4") * np.float32(scale / 1001)).astype("<f4")


def _state(rule: optim.Rule, count: int, seed: int) -> Arrays:
    """An old state, with every kind of odd number among the others."""
    scales = (0.02, 1e-3, 1e-6, 1e-6, 1, 1, 1, 1)
    state = [_numbers(seed + slot, count, scales[slot]) for slot in range(len(rule.slots))]
    for slot, part in enumerate(state):
        if slot > 1:
            np.abs(part, out=part)
        part.view("<u4")[slot : slot + len(_EDGES)] = _EDGES
    return state


def _gradients(count: int) -> Iterator[tuple[str, Any]]:
    dense = _numbers(40, count, 1e-3)
    where = np.arange(3, count, 37)
    kinds: tuple[tuple[str, Any], ...] = (
        ("fp32", dense),
        ("bf16", dense.astype(ml_dtypes.bfloat16)),
        ("fp16", (dense * np.float32(2**10)).astype(np.float16)),
    )
    for name, values in kinds:
        yield f"replayed.{name}", values
        yield f"sparse.{name}", optim.SparseGradient(where, values[where], count)


def _example(label: str, rule: optim.Rule, gradient: Any, count: int = 200, parameters: int = 1) -> Example:
    old = _state(rule, count, len(label))
    new = [part.copy() for part in old]
    dense = _numbers(40, count, 1e-3)
    applied = gradient.dense() if isinstance(gradient, optim.SparseGradient) else gradient
    optim.advance(rule, new, dense if applied is None else applied)
    new[0].view("<u4")[100::97] += np.uint32(3)  # values that another kernel rounded differently
    encoding: optim.Encoding = "replayed"
    if gradient is None:
        encoding, payload = "predicted", optim.predicted.encode(rule, old, new)
    else:
        encoding = "sparse" if isinstance(gradient, optim.SparseGradient) else "replayed"
        payload = optim.replayed.encode(rule, old, new, gradient)
    names = [label if parameters == 1 else f"{label}.{number}" for number in range(parameters)]
    members = tuple(tuple(f"{name}.{slot}" for slot in rule.slots) for name in names)
    return Example(StepGroup(encoding, rule, members), old, new, payload.tobytes())


def examples() -> list[Example]:
    """Every rule in every variant as a prediction and a replay; every form of gradient; parameters end to end."""
    return [*_examples()]


def _examples() -> Iterator[Example]:
    dense = _numbers(40, 200, 1e-3)
    for number, optimizer in enumerate(_OPTIMIZERS):
        for step in (_FIRST, _LATER):
            for variant in optimizer.variants:
                label, rule = f"{number}.{step.count}.{variant}", optimizer.rule(step, variant)
                yield _example(f"{label}.predicted", rule, None)
                yield _example(f"{label}.replayed", rule, dense)
    for form, gradient in _gradients(200):
        yield _example(f"gradient.{form}", _OPTIMIZERS[0].rule(_LATER), gradient)
    yield _example("skipped", _OPTIMIZERS[0].rule(replace(_LATER, skipped=True)), None)
    yield _example("end-to-end", _OPTIMIZERS[0].rule(_LATER), None, 100, 2)


def scaled_examples() -> list[Example]:
    """The encodings with scales: every rule of Adam, both forms of gradient, several runs, and classes of numbers."""
    return [*_scaled_examples()]


def _scaled_examples() -> Iterator[Example]:
    for number, optimizer in enumerate(_OPTIMIZERS[:3]):
        for variant in optimizer.variants:
            rule = optimizer.rule(_LATER, variant)
            for gradient in (None, _numbers(40, 600, 1e-3), _numbers(41, 600, 1e-3).astype(ml_dtypes.bfloat16)):
                kind = "none" if gradient is None else str(gradient.dtype)
                yield _scaled(f"{number}.{variant}.{kind}", rule, gradient, 600)
    rule = _OPTIMIZERS[0].rule(_LATER)
    yield _scaled("classes", rule, None, 20_000)


def _scaled(label: str, rule: optim.Rule, gradient: Any, count: int) -> Example:
    made = _example(f"scaled.{label}", rule, gradient, count)
    encoding: optim.Encoding = "predicted/2" if gradient is None else "replayed/2"
    payload = optim.scaled.encode(rule, made.old, made.new, gradient)
    return replace(made, group=replace(made.group, encoding=encoding), payload=payload.tobytes())


def base_segment(found: list[Example]) -> bytes:
    """A plain segment with the old states."""
    return _base(found)[0]


def _base(found: list[Example]) -> tuple[bytes, SegmentDoc]:
    images = {name: part.tobytes() for e in found for name, part in e.tensors(e.old).items()}
    specs = [TensorSpec(name, "F32", (len(image) // 4,)) for name, image in images.items()]
    trees = {20: {name: {"$t": name} for name in images}}
    doc = SegmentDoc(RUN, 1, "c" * 32, {20: StepEncoding(1, "full")}, parents={1: None}, trees=trees)
    layout = plan_plain(specs, doc, digests=False)
    entries = {s.name: raw_entry(layout, s, [chunk_hash(images[s.name])]) for s in layout.specs}
    doc = replace(doc, tensors={20: entries})
    return encode_plain(layout, doc) + b"".join(images[spec.name] for spec in layout.specs), doc


def step_segment(
    found: list[Example], change: Callable[[dict[str, Any]], dict[str, Any]] = lambda params: params
) -> bytes:
    """A packed segment with the steps; `change` replaces the leaders' parameters."""
    entries: list[tuple[TensorEntry, bytes]] = []
    for e in found:
        for name, part in e.tensors(e.new).items():
            leads = name == e.group.leader
            stored, image = e.payload if leads else b"", part.tobytes()
            chunk = Chunk(0, len(stored), len(image), chunk_hash(stored), chunk_hash(image))
            params = change(e.group.params) if leads else follower_params(e.group.leader)
            entry = TensorEntry(name, "F32", (len(part),), (chunk,), STEP, params, digest=digest(image))
            entries.append((entry, stored))
    trees = {21: {entry.name: {"$t": entry.name} for entry, _ in entries}}
    told = {21: StepEncoding(1, "gradient", CheckpointId(1, 20, state_of(_base(found)[1])))}
    return packed(SegmentDoc(RUN, 1, "d" * 32, told, parents={1: None}, trees=trees), {21: entries})[0]


SETS: tuple[GoldenSet[Example], ...] = (
    GoldenSet("steps-1.json", BASE, STEPS, examples),
    GoldenSet("steps-2.json", "steps-2-base.safetensors", "steps-2.safetensors", scaled_examples),
)
"""The golden files of all rules. The files of a set that is here never change: a later rule gets a row of its own."""


def main(folder: Path) -> None:
    """Write the files of each set to `folder`."""
    for one in SETS:
        found = list(one.examples())
        segments = {one.base: base_segment(found), one.change: step_segment(found)}
        images = ((name, part.tobytes()) for e in found for name, part in e.tensors(e.new).items())
        write(folder, one.listing, segments, images)
