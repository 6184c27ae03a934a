"""A medium that knows the true history of a log, and wrappers that lose, delay and repeat creates on it.

The truth: the first create of slot n, made when exactly n slots have ever been created, is history. `World` keeps it
and checks on every create that the protocol never leaves a gap.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Literal

from ckptstore.backends.base import OBJECT_LIMIT, Backend, SegmentSink, SegmentSource
from ckptstore.backends.memory import MemoryBackend
from ckptstore.errors import StorageError
from ckptstore.formats.checksums import xxh3_128
from ckptstore.formats.history.catalog import Catalog, CatalogBuilder
from ckptstore.formats.history.record_text import decode_record
from ckptstore.formats.history.records import (
    CheckpointEntry,
    CheckpointId,
    CommitRecord,
    Encoding,
    FormatFile,
    Node,
    Record,
    SegmentEntry,
    slot_of,
)
from ckptstore.log.journal import Journal
from ckptstore.log.log_reader import Patience
from ckptstore.log.term import Term

Fate = Literal["ok", "lost answer", "late", "duplicate", "error"]
"""The fate of a create: done; done, but the answer is lost; done later, or never; done, and done again later; not done.
All other operations have only ``ok`` and ``error``."""
FATES: tuple[Fate, ...] = ("ok", "lost answer", "late", "duplicate", "error")

HASTE = Patience(tries=2, sleep=lambda _seconds: None)


class World(MemoryBackend):
    """The medium and the truth.

    Attributes:
        fmt: its FORMAT.
        journal: both, as the protocol takes them.
        canon: the bytes of every slot of history.
        net: creates that are still in flight.
    """

    def __init__(self, every: int = 4) -> None:
        super().__init__(f"world-{secrets.token_hex(8)}")
        MemoryBackend.forget(self.url.removeprefix("memory://"))
        self.fmt = FormatFile(secrets.token_hex(16), anchor_every=every)
        self.journal = Journal(self, self.fmt)
        self.canon: list[bytes] = []
        self.net: list[tuple[str, bytes]] = []

    def create(self, key: str, data: bytes) -> None:
        super().create(key, data)
        seq = slot_of(key)
        if seq is not None:
            assert seq <= len(self.canon), f"slot {seq} created while slot {len(self.canon)} is the next one"
            if seq == len(self.canon):
                self.canon.append(data)

    def deliver(self, index: int) -> None:
        """Let a create in flight take effect."""
        key, data = self.net.pop(index)
        with contextlib.suppress(StorageError):  # it exists: nobody receives the refusal
            self.create(key, data)

    def record(self, seq: int) -> Record:
        return decode_record(self.canon[seq], seq=seq, run=self.fmt.run, what=f"canon {seq}")

    def catalog(self, end: int | None = None) -> Catalog:
        """The truth about the first `end` slots."""
        builder = CatalogBuilder()
        for seq in range(len(self.canon) if end is None else end):
            builder.apply(self.record(seq), seq, xxh3_128(self.canon[seq]))
        return builder.catalog

    def damage(self, key: str) -> None:
        """Flip a bit."""
        data = bytearray(self.get(key))
        data[len(data) // 2] ^= 1
        self.replace(key, bytes(data))


class FaultyBackend(Backend):
    """A client's backend for a `World`. `fate` decides the outcome of every operation."""

    anchored = True  # a World is an object, not a name that others may take

    def __init__(self, world: World, fate: Callable[[str, str], Fate]) -> None:
        self.world = world
        self.url = world.url
        self.fate = fate

    def _pass(self, operation: str, key: str) -> None:
        if self.fate(operation, key) != "ok":
            raise StorageError(f"{operation} {key} failed")

    def get(self, key: str, limit: int = OBJECT_LIMIT) -> bytes:
        self._pass("get", key)
        return self.world.get(key, limit)

    def size(self, key: str) -> int:
        self._pass("size", key)
        return self.world.size(key)

    def create(self, key: str, data: bytes) -> None:
        fate = self.fate("create", key)
        if fate in ("late", "duplicate"):
            self.world.net.append((key, data))
        if fate in ("late", "error"):
            raise StorageError(f"create {key}: timed out")
        self.world.create(key, data)
        if fate == "lost answer":
            raise StorageError(f"create {key}: connection reset")

    def replace(self, key: str, data: bytes) -> None:
        self._pass("replace", key)
        self.world.replace(key, data)

    def delete(self, key: str) -> None:
        self._pass("delete", key)
        self.world.delete(key)

    def list(self, prefix: str) -> list[str]:
        """Not atomic: objects that appear or vanish between its two steps are seen or missed, according to the second
        fate."""
        self._pass("list", prefix)
        before = set(self.world.list(prefix))
        seen_late = self.fate("listed", prefix) != "ok"
        after = set(self.world.list(prefix))
        return sorted((before & after) | (after - before if seen_late else before - after))

    def settle(self, prefix: str) -> None:
        self._pass("settle", prefix)

    def open_sink(self, key: str, size_hint: int) -> SegmentSink:
        return self.world.open_sink(key, size_hint)

    def open_source(self, key: str) -> SegmentSource:
        return self.world.open_source(key)

    def probe(self) -> None:
        return None


def scripted(world: World, fates: Sequence[Fate], prefix: str = "log/") -> FaultyBackend:
    """Creates below `prefix` meet `fates` in turn, then succeed; everything else succeeds."""
    left = list(fates)

    def fate(operation: str, key: str) -> Fate:
        return left.pop(0) if operation == "create" and key.startswith(prefix) and left else "ok"

    return FaultyBackend(world, fate)


class Stopped(BaseException):
    """Ends an actor's thread: its process was killed."""


class Actor:
    """A thread that stops before every operation on the medium until the test lets it continue.

    Attributes:
        name: of the actor.
        backend: its backend for the world.
        at: the operation it waits before; None: it has ended.
        error: the error that ended it, if any.
    """

    def __init__(self, world: World, name: str, work: Callable[[Backend], None]) -> None:
        self.name = name
        self.backend = FaultyBackend(world, self._gate)
        self.at: tuple[str, str] | None = ("start", "")
        self.error: BaseException | None = None
        self._work = work
        self._fate: Fate = "ok"
        self._killed = False
        self._go = threading.Semaphore(0)
        self._waits = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._waits.acquire()

    def step(self, fate: Fate = "ok") -> None:
        """Let it do the operation it waits before; return when it waits before the next or has ended."""
        assert self.at is not None
        self._fate = fate
        self._go.release()
        self._waits.acquire()

    def finish(self) -> None:
        """Let it do all remaining operations, without faults."""
        for _ in range(10_000):
            if self.at is None:
                return
            self.step()
        raise AssertionError(f"{self.name} does not end")

    def kill(self) -> None:
        """End it before its next operation."""
        if self.at is not None:
            self._killed = True
            self.step()
        self._thread.join()

    def _gate(self, operation: str, key: str) -> Fate:
        self.at = (operation, key)
        self._waits.release()
        self._go.acquire()
        if self._killed:
            raise Stopped
        return self._fate

    def _run(self) -> None:
        try:
            self._gate("start", "")
            self._work(self.backend)
        except BaseException as error:  # noqa: BLE001  # kept in `error` for the caller
            self.error = error
        self.at = None
        self._waits.release()


def full(term: int, step: int, base: CheckpointId | None = None, **more: object) -> CommitRecord:
    """A commit of one checkpoint in one segment (whose object is never written)."""
    segment = SegmentEntry(secrets.token_hex(16), term, 100, 64, secrets.token_hex(16))
    checkpoint = CheckpointEntry(term, step, secrets.token_hex(16), 1.0, 1, 10)
    kind = "full" if base is None else "delta"
    encoding = Encoding(checkpoint.node, kind, base, (segment.id,), False, 100)
    return CommitRecord(term, secrets.token_hex(16), (segment,), (checkpoint,), (encoding,), **more)  # type: ignore[arg-type]


def save(term: Term, step: int, base: CheckpointId | None = None, **more: object) -> CheckpointId:
    """Commit a checkpoint and return its identity."""
    record = full(term.number, step, base, **more)
    term.commit(record)
    return record.checkpoints[0].id


def segments_of(catalog: Catalog, node: Node) -> tuple[str, ...]:
    return tuple(segment for edge in catalog.encodings[node] for segment in edge.segments)
