"""Places for the stores of the crash tools: folders, or prefixes of a bucket on a loopback server behind a fault proxy.

The tested processes reach a bucket through the proxy, if there is one; the checks bypass it. The process that forks
never uses a bucket itself: see `apart`.
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
"""``s3`` is ministack. ``s3-memory`` is the server of the benchmarks: it is fast, and loses everything when it ends."""
TIMEOUT: Final = 2.0
"""Timeout of a request through the proxy, in seconds."""


class Place(ABC):
    """The location of one store.

    Attributes:
        faulty: whether the tested process may meet errors of the medium.
    """

    faulty: bool = False

    @abstractmethod
    def backend(self) -> Backend:
        """A healthy backend for the store."""

    def tormented(self) -> Backend:
        """The backend of the process that will be killed."""
        return self.backend()

    @abstractmethod
    def judged(self, look: Callable[[Backend], Any], *, settled: bool = True) -> Any:
        """The result of a check of the store: a number, a text or a list of them.

        Args:
            settled: wait for requests that are still in flight to the store.
        """

    def small_uploads(self) -> contextlib.AbstractContextManager[None]:
        """A context in which small segments are written as large ones are."""
        return contextlib.nullcontext()

    @abstractmethod
    def remove(self) -> None:
        """Delete the store."""


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
    """A server, and the proxy in front of it."""

    server: Server
    proxy: DistantProxy

    def through_proxy(self) -> Mapping[str, Any]:
        """Backend options for the processes that meet the faults."""
        return options_for(self.proxy.port, read_timeout=TIMEOUT)


@dataclass(frozen=True)
class BucketPlace(Place):
    """A prefix of a bucket.

    Attributes:
        faulty: whether the tested process uses the proxy.
        parts: whether small segments are uploaded in parts.
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
        """Do nothing: the server ends with the campaign, and its data with it."""


class Ground(ABC):
    """Makes places for stores."""

    @abstractmethod
    def place(self, number: int, *, recycles: bool) -> Place:
        """The place with this number: the same store each time, until it is removed.

        Args:
            recycles: on media that have the choice: whether deleted files are used again.
        """


@dataclass
class Folders(Ground):
    """Folders below one folder."""

    root: Path
    medium: str

    def place(self, number: int, *, recycles: bool) -> FolderPlace:
        medium = "recycled" if recycles and self.medium == "folder" else self.medium
        return FolderPlace(self.root / f"store-{number}", medium)


@dataclass
class Prefixes(Ground):
    """Prefixes of a bucket: every other store is tested through the proxy, every other two upload in parts."""

    bucket: Bucket
    _numbers: dict[int, BucketPlace] = field(default_factory=dict)

    def place(self, number: int, *, recycles: bool) -> BucketPlace:  # noqa: ARG002 - a bucket has no files
        if number not in self._numbers:
            url = self.bucket.server.url()
            self._numbers[number] = BucketPlace(url, self.bucket, bool(number % 2), bool(number // 2 % 2))
        return self._numbers[number]


@contextlib.contextmanager
def served(medium: str) -> Iterator[Server]:
    """A loopback server with a bucket. `medium`: one of `BUCKETS`."""
    with tempfile.TemporaryDirectory(prefix="ckptstore-bucket-") as folder:
        (Path(folder) / "server").mkdir()
        with serving(Path(folder) / "server") if medium == "s3" else serving_fast() as server:
            if not server.port:
                raise ValueError("CKPTSTORE_TEST_S3_URL is set, and the faults want a server of their own")
            yield server


@contextlib.contextmanager
def bucket(medium: str, seed: int = 0) -> Iterator[Bucket]:
    """A server, and in front of it a proxy without rules yet. `medium`: one of `BUCKETS`."""
    with served(medium) as server, proxying(server.port, seed) as proxy:
        yield Bucket(server, proxy)


@contextlib.contextmanager
def ground(medium: str, folder: Path | None = None, seed: int = 0) -> Iterator[Ground]:
    """The ground of a medium.

    Args:
        medium: one of `media.MEDIA` or `BUCKETS`.
        folder: where folders are made; None: in the temporary folder.
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
    """Faults for a share of the requests of many processes at once.

    They are faults of a network or a server that a store must tolerate while others work: none flips bits or lists old
    objects (`tools.objects.faults` does, for one process). A ``late`` request arrives when its sender may be dead and
    the next writer is at work.
    """
    kinds = ("lost_ack", "duplicate", "reset", "409", "412", "500", "500_after", "503", "truncate", "short")
    late = [Rule("late", seconds=seconds, odds=odds / 8) for seconds in (0.2, 1.0, 4.0)]
    waits = [Rule("stall", odds=odds / 50, seconds=2 * TIMEOUT), Rule("slow", odds=odds / 20, seconds=0.5)]
    return [*late, *waits, *(Rule(kind, odds=odds / len(kinds)) for kind in kinds)]
