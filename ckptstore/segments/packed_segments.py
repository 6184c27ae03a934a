"""Writes one packed segment: payload, index, then the header. Also makes the documents and sizes of all segments."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from ckptstore.backends.base import SegmentSink
from ckptstore.formats.history.records import SegmentEntry
from ckptstore.formats.segment_files.segment import SegmentDoc, TensorEntry, encode_packed, plan_packed
from ckptstore.formats.segment_files.segment_steps import SegmentPart
from ckptstore.segments.block_stream import BlockStream
from ckptstore.segments.write_session import SegmentSession

__all__ = ["INDEX_ENTRY", "drafts", "shares", "write_stream"]

INDEX_ENTRY: Final = 512
"""Upper estimate of the bytes by which a tensor's entries exceed those of a plain segment."""


def drafts(draft: SegmentDoc, tree: Any, count: int) -> list[SegmentDoc]:
    """The documents of the `count` segments that together hold one checkpoint: each says which part it is.

    Args:
        draft: what they have in common: everything but uuid, tree and tensors.
        tree: the tree of the state, which the first segment holds.
    """
    (step,) = draft.steps
    ids = [uuid.uuid4().hex for _ in range(count)]
    known = draft.encodings[step]
    parts = [SegmentPart(ids[0], number, count) if count > 1 else None for number in range(count)]
    return [
        replace(
            draft,
            segment=segment,
            encodings={step: replace(known, part=part)},
            trees={} if number else {step: tree},
        )
        for number, (segment, part) in enumerate(zip(ids, parts, strict=True))
    ]


def shares(size: int, stored: Sequence[int]) -> list[int]:
    """The size of each step of a segment: the bytes of its chunks and an equal share of the rest; the last step gets
    the remainder. formats/SPEC.md 5.1 defines this, so that a rebuilt log has the same sizes.

    Args:
        size: length of the segment.
        stored: bytes of each step's chunks.
    """
    share, left = divmod(size - sum(stored), len(stored))
    return [own + share + (left if number == len(stored) - 1 else 0) for number, own in enumerate(stored)]


def write_stream(
    session: SegmentSession,
    draft: SegmentDoc,
    payload: int,
    fill: Callable[[BlockStream], Mapping[int, Mapping[str, TensorEntry]]],
) -> SegmentEntry:
    """Write one packed segment and make it durable (COMMIT step 1).

    Args:
        draft: its document without tensors.
        payload: approximate number of bytes that `fill` will append.
        fill: appends the payload -> the entries of its tensors.

    Raises:
        the errors of `SegmentSession.write_segment`.
    """
    header_size = plan_packed(draft)

    def data(sink: SegmentSink) -> tuple[bytes, int]:
        with BlockStream(sink, session.staging, session.blocks, header_size) as stream:
            tensors = fill(stream)
            header, index = encode_packed(replace(draft, tensors=tensors), stream.position - header_size, header_size)
            stream.append(np.frombuffer(index, np.uint8))
            return header, stream.finish()

    return session.write_segment(draft, header_size + payload, data)
