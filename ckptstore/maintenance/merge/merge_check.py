"""Reads back what a merge wrote, before it is committed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial

from ckptstore.backends.base import Backend
from ckptstore.errors import CorruptSegmentError
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.records import CheckpointEntry, Encoding, SegmentEntry
from ckptstore.host.buffers import Bytes, Staging
from ckptstore.host.progress import Advance
from ckptstore.restore.chains.assembly import held_by, tree_of
from ckptstore.restore.chains.chain import restore_tensors
from ckptstore.restore.open_checkpoint import OpenCheckpoint, opened_readers
from ckptstore.restore.restore_plan import Plan
from ckptstore.restore.stored_parts import described_state
from ckptstore.segments.segment_reader import SegmentReader, copy_tensors

__all__ = ["check_copies", "check_state", "opened_plan"]


@contextmanager
def opened_plan(
    backend: Backend,
    catalog: Catalog,
    entry: CheckpointEntry,
    encodings: Sequence[Encoding],
    written: Sequence[SegmentEntry] = (),
) -> Iterator[OpenCheckpoint]:
    """Open the plan that restores `entry` by `encodings`, the full first, whether or not the catalog has it.

    The caller has pinned the segments; `written` are those that no catalog names yet.

    Raises:
        CorruptSegmentError, StorageError.
    """
    chosen = Plan(entry.id, tuple(encodings), float(sum(edge.bytes for edge in encodings)))
    new = {segment.id: segment for segment in written}
    entries = (new.get(segment) or catalog.segments[segment] for segment in chosen.segments)
    with ExitStack() as stack:
        readers = opened_readers(backend, entries, partial(SegmentReader, backend), stack)
        yield OpenCheckpoint(catalog, entry, chosen, readers)


def check_state(found: OpenCheckpoint, pool: ThreadPoolExecutor, staging: Staging, advance: Advance) -> None:
    """Decode every tensor through its chain. Compare each chunk with its hash, and the state's hash with the log's.

    Raises:
        CorruptSegmentError: names segment and tensor.
        StorageError: the medium failed.
    """
    found.check_identity()
    restore_tensors({name: (chain, _forget) for name, chain in found.chains.items()}, pool, staging, advance=advance)


def check_copies(
    backend: Backend,
    catalog: Catalog,
    written: Sequence[SegmentEntry],
    encodings: Sequence[Encoding],
    pool: ThreadPoolExecutor,
    staging: Staging,
    advance: Advance,
) -> None:
    """Read every stored chunk of copied encodings, and compare each step's description with the log's state hash.

    Raises:
        CorruptSegmentError: names segment and tensor.
        StorageError: the medium failed.
    """
    readers: dict[str, SegmentReader] = {}  # closed below; their descriptions remain usable
    for segment in written:
        with closing(SegmentReader(backend, segment)) as reader:
            readers[segment.id] = reader
            tensors = [tensor for own in reader.doc.tensors.values() for tensor in own.values()]
            # Check the stored bytes; nothing is decoded here.
            copy_tensors(reader, tensors, pool, staging, lambda _tensor, _offset, _data: None, advance=advance)
    for edge in encodings:
        _check_description([readers[one] for one in edge.segments], catalog, edge)


def _check_description(readers: Sequence[SegmentReader], catalog: Catalog, edge: Encoding) -> None:
    entry = catalog.find(edge.checkpoint)
    assert entry is not None, edge.checkpoint
    state = described_state(held_by(readers, edge), tree_of(readers, edge), f"checkpoint {entry.ref}")
    if state != entry.state:
        raise CorruptSegmentError(f"{readers[0].entry.key}: describes another state of {entry.ref} than the log")


def _forget(_offset: int, _data: Bytes) -> None:
    """Discard decoded bytes: they have been compared already."""
