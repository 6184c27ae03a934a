"""Segments of an object store: collected in memory and put as one object, read by ranges in parallel.

The header of a segment is final when everything else is, and the first part of an upload cannot be sent last through
obstore; so the PUT of a segment begins when its header is final. Until then nothing is in the bucket, and giving a
segment up costs no request.
"""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

from ckptstore.backends.base import SegmentSink, SegmentSource
from ckptstore.backends.gathered import in_order
from ckptstore.backends.object_requests import Requests
from ckptstore.errors import CkptError, CorruptSegmentError, KeyExistsError, KeyNotFoundError, StorageError
from ckptstore.host.threads import run_all

__all__ = ["RANGE", "SEGMENT_BYTES", "ObjectSink", "ObjectSource"]

SEGMENT_BYTES: Final = 240 << 20
"""Bytes of tensors in a segment, which is in memory as a whole before it is sent; with its header 256 MiB at most. (A
tensor that is larger has a segment of its own, also here.)"""
SINGLE: Final = 32 << 20
"""Up to so many bytes a segment is one PUT, which creates it or does nothing; beyond, a multipart upload."""
RANGE: Final = 8 << 20
"""Bytes of a range that is read at once."""

_being_written: set[str] = set()
"""Segments that this process is writing: a name is taken once, here at least. In the bucket nobody gives one twice."""
_taking = threading.Lock()


class ObjectSink(SegmentSink):
    """A segment on its way. Its memory is that of its blocks, until it is sealed.

    Args:
        requests: of its bucket.
        key: its name, which holds a UUID.
        pool: threads that read back, where an answer was lost.

    Raises `KeyExistsError` if this process is writing it already; if it is in the bucket, `seal` says so.
    """

    def __init__(self, requests: Requests, key: str, pool: Callable[[], ThreadPoolExecutor]) -> None:
        self._requests = requests
        self._key = key
        self._pool = pool
        self._taken = requests.name(key)
        self._blocks: dict[int, bytes] | None = {}
        self._perhaps = False  # whether something of ours may be in the bucket, although it is not sealed
        with _taking:
            if self._taken in _being_written:
                raise KeyExistsError(errno.EEXIST, "the segment exists already", self._taken)
            _being_written.add(self._taken)

    def write(self, offset: int, data: memoryview) -> None:
        """See `SegmentSink.write`."""
        blocks = self._open_blocks()
        blocks[offset] = bytes(data)

    def _open_blocks(self) -> dict[int, bytes]:
        if self._blocks is None:
            raise StorageError(errno.EBADF, "the segment is sealed or given up", self._taken)
        return self._blocks

    def seal(self, size: int) -> None:
        """See `SegmentSink.seal`. Whatever is not clear afterwards is looked up: length and bytes."""
        blocks, self._blocks = self._open_blocks(), None
        parts = list(in_order(blocks, size))
        del blocks
        try:
            self._put(parts, size)
        finally:
            self._free()
        self._perhaps = False

    def _put(self, parts: Sequence[bytes], size: int) -> None:
        """Send it until it is certainly there. Raises `KeyExistsError`: it is somebody else's; `StorageError`."""
        doubt: CkptError | None = None
        for done in range(self._requests.tries):
            if done:
                self._requests.pause(done - 1)
                self._requests.costs.count("create" if size <= SINGLE else "part", 0, repeated=True)
            try:
                self._send(parts, size)
                return
            except (StorageError, KeyNotFoundError) as error:  # an upload that is done may be said not to exist
                if isinstance(error, StorageError) and error.unsent and doubt is None:
                    raise
                self._perhaps = self._perhaps or not isinstance(error, KeyExistsError)
                doubt = error
            try:
                if self._is_there(parts, size):
                    return
            except KeyNotFoundError:
                continue  # absent: again
            except StorageError:
                continue  # no answer to that either
            if not self._perhaps:
                raise KeyExistsError(errno.EEXIST, "the segment exists already", self._taken)
            raise StorageError(errno.EIO, "what is there is not what was sent", self._taken)
        assert doubt is not None
        if type(doubt) is StorageError:
            raise doubt
        raise StorageError(errno.EIO, f"cannot write: {doubt}", self._taken)

    def _send(self, parts: Sequence[bytes], size: int) -> None:
        if size <= SINGLE:
            self._requests.create(self._key, parts)
        else:
            self._requests.upload(self._key, parts, size)

    def _is_there(self, parts: Sequence[bytes], size: int) -> bool:
        """Whether the bucket has exactly these bytes, and not others. Raises `KeyNotFoundError`, `StorageError`."""
        if self._requests.size(self._key) != size:
            return False
        try:
            self._compare(parts)
        except CorruptSegmentError:
            return False
        return True

    def _compare(self, parts: Sequence[bytes]) -> None:
        def job(start: int, part: memoryview) -> None:
            found = memoryview(bytearray(len(part)))
            self._requests.get_range(self._key, start, found)
            if found != part:
                raise CorruptSegmentError(f"{self._taken}: other bytes")

        work: list[Callable[[], None]] = []
        at = 0
        for part in parts:
            view = memoryview(part)
            work += [partial(job, at + cut, view[cut : cut + RANGE]) for cut in range(0, len(view), RANGE)]
            at += len(part)
        if work:
            run_all(self._pool(), work)

    def abort(self) -> None:
        """See `SegmentSink.abort`."""
        self._blocks = None
        self._free()
        if self._perhaps:
            self._perhaps = False
            with contextlib.suppress(CkptError):  # no record names it: gc removes it
                self._requests.delete(self._key)

    def _free(self) -> None:
        with _taking:
            _being_written.discard(self._taken)


class ObjectSource(SegmentSource):
    """A segment in a bucket. Raises `KeyNotFoundError`, `StorageError`.

    Args:
        requests: of its bucket.
        key: its name.
        pool: threads that read ranges.
    """

    def __init__(self, requests: Requests, key: str, pool: Callable[[], ThreadPoolExecutor]) -> None:
        self._requests = requests
        self._key = key
        self._pool = pool
        self._closed = False
        self.size = requests.size(key)

    def read_into(self, offset: int, out: memoryview) -> None:
        """See `SegmentSource.read_into`. Ranges of 8 MiB, several at once."""
        view = out.cast("B")
        self._check_open()
        if offset < 0 or offset + len(view) > self.size:
            raise CorruptSegmentError(
                f"{self._requests.name(self._key)} ends at byte {self.size}; bytes {offset} to {offset + len(view)} "
                "were asked for"
            )
        if len(view) <= RANGE:
            self._read(offset, view)
            return
        cuts = range(0, len(view), RANGE)
        run_all(self._pool(), [partial(self._read, offset + cut, view[cut : cut + RANGE]) for cut in cuts])

    def _read(self, offset: int, out: memoryview) -> None:
        try:
            self._requests.get_range(self._key, offset, out)
        except KeyNotFoundError as error:
            raise CorruptSegmentError(f"{error}: it was deleted while it was read") from None

    def map(self) -> memoryview | None:
        """See `SegmentSource.map`: a bucket has no memory."""
        self._check_open()
        return None

    def _check_open(self) -> None:
        if self._closed:
            raise StorageError(errno.EBADF, "the segment is closed", self._requests.name(self._key))

    def close(self) -> None:
        """See `SegmentSource.close`."""
        self._closed = True
