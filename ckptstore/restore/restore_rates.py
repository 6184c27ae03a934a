"""How fast this machine and medium restore: measured in a moment, on what is to be restored."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median
from typing import NamedTuple

import numpy as np

from ckptstore.formats import codecs, optim
from ckptstore.host.buffers import aligned
from ckptstore.host.threads import default_threads, started_pool
from ckptstore.restore.open_checkpoint import Opened
from ckptstore.restore.restore_plan import TYPICAL, Rates

__all__ = ["Measured", "measure_rates"]

_PROBE = 16 << 20
_NUMBERS = 1 << 18
_ROUNDS = 5


class Measured(NamedTuple):
    """What a kernel did, on all threads at once.

    Attributes:
        startup: seconds that its first call took beyond the others: the kernel was loaded.
        quick, slow: bytes in a second, all threads together: of the quickest and of the middle one of further rounds.
    """

    startup: float
    quick: float
    slow: float


def measure_rates(found: Opened, *, decode: bool = True, replay: bool = True) -> Rates:
    """Read up to 16 MiB of the plan's largest segment, and decode a made-up delta and step, against the clock.

    A first call, which loads the kernel, is timed by itself: what takes a second once is no rate. The rates are those
    of the quickest of a few further rounds; how much slower the middle one was is `Rates.spread`.

    Args:
        decode, replay: False: nobody asks for that rate, which is the typical one then. Its kernels alone take a second
            of the processor to load.
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


def _delta_rate(threads: int) -> Measured:
    old = np.linspace(-0.1, 0.1, _NUMBERS, dtype=np.float32)
    new = old + np.sin(np.arange(_NUMBERS, dtype=np.float32)) * np.float32(1e-5)
    codec = codecs.codec("sub", {"word": 4})
    payload = codecs.encode(codec, new, old)

    def prepared() -> Callable[[], object]:
        state = codecs.as_bytes(old).copy()
        return lambda: codecs.apply([(codec, payload)], state)

    return _against_the_clock(prepared, threads, old.nbytes)


def _replay_rate(threads: int) -> Measured:
    rule = optim.AdamW().rule(optim.Step(count=1000, lr=1e-3))
    wave = np.sin(np.arange(_NUMBERS, dtype=np.float32))
    old = [wave * np.float32(scale) for scale in (1e-1, 1e-4)] + [np.square(wave * np.float32(1e-4))]
    new = [part.copy() for part in old]
    optim.advance(rule, new, np.roll(wave, 7) * np.float32(1e-4))
    payload = optim.predicted.encode(rule, old, new)

    def prepared() -> Callable[[], object]:
        state = [part.copy() for part in old]
        return lambda: optim.predicted.decode(rule, payload, state)

    return _against_the_clock(prepared, threads, 12 * _NUMBERS)


def _against_the_clock(prepared: Callable[[], Callable[[], object]], threads: int, nbytes: int) -> Measured:
    """Time a kernel.

    Args:
        prepared: gives one call, with memory of its own, for each thread and round.
        nbytes: logical bytes that one call decodes.
    """
    first = _seconds(prepared())
    again = _seconds(prepared())
    with started_pool(threads, "ckptstore-rates") as pool:
        rounds: list[float] = []
        for _ in range(_ROUNDS):
            calls = [prepared() for _ in range(threads)]
            rounds.append(_seconds(partial(_together, pool, calls)))
    return Measured(max(0.0, first - again), threads * nbytes / min(rounds), threads * nbytes / median(rounds))


def _together(pool: ThreadPoolExecutor, calls: Sequence[Callable[[], object]]) -> None:
    for future in [pool.submit(call) for call in calls]:
        future.result()


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return max(time.perf_counter() - began, 1e-6)
