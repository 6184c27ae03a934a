"""The input of the codec benchmark: tensors of the project's own trajectories, as a writer would pass them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ckptstore.formats import codecs
from tools.bench.codecs import trajectories


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of tensor of one trajectory, at one step or as the change over ``gap`` steps."""

    label: str
    trajectory: str
    prefix: str
    dtype: str
    step: int
    gap: int = 0
    master: bool = False
    group: str = "raw"

    @property
    def base_step(self) -> int | None:
        return self.step - self.gap if self.gap else None


def _lm(phase: str) -> int:
    return trajectories.RECIPES["lm"].phases[phase]


def _cases() -> list[Case]:
    found = [Case(f"weights, {phase}", "lm", "model.", "F32", _lm(phase) + 1) for phase in ("early", "mid", "late")]
    found += [
        Case("first moments", "lm", "exp_avg.", "F32", _lm("mid") + 1),
        Case("second moments", "lm", "exp_avg_sq.", "F32", _lm("mid") + 1),
        Case("gradients", "lm", "gradient.", "F32", _lm("mid") + 1),
        Case("bf16 weights", "bf16", "model.", "BF16", 2),
        Case("bf16 weights beside their master", "bf16", "model.", "BF16", 2, master=True),
    ]
    for phase in ("early", "mid", "late"):
        for gap in (1, 10, 100):
            found.append(Case(f"weights, {phase}", "lm", "model.", "F32", _lm(phase) + gap, gap, group="delta"))
    for gap in (1, 10, 100):
        found.append(Case("weights, fine-tune", "finetune", "model.", "F32", 1 + gap, gap, group="delta"))
    for gap in (1, 10, 100):
        found.append(Case("bf16 weights", "bf16", "model.", "BF16", 1 + gap, gap, group="delta"))
    found += [
        Case("fp32 masters of bf16", "bf16", "master.", "F32", 2, 1, group="delta"),
        Case("CNN weights, mid", "cnn", "model.", "F32", 101, 1, group="delta"),
        Case("CNN weights, rate near 0", "cnn", "model.", "F32", 299, 1, group="delta"),
        Case("CNN momentum", "cnn", "momentum.", "F32", 101, 1, group="delta"),
        Case("first moments", "lm", "exp_avg.", "F32", _lm("mid") + 1, 1, group="delta"),
        Case("first moments", "lm", "exp_avg.", "F32", _lm("mid") + 10, 10, group="delta"),
        Case("second moments", "lm", "exp_avg_sq.", "F32", _lm("mid") + 1, 1, group="delta"),
        Case("second moments", "lm", "exp_avg_sq.", "F32", _lm("mid") + 10, 10, group="delta"),
    ]
    return found


CASES: Sequence[Case] = tuple(_cases())


@dataclass(frozen=True, slots=True)
class Part:
    """Up to one chunk of bytes to be compressed separately: of a tensor, or of a pool of tiny ones."""

    data: np.ndarray
    base: np.ndarray | None
    master: np.ndarray | None


def load(case: Case, limit: int | None = None) -> list[Part]:
    """The case's tensors as chunks, tiny ones pooled; at most about ``limit`` bytes of them."""
    trajectory = trajectories.ensure(case.trajectory)
    word = codecs.word_size(case.dtype)
    new = _images(trajectory, case.step, case.prefix, word)
    base = _images(trajectory, case.base_step, case.prefix, word) if case.base_step is not None else {}
    master = {
        case.prefix + name.removeprefix("master."): image
        for name, image in (_images(trajectory, case.step, "master.", 4) if case.master else {}).items()
    }
    parts: list[Part] = []
    pools = codecs.plan_pools((name, case.dtype, len(image)) for name, image in new.items())
    pooled = {member.name for pool in pools for member in pool.members}
    runs = [
        (new[name], base.get(name), master.get(name)) for name in new if name not in pooled and len(new[name]) > 0
    ] + [
        (
            pool.gather(new),
            pool.gather(base) if base else None,
            np.concatenate([master[member.name] for member in pool.members]) if master else None,
        )
        for pool in pools
    ]
    taken = 0
    for data, older, wide in runs:
        for start in range(0, len(data), codecs.CHUNK):
            if limit is not None and taken >= limit:
                return parts
            part = slice(start, min(start + codecs.CHUNK, len(data)))
            twice = slice(2 * part.start, 2 * part.stop)
            parts.append(
                Part(data[part], None if older is None else older[part], None if wide is None else wide[twice])
            )
            taken += part.stop - part.start
    return parts


def _images(trajectory: trajectories.Trajectory, step: int, prefix: str, word: int) -> dict[str, np.ndarray]:
    """Tensors of one word size as bytes (a CNN's counters of batches are not weights)."""
    tensors = trajectory.load(step, prefix)
    return {name: tensors[name].view(np.uint8) for name in sorted(tensors) if tensors[name].itemsize == word}
