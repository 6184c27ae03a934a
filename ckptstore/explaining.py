"""What restoring a checkpoint will read and decode, encoding by encoding, and how long that should take here."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ckptstore.chains import Chain
from ckptstore.formats import codecs, optim
from ckptstore.formats.segment import RAW, TensorEntry
from ckptstore.formats.steps import STEP
from ckptstore.loading import Opened, opened, select_from
from ckptstore.staging import aligned
from ckptstore.store import Store

__all__ = ["Explanation", "PlanStep", "Rates", "explain", "measure_rates"]

_PROBE = 16 << 20
_NUMBERS = 1 << 18


@dataclass(frozen=True, slots=True)
class Rates:
    """Speeds of this machine and medium, in bytes per second, all threads together.

    Attributes:
        read: of stored bytes, checksums included.
        decode: of logical bytes, per layer of a chain.
        replay: of logical bytes, per optimizer step.
    """

    read: float
    decode: float
    replay: float


@dataclass(frozen=True, slots=True)
class PlanStep:
    """One encoding of the plan.

    Attributes:
        ref: the checkpoint it leads to.
        kind: ``full``, ``delta``, ...
        base: REF it builds on, or None.
        segments: keys of the objects read.
        tensors: how many tensors it contributes to.
        bytes_read: stored bytes of those tensors.
        bytes_decoded: logical bytes decoded; 0 for uncompressed ones.
        seconds: estimate.
    """

    ref: str
    kind: str
    base: str | None
    segments: tuple[str, ...]
    tensors: int
    bytes_read: int
    bytes_decoded: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """A restore plan with costs.

    Attributes:
        ref: what is restored.
        steps: base first.
        nbytes: logical bytes of the result.
        rates: what the estimates rest on.
    """

    ref: str
    steps: tuple[PlanStep, ...]
    nbytes: int
    rates: Rates

    @property
    def bytes_read(self) -> int:
        """Stored bytes to read, headers not counted."""
        return sum(step.bytes_read for step in self.steps)

    @property
    def seconds(self) -> float:
        """Estimate for the whole restore: reading and decoding do not overlap in it."""
        return sum(step.seconds for step in self.steps)


def explain(store: Store, ref: str | int = "latest", select: str | Sequence[str] | None = None) -> Explanation:
    """How `ref` (or the tensors of it that `select` names) would be restored.

    Raises:
        as `Store.load`. Reads headers, and at most 16 MiB to measure the medium; no tensor is restored.
    """
    with opened(store, ref) as found:
        chains = found.chains
        chosen = [chains[name] for name in select_from(found.tree, select, found.entry.ref).tensors]
        rates = measure_rates(found)
        layers = _all_layers(chosen)
        steps = []
        for encoding in found.plan.encodings:
            read = decoded = count = 0
            seconds = 0.0
            for segment in encoding.segments:
                reader = found.readers[segment]
                for tensor in reader.doc.tensors.get(encoding.checkpoint[1], {}).values():
                    if (id(reader), tensor.name) in layers:
                        read += tensor.stored
                        decoded += 0 if tensor.codec == RAW else tensor.nbytes
                        seconds += _seconds(tensor, rates)
                        count += 1
            steps.append(
                PlanStep(
                    ref=f"{encoding.checkpoint[1]}@{encoding.checkpoint[0]}",
                    kind=encoding.kind,
                    base=None if encoding.base is None else encoding.base.ref,
                    segments=tuple(found.readers[segment].entry.key for segment in encoding.segments),
                    tensors=count,
                    bytes_read=read,
                    bytes_decoded=decoded,
                    seconds=seconds,
                )
            )
        return Explanation(found.entry.ref, tuple(steps), sum(chain.tensor.nbytes for chain in chosen), rates)


def _seconds(tensor: TensorEntry, rates: Rates) -> float:
    if tensor.codec == RAW:
        return tensor.stored / rates.read
    return tensor.stored / rates.read + tensor.nbytes / (rates.replay if tensor.codec == STEP else rates.decode)


def _all_layers(chains: Sequence[Chain]) -> set[tuple[int, str]]:
    """(segment, tensor) of every layer that restoring `chains` reads, masters of derived tensors included."""
    return {(id(layer.reader), layer.tensor.name) for chain in chains for layer in chain.sources}


def measure_rates(found: Opened) -> Rates:
    """Read up to 16 MiB of the plan's largest segment, and decode a made-up delta and step, against the clock."""
    largest = max(found.readers.values(), key=lambda reader: reader.entry.size)
    memory = aligned(min(_PROBE, largest.entry.size))
    began = time.perf_counter()
    largest.source.read_into(0, memory.data)
    read = len(memory) / max(time.perf_counter() - began, 1e-6)
    threads = min(4, os.cpu_count() or 1)
    return Rates(read, _delta_rate() * threads, _replay_rate() * threads)


def _delta_rate() -> float:
    old = np.linspace(-0.1, 0.1, _NUMBERS, dtype=np.float32)
    new = old + np.sin(np.arange(_NUMBERS, dtype=np.float32)) * np.float32(1e-5)
    codec = codecs.codec("diff", {"word": 4})
    payload = codecs.encode(codec, new, old)
    state = codecs.as_bytes(old).copy()
    began = time.perf_counter()
    codecs.fold([(codec, payload)], state)
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
