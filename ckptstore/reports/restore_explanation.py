"""Explains a restore: what it reads and decodes, encoding by encoding, and how long that should take here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ckptstore.formats.history.records import ref_of
from ckptstore.formats.html_tables import HtmlTable
from ckptstore.formats.segment_files.segment import RAW, TensorEntry
from ckptstore.formats.segment_files.shards import key_of
from ckptstore.formats.segment_files.step_codec import STEP
from ckptstore.log.journal import Journal
from ckptstore.restore.chains.chain import Chain
from ckptstore.restore.open_checkpoint import OpenCheckpoint, opened
from ckptstore.restore.restore_plan import Rates
from ckptstore.restore.restore_rates import measure_rates
from ckptstore.restore.selection import select_from

__all__ = ["Explanation", "PlanStep", "explain", "explained"]

_EACH: Final = 2.5e-4
"""Maximum seconds of overhead per tensor of a delta or step diff, even a small one (two cores, under other load)."""
_SURE: Final = 1.0
"""Below this many seconds the distance of the two estimates does not matter."""
_WIDEST: Final = 4.0
"""Maximum ratio of the upper estimate to the lower one for the estimate to be shown."""


@dataclass(frozen=True, slots=True)
class PlanStep:
    """One encoding of the plan.

    Attributes:
        ref: the checkpoint that it restores.
        kind: ``full``, ``delta``, ...
        base: REF it builds on, or None.
        segments: keys of the objects read.
        tensors: number of tensors that it contributes to.
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
class Explanation(HtmlTable):
    """A restore plan with costs.

    Attributes:
        ref: the checkpoint to restore.
        steps: the encodings, base first.
        nbytes: logical bytes of the result.
        rates: the rates that the estimates are based on.
    """

    ref: str
    steps: tuple[PlanStep, ...]
    nbytes: int
    rates: Rates

    @property
    def bytes_read(self) -> int:
        """Stored bytes to read, without headers."""
        return sum(step.bytes_read for step in self.steps)

    @property
    def seconds(self) -> float:
        """Estimated seconds for the whole restore at the measured rates, without overlap of reading and decoding."""
        return self.rates.startup + sum(step.seconds for step in self.steps)

    @property
    def span(self) -> tuple[float, float] | None:
        """Lower and upper estimate in seconds; None: the measurements differ too much for an estimate.

        The upper one uses the slower of the measured rates, and adds the overhead of each tensor of each step.
        """
        work = sum(step.seconds for step in self.steps)
        each = sum(step.tensors for step in self.steps if step.bytes_decoded) * _EACH
        low, high = self.rates.startup + work, self.rates.startup + work * max(1.0, self.rates.spread) + each
        return (low, high) if high < _SURE or high <= _WIDEST * low else None


def explain(journal: Journal, ref: str | int = "latest", select: str | Sequence[str] | None = None) -> Explanation:
    """Explain how `ref` (or its tensors that match `select`) would be restored.

    Reads headers, and at most 16 MiB to measure the medium. No tensor is restored.

    Raises:
        as `Store.load`.
    """
    with opened(journal, ref) as found:
        return explained(found, select, measure_rates(found))


def explained(found: OpenCheckpoint, select: str | Sequence[str] | None, rates: Rates | None = None) -> Explanation:
    """Explain an open checkpoint, as `explain` does.

    Args:
        rates: rates of this machine and medium; None: measure those that this restore needs, and use typical values
            for the others.
    """
    names = select_from(found.tree, select, found.ref).tensors
    chosen = [chain for name in names for chain, _ in found.stored(name)]
    links = _all_links(chosen)
    if rates is None:
        codecs = {link.tensor.codec for chain in chosen for link in chain.sources}
        rates = measure_rates(found, decode=not codecs <= {RAW, STEP}, replay=STEP in codecs)
    steps = []
    for encoding in found.plan.encodings:
        read = decoded = 0
        restored: set[str] = set()
        seconds = 0.0
        for segment in encoding.segments:
            reader = found.readers[segment]
            for tensor in reader.doc.tensors.get(encoding.checkpoint[1], {}).values():
                if (id(reader), key_of(tensor)) in links:
                    read += tensor.stored
                    decoded += 0 if tensor.codec == RAW else tensor.nbytes
                    seconds += _seconds(tensor, rates)
                    restored.add(tensor.name)
        steps.append(
            PlanStep(
                ref=ref_of(encoding.checkpoint),
                kind=encoding.kind,
                base=None if encoding.base is None else encoding.base.ref,
                segments=tuple(found.readers[segment].entry.key for segment in encoding.segments),
                tensors=len(restored),
                bytes_read=read,
                bytes_decoded=decoded,
                seconds=seconds,
            )
        )
    return Explanation(found.ref, tuple(steps), sum(chain.tensor.nbytes for chain in chosen), rates)


def _seconds(tensor: TensorEntry, rates: Rates) -> float:
    if tensor.codec == RAW:
        return tensor.stored / rates.read
    return tensor.stored / rates.read + tensor.nbytes / (rates.replay if tensor.codec == STEP else rates.decode)


def _all_links(chains: Sequence[Chain]) -> set[tuple[int, str]]:
    """Return (segment, tensor) of every link that restoring `chains` reads, masters of derived tensors included."""
    return {(id(link.reader), link.tensor.name) for chain in chains for link in chain.sources}
