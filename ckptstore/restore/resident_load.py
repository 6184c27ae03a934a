"""From an open checkpoint to one that is held in memory: all that is read goes into memory that nobody else sees.

So damage, a lost connection or Ctrl-C in the middle costs nothing but that memory: what was held before stays whole.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from ckptstore.backends.base import SegmentSource
from ckptstore.formats import checksums
from ckptstore.formats.segment import TensorEntry
from ckptstore.host.buffers import Bytes, Staging, aligned
from ckptstore.host.progress import Progress, Tally
from ckptstore.host.threads import Workers, workers
from ckptstore.restore.assembly import Held, assemble
from ckptstore.restore.chain import Chain, master_of, restore_tensors
from ckptstore.restore.open_checkpoint import Opened
from ckptstore.restore.resident_checkpoint import HeldState, layout, made
from ckptstore.restore.selection import select_from
from ckptstore.segments.segment_reader import copy_tensors

__all__ = ["BytesRead", "adopt", "companions", "hold", "lacking"]

_AT_ONCE: Final = 256 << 20
"""Bytes of segments that are fetched as wholes, so that their many small payloads are no requests of their own."""


class BytesRead:
    """Counts what is read of segments. Thread-safe."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        """So many more."""
        with self._lock:
            self.nbytes += nbytes


def companions(encodings: Sequence[Held], keys: Iterable[str]) -> list[str]:
    """`keys`, and what else has to be restored with them: an optimizer step's other tensors, a rounded copy's master.

    Args:
        encodings: the tensors of each encoding of a plan, as `assemble` takes them.
    """
    needed = dict.fromkeys(keys)
    for held in reversed(encodings):
        waiting = list(needed)
        while waiting:
            link = held.get(waiting.pop())
            if link is None:
                continue
            more: tuple[str, ...] = () if link.group is None else link.group.names
            master = master_of(link.tensor)
            for name in (*more, *(() if master is None else (master,))):
                if name not in needed:
                    needed[name] = None
                    waiting.append(name)
    return [key for key in encodings[-1] if key in needed]


def lacking(found: Opened, select: str | Sequence[str] | None, rank: int | None = None) -> bool:
    """Whether something of the selection builds on a tensor that the base, which is in memory, does not have."""
    if found.base is None:
        return False
    return any(
        key not in found.base.links and all(key not in held or held[key].base_ratio for held in found.encodings)
        for key in _wanted(found, select, rank)
    )


def _wanted(found: Opened, select: str | Sequence[str] | None, rank: int | None) -> list[str]:
    names = select_from(found.tree_of(rank), select, found.ref).tensors
    return companions(found.encodings, [key for name in names for key in found.parts[name]])


def hold(
    found: Opened,
    select: str | Sequence[str] | None,
    spare: Sequence[Bytes] = (),
    threads: int = 1,
    progress: Progress | None = None,
    read: BytesRead | None = None,
    rank: int | None = None,
) -> list[HeldState]:
    """Restore an open checkpoint, or what is selected of it and what that needs, into memory of its own.

    Args:
        found: not `lacking`.
        select: globs of names; None: everything.
        spare: memory to use if it is as long as is needed; worthless afterwards, whether this succeeds or not.
        progress: told (bytes done, bytes in all) of the tensors.
        read: counts what is read of segments, but for their headers.
        rank: whose tensors, of a checkpoint of many ranks; None: as one process reads it that is no rank.

    Returns:
        the checkpoint, and after it the one that its last encoding builds on: the next one may build on either.

    Raises:
        CorruptSegmentError: something is not what was saved.
        StorageError: the medium failed.
        TensorNotFoundError: nothing matches.
    """
    keys = _wanted(found, select, rank)
    _prepare_sources(found, keys, read)
    last, left = found.plan.encodings[-1], list(spare)
    below, above = found.encodings[:-1], found.encodings[-1]
    base = found.base if len(below) == 1 else None
    first = last.base is not None and base is None and not found.lossy
    tally = Tally(progress, (1 + first) * sum(above[key].tensor.nbytes for key in keys))
    with workers(threads, "read") as readers:
        if first:  # the base by itself: it is read once, and whatever comes next may build on it
            common = [key for key in companions(below, keys) if key in below[-1]]
            region = _restored(below, common, left, readers, tally)
            assert last.base is not None
            base = made(last.base, {key: below[-1][key].tensor for key in common}, region, {}, None)
        encodings = found.encodings if base is None else [base.links, above]
        region = _restored(encodings, keys, left, readers, tally)
    kept = set(keys)
    parts = {name: own for name, own in found.parts.items() if kept.issuperset(own)}
    tensors = {key: above[key].tensor for key in keys}
    state = made(found.entry.id, tensors, region, parts, found.merged, lossy=found.lossy)
    return [state] if base is None else [state, base]


def _restored(
    encodings: Sequence[Held], keys: Sequence[str], spare: list[Bytes], readers: Workers, tally: Tally
) -> Bytes:
    """The tensors `keys` of the last of some encodings, in a region of memory as `layout` says."""
    tensors = {key: encodings[-1][key].tensor for key in keys}
    places, length = layout(tensors)
    fitting = [number for number, region in enumerate(spare) if len(region) == length]
    region = spare.pop(fitting[0]) if fitting else aligned(length)
    memory = {key: region[places[key] : places[key] + tensor.nbytes] for key, tensor in tensors.items()}
    _restore(assemble(encodings, keys), memory, readers, tally)
    return region


def _restore(chains: Mapping[str, Chain], memory: Mapping[str, Bytes], readers: Workers, tally: Tally) -> None:
    staging = Staging.for_chunks(2 * readers.threads)

    def deliver(tensor: TensorEntry, offset: int, data: Bytes) -> None:
        memory[tensor.name][offset : offset + len(data)] = data

    groups: dict[int, list[Chain]] = {}
    for chain in chains.values():
        if chain.raw:
            groups.setdefault(id(chain.links[0].reader), []).append(chain)
    for group in groups.values():
        members = [chain.tensor for chain in group]
        copy_tensors(group[0].links[0].reader, members, readers.pool, staging, deliver, advance=tally.advance)
    chained = {key: (chain, memory[key]) for key, chain in chains.items() if not chain.raw}
    restore_tensors(chained, readers.pool, staging, advance=tally.advance)


def adopt(
    found: Opened,
    select: str | Sequence[str] | None,
    read: Callable[[str, int, Bytes], None],
    rank: int | None = None,
) -> HeldState | None:
    """Hold what somebody has already, if it is the checkpoint bit for bit; None: it is not.

    Args:
        found: the checkpoint that it should be. No tensor of it is read.
        read: copies bytes of the tensor that is called so in the state, from an offset on, to memory; raises
            `KeyError` for one that is not there, `ValueError` for one that ends before.
        rank: as for `hold`.
    """
    chosen = select_from(found.tree_of(rank), select, found.ref).tensors
    names = {name: there for name, there in chosen.items() if not found.sharded(name)}
    tensors = {name: found.encodings[-1][name].tensor for name in names}
    places, length = layout(tensors)
    region = aligned(length)
    try:
        for name, tensor in tensors.items():
            at = 0
            for chunk in tensor.chunks:
                out = region[places[name] + at : places[name] + at + chunk.logical]
                read(names[name], at, out)
                if checksums.chunk_hash(out.data) != chunk.decoded_hash:
                    return None
                at += chunk.logical
    except (KeyError, ValueError):
        return None
    return made(found.entry.id, tensors, region, {name: (name,) for name in names}, found.merged)


def _prepare_sources(found: Opened, keys: Sequence[str], read: BytesRead | None) -> None:
    """Count what is read; and of media where every read is a request, fetch segments of which most is needed whole."""
    needed: dict[int, int] = {}
    for held in found.encodings:
        for key in keys:
            if key in held:
                reader = held[key].reader
                needed[id(reader)] = needed.get(id(reader), 0) + held[key].tensor.stored
    left = _AT_ONCE
    for reader in found.readers.values():
        size = reader.entry.size
        if read is not None:
            reader.source = _Counted(reader.source, read)
        far = not found.cheap_reads
        if far and size <= left and 2 * needed.get(id(reader), 0) >= size - reader.entry.header:
            left -= size
            reader.source = _Whole(reader.source, reader.entry.header)


class _Passing(SegmentSource):
    """A source that asks another one."""

    def __init__(self, source: SegmentSource) -> None:
        self._source = source
        self.size = source.size
        self.held = source.held

    def read_into(self, offset: int, out: memoryview) -> None:
        self._source.read_into(offset, out)

    def map(self) -> memoryview | None:
        return self._source.map()

    def close(self) -> None:
        self._source.close()


class _Counted(_Passing):
    def __init__(self, source: SegmentSource, read: BytesRead) -> None:
        super().__init__(source)
        self._read = read

    def read_into(self, offset: int, out: memoryview) -> None:
        super().read_into(offset, out)
        self._read.add(out.nbytes)


class _Whole(_Passing):
    """All of a segment behind its header, fetched when the first byte of it is asked for."""

    def __init__(self, source: SegmentSource, header: int) -> None:
        super().__init__(source)
        self._header = header
        self._data: memoryview | None = None
        self._lock = threading.Lock()

    def read_into(self, offset: int, out: memoryview) -> None:
        view = out.cast("B")
        if offset < self._header or offset + len(view) > self.size:
            super().read_into(offset, out)  # which says what is wrong
            return
        with self._lock:
            if self._data is None:
                data = aligned(self.size - self._header).data
                super().read_into(self._header, data)
                self._data = data
        at = offset - self._header
        view[:] = self._data[at : at + len(view)]
