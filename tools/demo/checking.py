"""Compares states from the store with the records of the reference run."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ckptstore import CheckpointInfo, Store
from tools.demo.config import DemoConfig
from tools.demo.fingerprint import PartDifference, compare, leaves, part_hashes
from tools.demo.reference import Reference


@dataclass(frozen=True, slots=True)
class RestoredStep:
    """One earlier step, loaded from the store and compared with the reference run's hashes of that step."""

    step: int
    ref: str
    seconds: float
    nbytes: int
    differing_parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Checks:
    """The results of reading a finished run's store."""

    parts: list[PartDifference]
    """The newest checkpoint against the reference's last state."""
    restored: list[RestoredStep]
    missing: list[int]
    """Steps that do not have exactly one checkpoint."""
    checkpoints: int
    terms: int
    tensors: int
    nbytes: int
    """Logical bytes of the tensors of all checkpoints."""
    corpus: dict[str, Any]
    environment: dict[str, Any]
    stored: dict[str, int]
    """Bytes of a checkpoint of each kind (full, gradient), the median."""


def check(store: Store, reference: Reference, config: DemoConfig, advance: Callable[[], None]) -> Checks:
    """Compare the last state whole and ``config.samples`` earlier ones by their hashes; `advance` counts the loads."""
    checkpoints = store.checkpoints()
    final = as_recorded(store.load("latest", framework="numpy"))
    parts = compare(reference.final, list(leaves(final)))
    advance()
    restored = []
    for info in _choose(checkpoints, config):
        restored.append(_restore(store, reference, info))
        advance()
    found = [info.step for info in checkpoints]
    return Checks(
        parts=parts,
        restored=restored,
        missing=[step for step in range(1, config.steps + 1) if found.count(step) != 1],
        checkpoints=len(checkpoints),
        terms=len(store.terms()),
        tensors=checkpoints[-1].tensors,
        nbytes=sum(info.nbytes for info in checkpoints),
        corpus=final["corpus"],
        environment=final["environment"],
        stored={
            kind: int(statistics.median(info.stored for info in checkpoints if info.kind == kind))
            for kind in sorted({info.kind for info in checkpoints})
        },
    )


def _choose(checkpoints: list[CheckpointInfo], config: DemoConfig) -> list[CheckpointInfo]:
    """Checkpoints before the last, drawn by the seed, in order of their steps."""
    earlier = checkpoints[:-1]
    drawn = random.Random(f"{config.seed} samples").sample(earlier, min(config.samples, len(earlier)))
    return sorted(drawn, key=lambda info: info.step)


def _restore(store: Store, reference: Reference, info: CheckpointInfo) -> RestoredStep:
    began = time.monotonic()
    state = store.load(info.ref, framework="numpy")
    seconds = time.monotonic() - began
    state = as_recorded(state)
    expected, actual = reference.hashes[info.step], part_hashes(state)
    differing = tuple(part for part in expected if expected[part] != actual[part])
    return RestoredStep(info.step, info.ref, seconds, info.nbytes, differing)


def as_recorded(state: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint, in the form in which the reference run has recorded its states (`Training.state`)."""
    python, numpy, run = state["random"]["python"], state["random"]["numpy"], state["extra"]["run"]
    return {
        "step": state["step"],
        "model": state["model"],
        "optimizer": state["optimizer"],
        "schedule": state["scheduler"],
        "rng": {
            "python": (python["version"], tuple(int(word) for word in python["words"]), python["spare"]),
            "numpy": (numpy["name"], numpy["keys"], numpy["position"], numpy["has_gauss"], numpy["cached"]),
            "torch": state["random"]["torch"],
        },
        "loader": state["loader"],
        **run,
    }
