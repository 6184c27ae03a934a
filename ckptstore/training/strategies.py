"""The strategies of a `Checkpointer` (full, delta, gradient, replica), and how ``auto`` chooses one."""

from __future__ import annotations

import logging
import os
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

from ckptstore.backends.base import Backend
from ckptstore.errors import CkptError, UsageError
from ckptstore.formats.byte_text import size
from ckptstore.frameworks.torch_optimizers import kind_of
from ckptstore.host.buffers import aligned
from ckptstore.write.policy.delta_options import DeltaOptions
from ckptstore.write.policy.diff_options import DiffOptions

__all__ = [
    "STRATEGIES",
    "Circumstances",
    "Strategy",
    "chosen",
    "frozen_bytes",
    "measure_rate",
    "predicted",
    "say",
    "spare_cores",
    "state_bytes",
    "stores_once",
    "tell",
    "writer_options",
]

_LOG: Final = logging.getLogger("ckptstore.training")

Strategy = Literal["full", "delta", "gradient", "replica"]

STRATEGIES: Final = ("auto", "full", "delta", "gradient", "replica")

_TINY: Final = 1 << 20
_QUICK: Final = 0.02
"""Seconds: if a full takes no longer, compressing it costs more than writing it."""
_WORTH_ONCE: Final = 64 << 10
"""Fewer frozen bytes than this are stored in each full."""
_ONE_BASE: Final = 1 << 30
"""Checkpoints that share a base with frozen weights: all that follow, as long as a delta is smaller than a full."""
_PROBED: Final = 4 << 20
_PROBES: Final = 4
_PATIENCE: Final = 0.25


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What ``auto`` bases its choice on.

    Attributes:
        nbytes: of the state, including that of the optimizers.
        rate: bytes per second that the medium stores; None: it could not be measured.
        spare: cores that training leaves idle.
        unpredicted: why the optimizers' steps cannot be predicted; None: they can.
        frozen: bytes of `nbytes` that no optimizer moves.
    """

    nbytes: int
    rate: float | None
    spare: int
    unpredicted: str | None
    frozen: int = 0


def chosen(about: Circumstances) -> tuple[Strategy, str]:
    """Choose the strategy for ``auto`` -> the strategy, and the reason."""
    state = f"{size(about.nbytes)} of state"
    if stores_once(about.frozen, about.nbytes):
        once = f"{size(about.frozen)} of {state} are frozen, and are stored once"
        if about.unpredicted is not None:
            return "delta", f"{once}; {about.unpredicted}"
        return "gradient", f"{once}; the optimizers' steps can be predicted"
    if about.nbytes <= _TINY:
        return "full", f"{state} are not worth compressing"
    if about.spare < 1:
        return "full", f"{state}, and no core to spare for compressing them"
    seconds = None if about.rate is None else about.nbytes / about.rate
    speed = "" if about.rate is None else f" to a medium of {size(about.rate)}/s"
    cores = f"{about.spare} spare core{'s' if about.spare > 1 else ''}"
    if seconds is not None and seconds <= _QUICK:
        return "full", f"{state}{speed} take {seconds * 1e3:.0f} ms, less than compressing would"
    if about.unpredicted is not None:
        return "delta", f"{state}{speed}, {cores}, but {about.unpredicted}"
    return "gradient", f"{state}{speed}, {cores}, and the optimizers' steps can be predicted"


def tell(url: str, strategy: Strategy, why: str) -> None:
    """Say what ``auto`` chose, as `say` does."""
    say(url, f"strategy {strategy!r}: {why}")


def say(url: str, what: str) -> None:
    """Log a sentence about a store at level INFO. If no handler takes it, print it on a terminal."""
    said = f"{url}: {what}"
    _LOG.info("%s", said)
    heard = _LOG.isEnabledFor(logging.INFO) and _LOG.hasHandlers()
    if not heard and sys.stderr is not None and sys.stderr.isatty():
        print(f"ckptstore: {said}", file=sys.stderr)


def predicted(optimizers: Sequence[torch.optim.Optimizer], save_every: int | None) -> str | None:
    """Why `OptimizerStep` cannot predict the change between two checkpoints; None: it can."""
    if not optimizers:
        return "there is no optimizer"
    if save_every is None:
        return "the number of steps between two checkpoints is not known, and only one can be predicted"
    if save_every > 1:
        return f"there are {save_every} steps between two checkpoints, and only one can be predicted"
    for optimizer in optimizers:
        if kind_of(optimizer) is None:
            return f"the arithmetic of {type(optimizer).__qualname__} is not known"
    whole = [one for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]]
    known = sum(one.numel() for one in whole if one.dtype == torch.float32)
    if known * 2 < sum(one.numel() for one in whole):
        return "most parameters are not fp32"
    return None


def state_bytes(models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """About how many bytes a checkpoint has once the optimizers have created their state."""
    found = sum(_nbytes(one) for model in models for one in (*model.parameters(), *model.buffers()))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            momentum = bool(group.get("momentum")) if isinstance(optimizer, torch.optim.SGD) else False
            copies = 2 if "betas" in group else int(momentum)
            copies += bool(group.get("amsgrad"))
            found += copies * sum(_nbytes(one) for one in group["params"] if one.requires_grad)
    return found


def frozen_bytes(models: Sequence[torch.nn.Module]) -> int:
    """Bytes of the parameters that have no gradient."""
    return sum(_nbytes(one) for model in models for one in model.parameters() if not one.requires_grad)


def stores_once(frozen: int, nbytes: int) -> bool:
    """Whether frozen weights are worth storing once: every later checkpoint refers to the full that holds them.

    Args:
        frozen: bytes of `nbytes`, the state, that no optimizer moves.
    """
    return frozen >= _WORTH_ONCE and 2 * frozen >= nbytes


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def spare_cores(models: Sequence[torch.nn.Module]) -> int:
    """Cores that training leaves idle: torch's threads use theirs, training on a device uses one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    beside = os.environ.get("LOCAL_WORLD_SIZE", "1")  # processes that torchrun started on this machine
    on_device = any(one.device.type not in ("cpu", "meta") for model in models for one in model.parameters())
    busy = 1 if on_device else torch.get_num_threads()
    return cores // (int(beside) if beside.isdecimal() and int(beside) > 0 else 1) - busy


def measure_rate(backend: Backend) -> float | None:
    """Measure how many bytes per second a medium stores durably; None: it cannot be measured.

    Writes a segment of at most 16 MiB, and deletes it. No record refers to it: if the process is killed, gc deletes it.
    """
    key = f"seg/{0:010}/{uuid.uuid4().hex}.safetensors"
    memory = aligned(_PROBED)
    memory[:] = 1
    block = memory.data
    try:
        sink = backend.open_sink(key, _PROBED * _PROBES)
    except CkptError:
        return None
    written, began = 0, time.monotonic()
    try:
        for number in range(_PROBES):
            sink.write(number * _PROBED, block)
            written += _PROBED
            if time.monotonic() - began > _PATIENCE:
                break
        sink.seal(written)
        seconds = time.monotonic() - began
        backend.delete(key)
    except CkptError:
        sink.abort()
        return None
    return written / max(seconds, 1e-6)


def writer_options(
    strategy: Strategy,
    full_every: int,
    batch: int,
    deltas: DeltaOptions | None,
    save_every: int | None = 1,
    *,
    recompute: bool = False,
    once: bool = False,
) -> dict[str, Any]:
    """The options of `Store.writer` for a strategy.

    Args:
        once: most of the state is frozen. All deltas build on one full, and where step diffs need a new base, that is a
            delta, too. With many ranks it has to be the same on all.

    Raises:
        UsageError: invalid options.
    """
    if strategy != "gradient" and batch != 1:
        raise UsageError(f"batch={batch}: only step diffs are written in batches, and the strategy is {strategy!r}")
    if strategy != "gradient" and recompute:
        raise UsageError(f"recompute: only for step diffs, and the strategy is {strategy!r}")
    if strategy == "full":
        return {}
    coded = deltas
    if coded is None:
        coded = DeltaOptions(interval=_ONE_BASE) if once else DeltaOptions()
    if strategy == "delta" or (strategy == "replica" and save_every != 1):  # several steps cannot be explained as one
        return {"deltas": coded}
    # The Checkpointer handles SIGTERM: it saves the current step first.
    diffs = DiffOptions(full_every=full_every, batch=batch, flush_on_sigterm=False, recompute=recompute)
    return {"diffs": diffs, "deltas": coded} if deltas is not None or once else {"diffs": diffs}
