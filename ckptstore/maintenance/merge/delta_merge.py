"""Materializing: the end of a range, decoded through its chain, coded again as one delta against what lies below."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ckptstore.formats.codecs import SMALL_POLICY
from ckptstore.formats.records import Encoding, SegmentEntry
from ckptstore.formats.segment import SegmentDoc, TensorEntry
from ckptstore.maintenance.merge.checkpoint_portions import Portion, portions_of, write_portions
from ckptstore.restore.open_checkpoint import Opened
from ckptstore.segments.write_session import SegmentSession
from ckptstore.write.encoding import Choices, write_coded

__all__ = ["recode"]


def recode(
    session: SegmentSession,
    found: Opened,
    below: Opened | None,
    draft: Callable[[Encoding], SegmentDoc],
) -> tuple[list[SegmentEntry], Encoding, str]:
    """Code a checkpoint as one delta against `below`, or as a full where no tensor gains from that.

    Args:
        session: what it is written with; not every segment that it begins need be part of the result. Each of its
            workers has two chunks in memory.
        found: the checkpoint. A tensor in shards stays cut as it is, and each shard is coded against the same of
            `below`, if that has it.
        below: the base, or None.
        draft: what the segments of an encoding say of themselves (`copying.merged_draft`).

    Returns:
        The segments, the encoding that they make, and the hash of the state that was read.

    Raises:
        CorruptSegmentError: what is stored is not what was saved.
        StorageError: the medium failed.
    """
    portions = portions_of(found)
    lossy = found.plan.encodings[-1].lossy  # what is stored is what it is, however it is coded
    choices = [Choices(SMALL_POLICY) for _ in portions]
    gap = 1 if below is None else max(1, found.entry.step - below.entry.step)

    def write(against: Opened | None) -> tuple[list[SegmentEntry], Encoding, str]:
        def portion(
            number: int, documents: Callable[[int], Sequence[SegmentDoc]]
        ) -> tuple[tuple[SegmentEntry, ...], list[TensorEntry]]:
            own = portions[number]
            base = None if against is None else own.base(against)
            return write_coded(session, own.flat, documents, base=base, gap=gap, choices=choices[number])

        edge = Encoding(
            checkpoint=found.entry.node,
            kind="full" if against is None else "delta",
            base=None if against is None else against.entry.id,
            segments=(),
            lossy=lossy,
            bytes=0,
        )
        written = write_portions(session, portions, draft(edge), portion)
        edge = replace(edge, segments=tuple(entry.id for entry in written.segments), bytes=written.stored)
        return list(written.segments), edge, written.state

    made = write(below)
    if below is not None and not _gains(portions, choices, gap):
        # No tensor gained from the base: as a full it is no larger, and a restore reads nothing else.
        return write(None)
    return made


def _gains(portions: Sequence[Portion], choices: Sequence[Choices], gap: int) -> bool:
    """Whether any tensor was coded against the base."""
    for portion, known in zip(portions, choices, strict=True):
        for name in portion.flat.tensors:
            chosen = known.known(name, gap)
            if chosen is not None and chosen[0].codec.base_ratio == 1:
                return True
    return False
