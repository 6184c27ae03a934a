"""Stores to copy and to break: a fork, deltas, batches of step diffs, tags, metadata, retired bases."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import ckptstore
from ckptstore import DeltaOptions, DiffOptions
from ckptstore.formats import optim
from ckptstore.formats.sources import NumpySource
from ckptstore.write.steps.updates import Update


class Run:
    """A run of one parameter under SGD with momentum, and a table that never changes."""

    def __init__(self, size: int = 3000) -> None:
        rng = np.random.default_rng(7)
        self.group = optim.SGD(momentum=0.9)
        self.slots = [rng.normal(0, 1, size).astype("<f4"), np.zeros(size, "<f4")]
        self.rng, self.count = rng, 0

    def take(self) -> list[Update]:
        self.count += 1
        step = optim.Step(count=self.count, lr=1e-3)
        gradient = self.rng.normal(0, 1e-3, len(self.slots[0])).astype("<f4")
        optim.advance(self.group.rule(step), self.slots, gradient)
        return [Update(("w", "momentum"), self.group, step, NumpySource(gradient))]

    def state(self) -> dict[str, Any]:
        w, momentum = (slot.copy() for slot in self.slots)
        return {"w": w, "momentum": momentum, "table": np.arange(500), "n": self.count}


def grown(root: Path) -> ckptstore.Store:
    """1@1 to 6@1 as fulls and deltas, 5@2 and 6@2 beside them, 7@3 to 18@3 as batches of diffs, 19@4 and 20@4."""
    store, run = ckptstore.open(root, create=True), Run()
    with store.writer(deltas=DeltaOptions(interval=3), poll_seconds=None) as writer:
        for step in range(1, 7):
            run.take()
            writer.save(run.state(), step, metadata={"loss": 1.0 / step})
    with store.writer(parent=4, poll_seconds=None) as writer:
        for step in (5, 6):
            run.take()
            writer.save(run.state(), step)
    diffs = DiffOptions(batch=4, seconds=None, full_every=100)
    with store.writer(parent="6@2", diffs=diffs, poll_seconds=None) as writer:
        for step in range(7, 19):
            updates = run.take()
            writer.save_async(run.state(), step, updates=updates)
    with store.writer(deltas=DeltaOptions(interval=1), poll_seconds=None) as writer:
        for step in (19, 20):
            run.take()
            writer.save(run.state(), step)
        writer.tag("best", 20)
        writer.tag("old", "2@1")
    return store


def bits(state: Any) -> Any:
    """A form of a state that compares by its bits."""
    if isinstance(state, dict):
        return {key: bits(value) for key, value in state.items()}
    return (state.dtype.str, state.shape, state.tobytes()) if isinstance(state, np.ndarray) else state


def states(store: ckptstore.Store) -> dict[str, Any]:
    """REF -> state of every checkpoint."""
    return {info.ref: bits(store.load(info.ref, framework="numpy")) for info in store.checkpoints()}


def broken(source: Path, target: Path, damage: Callable[[Path], object]) -> Path:
    """A copy of a store's folder, damaged."""
    shutil.copytree(source, target)
    damage(target)
    return target


def flip(path: Path, offset: int = -20) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def segments(root: Path) -> Iterator[Path]:
    yield from sorted(root.glob("seg/*/*.safetensors"))


_LATE = """
import sys
import ckptstore
from ckptstore.maintenance.copies import transfer

passed = transfer.crash_point

def waits(name):
    if name == "copy.brought":
        transfer.crash_point = passed
        print(name, flush=True)
        sys.stdin.readline()
    passed(name)

transfer.crash_point = waits
"""


def late(work: str, *arguments: object, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """A process that copies a store by `work`. It has the segments, no slot names them yet, and it waits for a line."""
    command = [sys.executable, "-c", _LATE + work, *map(str, arguments)]
    environment = {**os.environ, **(env or {})}
    found = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert found.stdout is not None
    said = found.stdout.readline()
    if said != "copy.brought\n":
        found.kill()
        raise AssertionError(said, found.communicate())
    return found
