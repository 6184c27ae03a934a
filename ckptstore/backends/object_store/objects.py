"""A store in a bucket of an object store: S3 and compatible servers, Google Cloud Storage, Azure.

Create-if-absent (SPEC 10) is one PUT with ``If-None-Match: *``, never a multipart upload. Only a clear answer is
trusted: 200 means that the object is ours. After any other answer (412, 409, none, 500) the object is read back and its
bytes are compared. If it is absent, the same bytes are sent again, a bounded number of times.

Visible objects are durable here, so `settle` does nothing. No decision of the engine depends on listing ``log/``.
"""

from __future__ import annotations

import contextlib
import errno
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

from ckptstore.backends.base import (
    OBJECT_LIMIT,
    Backend,
    SegmentSink,
    SegmentSource,
    checked_folder,
    checked_key,
)
from ckptstore.backends.costs import Costs
from ckptstore.backends.gathered import Blocks
from ckptstore.backends.object_store.object_options import Concealed, place_of
from ckptstore.backends.object_store.object_requests import Requests
from ckptstore.backends.object_store.object_segments import SEGMENT_BYTES, ObjectSink, ObjectSource
from ckptstore.backends.store_names import canonical
from ckptstore.errors import (
    CkptError,
    ForeignObjectError,
    KeyExistsError,
    KeyNotFoundError,
    StorageError,
    UnsupportedBackendError,
)
from ckptstore.host.threads import started_pool

__all__ = ["NOT_EXCLUSIVE", "ObjectBackend"]

_THREADS: Final = 8
"""Ranges that are read in parallel."""
_VENDORS: Final = {"s3": "S3", "gs": "Google Cloud Storage", "az": "Azure"}
NOT_EXCLUSIVE: Final = (
    "creating an object twice succeeded: this store ignores If-None-Match, so that two writers could not exclude each "
    "other and commits would be lost; use one with conditional writes (AWS S3, Google Cloud Storage, Azure, R2, MinIO, "
    "Ceph 16 or newer), or keep the run in a folder"
)


class ObjectBackend(Backend):
    """The store below a bucket's prefix. Thread-safe. No store in a bucket works in a child forked after its first use.

    Args:
        url: ``s3://bucket/prefix``, ``gs://…``, ``az://…``.
        options: options in fsspec's form (`object_options`). They may hold credentials and are never shown.

    Attributes:
        costs: requests and bytes so far.

    Raises:
        UsageError: the URL or an option is invalid, or this process was forked from one that had used a bucket.
        MissingDependencyError: a profile must be read, and boto3 is not installed.
    """

    segment_bytes = SEGMENT_BYTES
    sends_late = True

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        self.url = url
        self._place = place_of(url, options)
        self._options = Concealed(options or {})
        self._requests = Requests(self._place)
        self._threads: ThreadPoolExecutor | None = None
        self._starting = threading.Lock()
        self._memory = Blocks(SEGMENT_BYTES)

    @property
    def costs(self) -> Costs:
        """See `Backend.costs`."""
        return self._requests.costs

    @property
    def storage_options(self) -> Mapping[str, Any]:
        """See `Backend.storage_options`."""
        return dict(self._options)

    def _pool(self) -> ThreadPoolExecutor:
        self._requests.check_process()  # a fork has the pool object but none of its threads
        with self._starting:
            if self._threads is None:
                self._threads = started_pool(_THREADS, "ckptstore-ranges")
            return self._threads

    def get(self, key: str, limit: int = OBJECT_LIMIT) -> bytes:
        """See `Backend.get`."""
        return self._requests.get(checked_key(key), limit)

    def size(self, key: str) -> int:
        """See `Backend.size`."""
        return self._requests.size(checked_key(key))

    def create(self, key: str, data: bytes) -> None:
        """See `Backend.create`."""
        with self._requests.patient() as in_time:
            self._created(key, data, in_time)

    def _created(self, key: str, data: bytes, in_time: Callable[[], bool]) -> None:
        doubt: StorageError | None = None
        for done in range(self._requests.tries):
            if done and not in_time():
                break
            if done:
                self._requests.pause(done - 1)
                self.costs.count("create", 0, repeated=True)
            try:
                self._requests.create(checked_key(key), bytes(data))
                return
            except StorageError as error:
                if error.unsent and doubt is None:
                    raise
                # Refused at the first try: the object is someone else's. (Or it comes from a duplicate of this request:
                # callers that care compare the bytes, as `log.term` does.)
                theirs = not done and isinstance(error, KeyExistsError)
                doubt = error if doubt is None or not error.unsent else doubt
            found: bytes | None = None
            try:
                found = self._requests.get(key, len(data))
            except KeyNotFoundError:
                continue  # 409 although the key is absent, or nothing has arrived yet: send the same bytes again
            except ForeignObjectError:
                pass  # longer than what was sent
            except StorageError:
                continue
            if theirs or found != data:
                raise KeyExistsError(errno.EEXIST, "the object exists already", self._requests.name(key))
            return
        assert doubt is not None
        if isinstance(doubt, KeyExistsError):
            why = "the server reports the object as existing and as absent in turn"
            raise StorageError(errno.EIO, why, self._requests.name(key))
        raise doubt

    def replace(self, key: str, data: bytes) -> None:
        """See `Backend.replace`."""
        self._requests.replace(checked_key(key), bytes(data))

    def delete(self, key: str) -> None:
        """See `Backend.delete`."""
        self._requests.delete(checked_key(key))

    def list(self, prefix: str) -> list[str]:
        """See `Backend.list`. Omits folder markers (an object ``log/``, which consoles create)."""
        folder = checked_folder(prefix)
        return sorted(_without_markers(key for key in self._requests.keys(folder) if key.startswith(folder)))

    def sizes(self, prefix: str) -> dict[str, int]:
        """See `Backend.sizes`. Sends one request for 1,000 objects. What is being sent is not seen."""
        folder = checked_folder(prefix)
        found = {key: size for key, size in self._requests.sizes(folder).items() if key.startswith(folder)}
        return {key: found[key] for key in sorted(_without_markers(found))}

    def folders(self, prefix: str) -> Sequence[str]:
        """See `Backend.folders`."""
        return sorted(set(self._requests.folders(checked_folder(prefix))))

    def settle(self, prefix: str) -> None:
        """See `Backend.settle`: visible objects in a bucket are durable."""
        checked_folder(prefix)

    def open_sink(self, key: str, size_hint: int) -> SegmentSink:  # noqa: ARG002 - memory needs no reservation
        """See `Backend.open_sink`. `SegmentSink.seal` detects that the key is taken in the bucket."""
        return ObjectSink(self._requests, checked_key(key), self._pool, self._memory)

    def open_source(self, key: str) -> SegmentSource:
        """See `Backend.open_source`."""
        return ObjectSource(self._requests, checked_key(key), self._pool)

    def probe(self) -> None:
        """See `Backend.probe`. Sends three requests."""
        key = f"probe/{uuid.uuid4().hex}"
        try:
            self.create(key, b"first")
        except KeyExistsError:  # the key is unique: a duplicate of this request was faster, if the bytes are the same
            if self.get(key) != b"first":
                raise
        try:
            self.create(key, b"second")
        except KeyExistsError:
            pass
        else:
            raise UnsupportedBackendError(errno.EOPNOTSUPP, NOT_EXCLUSIVE, self.url)
        finally:
            self._forget(key)

    def _forget(self, key: str) -> None:
        with contextlib.suppress(CkptError):  # the writer may lack the right to delete: the probe's object is harmless
            self.delete(key)

    @property
    def address(self) -> str:
        """See `Backend.address`."""
        return canonical(self.url)

    def medium(self) -> str:
        """See `Backend.medium`."""
        at = self._place.endpoint
        return f"object store ({_VENDORS[self._place.scheme]}{f', {at}' if at else ''})"

    def above(self) -> Sequence[tuple[str, Callable[[], Backend]]]:
        """See `Backend.above`."""
        names = self._place.prefix.split("/") if self._place.prefix else []
        bucket = f"{self._place.scheme}://{self._place.bucket}"
        return [
            (names[n], partial(self._beside, "/".join([bucket, *names[:n]]))) for n in range(len(names) - 1, -1, -1)
        ]

    def _beside(self, url: str) -> ObjectBackend:
        other = ObjectBackend(url, self._options)
        other._requests.costs = self.costs
        return other

    def reopened(self) -> ObjectBackend:
        """See `Backend.reopened`."""
        return ObjectBackend(self.url, self._options)

    def close(self) -> None:
        """See `Backend.close`. Connections close when no object refers to them."""
        with self._starting:
            if self._threads is not None:
                self._threads.shutdown(wait=False)
                self._threads = None


def _without_markers(keys: Iterable[str]) -> set[str]:
    """Omit folder markers. Prevents: a new folder of a bucket that is reported as not empty."""
    found, markers = set(keys), {""}  # a marker is listed without its slash
    for key in found:
        while (key := key.rpartition("/")[0]) not in markers:  # its folders, from the inside
            markers.add(key)
    return found - markers
