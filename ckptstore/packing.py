"""Writing one packed segment: payload first, then its index, and the header last."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from ckptstore.backends.base import Backend, SegmentSink
from ckptstore.blocks import BlockStream
from ckptstore.crashpoints import crash_point
from ckptstore.formats import hashing
from ckptstore.formats.records import SegmentEntry
from ckptstore.formats.segment import SegmentDoc, TensorEntry, encode_packed, plan_packed
from ckptstore.staging import Staging, aligned

__all__ = ["write_stream"]


def write_stream(
    backend: Backend,
    draft: SegmentDoc,
    payload: int,
    fill: Callable[[BlockStream], Mapping[int, Mapping[str, TensorEntry]]],
    staging: Staging,
    pool: ThreadPoolExecutor,
) -> SegmentEntry:
    """Write one packed segment and make it durable (COMMIT step 1).

    Args:
        draft: its document without tensors.
        payload: about how many bytes `fill` will append.
        fill: appends the payload, and tells which tensors it made of it.
    """
    header_size = plan_packed(draft)
    crash_point("save.begin")
    sink: SegmentSink = backend.open_sink(SegmentEntry(draft.segment, draft.term, 0, 0, "").key, header_size + payload)
    stream = BlockStream(sink, staging, pool, header_size)
    try:
        tensors = fill(stream)
        header, index = encode_packed(replace(draft, tensors=tensors), stream.position - header_size, header_size)
        stream.append(np.frombuffer(index, np.uint8))
        size = stream.finish()
        crash_point("save.before-header")
        memory = aligned(len(header))
        memory[:] = np.frombuffer(header, np.uint8)
        sink.write(0, memory.data)
        crash_point("save.before-seal")
        sink.seal(size)
        crash_point("save.sealed")
    except BaseException:
        stream.drain()
        sink.abort()
        raise
    return SegmentEntry(draft.segment, draft.term, size, len(header), hashing.header_hash(header))
