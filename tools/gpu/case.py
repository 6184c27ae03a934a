"""One way to save in a training loop on a device: ``python -m tools.gpu.case WAY --dir FOLDER``, which prints JSON.

The process trains without saves, then saves in blocks of iterations (warm-up, a save every so many iterations, a save
every iteration), saves once more under a profiler, which slows down what comes after it, restores the newest checkpoint
into other tensors, and compares bit for bit. Each iteration synchronizes the device once, after the optimizer's step:
the time of the call that saves is its own, and the copies that it queued run beside the next iteration.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from tools.bench.measure import Measurement
from tools.bench.training.training_loop import Shape, Trainer, tensors
from tools.bench.training.training_strategies import AbsentError, Ledger, Options
from tools.bench.training.training_worker import Run
from tools.gpu import ways
from tools.gpu.bus import Traffic, watched

__all__ = ["Load", "Plan", "Training", "equal", "fitting", "measured"]

BYTES_PER_PARAMETER: Final = 12
_WARM_STEPS: Final = 3
_CLOCK: Final = 4
"""Iterations that find the number of micro-batches."""


@dataclass(frozen=True, slots=True)
class Load:
    """The load of training.

    Attributes:
        micro: backward passes of one iteration, each of `batch` windows of `context` bytes of text.
    """

    device: str
    width: int
    layers: int
    batch: int
    context: int
    micro: int = 1


@dataclass(frozen=True, slots=True)
class Plan:
    """The measurement of a case.

    Attributes:
        interval: iterations from save to save in the block with few saves; 0: there is none.
        saves: of each block, at most.
        seconds: of each block, at most; it ends with the save that is late.
        plain: iterations without saves.
    """

    interval: int = 10
    saves: int = 5
    seconds: float = 4.0
    plain: int = 10


class Training(Trainer):
    """The loop's model on the device, fp32 with backward in bf16 on CUDA (autocast), and AdamW."""

    def __init__(self, load: Load, seed: int = 1) -> None:
        with torch.device(load.device):  # parameters are drawn there: on the host it takes seconds
            super().__init__(Shape(load.width, load.layers, load.batch, load.context), load.device, seed)
        self._micro = load.micro

    def backward(self) -> None:
        """The gradient of the next step: the sum over the micro-batches, compressed once."""
        hook, self.compressor = self.compressor, None
        try:
            for _ in range(self._micro):
                with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
                    super().backward()
        finally:
            self.compressor = hook
        if hook is not None:
            hook.compress(self.model.parameters())

    def timed(self, iterations: int) -> list[float]:
        """Seconds of iterations without saves."""
        found = []
        for _ in range(iterations):
            began = time.perf_counter()
            self.take()
            found.append(time.perf_counter() - began)
        return found


def fitting(load: Load, seconds: float) -> int:
    """How many micro-batches make an iteration of about `seconds`; at least 1."""
    training = Training(replace(load, micro=1))
    training.timed(_WARM_STEPS)
    one = statistics.median(training.timed(_CLOCK))
    return max(1, round(seconds / one))


def equal(one: Any, other: Any) -> str | None:
    """The first tensor in which two states differ, as bits; None: they are equal. Shapes and dtypes count."""
    mine, its = dict(tensors(one)), dict(tensors(other))
    if mine.keys() != its.keys():
        return f"{min(mine.keys() ^ its.keys())} is in one of the two only"
    for name, tensor in mine.items():
        found = its[name]
        if (tensor.dtype, tensor.shape) != (found.dtype, found.shape):
            return f"{name}: {tensor.dtype} {tuple(tensor.shape)}, {found.dtype} {tuple(found.shape)}"
        if not torch.equal(_bits(tensor), _bits(found).to(tensor.device)):
            return name
    return None


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().contiguous().reshape(-1)
    return plain.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[plain.element_size()])


class _Memory:
    """Peaks of device memory and of pinned memory that is not in the process's resident memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._unseen = self._device is not None and _pinned_is_unseen()

    def restart(self) -> None:
        if self._device is not None:
            torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int | None:
        """Bytes of torch's allocator since `restart`; None: there is no device."""
        return None if self._device is None else torch.cuda.max_memory_allocated(self._device)

    def held(self) -> int | None:
        """Bytes of the allocator now."""
        return None if self._device is None else torch.cuda.memory_allocated(self._device)

    def pinned(self) -> int:
        """Pinned bytes of torch that are not in the process's resident memory."""
        if not self._unseen:
            return 0
        stats = getattr(torch.cuda, "host_memory_stats", dict)()
        return int(stats.get("allocated_bytes.current", 0))


def _pinned_is_unseen() -> bool:
    size = 64 << 20
    before = _resident("self", "VmRSS")
    memory = torch.ones(size, dtype=torch.uint8).pin_memory()
    grown = _resident("self", "VmRSS") - before
    del memory
    return grown < size // 2


def _resident(process: int | str, name: str) -> int:
    """The resident bytes in ``/proc/PID/status``; 0: the process is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    return 0


@dataclass(slots=True)
class _Loop:
    """A loop with saves, and the results of its blocks."""

    run: Run
    plan: Plan

    def block(self, interval: int, saves: int, seconds: float, lead: int = 0) -> dict[str, Any]:
        """Train with a save every `interval` iterations -> numbers. Nothing is in flight before and after.

        Args:
            saves: how many count; fewer if the time is up.
            lead: saves before those, which do not count: with them in flight the first one that counts waits for memory
                as all later ones do.
        """
        run = self.run
        # Half of an interval before the first save and half of one after the last: the slowdown after a save counts.
        half = interval // 2
        save = -(-(run.trainer.step + half) // interval) * interval
        run.interval = sys.maxsize if interval > 1 else 1
        run.until(save - interval + half + lead)
        start = run.trainer.step
        run.interval = interval
        run.iterations.clear()
        run.stalls.clear()
        began = time.perf_counter()
        for number in range(1, saves + 1):
            run.until(start + number * interval)
            if time.perf_counter() - began > seconds:
                break
        wall = time.perf_counter() - began
        run.strategy.settle()
        drained = time.perf_counter() - began - wall
        ways.tidied(run.strategy)
        durable = run.ledger.seconds(start)
        found = {
            "iterations": len(run.iterations),
            "saves": len(run.stalls),
            "iteration_s": wall / len(run.iterations),
            "median_iteration_s": statistics.median(run.iterations),
            "stalls_s": list(run.stalls),
            "stall_s": statistics.median(run.stalls) if run.stalls else None,
            "worst_stall_s": max(run.stalls, default=None),
            "drain_s": drained,
            "durable": len(durable),
        }
        return found | ({"durable_s": statistics.median(durable)} if durable else {})


def measured(way: str, load: Load, plan: Plan, folder: Path) -> dict[str, Any]:
    """Measure one way.

    Args:
        folder: where it writes. The newest checkpoint stays there.

    Returns:
        numbers by name; bytes and seconds. ``losses`` is by interval: an iteration's mean over that of the loop without
        saves, less 1. ``differs``: None, or why the newest checkpoint is not the state that was trained.

    Raises:
        AbsentError: this way does not exist here; says why.
    """
    kind = ways.WAYS[way]
    training = Training(load)
    if getattr(kind, "compressed", False):
        ways.compress(training)
    training.timed(_WARM_STEPS)
    gc.collect()
    memory = _Memory(training.device)
    memory.restart()
    plain = training.timed(plan.plain)
    peak, held = memory.peak(), memory.held()
    result: dict[str, Any] = {
        "way": way,
        "label": kind.label,
        "parameters": training.parameters,
        "state_bytes": sum(one.nbytes for _, one in tensors(training.state())),
        "plain_s": statistics.median(plain),
    }
    if way.startswith("none"):
        return result
    with Measurement() as host:
        before, ledger = memory.pinned(), Ledger()
        strategy = kind(folder, training, Options(1, full_every=100), ledger)
        with _closed(strategy):
            loop = _Loop(Run(training, strategy, ledger, 1), plan)
            first = loop.block(1, 2, plan.seconds)  # touches memory, registers it, starts threads
            memory.restart()
            blocks = {}
            if plan.interval > 1 and not strategy.every_step:
                blocks[plan.interval] = loop.block(plan.interval, 2, plan.seconds)
            # A way that blocks for seconds has nothing in flight.
            blocks[1] = loop.block(1, plan.saves, plan.seconds, lead=2 if first["stall_s"] < 1.0 else 0)
            at_most = memory.peak()
            agent = ways.agent_of(strategy)
            if agent is not None:
                result["agent_bytes"] = _resident(agent, "RssAnon")  # the shared buffers are in the trainer's
            result["pinned_unseen_bytes"] = memory.pinned() - before

            def one_more() -> None:
                run = loop.run
                run.until(run.trainer.step + 1)
                run.strategy.settle()

            traffic = watched(one_more, training.device)
            if held is not None and peak is not None and at_most is not None:
                result |= {"device_peak_bytes": at_most - peak, "device_held_bytes": (memory.held() or 0) - held}
        result["first_stall_s"] = first["stalls_s"][0]
    result["host_bytes"] = host.peak_rss + result["pinned_unseen_bytes"]
    result["traffic"] = asdict(traffic) if isinstance(traffic, Traffic) else None
    if isinstance(traffic, str):
        result["no_traffic"] = traffic
    began = time.perf_counter()
    other = Training(load, seed=2)
    other.take()  # so that there are moments to load into
    step = kind.restore(folder, other)
    result["restore_s"] = time.perf_counter() - began
    result["stored_bytes"] = ways.stored(folder)
    trained = training.state()
    differs = f"the newest checkpoint is step {step}" if step != training.step else equal(trained, other.state())
    result["differs"] = differs
    result["blocks"] = {str(interval): block for interval, block in blocks.items()}
    result["losses"] = {name: one["iteration_s"] / result["plain_s"] - 1 for name, one in result["blocks"].items()}
    return result


@contextlib.contextmanager
def _closed(strategy: ways.Strategy) -> Iterator[None]:
    """Close the strategy; if the loop failed, its error is the one that is raised."""
    from ckptstore.host.caller_warnings import UnexplainedStepWarning

    try:
        yield
    except UnexplainedStepWarning as error:  # of a replica: this device computes otherwise than the agent
        with contextlib.suppress(Exception):
            strategy.close()
        raise AbsentError(str(error)) from error
    except BaseException:
        with contextlib.suppress(Exception):
            strategy.close()
        raise
    strategy.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=[*ways.WAYS, "fit"])
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--load", type=json.loads, required=True)
    parser.add_argument("--plan", type=json.loads, default={})
    parser.add_argument("--iteration", type=float, default=0.0)
    asked = parser.parse_args()
    os.environ.setdefault("CKPTSTORE_RECYCLE", "never")  # every way writes new files
    load = Load(**asked.load)
    if load.device == "cuda":
        torch.set_float32_matmul_precision("high")
    asked.dir.mkdir(parents=True, exist_ok=True)
    try:
        if asked.way == "fit":
            found: dict[str, Any] = {"micro": fitting(load, asked.iteration)}
        else:
            found = measured(asked.way, load, Plan(**asked.plan), asked.dir)
    except AbsentError as error:
        found = {"way": asked.way, "label": ways.WAYS[asked.way].label, "absent": str(error)}
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
