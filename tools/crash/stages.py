"""The working environment of the actors of `tools.crash.torture`: a store in a folder or bucket, a seed, a journal."""

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
    """A journal of events, one JSON object a line, appended by one process, read by others. It survives a SIGKILL."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def note(self, **event: Any) -> None:
        """Append an event. When this returns, every process can read it."""
        os.write(self._descriptor, json.dumps(event).encode() + b"\n")

    @staticmethod
    def read(folder: Path) -> list[dict[str, Any]]:
        """Every event of every journal; ordered only within each process."""
        events = []
        for path in sorted(folder.glob("*.jsonl")):
            # A SIGKILL may leave half a line, at the end.
            events += [json.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
        return events


@dataclass(slots=True)
class Stage(ABC):
    """The environment of an actor.

    Attributes:
        notes: the folder of the journals, on a disk that is never full.
        chance: decides everything the actor does.
        journal: the actor's own.
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
        """A backend for the store that meets this actor's faults."""

    @abstractmethod
    def plain(self) -> Backend:
        """A backend for the store without faults."""

    def conditions(self) -> contextlib.AbstractContextManager[None]:
        """A context for everything that this actor does."""
        return contextlib.nullcontext()

    def store(self) -> Store:
        """The store, opened again: after a failed fsync a backend acknowledges nothing any more."""
        return Store(self.backend())

    def note(self, **event: Any) -> None:
        """See `Acknowledged.note`."""
        self.journal.note(**event)

    def retiring(self) -> set[str]:
        """REFs that an actor has asked to retire, or is about to."""
        return {ref for event in Acknowledged.read(self.notes) for ref in event.get("retiring", ())}


@dataclass(slots=True)
class FolderStage(Stage):
    """A store in a folder.

    Attributes:
        root: that folder.
        faulty: faults of the actor's system calls.
    """

    root: Path = field(kw_only=True)
    faulty: Sequence[Fault] = field(default=(), kw_only=True)

    @property
    def meets_faults(self) -> bool:
        return bool(self.faulty)

    def backend(self) -> LocalBackend:
        return self.backend_in(self.root)

    def backend_in(self, folder: Path) -> LocalBackend:
        """A backend for the store in another folder, with this actor's faults."""
        return LocalBackend(folder, self.posix(), direct=self.chance.random() < 0.7)

    def plain(self) -> LocalBackend:
        return LocalBackend(self.root)

    def posix(self) -> Posix:
        """The system calls of a backend: with this actor's faults, counted from 0 again."""
        return FaultyPosix(SYSTEM, *self.faulty) if self.faulty else SYSTEM


@dataclass(slots=True)
class BucketStage(Stage):
    """A store in a bucket.

    Attributes:
        place: of the store; it is faulty if this actor uses the proxy.
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
