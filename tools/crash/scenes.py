"""Scenes of a torture: a folder, on its own small disk or not; or a bucket behind a fault proxy."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ckptstore.backends.base import Backend
from ckptstore.backends.local_disk.local import LocalBackend
from ckptstore.store import Store
from tools.crash.grounds import Bucket, BucketPlace, mishaps
from tools.crash.stages import Acknowledged, BucketStage, FolderStage, Stage
from tools.crash.torture_actors import sample_faults

__all__ = ["KILL_EVERY", "BucketScene", "FolderScene", "Scene"]

KILL_EVERY: Final = 0.5
"""Seconds between two kills, on average."""
FAULTY: Final = 0.3
"""Share of incarnations that meet faults of their medium."""


class Scene(ABC):
    """The location of the store, and what the parent does with it.

    Attributes:
        notes: the folder of the journals.
        names: the processes that run at once.
        disk_full: whether the store has its own small disk.
        kill_every: seconds between two kills, on average.
    """

    notes: Path
    names: Sequence[str]
    disk_full: bool = False
    kill_every: float = KILL_EVERY

    @abstractmethod
    def stage(self, chance: random.Random, journal: Acknowledged) -> Stage:
        """The stage of one incarnation of an actor."""

    @abstractmethod
    def judged(self, look: Callable[[Backend], Any]) -> Any:
        """The result of a check while no actor works: a JSON value."""

    def told(self) -> Counter[str]:
        """The faults that the medium injected into actors -> counts."""
        return Counter()


class FolderScene(Scene):
    """A store in a folder, on its own small disk or not."""

    def __init__(self, root: Path, notes: Path, names: Sequence[str], *, disk_full: bool) -> None:
        self.root = root
        self.notes = notes
        self.disk_full = disk_full
        self.names = names

    def stage(self, chance: random.Random, journal: Acknowledged) -> FolderStage:
        faulty = sample_faults(chance) if chance.random() < FAULTY else ()
        return FolderStage(self.notes, chance, journal, root=self.root, faulty=faulty)

    def judged(self, look: Callable[[Backend], Any]) -> Any:
        (self.root.parent / "hog").unlink(missing_ok=True)
        with Store(LocalBackend(self.root)) as store:  # its handle would keep the disk from being unmounted
            return look(store.backend)


class BucketScene(Scene):
    """A store in a bucket; some actors reach it through the proxy."""

    kill_every = 1.0

    def __init__(self, bucket: Bucket, notes: Path, names: Sequence[str]) -> None:
        self.place = BucketPlace(bucket.server.url(), bucket)
        self.notes = notes
        self.names = names
        bucket.proxy.rules(mishaps())

    def stage(self, chance: random.Random, journal: Acknowledged) -> BucketStage:
        place = replace(self.place, faulty=chance.random() < FAULTY, parts=chance.random() < 0.5)
        return BucketStage(self.notes, chance, journal, place=place)

    def judged(self, look: Callable[[Backend], Any]) -> Any:
        return self.place.judged(look)

    def told(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for (fault, _), count in self.place.bucket.proxy.injected().items():
            counts[f"fault {fault}"] += count
        return counts
