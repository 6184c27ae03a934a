"""The save methods that are compared. A saver leaves its files in a folder, under the name that `compared` gives.

`Measurement` covers the time from the call to the moment when a power cut would lose nothing: files and folder synced.
If a tool does not sync, the benchmark does it after the call, inside the measurement; ``stall`` is when the call
returned.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tools.bench.dcp_stagers import Stagers
from tools.bench.measure import Measurement
from tools.bench.storage import raw
from tools.bench.storage.pagecache import fsync
from tools.bench.storage.state import BenchState, tensor_bytes

_LOOP_STEPS = 10
"""Fewest training steps beside an asynchronous save."""

Saver = Callable[[BenchState, Path, Measurement], dict[str, float]]
"""Saves the state into a folder inside the measurement; returns further numbers."""


def _image(state: BenchState) -> memoryview:
    """All tensors' bytes after one another in aligned memory, zero-padded to whole disk blocks."""
    view = memoryview(raw.aligned_buffer(state.nbytes))
    offset = 0
    for tensor in state.tensors.values():
        view[offset : offset + tensor.nbytes] = tensor_bytes(tensor)
        offset += tensor.nbytes
    return view


def raw_buffered(state: BenchState, folder: Path, measurement: Measurement) -> dict[str, float]:
    image = _image(state)
    with measurement:
        raw.write_buffered(folder / "image", image)
        measurement.mark("stall")
    return {}


def raw_direct(state: BenchState, folder: Path, measurement: Measurement) -> dict[str, float]:
    image = _image(state)
    with measurement:
        raw.write_direct(folder / "image", image)
        measurement.mark("stall")
    return {}


def raw_overwrite(state: BenchState, folder: Path, measurement: Measurement) -> dict[str, float]:
    image = _image(state)
    raw.write_direct(folder / "image", image)
    with measurement:
        raw.overwrite_direct(folder / "image", image)
        measurement.mark("stall")
    return {}


def torch_save(state: BenchState, folder: Path, measurement: Measurement) -> dict[str, float]:
    with measurement:
        torch.save(state.nested, folder / "state.pt")
        measurement.mark("stall")
        fsync(folder / "state.pt")
        fsync(folder)
    return {}


def safetensors_save(state: BenchState, folder: Path, measurement: Measurement) -> dict[str, float]:
    from safetensors.torch import save_file

    path = folder / "state.safetensors"
    with measurement:
        save_file(state.tensors, path, metadata={"small": json.dumps(state.small)})
        measurement.mark("stall")
        fsync(path)
        fsync(folder)
    return {}


def dcp_save(state: BenchState, folder: Path, measurement: Measurement) -> dict[str, float]:
    """DCP's writer syncs its own files (`sync_files=True`); the folder is synced here."""
    from torch.distributed.checkpoint.state_dict_saver import save

    with measurement:
        save(state.nested, checkpoint_id=folder / "dcp", no_dist=True)
        measurement.mark("stall")
        fsync(folder / "dcp")
        fsync(folder)
    return {}


def dcp_async(state: BenchState, folder: Path, measurement: Measurement) -> dict[str, float]:
    """DCP with a stager that keeps its buffers: the first save fills them, the measured one finds them warm."""
    from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save

    stagers = Stagers(pinned=False)

    def start(nested: dict[str, Any], step: int) -> _Pending:
        path = folder / f"dcp-{step}"
        future = async_save(nested, checkpoint_id=path, async_stager=stagers.next(), no_dist=True)
        assert not isinstance(future, AsyncSaveResponse)

        def settle() -> None:
            future.result()
            fsync(path)
            fsync(folder)

        return _Pending(future.done, settle)

    try:
        further = _async_save(start, state, measurement, lambda step: shutil.rmtree(folder / f"dcp-{step}"))
    finally:
        stagers.close()
    (folder / "dcp-3").rename(folder / "dcp")
    return further


def ckptstore_save(state: BenchState, folder: Path, measurement: Measurement) -> dict[str, float]:
    import ckptstore

    with ckptstore.open(folder / "store", create=True).writer() as writer, measurement:
        writer.save(state.nested, step=1)
        measurement.mark("stall")
    return {}


def ckptstore_async(state: BenchState, folder: Path, measurement: Measurement) -> dict[str, float]:
    """The first save fills the writer's snapshot buffers, the measured one finds them warm, as in a training loop."""
    import ckptstore

    with ckptstore.open(folder / "store", create=True).writer() as writer:

        def start(nested: dict[str, Any], step: int) -> _Pending:
            handle = writer.save_async(nested, step=step)
            return _Pending(handle.done, handle.result)

        return _async_save(start, state, measurement, lambda step: None)  # noqa: ARG005  # a store keeps its checkpoints


@dataclass(frozen=True, slots=True)
class _Pending:
    """A save in flight: whether its tool reports it done, and waiting until it is durable."""

    done: Callable[[], bool]
    settle: Callable[[], object]


def _async_save(
    start: Callable[[dict[str, Any], int], _Pending],
    state: BenchState,
    measurement: Measurement,
    discard: Callable[[int], None],
) -> dict[str, float]:
    """Save three times: cold buffers, warm buffers (measured), and beside a training loop that changes the state.

    Returns the first call's stall and the whole time that the loop lost to the third save: wall time of the loop minus
    its steps at their pace without a save. The files on disk afterwards must hold the state before that loop.
    """
    started = time.perf_counter()
    pending = start(state.nested, 1)
    first_stall = time.perf_counter() - started
    pending.settle()
    discard(1)
    os.sync()
    with measurement:
        pending = start(state.nested, 2)
        measurement.mark("stall")
        pending.settle()
    discard(2)
    train = _TrainingStep(state)
    paces = train.paces()
    started = time.perf_counter()
    pending = start(state.nested, 3)
    steps = 0
    while steps < _LOOP_STEPS or not pending.done():
        train.step()
        steps += 1
    wall = time.perf_counter() - started
    pending.settle()
    pace = statistics.median(paces + train.paces())  # from both sides: the machine's speed drifts
    return {"first_stall_s": first_stall, "loop_loss_s": wall - steps * pace, "loop_step_s": pace}


class _TrainingStep:
    """A substitute for a training step: multiplies matrices, then writes every tensor of the state, like an optimizer.

    Negation is its own inverse to the bit, so an even number of steps leaves the state unchanged.
    """

    def __init__(self, state: BenchState) -> None:
        self._tensors = list(state.tensors.values())
        side = 1024 if state.nbytes > 32 << 20 else 128
        self._factor = torch.full((side, side), 1.0 / side)

    def step(self) -> None:
        product = self._factor
        for _ in range(6):
            product = product @ self._factor
        torch._foreach_neg_(self._tensors)

    def paces(self, steps: int = 8) -> list[float]:
        """Seconds of undisturbed steps, after two that warm up; an even number in all."""
        self.step()
        self.step()
        times = []
        for _ in range(steps):
            started = time.perf_counter()
            self.step()
            times.append(time.perf_counter() - started)
        return times


RUN: dict[str, Saver] = {
    "raw-buffered": raw_buffered,
    "raw-direct": raw_direct,
    "raw-overwrite": raw_overwrite,
    "ckptstore": ckptstore_save,
    "ckptstore-async": ckptstore_async,
    "safetensors": safetensors_save,
    "torch": torch_save,
    "dcp": dcp_save,
    "dcp-async": dcp_async,
}
"""By the names of `compared.SAVES`."""
