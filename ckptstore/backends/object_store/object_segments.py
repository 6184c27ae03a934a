"""Segments of an object store: collected in memory and written as one object, read by ranges in parallel.

A segment's header is final only when everything else is, and obstore cannot send the first part of an upload last. So
the PUT of a segment starts when its header is final. Until then nothing is in the bucket, and aborting a segment sends
no request.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

from ckptstore.backends.base import SegmentSource
from ckptstore.backends.gathered import Blocks, GatheredSink
from ckptstore.backends.object_store import segment_ranges
from ckptstore.backends.object_store.object_requests import Requests
from ckptstore.backends.object_store.segment_ranges import RANGE
from ckptstore.errors import CkptError, CorruptSegmentError, KeyExistsError, KeyNotFoundError, StorageError
from ckptstore.host.threads import run_all

__all__ = ["SEGMENT_BYTES", "ObjectSink", "ObjectSource"]

SEGMENT_BYTES: Final = 240 << 20
"""Maximum bytes of tensors in a segment, which is held in memory until it is sent; at most 256 MiB with its header. (A
larger tensor has its own segment.)"""
SINGLE: Final = 32 << 20
"""Maximum bytes of a segment that is sent as one PUT, which is atomic. Larger ones use a multipart upload."""


class ObjectSink(GatheredSink):
    """A segment that is being written to a bucket.

    Args:
        requests: requests to the bucket.
        key: its name, which contains a UUID.
        pool: threads that read the segment back after a lost answer.
        memory: the backend's pool of blocks.
    """

    def __init__(self, requests: Requests, key: str, pool: Callable[[], ThreadPoolExecutor], memory: Blocks) -> None:
        super().__init__(requests.name(key), memory)
        self._requests = requests
        self._key = key
        self._pool = pool

    def put(self, parts: Sequence[memoryview], size: int) -> None:
        """See `GatheredSink.put`. After an unclear answer, checks length and bytes in the bucket."""
        with self._requests.patient() as in_time:
            self._put(parts, size, in_time)

    def _put(self, parts: Sequence[memoryview], size: int, in_time: Callable[[], bool]) -> None:
        doubt: CkptError | None = None
        for done in range(self._requests.tries):
            if done and not in_time():
                break
            if done:
                self._requests.pause(done - 1)
                self._requests.costs.count("create" if size <= SINGLE else "part", 0, repeated=True)
            try:
                self._send(parts, size)
                return
            except (StorageError, KeyNotFoundError) as error:  # a completed upload may be reported as missing
                if isinstance(error, StorageError) and error.unsent and doubt is None:
                    raise
                self.perhaps = self.perhaps or not isinstance(error, KeyExistsError)
                doubt = error
            try:
                if self._is_there(parts, size):
                    return
            except KeyNotFoundError:
                continue  # absent: send again
            except StorageError:
                continue  # the check got no answer either
            if not self.perhaps:
                raise KeyExistsError(errno.EEXIST, "the segment exists already", self.name)
            raise StorageError(errno.EIO, "the object there differs from the segment that was sent", self.name)
        assert doubt is not None
        if type(doubt) is StorageError:
            raise doubt
        raise StorageError(errno.EIO, f"cannot write: {doubt}", self.name)

    def _send(self, parts: Sequence[memoryview], size: int) -> None:
        if size <= SINGLE:
            self._requests.create(self._key, parts)
        else:
            self._requests.upload(self._key, parts, size)

    def _is_there(self, parts: Sequence[memoryview], size: int) -> bool:
        """Whether the bucket holds exactly these bytes. Raises `KeyNotFoundError`, `StorageError`."""
        if self._requests.size(self._key) != size:
            return False
        try:
            self._compare(parts)
        except CorruptSegmentError:
            return False
        return True

    def _compare(self, parts: Sequence[memoryview]) -> None:
        def job(start: int, part: memoryview) -> None:
            found = memoryview(bytearray(len(part)))
            self._requests.get_range(self._key, start, found)
            if found != part:
                raise CorruptSegmentError(f"{self.name}: other bytes")

        work: list[Callable[[], None]] = []
        at = 0
        for part in parts:
            view = memoryview(part)
            work += [partial(job, at + cut, view[cut : cut + RANGE]) for cut in range(0, len(view), RANGE)]
            at += len(part)
        if work:
            run_all(self._pool(), work)

    def remove(self) -> None:
        """See `GatheredSink.remove`."""
        self._requests.delete(self._key)


class ObjectSource(SegmentSource):
    """A segment in a bucket. Holds its first bytes and, once they are read, all bytes of a small one.

    Raises `KeyNotFoundError`, `StorageError`.

    Args:
        requests: requests to the bucket.
        key: its name.
        pool: threads that read ranges.
    """

    def __init__(self, requests: Requests, key: str, pool: Callable[[], ThreadPoolExecutor]) -> None:
        self._requests = requests
        self._key = key
        self._pool = pool
        self._closed = False
        self._lock = threading.Lock()
        self._start, self.size = requests.get_start(key, segment_ranges.FIRST)

    def read_into(self, offset: int, out: memoryview) -> None:
        """See `SegmentSource.read_into`. Reads large segments in ranges of 8 MiB, several in parallel."""
        view = out.cast("B")
        self._check_open()
        end = offset + len(view)
        if offset < 0 or end > self.size:
            raise CorruptSegmentError(
                f"{self._requests.name(self._key)} ends at byte {self.size}; bytes {offset} to {end} were asked for"
            )
        start = self._start
        if end > len(start) and segment_ranges.is_small(self.size):
            start = self._read_rest()
        at_hand = max(0, min(end, len(start)) - offset)
        view[:at_hand] = memoryview(start)[offset : offset + at_hand]
        if at_hand == len(view):
            return
        ranges = [
            partial(self._read, at, view[at - offset : at - offset + length])
            for at, length in segment_ranges.cuts(offset, len(view))
        ]
        if len(ranges) == 1:
            ranges[0]()
        else:
            run_all(self._pool(), ranges)

    def _read_rest(self) -> bytes:
        """Read what is not at hand -> the whole segment."""
        with self._lock:  # of several threads one reads, and the others find all bytes
            had = len(self._start)
            if had < self.size:
                rest = memoryview(bytearray(self.size - had))
                self._read(had, rest)
                self._start = b"".join((self._start, rest))
            return self._start

    def _read(self, offset: int, out: memoryview) -> None:
        try:
            self._requests.get_range(self._key, offset, out)
        except KeyNotFoundError as error:
            raise CorruptSegmentError(f"{error}: it was deleted while it was read") from None

    def map(self) -> memoryview | None:
        """See `SegmentSource.map`: a bucket cannot be mapped."""
        self._check_open()
        return None

    def _check_open(self) -> None:
        if self._closed:
            raise StorageError(errno.EBADF, "the segment is closed", self._requests.name(self._key))

    def close(self) -> None:
        """See `SegmentSource.close`."""
        self._closed = True
