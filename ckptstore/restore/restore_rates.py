"""Measures quickly how fast this machine and medium restore, with the data to be restored."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median
from typing import Final, NamedTuple

import numpy as np

from ckptstore.formats import codecs, optim
from ckptstore.host.buffers import aligned
from ckptstore.host.threads import default_threads, started_pool
from ckptstore.restore.open_checkpoint import OpenCheckpoint
from ckptstore.restore.restore_plan import TYPICAL, Rates

__all__ = ["KernelSpeed", "measure_rates"]

_PROBE = 16 << 20
NUMBERS: Final = 1 << 18
"""Values of the synthetic delta and step: 1 MiB of each tensor, more than a processor's first caches hold."""
_ROUNDS = 5


class KernelSpeed(NamedTuple):
    """The speed of a kernel, on all threads at once.

    Attributes:
        startup: additional seconds of its first call, which loads the kernel.
        quick, slow: bytes a second, all threads together, in the fastest and in the median of the other rounds.
    """

    startup: float
    quick: float
    slow: float


def measure_rates(found: OpenCheckpoint, *, decode: bool = True, replay: bool = True) -> Rates:
    """Time the reading of up to 16 MiB of the plan's largest segment, and the decoding of a synthetic delta and step.

    The first call, which loads the kernel, is timed separately: a one-time cost is not part of a rate. The rates are
    those of the fastest of a few further rounds; `Rates.spread` says how much slower the median was.

    Args:
        decode, replay: False: do not measure this rate, and return the typical one. Loading its kernels alone takes a
            second of processor time.
    """
    largest = max(found.readers.values(), key=lambda reader: reader.entry.size)
    memory = aligned(min(_PROBE, largest.entry.size))
    began = time.perf_counter()
    largest.source.read_into(0, memory.data)
    read = len(memory) / max(time.perf_counter() - began, 1e-6)
    threads = default_threads()
    measured = [kernel(threads) for kernel, wanted in ((_delta_rate, decode), (_replay_rate, replay)) if wanted]
    rates = iter(one.quick for one in measured)
    return Rates(
        read,
        next(rates) if decode else TYPICAL.decode,
        next(rates) if replay else TYPICAL.replay,
        startup=sum(one.startup for one in measured),
        spread=max((one.quick / one.slow for one in measured), default=1.0),
    )


def _delta_rate(threads: int) -> KernelSpeed:
    old = np.linspace(-0.1, 0.1, NUMBERS, dtype=np.float32)
    new = old + np.sin(np.arange(NUMBERS, dtype=np.float32)) * np.float32(1e-5)
    codec = codecs.codec("sub", {"word": 4})
    payload = codecs.encode(codec, new, old)

    def prepared() -> Callable[[], object]:
        state = codecs.as_bytes(old).copy()
        return lambda: codecs.apply([(codec, payload)], state)

    return _time_kernel(prepared, threads, old.nbytes)


def _replay_rate(threads: int) -> KernelSpeed:
    rule = optim.AdamW().rule(optim.Step(count=1000, lr=1e-3))
    wave = np.sin(np.arange(NUMBERS, dtype=np.float32))
    old = [wave * np.float32(scale) for scale in (1e-1, 1e-4)] + [np.square(wave * np.float32(1e-4))]
    new = [part.copy() for part in old]
    optim.advance(rule, new, np.roll(wave, 7) * np.float32(1e-4))
    payload = optim.predicted.encode(rule, old, new)

    def prepared() -> Callable[[], object]:
        state = [part.copy() for part in old]
        return lambda: optim.predicted.decode(rule, payload, state)

    return _time_kernel(prepared, threads, 12 * NUMBERS)


def _time_kernel(prepared: Callable[[], Callable[[], object]], threads: int, nbytes: int) -> KernelSpeed:
    """Time a kernel.

    Args:
        prepared: returns a call with memory of its own, for each thread and round.
        nbytes: logical bytes that one call decodes.
    """
    first = _seconds(prepared())
    again = _seconds(prepared())
    with started_pool(threads, "ckptstore-rates") as pool:
        rounds: list[float] = []
        for _ in range(_ROUNDS):
            calls = [prepared() for _ in range(threads)]
            rounds.append(_seconds(partial(_run_all, pool, calls)))
    return KernelSpeed(max(0.0, first - again), threads * nbytes / min(rounds), threads * nbytes / median(rounds))


def _run_all(pool: ThreadPoolExecutor, calls: Sequence[Callable[[], object]]) -> None:
    for future in [pool.submit(call) for call in calls]:
        future.result()


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return max(time.perf_counter() - began, 1e-6)
