"""Materializing: the end of a range, decoded through its chain, coded again as one delta against what lies below."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace

from ckptstore.formats import dtypes
from ckptstore.formats.codecs import SMALL_POLICY
from ckptstore.formats.layout import CHUNK
from ckptstore.formats.records import Encoding, SegmentEntry
from ckptstore.formats.segment import SegmentDoc
from ckptstore.formats.sources import Origin
from ckptstore.formats.state import FlatState, TensorSource
from ckptstore.host.buffers import Bytes
from ckptstore.maintenance.merge.copying import refuse_shards
from ckptstore.restore.opened import Opened
from ckptstore.restore.stored_base import StoredBase
from ckptstore.segments.session import SegmentSession
from ckptstore.write.encoding import Choices, write_packed

__all__ = ["ChainSource", "flat_of", "recode"]


class ChainSource:
    """A tensor of a stored checkpoint as a `TensorSource`: its chunks are decoded when they are read."""

    origin: Origin = "numpy"

    def __init__(self, state: StoredBase, name: str) -> None:
        """Read `name` of `state`, whose threads keep the chunk they decoded last."""
        spec = state.spec(name)
        assert spec is not None, name
        self.dtype, self.shape = spec
        self.nbytes = dtypes.nbytes(dtypes.get(self.dtype), self.shape)
        self.identity: Hashable = (id(state), name)
        self._state = state
        self._name = name

    def view(self) -> Bytes | None:
        """None: it is in no memory."""
        return None

    def read(self, offset: int, out: Bytes) -> None:
        """See `TensorSource.read`. Raises `CorruptSegmentError`, `StorageError`."""
        if offset < 0 or offset + len(out) > self.nbytes:
            raise ValueError(f"bytes {offset} to {offset + len(out)} of {self._name!r}, which has {self.nbytes}")
        done = 0
        while done < len(out):
            at = offset + done
            length = min(len(out) - done, CHUNK - at % CHUNK)
            out[done : done + length] = self._state.read(self._name, at, length)
            done += length


def flat_of(found: Opened) -> FlatState:
    """A stored checkpoint as a state, whose tensors are decoded when they are read.

    Raises:
        UsageError: it is stored in shards.
    """
    if any(found.sharded(name) for name in found.parts):
        refuse_shards(found.ref)
    state = StoredBase(found.entry.id, found.chains, _nothing)
    sources: dict[str, TensorSource] = {name: ChainSource(state, name) for name in found.chains}
    return FlatState(found.merged, sources)


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
        found: the checkpoint.
        below: the base, or None.
        draft: what the segments of an encoding say of themselves (`copying.merged_draft`).

    Returns:
        The segments, the encoding that they make, and the hash of the state that was read.

    Raises:
        UsageError: it is stored in shards.
        CorruptSegmentError: what is stored is not what was saved.
        StorageError: the medium failed.
    """
    flat = flat_of(found)
    lossy = found.plan.encodings[-1].lossy  # what is stored is what it is, however it is coded
    base = None if below is None else StoredBase(below.entry.id, below.chains, _nothing)
    choices = Choices(SMALL_POLICY)
    gap = 1 if below is None else max(1, found.entry.step - below.entry.step)

    def write(against: StoredBase | None) -> tuple[list[SegmentEntry], Encoding, str]:
        edge = Encoding(
            checkpoint=found.entry.node,
            kind="full" if against is None else "delta",
            base=None if against is None else against.id,
            segments=(),
            lossy=lossy,
            bytes=0,
        )
        written = write_packed(session, flat, draft(edge), base=against, gap=gap, choices=choices)
        edge = replace(edge, segments=tuple(entry.id for entry in written.segments), bytes=written.stored)
        return list(written.segments), edge, written.state

    made = write(base)
    if base is not None and not any(_against_base(choices, name, gap) for name in flat.tensors):
        # No tensor gained from the base: as a full it is no larger, and a restore reads nothing else.
        return write(None)
    return made


def _against_base(choices: Choices, name: str, gap: int) -> bool:
    chosen = choices.known(name, gap)
    return chosen is not None and chosen[0].codec.base_ratio == 1


def _nothing() -> None:
    """Who opened the segments closes them."""
