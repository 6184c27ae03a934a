"""What the actors of `tools.crash.torture` work with: a store in a folder or in a bucket, chance, and a journal."""

from __future__ import annotations

import contextlib
import json
import os
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptstore.backends.base import Backend
from ckptstore.backends.local_disk.local import LocalBackend
from ckptstore.backends.local_disk.posix import SYSTEM, Posix
from ckptstore.backends.object_store.objects import ObjectBackend
from ckptstore.log.pins import PinWatch
from ckptstore.store import Store
from tools.crash.faults import Fault, FaultyPosix
from tools.crash.grounds import BucketPlace

__all__ = ["Acknowledged", "BucketStage", "FolderStage", "Stage"]


class Acknowledged:
    """What happened, one JSON object a line, appended by one process and read by others. It outlives a SIGKILL."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def note(self, **event: Any) -> None:
        """Append an event. When this returns, every process can read it."""
        os.write(self._descriptor, json.dumps(event).encode() + b"\n")

    @staticmethod
    def read(folder: Path) -> list[dict[str, Any]]:
        """Every event of every journal; the order is that of each process only."""
        events = []
        for path in sorted(folder.glob("*.jsonl")):
            # A SIGKILL may leave half a line, at the end.
            events += [json.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
        return events


@dataclass(slots=True)
class Stage(ABC):
    """What an actor works with.

    Attributes:
        notes: the folder of the journals, on a disk that is never full.
        chance: decides everything the actor does.
        journal: its own.
        watch: a collector's observation of the pins.
    """

    notes: Path
    chance: random.Random
    journal: Acknowledged
    watch: PinWatch | None = None

    @property
    @abstractmethod
    def meets_faults(self) -> bool:
        """Whether its medium fails now and then."""

    @abstractmethod
    def backend(self) -> Backend:
        """A way to the store, through this actor's faults."""

    @abstractmethod
    def plain(self) -> Backend:
        """A way past them."""

    def conditions(self) -> contextlib.AbstractContextManager[None]:
        """What holds for everything that this actor does."""
        return contextlib.nullcontext()

    def store(self) -> Store:
        """The store, opened anew: after a failed fsync a backend acknowledges nothing any more."""
        return Store(self.backend())

    def note(self, **event: Any) -> None:
        """See `Acknowledged.note`."""
        self.journal.note(**event)

    def retiring(self) -> set[str]:
        """REFs that somebody has asked to retire, or is about to."""
        return {ref for event in Acknowledged.read(self.notes) for ref in event.get("retiring", ())}


@dataclass(slots=True)
class FolderStage(Stage):
    """A store in a folder.

    Attributes:
        root: that folder.
        faulty: faults that the actor's system calls meet.
    """

    root: Path = field(kw_only=True)
    faulty: Sequence[Fault] = field(default=(), kw_only=True)

    @property
    def meets_faults(self) -> bool:
        return bool(self.faulty)

    def backend(self) -> LocalBackend:
        return self.backend_in(self.root)

    def backend_in(self, folder: Path) -> LocalBackend:
        """A way to the store in another folder, through this actor's faults."""
        return LocalBackend(folder, self.posix(), direct=self.chance.random() < 0.7)

    def plain(self) -> LocalBackend:
        return LocalBackend(self.root)

    def posix(self) -> Posix:
        """The calls of a way to a store: through this actor's faults, counted anew."""
        return FaultyPosix(SYSTEM, *self.faulty) if self.faulty else SYSTEM


@dataclass(slots=True)
class BucketStage(Stage):
    """A store in a bucket.

    Attributes:
        place: of the store; it is faulty where this actor comes through the proxy.
    """

    place: BucketPlace = field(kw_only=True)

    @property
    def meets_faults(self) -> bool:
        return self.place.faulty

    def backend(self) -> ObjectBackend:
        return self.place.tormented()

    def plain(self) -> ObjectBackend:
        return self.place.backend()

    def conditions(self) -> contextlib.AbstractContextManager[None]:
        return self.place.small_uploads()
