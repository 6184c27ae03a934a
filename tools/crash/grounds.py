"""Where the crash tools make their stores: in folders, or in a bucket of a server on loopback, behind a fault proxy.

Whoever is tormented comes to a bucket through the proxy, if there is one; whoever judges goes past it. In a bucket
nothing is done by the process that forks: see `apart`.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ckptstore.backends.base import Backend
from ckptstore.backends.local_disk.local import LocalBackend
from ckptstore.backends.object_store.objects import ObjectBackend
from tools.crash.apart import apart
from tools.crash.media import backend_on
from tools.crash.old_headers import files_below, mixed
from tools.crash.scenario import Violation
from tools.objects.fast_server import serving_fast
from tools.objects.faults import small_uploads
from tools.objects.proxies import DistantProxy, proxying
from tools.objects.proxy import Rule
from tools.objects.server import Server, options_for, serving

__all__ = ["BUCKETS", "TIMEOUT", "Bucket", "BucketPlace", "Ground", "Place", "bucket", "ground", "mishaps", "served"]

BUCKETS: Final = ("s3", "s3-memory")
"""``s3`` is ministack; ``s3-memory`` the server of the benchmarks: it loses everything when it ends, and is fast."""
TIMEOUT: Final = 2.0
"""Seconds for an answer through the proxy."""


class Place(ABC):
    """Where one store lies.

    Attributes:
        faulty: whether who is tormented may meet errors of the medium.
    """

    faulty: bool = False

    @abstractmethod
    def backend(self) -> Backend:
        """A way to the store."""

    def tormented(self) -> Backend:
        """The way of who is to be killed."""
        return self.backend()

    @abstractmethod
    def judged(self, look: Callable[[Backend], Any], *, settled: bool = True) -> Any:
        """What a look at the store gives: a number, a text or a list of them.

        Args:
            settled: wait for what is still on its way to the store.
        """

    def small_uploads(self) -> contextlib.AbstractContextManager[None]:
        """While it lasts, small segments go to the medium as large ones do."""
        return contextlib.nullcontext()

    @abstractmethod
    def remove(self) -> None:
        """It is not needed any more."""


@dataclass(frozen=True)
class FolderPlace(Place):
    """A folder. `medium`: one of `media.MEDIA`."""

    root: Path
    medium: str

    def backend(self) -> LocalBackend:
        return backend_on(self.medium, self.root)

    def judged(self, look: Callable[[Backend], Any], *, settled: bool = True) -> Any:  # noqa: ARG002 - it is at once
        found = look(self.backend())
        if wrong := mixed(files_below(self.root)):
            raise Violation(f"old headers over new data: {wrong}")
        return found

    def remove(self) -> None:
        shutil.rmtree(self.root)


@dataclass(frozen=True)
class Bucket:
    """A server, and what stands before it."""

    server: Server
    proxy: DistantProxy

    def through_proxy(self) -> Mapping[str, Any]:
        """Options for who meets the faults."""
        return options_for(self.proxy.port, read_timeout=TIMEOUT)


@dataclass(frozen=True)
class BucketPlace(Place):
    """A prefix of a bucket.

    Attributes:
        faulty: whether who is tormented comes through the proxy.
        parts: whether small segments go up in parts.
    """

    url: str
    bucket: Bucket
    faulty: bool = False
    parts: bool = False

    def backend(self) -> ObjectBackend:
        return ObjectBackend(self.url, self.bucket.server.options)

    def tormented(self) -> ObjectBackend:
        return ObjectBackend(self.url, self.bucket.through_proxy()) if self.faulty else self.backend()

    def judged(self, look: Callable[[Backend], Any], *, settled: bool = True) -> Any:
        if settled:
            self.bucket.proxy.settle()
        return apart(lambda: look(self.backend()))

    def small_uploads(self) -> contextlib.AbstractContextManager[None]:
        return small_uploads() if self.parts else contextlib.nullcontext()

    def remove(self) -> None:
        """The server ends with the campaign, and what it has with it."""


class Ground(ABC):
    """Where places are to be had."""

    @abstractmethod
    def place(self, number: int, *, recycles: bool) -> Place:
        """The place of this number: always the same store, as long as it is not removed.

        Args:
            recycles: where a medium has such a choice: its files are used again.
        """


@dataclass
class Folders(Ground):
    """Below a folder."""

    root: Path
    medium: str

    def place(self, number: int, *, recycles: bool) -> FolderPlace:
        medium = "recycled" if recycles and self.medium == "folder" else self.medium
        return FolderPlace(self.root / f"store-{number}", medium)


@dataclass
class Prefixes(Ground):
    """In a bucket: every other store is tormented through the proxy, every other two go up in parts."""

    bucket: Bucket
    _numbers: dict[int, BucketPlace] = field(default_factory=dict)

    def place(self, number: int, *, recycles: bool) -> BucketPlace:  # noqa: ARG002 - a bucket has no files
        if number not in self._numbers:
            url = self.bucket.server.url()
            self._numbers[number] = BucketPlace(url, self.bucket, bool(number % 2), bool(number // 2 % 2))
        return self._numbers[number]


@contextlib.contextmanager
def served(medium: str) -> Iterator[Server]:
    """A server with a bucket on loopback. `medium`: one of `BUCKETS`."""
    with tempfile.TemporaryDirectory(prefix="ckptstore-bucket-") as folder:
        (Path(folder) / "server").mkdir()
        with serving(Path(folder) / "server") if medium == "s3" else serving_fast() as server:
            if not server.port:
                raise ValueError("CKPTSTORE_TEST_S3_URL is set, and the faults want a server of their own")
            yield server


@contextlib.contextmanager
def bucket(medium: str, seed: int = 0) -> Iterator[Bucket]:
    """A server, and before it a proxy that does nothing yet. `medium`: one of `BUCKETS`."""
    with served(medium) as server, proxying(server.port, seed) as proxy:
        yield Bucket(server, proxy)


@contextlib.contextmanager
def ground(medium: str, folder: Path | None = None, seed: int = 0) -> Iterator[Ground]:
    """A ground of a medium.

    Args:
        medium: one of `media.MEDIA` or `BUCKETS`.
        folder: where folders are made; None: among the temporary ones.
    """
    if medium in BUCKETS:
        with bucket(medium, seed) as found:
            found.proxy.rules(mishaps())
            yield Prefixes(found)
        return
    work = Path(tempfile.mkdtemp(prefix="ckptstore-kills-", dir=folder))
    try:
        yield Folders(work, medium)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def mishaps(odds: float = 0.05) -> Sequence[Rule]:
    """What happens to a share of the requests of many processes at once.

    What a network or a server does, and a store must bear beside others: nothing here flips bits, or lists what
    is old (`tools.objects.faults` does, to one process). What comes ``late`` comes when its sender may be dead, and
    the next writer at work.
    """
    kinds = ("lost_ack", "duplicate", "reset", "409", "412", "500", "500_after", "503", "truncate", "short")
    late = [Rule("late", seconds=seconds, odds=odds / 8) for seconds in (0.2, 1.0, 4.0)]
    waits = [Rule("stall", odds=odds / 50, seconds=2 * TIMEOUT), Rule("slow", odds=odds / 20, seconds=0.5)]
    return [*late, *waits, *(Rule(kind, odds=odds / len(kinds)) for kind in kinds)]
