"""Enumerates the states in which a power cut may leave a disk, like SQLite's ``test6.c`` and ALICE (OSDI 2014).

Run something on a `RecordingPosix`, note its promises, and look at every state that a crash may leave::

    posix = RecordingPosix()
    backend = LocalBackend("/store", posix)
    for key in ("log/0", "log/1"):
        backend.create(key, key.encode())
        posix.acknowledge(key)

    for state in crash_states(posix, limit=5000, seed=7):
        survivor = LocalBackend("/store", state.mount())
        for key in state.acknowledged:
            assert survivor.get(key) == key.encode(), state.explain()
        assert set(survivor.list("log/")) <= {"log/0", "log/1"}

The model allows what POSIX allows (real file systems promise more, each in its own way):

- A write, truncation or allocation that no later fsync of the file covers is kept or lost. A write may also be *torn*:
  any of its 512-byte sectors are on disk, the others are as before; the length has grown or not; the added part holds
  zeros or stale bytes.
- A name made, removed or renamed that no later fsync of its folder covers is kept or lost, in any combination. The
  fsync of a file does not save its name. The fsync of a folder does not save the folder's own name in its parent.
- Data that was *stored* into a mapped file and not drained since (`Drain`: the fence of the thread that stored, or
  msync) is there or not, line of 64 bytes by line. An fsync of the file drains nothing; a drain saves no length and no
  name.
- Whatever was pending when a sync *failed* stays in doubt for ever: a later sync that succeeds does not save it.

Cuts are taken just before each sync, drain and acknowledgement, and at the end. A cut anywhere else leaves a state that
the next of these also leaves, with the operations between them lost. If the combinations at a cut number `limit` or
fewer, all are visited; otherwise the most telling ones (nothing, everything, all but one, one alone, everything up to
one) and random ones. Torn patterns are always a sample. The same `seed` gives the same states; equal states are visited
once.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from tools.crash.disk import (
    Acknowledge,
    Allocate,
    Blob,
    ContentOperation,
    Drain,
    Image,
    Name,
    NameOperation,
    Operation,
    Rename,
    Store,
    Sync,
    SyncFailed,
    Truncate,
    Unname,
    Write,
    give_birth,
    rename,
)
from tools.crash.fates import KEPT, LOST, Fate, contents, possible_fates
from tools.crash.ramfs import RamPosix
from tools.crash.recording import RecordingPosix


@dataclass(frozen=True, slots=True)
class CrashState:
    """One state in which a crash may leave the disk.

    Attributes:
        image: the file system.
        position: how many operations of the history were issued before the cut.
        acknowledged: labels promised before the cut, in order.
        fates: the outcome of each operation that was not durable.
        exhaustive: whether all combinations at this cut were visited (with sampled torn patterns).
    """

    image: Image
    position: int
    acknowledged: tuple[Hashable, ...]
    fates: tuple[tuple[Operation, Fate], ...] = field(repr=False)
    exhaustive: bool

    def mount(self) -> RamPosix:
        """A file system in this state, to open a backend on."""
        return RamPosix(self.image)

    def explain(self) -> str:
        """Lists the lost operations and the files that remain, for the message of a failing test."""
        lines = [f"cut after operation {self.position}, {len(self.acknowledged)} acknowledged; not on disk:"]
        lines += [f"  {fate.what}: {operation}" for operation, fate in self.fates if fate.what != "kept"]
        lines.append("files:")
        lines += [f"  {path} {'/' if blob is None else len(blob.data)}" for path, blob in self.image.walk()]
        return "\n".join(lines)


@dataclass(slots=True)
class _Pending:
    operation: ContentOperation | NameOperation
    fates: tuple[Fate, ...]
    doubtful: bool = False  # a sync that should have saved it failed
    certain: bool = False  # saved, but applied after one that is not

    @property
    def unsaved(self) -> bool:
        """Whether the operation stays in doubt after a sync of the file."""
        return self.doubtful or (isinstance(self.operation, Store) and not self.certain)

    @property
    def owner(self) -> int:
        operation = self.operation
        return operation.folder if isinstance(operation, Name | Unname | Rename) else operation.node


class _Disk:
    """The certain and the pending operations at a position of the history."""

    def __init__(self, base: Image) -> None:
        self.folders = {node: dict(names) for node, names in base.folders.items()}
        self.files = dict(base.files)
        self.pending: list[_Pending] = []

    def issue(self, operation: ContentOperation | NameOperation, fates: tuple[Fate, ...]) -> None:
        if isinstance(operation, Name):
            give_birth(operation, self.folders, self.files)
        self.pending.append(_Pending(operation, fates))

    def sync(self, node: int) -> None:
        mine = [pending for pending in self.pending if pending.owner == node]
        if any(pending.unsaved for pending in mine):
            for pending in mine:
                pending.certain = not pending.unsaved
            return
        self.pending = [pending for pending in self.pending if pending.owner != node]
        writes: list[tuple[ContentOperation, Fate]] = []
        for pending in mine:
            if isinstance(pending.operation, Name | Unname | Rename):
                self.folders[node] = dict(self.folders[node])  # images of earlier cuts share the old one
                rename(self.folders[node], pending.operation)
            else:
                writes.append((pending.operation, KEPT))
        if writes:
            self.files[node] = contents(self.files[node], writes)

    def drain(self, stores: frozenset[int]) -> None:
        for pending in self.pending:
            operation = pending.operation
            pending.certain |= isinstance(operation, Store) and operation.number in stores and not pending.doubtful

    def fail_sync(self, node: int) -> None:
        for pending in self.pending:
            pending.doubtful |= pending.owner == node and not pending.certain

    def image(self, fates: Sequence[Fate], cache: dict[tuple[int, tuple[Fate, ...]], Blob]) -> Image:
        """The disk if the pending operations met these fates. `cache` avoids building equal contents twice."""
        folders, files = dict(self.folders), dict(self.files)
        writes: dict[int, list[tuple[ContentOperation, Fate]]] = {}
        for pending, fate in zip(self.pending, fates, strict=True):
            operation, node = pending.operation, pending.owner
            if not isinstance(operation, Name | Unname | Rename):
                writes.setdefault(node, []).append((operation, fate))
            elif fate is not LOST:
                if folders[node] is self.folders[node]:
                    folders[node] = dict(folders[node])
                rename(folders[node], operation)
        for node, history in writes.items():
            key = node, tuple(fate for _, fate in history)
            if key not in cache:
                cache[key] = contents(self.files[node], history)
            files[node] = cache[key]
        return Image(folders, files)


def _telling(choices: Sequence[tuple[Fate, ...]]) -> Iterator[tuple[Fate, ...]]:
    everything = [KEPT] * len(choices)
    nothing = [LOST if LOST in fates else KEPT for fates in choices]  # some are certain
    for count in range(len(choices) + 1):
        yield (*everything[:count], *nothing[count:])
    for index, fates in enumerate(choices):
        for fate in fates:
            yield (*everything[:index], fate, *everything[index + 1 :])
            yield (*nothing[:index], fate, *nothing[index + 1 :])


def _combinations(choices: Sequence[tuple[Fate, ...]], limit: int, source: random.Random) -> Iterator[tuple[Fate, ...]]:
    """All combinations if they number `limit` or fewer, else `limit`: the most telling ones first, then random ones."""
    if math.prod(map(len, choices)) <= limit:
        return itertools.product(*choices)
    at_random = (tuple(map(source.choice, choices)) for _ in itertools.count())
    return itertools.islice(itertools.chain(_telling(choices), at_random), limit)


def crash_states(
    recording: RecordingPosix, *, limit: int = 4096, seed: int = 0, torn: int = 2, begin: int = 0
) -> Iterator[CrashState]:
    """Every state that a power cut during the recording may leave: see the module.

    Args:
        recording: the recorded run; its history must not grow meanwhile.
        limit: visit at most this many combinations at each cut.
        seed: decides torn patterns and, beyond `limit`, the sample.
        torn: random torn patterns for each write of several sectors.
        begin: skip cuts before this position of the history.
    """
    disk = _Disk(recording.base)
    lengths = {node: len(blob.data) for node, blob in recording.base.files.items()}
    acknowledged: list[Hashable] = []
    seen: set[tuple[bytes, int]] = set()
    source = random.Random(seed)
    for position, operation in enumerate([*recording.history, None]):
        cut = operation is None or isinstance(operation, Sync | SyncFailed | Drain | Acknowledge)
        if cut and position >= begin:
            for state in _cut(disk, position, tuple(acknowledged), limit, source):
                key = state.image.digest(), len(acknowledged)
                if key not in seen:
                    seen.add(key)
                    yield state
        match operation:
            case Sync(node):
                disk.sync(node)
            case SyncFailed(node):
                disk.fail_sync(node)
            case Drain(stores):
                disk.drain(stores)
            case Acknowledge(label):
                acknowledged.append(label)
            case None:
                return
            case _:
                disk.issue(operation, possible_fates(operation, _follow(lengths, operation), torn, source))


def _follow(lengths: dict[int, int], operation: ContentOperation | NameOperation) -> int:
    """Track the length of each file as its processes see it; returns the length before `operation`."""
    if isinstance(operation, Name | Unname | Rename):
        return 0
    before = lengths.get(operation.node, 0)
    match operation:
        case Write(node, offset, data):
            lengths[node] = max(before, offset + len(data))
        case Truncate(node, size):
            lengths[node] = size
        case Allocate(node, size):
            lengths[node] = max(before, size)
    return before


def _cut(
    disk: _Disk, position: int, acknowledged: tuple[Hashable, ...], limit: int, source: random.Random
) -> Iterator[CrashState]:
    choices = [(KEPT,) if pending.certain else pending.fates for pending in disk.pending]
    exhaustive = math.prod(map(len, choices)) <= limit
    operations = [pending.operation for pending in disk.pending]
    cache: dict[tuple[int, tuple[Fate, ...]], Blob] = {}
    for fates in _combinations(choices, limit, source):
        image = disk.image(fates, cache)
        yield CrashState(image, position, acknowledged, tuple(zip(operations, fates, strict=True)), exhaustive)
