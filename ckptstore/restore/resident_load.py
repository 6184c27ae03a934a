"""Reads an open checkpoint into new memory, as the base of the next one.

No other code sees that memory. So damage, a lost connection or Ctrl-C costs nothing else: the previous state stays.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from ckptstore.backends.base import SegmentSource
from ckptstore.formats import checksums
from ckptstore.formats.segment_files.segment import TensorEntry
from ckptstore.host.buffers import Bytes, Staging, aligned
from ckptstore.host.progress import Progress, Tally
from ckptstore.host.threads import Workers, workers
from ckptstore.restore.chains.assembly import Held, assemble
from ckptstore.restore.chains.chain import Chain, master_of, restore_tensors
from ckptstore.restore.open_checkpoint import OpenCheckpoint
from ckptstore.restore.resident_checkpoint import ResidentCheckpoint, layout, make_resident
from ckptstore.restore.selection import select_from
from ckptstore.segments.segment_reader import copy_tensors

__all__ = ["BytesRead", "adopt_resident", "lacking", "load_resident", "with_dependencies"]

_WHOLE_BYTES: Final = 256 << 20
"""Bytes of segments that are fetched as a whole, so that their many small payloads are not separate requests."""


class BytesRead:
    """Counts the bytes that are read from segments. Thread-safe."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        """Add to the count."""
        with self._lock:
            self.nbytes += nbytes


def with_dependencies(encodings: Sequence[Held], keys: Iterable[str]) -> list[str]:
    """`keys`, and the keys that must be restored with them: other tensors of an optimizer step, a rounded copy's
    master.

    Args:
        encodings: the tensors of each encoding of a plan, in the form for `assemble`.
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


def lacking(found: OpenCheckpoint, select: str | Sequence[str] | None, rank: int | None = None) -> bool:
    """Whether a selected tensor builds on one that the base in memory does not have."""
    if found.base is None:
        return False
    return any(
        key not in found.base.links and all(key not in held or held[key].base_ratio for held in found.encodings)
        for key in _selected_keys(found, select, rank)
    )


def _selected_keys(found: OpenCheckpoint, select: str | Sequence[str] | None, rank: int | None) -> list[str]:
    names = select_from(found.tree_of(rank), select, found.ref).tensors
    return with_dependencies(found.encodings, [key for name in names for key in found.parts[name]])


def load_resident(
    found: OpenCheckpoint,
    select: str | Sequence[str] | None,
    spare: Sequence[Bytes] = (),
    threads: int = 1,
    progress: Progress | None = None,
    read: BytesRead | None = None,
    rank: int | None = None,
) -> list[ResidentCheckpoint]:
    """Restore an open checkpoint, or the selected tensors and those that they need, into new memory.

    Args:
        found: must not be `lacking`.
        select: globs of names; None: everything.
        spare: memory to reuse if it has the right length; its contents are lost, also if this fails.
        progress: called with (bytes done, total bytes) of the tensors.
        read: counts the bytes that are read from segments, except their headers.
        rank: in a checkpoint of many ranks, the rank whose tensors are read; None: as a single process reads it.

    Returns:
        the checkpoint, and after it the one that its last encoding builds on: the next one may build on either.

    Raises:
        CorruptSegmentError: stored data is not what was saved.
        StorageError: the medium failed.
        TensorNotFoundError: nothing matches.
    """
    keys = _selected_keys(found, select, rank)
    _prepare_sources(found, keys, read)
    last, left = found.plan.encodings[-1], list(spare)
    below, above = found.encodings[:-1], found.encodings[-1]
    base = found.base if len(below) == 1 else None
    first = last.base is not None and base is None and not found.lossy
    tally = Tally(progress, (1 + first) * sum(above[key].tensor.nbytes for key in keys))
    with workers(threads, "read") as readers:
        if first:  # the base separately: it is read once, and the next checkpoint may build on it
            common = [key for key in with_dependencies(below, keys) if key in below[-1]]
            region = _restore_region(below, common, left, readers, tally)
            assert last.base is not None
            base = make_resident(last.base, {key: below[-1][key].tensor for key in common}, region, {}, None)
        encodings = found.encodings if base is None else [base.links, above]
        region = _restore_region(encodings, keys, left, readers, tally)
    kept = set(keys)
    parts = {name: own for name, own in found.parts.items() if kept.issuperset(own)}
    tensors = {key: above[key].tensor for key in keys}
    state = make_resident(found.entry.id, tensors, region, parts, found.merged, lossy=found.lossy)
    return [state] if base is None else [state, base]


def _restore_region(
    encodings: Sequence[Held], keys: Sequence[str], spare: list[Bytes], readers: Workers, tally: Tally
) -> Bytes:
    """The tensors `keys` of the last of some encodings, in a region of memory with the positions of `layout`."""
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


def adopt_resident(
    found: OpenCheckpoint,
    select: str | Sequence[str] | None,
    read: Callable[[str, int, Bytes], None],
    rank: int | None = None,
) -> ResidentCheckpoint | None:
    """Hold the state that the caller already has, if it is the checkpoint bit for bit; None: it is not.

    Args:
        found: the checkpoint that it should be. No tensor of it is read.
        read: copies bytes of the caller's tensor of this name, from an offset on, to memory; raises `KeyError` if the
            tensor is missing, `ValueError` if it is too short.
        rank: as for `load_resident`.
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
    return make_resident(found.entry.id, tensors, region, {name: (name,) for name in names}, found.merged)


def _prepare_sources(found: OpenCheckpoint, keys: Sequence[str], read: BytesRead | None) -> None:
    """Count what is read; if every read is a request, fetch segments of which most is needed as a whole."""
    needed: dict[int, int] = {}
    for held in found.encodings:
        for key in keys:
            if key in held:
                reader = held[key].reader
                needed[id(reader)] = needed.get(id(reader), 0) + held[key].tensor.stored
    left = _WHOLE_BYTES
    for reader in found.readers.values():
        size = reader.entry.size
        if read is not None:
            reader.source = _CountedSource(reader.source, read)
        far = not found.cheap_reads
        if far and size <= left and 2 * needed.get(id(reader), 0) >= size - reader.entry.header:
            left -= size
            reader.source = _WholeSource(reader.source, reader.entry.header)


class _SourceWrapper(SegmentSource):
    """A source that reads from another one."""

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


class _CountedSource(_SourceWrapper):
    def __init__(self, source: SegmentSource, read: BytesRead) -> None:
        super().__init__(source)
        self._read = read

    def read_into(self, offset: int, out: memoryview) -> None:
        super().read_into(offset, out)
        self._read.add(out.nbytes)


class _WholeSource(_SourceWrapper):
    """A segment without its header, fetched as a whole when the first byte of it is read."""

    def __init__(self, source: SegmentSource, header: int) -> None:
        super().__init__(source)
        self._header = header
        self._data: memoryview | None = None
        self._lock = threading.Lock()

    def read_into(self, offset: int, out: memoryview) -> None:
        view = out.cast("B")
        if offset < self._header or offset + len(view) > self.size:
            super().read_into(offset, out)  # raises the right error
            return
        with self._lock:
            if self._data is None:
                data = aligned(self.size - self._header).data
                super().read_into(self._header, data)
                self._data = data
        at = offset - self._header
        view[:] = self._data[at : at + len(view)]
