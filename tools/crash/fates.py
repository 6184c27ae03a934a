"""The possible outcomes of one unsynced operation after a crash, and of a file with several of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tools.crash.disk import LINE, Allocate, Blob, ContentOperation, NameOperation, Store, Truncate, Write, grow, put
from tools.crash.ramfs import SECTOR

STALE = b"\xa5"
"""The content of a block that was allocated to the file but never written."""


@dataclass(frozen=True, slots=True)
class Fate:
    """The outcome of one operation after a crash.

    Attributes:
        what: for messages.
        sectors: bit i: whether the i-th sector of a write, or line of a store, is on disk. For other operations 1
            (kept) or 0 (lost).
        grows: whether a write's new length is on disk.
        stale: the content of missing sectors where the file grew: stale bytes instead of zeros.
    """

    what: str
    sectors: int
    grows: bool = False
    stale: bool = False


KEPT = Fate("kept", 1)
LOST = Fate("lost", 0)


def contents(before: Blob, history: Sequence[tuple[ContentOperation, Fate]]) -> Blob:
    """The file's bytes after these operations met these fates, in order."""
    data = bytearray(before.data)
    for operation, fate in history:
        if fate is LOST:
            continue
        match operation:
            case Truncate(_, size):
                del data[size:]
                grow(data, size)
            case Allocate(_, size):
                grow(data, size)
            case Store():
                _store(data, operation, fate)
            case Write():
                _tear(data, operation, fate)
    return Blob(bytes(data))


def _tear(data: bytearray, write: Write, fate: Fate) -> None:
    end = write.offset + len(write.data)
    if fate.grows and fate.stale:
        data.extend(STALE * (end - len(data)))
    elif fate.grows or fate is KEPT:
        grow(data, end)
    if fate is KEPT:
        data[write.offset : end] = write.data
        return
    for index, sector in enumerate(_sectors(write)):
        begin, stop = max(sector, write.offset), min(sector + SECTOR, end, len(data))
        if fate.sectors >> index & 1 and begin < stop:
            data[begin:stop] = write.data[begin - write.offset : stop - write.offset]


def _store(data: bytearray, store: Store, fate: Fate) -> None:
    if fate is KEPT:
        put(data, store.offset, store.data)
        return
    end = store.offset + len(store.data)
    for index, line in enumerate(_lines(store)):
        if fate.sectors >> index & 1:
            begin = max(line, store.offset)
            put(data, begin, store.data[begin - store.offset : min(line + LINE, end) - store.offset])


def _lines(store: Store) -> range:
    return range(store.offset // LINE * LINE, store.offset + len(store.data), LINE)


def _sectors(write: Write) -> range:
    return range(write.offset // SECTOR * SECTOR, write.offset + len(write.data), SECTOR)


def possible_fates(
    operation: ContentOperation | NameOperation, length: int, torn: int, source: random.Random
) -> tuple[Fate, ...]:
    """The possible fates of `operation` on a file of `length` bytes; `torn` random patterns beside the regular ones."""
    if isinstance(operation, Store):
        return _fates_of_lines(len(_lines(operation)), torn, source)
    if not isinstance(operation, Write):
        return KEPT, LOST
    extends = operation.offset + len(operation.data) > length
    count = len(_sectors(operation))
    fates = [KEPT, LOST]
    if extends:
        fates += [Fate("only the length kept", 0, True), Fate("only the length kept, stale bytes", 0, True, True)]
    if count > 1:
        half = (1 << count // 2) - 1
        fates += [Fate("torn, first half kept", half, extends), Fate("torn, last half kept", ~half, extends)]
        fates += [Fate("torn", source.getrandbits(count), extends, source.random() < 0.5) for _ in range(torn)]
    return tuple(fates)


def _fates_of_lines(count: int, torn: int, source: random.Random) -> tuple[Fate, ...]:
    """Any subset of the lines may be there: all subsets of a few lines; of many, the most telling ones and a sample."""
    everything = (1 << count) - 1
    if count <= 3:
        subsets = range(1, everything)
        return KEPT, LOST, *(Fate(f"lines {lines:0{count}b} of {count} kept", lines) for lines in subsets)
    half = (1 << count // 2) - 1
    telling = {"first half kept": half, "last half kept": everything & ~half, "first line lost": everything & ~1}
    telling |= {"last line lost": everything >> 1, "only the first line kept": 1}
    fates = [Fate(f"{what}, of {count} lines", lines) for what, lines in telling.items()]
    return KEPT, LOST, *fates, *(Fate(f"some of {count} lines kept", source.getrandbits(count)) for _ in range(torn))
