"""How fast this machine and medium restore: measured in a moment, on what is to be restored."""

from __future__ import annotations

import time

import numpy as np

from ckptstore.formats import codecs, optim
from ckptstore.host.buffers import aligned
from ckptstore.host.threads import default_threads
from ckptstore.restore.opened import Opened
from ckptstore.restore.plan import TYPICAL, Rates

__all__ = ["measure_rates"]

_PROBE = 16 << 20
_NUMBERS = 1 << 18


def measure_rates(found: Opened, *, decode: bool = True, replay: bool = True) -> Rates:
    """Read up to 16 MiB of the plan's largest segment, and decode a made-up delta and step, against the clock.

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
    return Rates(
        read,
        _delta_rate() * threads if decode else TYPICAL.decode,
        _replay_rate() * threads if replay else TYPICAL.replay,
    )


def _delta_rate() -> float:
    old = np.linspace(-0.1, 0.1, _NUMBERS, dtype=np.float32)
    new = old + np.sin(np.arange(_NUMBERS, dtype=np.float32)) * np.float32(1e-5)
    codec = codecs.codec("sub", {"word": 4})
    payload = codecs.encode(codec, new, old)
    state = codecs.as_bytes(old).copy()
    began = time.perf_counter()
    codecs.apply([(codec, payload)], state)
    return len(state) / max(time.perf_counter() - began, 1e-6)


def _replay_rate() -> float:
    rule = optim.AdamW().rule(optim.Step(count=1000, lr=1e-3))
    wave = np.sin(np.arange(_NUMBERS, dtype=np.float32))
    old = [wave * np.float32(scale) for scale in (1e-1, 1e-4)] + [np.square(wave * np.float32(1e-4))]
    new = [part.copy() for part in old]
    optim.advance(rule, new, np.roll(wave, 7) * np.float32(1e-4))
    payload = optim.predicted.encode(rule, old, new)
    began = time.perf_counter()
    optim.predicted.decode(rule, payload, old)
    return 12 * _NUMBERS / max(time.perf_counter() - began, 1e-6)
