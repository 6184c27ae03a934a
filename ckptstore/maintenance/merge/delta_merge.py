"""Rewrites a checkpoint, decoded through its chain: as one delta against a checkpoint below, or as a full."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ckptstore.formats.codecs import SMALL_POLICY
from ckptstore.formats.history.records import Encoding, SegmentEntry
from ckptstore.formats.segment_files.segment import SegmentDoc, TensorEntry
from ckptstore.maintenance.merge.checkpoint_portions import Portion, portions_of, write_portions
from ckptstore.restore.open_checkpoint import OpenCheckpoint
from ckptstore.segments.plain_segments import write_plain
from ckptstore.segments.write_session import SegmentSession
from ckptstore.write.delta_encoding import Choices, write_coded

__all__ = ["reencode", "write_as_full"]


def reencode(
    session: SegmentSession,
    found: OpenCheckpoint,
    below: OpenCheckpoint | None,
    draft: Callable[[Encoding], SegmentDoc],
) -> tuple[list[SegmentEntry], Encoding, str]:
    """Encode a checkpoint as one delta against `below`, or as a full if no tensor gains from that.

    Args:
        session: the session to write with. Not every segment that it begins is part of the result. Each of its workers
            has two chunks in memory.
        found: the checkpoint. A tensor in shards stays cut as it is, and each shard is encoded against the same shard
            of `below`, if that has it.
        below: the base, or None.
        draft: returns the description of an encoding's segments (`chunk_copies.merged_draft`).

    Returns:
        The segments, the encoding that they make, and the hash of the state that was read.

    Raises:
        CorruptSegmentError: the stored data is not what was saved.
        StorageError: the medium failed.
    """
    portions = portions_of(found)
    lossy = found.plan.encodings[-1].lossy  # encoding it again loses nothing more
    choices = [Choices(SMALL_POLICY) for _ in portions]
    gap = 1 if below is None else max(1, found.entry.step - below.entry.step)

    def write(against: OpenCheckpoint | None) -> tuple[list[SegmentEntry], Encoding, str]:
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
        # No tensor gained from the base. A full is no larger, and a restore reads nothing else.
        return write(None)
    return made


def write_as_full(
    session: SegmentSession, found: OpenCheckpoint, draft: Callable[[Encoding], SegmentDoc]
) -> tuple[list[SegmentEntry], Encoding, str]:
    """Write a checkpoint, decoded through its chain, as an uncompressed full.

    Args, returns and raises as `reencode`.
    """
    edge = Encoding(found.entry.node, "full", None, (), found.plan.encodings[-1].lossy, 0)
    portions = portions_of(found)
    written = write_portions(
        session, portions, draft(edge), lambda number, told: write_plain(session, portions[number].flat, told)
    )
    edge = replace(edge, segments=tuple(entry.id for entry in written.segments), bytes=written.stored)
    return list(written.segments), edge, written.state


def _gains(portions: Sequence[Portion], choices: Sequence[Choices], gap: int) -> bool:
    """Tell whether any tensor was encoded against the base."""
    for portion, known in zip(portions, choices, strict=True):
        for name in portion.flat.tensors:
            chosen = known.known(name, gap)
            if chosen is not None and chosen[0].codec.base_ratio == 1:
                return True
    return False
