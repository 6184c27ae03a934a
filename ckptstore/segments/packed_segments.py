"""Writing one packed segment: payload first, then its index, and the header last. And what all segments say alike."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ckptstore.backends.base import SegmentSink
from ckptstore.formats.records import SegmentEntry
from ckptstore.formats.segment import SegmentDoc, TensorEntry, encode_packed, plan_packed
from ckptstore.formats.segment_steps import Part
from ckptstore.segments.block_stream import BlockStream
from ckptstore.segments.write_session import SegmentSession

__all__ = ["drafts", "shares", "write_stream"]


def drafts(draft: SegmentDoc, tree: Any, count: int) -> list[SegmentDoc]:
    """The documents of the `count` segments that together hold one checkpoint: each is told which part it is.

    Args:
        draft: what they have in common: everything but uuid, tree and tensors.
        tree: the state's, which the first of them holds.
    """
    (step,) = draft.steps
    ids = [uuid.uuid4().hex for _ in range(count)]
    known = draft.encodings[step]
    parts = [Part(ids[0], number, count) if count > 1 else None for number in range(count)]
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
    """What each step of a segment costs: the bytes of its chunks and an equal share of the rest, of which the last step
    has what does not divide. SPEC.md 5.1 says so: who makes the log again counts alike.

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
        payload: about how many bytes `fill` will append.
        fill: appends the payload, and tells which tensors it made of it.

    Raises:
        as `SegmentSession.write_segment`.
    """
    header_size = plan_packed(draft)

    def data(sink: SegmentSink) -> tuple[bytes, int]:
        with BlockStream(sink, session.staging, session.blocks, header_size) as stream:
            tensors = fill(stream)
            header, index = encode_packed(replace(draft, tensors=tensors), stream.position - header_size, header_size)
            stream.append(np.frombuffer(index, np.uint8))
            return header, stream.finish()

    return session.write_segment(draft, header_size + payload, data)
