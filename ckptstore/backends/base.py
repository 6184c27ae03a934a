"""The interface between the engine and a medium: objects that are named by keys.

Keys are relative, ``/``-separated ASCII (``log/00000000000000000007``; see `checked_key`). Small objects (log slots,
folds, pins) are created and read whole. Segments are written through a `SegmentSink` and read through a
`SegmentSource`, both by position and from several threads at once. A backend does not know the format.

The commit protocol (SPEC 10) needs this of a medium, and the conformance suite checks it:

1. `Backend.create` has exactly one winner per key, and an acknowledged object survives a power cut.
2. A segment survives a power cut once `SegmentSink.seal` has returned.
3. Listings of ``pins/`` and ``req/`` are strongly consistent. No decision depends on a listing of ``log/``.

Every method raises the project's errors and no others. `KeyNotFoundError` and `StorageError` are themselves
``OSError``: translate the error of a system call where the call is.

A visible object is not yet durable. If another process left it, or if our own create failed halfway, it may vanish in
a power cut. So call `Backend.settle` before acting on something that was only read: before acknowledging a commit that
was read back, and before deleting what a slot dropped. After a failed fsync `settle` always fails.
"""

from __future__ import annotations

import errno
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from ckptstore.backends.costs import Costs
from ckptstore.backends.sharing import SaveSpace, Sharing
from ckptstore.backends.space_bound import Limit, Reclaiming, SpaceBound
from ckptstore.errors import ForeignObjectError, KeyNotFoundError, StorageError, UsageError

if TYPE_CHECKING:
    from ckptstore.host.buffers import Bytes  # numpy: listing a store does not need it

OBJECT_LIMIT: Final = 256 << 20
"""Bytes that `Backend.get` reads if the caller passes no limit."""

SEGMENT_BYTES: Final = (4 << 30) - (64 << 20)
"""Maximum bytes of tensors in a segment, so that it has at most 4 GiB with its header. One larger tensor is allowed."""

_KEY: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*")


def checked_key(key: str) -> str:
    """Return `key` if it is a valid object name.

    Components are ASCII letters, digits, ``_``, ``.`` and ``-``, and do not begin with a dot or a hyphen. So no key
    leads out of the store, even if it comes from a hostile record. Raises `UsageError`.
    """
    if not _KEY.fullmatch(key):
        raise UsageError(f"{key!r} is not a valid key of a store")
    return key


def checked_folder(prefix: str) -> str:
    """Return `prefix` if it is ``""`` or a key followed by ``/``. Raises `UsageError`."""
    if prefix and not (prefix.endswith("/") and _KEY.fullmatch(prefix[:-1])):
        raise UsageError(f"{prefix!r} is not a valid folder of a store")
    return prefix


def too_long(name: str, size: int, limit: int) -> ForeignObjectError:
    """The error for an object that is too large to be one of the store's."""
    return ForeignObjectError(f"{name}: {size} bytes, at most {limit} are allowed")


class SegmentSink(ABC):
    """A new segment that is being written. Several threads may call `write`, until `seal`.

    Listings may show its name from the start. The segment counts only once a committed record names it.
    """

    @abstractmethod
    def write(self, offset: int, data: memoryview) -> None:
        """Write `data` at `offset`, a multiple of `BLOCK`. Length and address of `data` are multiples of it, too.

        Blocks never overlap. The last block may be padded past the segment's end; `seal` cuts the file to its length.
        The caller may reuse the memory once this has returned. Raises `StorageError`, also after `seal` or `abort`.
        """

    def map(self, offset: int, length: int) -> memoryview | None:  # noqa: ARG002 - most media have none
        """Bytes `offset` to `offset` + `length` > 0 of the segment as writable memory; None if the medium has none.

        Callers use it to copy straight to the medium (from a device's memory, layer by layer). Any alignment is
        allowed. The contents are undefined until they are written. They count as written once `persist` or `seal` has
        returned. Do not touch the memory after `seal` or `abort`: a store there damages the segment or kills the
        process.

        Raises `StorageError`: no space, or the segment was sealed or aborted.
        """
        return None

    def block(self, length: int) -> Bytes | None:  # noqa: ARG002 - most media have none
        """Page-aligned memory that `write` takes over instead of copying it; None if the medium has none.

        For a medium that holds a segment in memory until it is complete. The caller fills the block, passes it or a
        part of it to `write`, and then drops it.
        """
        return None

    refers: bool = False
    """Whether the sink supports `refer`."""

    shared: bool = False
    """Whether another process may also write this segment, with the same bytes, and publish it (a copy). If that cannot
    be excluded, `abort` does not delete the object."""

    def refer(self, offset: int, data: memoryview) -> None:
        """Use `data` in place, without a copy: any offset, length and address. Ranges never overlap.

        For media that take a segment as a whole (`refers`). `data` must not change until `seal` or `abort` has
        returned. A request that was abandoned may still send `data` later, but that belongs to no segment.

        Raises `StorageError`: the medium does not support this, or the segment was sealed or aborted.
        """
        raise StorageError(errno.EOPNOTSUPP, f"this medium cannot refer to memory: {len(data)} bytes at {offset}")

    def persist(self, offset: int, length: int) -> None:
        """Flush these bytes, which were stored through `map`, to the medium, so that `seal` has less to do.

        Any thread may call this once all stores to the range are complete. Raises `StorageError`; then call `abort`.
        """
        raise StorageError(errno.EOPNOTSUPP, f"this segment has no mapped memory: {length} bytes at {offset}")

    @abstractmethod
    def seal(self, size: int) -> None:
        """Cut to exactly `size` bytes and make contents and name durable. Call it once.

        Raises `StorageError`: then call `abort` and write the whole segment again, because a failed sync is never
        repeated. Also raises `KeyExistsError` if the medium creates the object only here and the key is taken.
        """

    @abstractmethod
    def abort(self) -> None:
        """Abandon the segment and remove what was written, if possible. Never raises; harmless after `seal`."""


class SegmentSource(ABC):
    """An open segment. Reads by position; thread-safe."""

    size: int
    held: bool = True
    """Whether writers cannot overwrite these bytes with another segment's while the source is open or mapped. If False
    (a file system without locks), readers always compare the bytes with their hashes, and `map` returns a copy."""

    @abstractmethod
    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill `out`, any writable contiguous memory, with the bytes from `offset`.

        Raises `CorruptSegmentError` if the object does not have all these bytes (`offset` may be negative or beyond the
        end), and `StorageError` on I/O errors and after `close`. Both name the object.
        """

    def map(self) -> memoryview | None:
        """The whole segment as private, copy-on-write memory; None if the medium has none.

        Writes to it do not reach the medium (torch has no read-only tensors). The memory lives as long as the
        memoryview, also after this object is gone. Raises `StorageError`.
        """
        return None

    @abstractmethod
    def close(self) -> None:
        """Release the handle."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Backend(ABC):
    """A medium that holds one store.

    Attributes:
        url: the path or URL that the user passed, for messages.
        read_only: no write can succeed (read-only mount or credentials); readers then write no pins.
        cheap_looks: listing ``log/``, or reading one more slot, costs almost nothing. Then every reader looks for slots
            above the end of the log, and a writer checks before each commit that the previous slot is still the one it
            knows.
        anchored: every call reaches the same store as the first call, even if another store takes its place (a handle
            on a folder). If False, a writer must check before a commit that the store is still the same.
        shows_parts: an object may be visible before it is complete, while it is created. If True, a writer must check
            after a commit that no other writer has opened a term over the slot because it was torn for too long.
        segment_bytes: maximum bytes of tensors in one segment; larger saves are split. A medium that holds a segment in
            memory until it is sealed uses a smaller value.
        sends_late: a segment is sent to the medium when it is sealed, not while it is written. So it is worth filling
            the next segment meanwhile, with memory for two.
        costs: requests and bytes so far if the medium charges for them, else None.
        bound: the limit that `limit_space` has set; None: there is none.
    """

    url: str
    read_only: bool = False
    cheap_looks: bool = False
    anchored: bool = False
    segment_bytes: int = SEGMENT_BYTES
    sends_late: bool = False
    bound: SpaceBound | None = None
    _reclaim: Callable[[Backend], int] | None = None

    @property
    def shows_parts(self) -> bool:
        """See the class."""
        return False

    @property
    def costs(self) -> Costs | None:
        """Counters of requests and bytes; None if requests to this medium cost nothing."""
        return None

    @property
    def storage_options(self) -> Mapping[str, Any]:
        """Options that another process needs besides the URL to open this store. May hold credentials: never show."""
        return {}

    @property
    def address(self) -> str | None:
        """Path or URL with which another process of this machine opens this store, from any folder; None: it cannot."""
        return self.url

    def locate(self, key: str) -> str | None:
        """The path of a file of the store, or the URL of an object, for other programs; None: they cannot open it."""
        address = self.address
        return None if address is None else f"{address.partition('?')[0].rstrip('/')}/{checked_key(key)}"

    @property
    def recycling(self) -> str:
        """For people: whether new segments overwrite the space of deleted ones (``on: ...``, ``off: ...``), and why."""
        return "off: not on this kind of medium"

    @abstractmethod
    def get(self, key: str, limit: int = OBJECT_LIMIT) -> bytes:
        """Read the whole object, of at most `limit` bytes. A longer object is refused without reading it.

        Raises:
            KeyNotFoundError: there is no such object.
            ForeignObjectError: it is longer, or it is not an object (a folder, a link, a pipe).
            StoreNotFoundError: the store was deleted while it was open.
            StorageError: the medium failed.
        """

    @abstractmethod
    def size(self, key: str) -> int:
        """Length in bytes. Raises the same errors as `get`."""

    @abstractmethod
    def create(self, key: str, data: bytes) -> None:
        """Create the object if the key is absent. On return it is complete and durable.

        Raises `KeyExistsError` if the key is present (then nothing changed). After any other `StorageError` it is
        *unknown* whether the object exists: the caller reads back, and settles before it trusts the result. The
        exception is `StorageError.unsent`: then this attempt has created nothing and never will.
        """

    @abstractmethod
    def replace(self, key: str, data: bytes) -> None:
        """Create or overwrite atomically: a reader sees the old or the new bytes. Only for pins.

        After a power cut the key may be absent or hold older bytes, but never a part of an object.

        Raises `StorageError`.
        """

    @abstractmethod
    def delete(self, key: str) -> None:
        """Delete the object; a missing key is not an error. Raises `StorageError`."""

    def release(self, key: str) -> None:
        """`delete` a segment; the medium may keep its space for new ones (`shrink_spare`). Raises `StorageError`.

        Only for segments that no living reader has claimed. If a pin was only presumed dead, use `delete`.
        """
        self.delete(key)

    def shrink_spare(self, limit: int) -> int:  # noqa: ARG002 - most media keep nothing
        """Delete spare files of released segments beyond `limit` bytes -> bytes that are still kept. Never raises."""
        return 0

    def check_space(self, nbytes: int) -> None:
        """Raise `StorageError` (ENOSPC) if `nbytes` of new segments certainly do not fit. If unsure, do nothing.

        Args:
            nbytes: of a full, where there is a limit (`limit_space`).
        """
        if self.bound is not None:
            self.bound.admit(nbytes, nbytes)

    def limit_space(self, limit: Limit | None, retire: Callable[[], object] = lambda: None) -> None:
        """Limit the bytes of all segments from now on, for saves through this backend; None: do not.

        A save claims what it may take at most with `check_space` or `SpaceBound.admit`, before it opens a sink.

        Args:
            retire: called before unneeded data is deleted for a save: retires checkpoints that no rule keeps.
        """
        self.bound = None
        if limit is not None:
            reclaiming = Reclaiming()
            reclaiming.reclaim = lambda: 0 if self._reclaim is None else self._reclaim(self)
            self.bound = SpaceBound(limit, self.segments_nbytes, Sharing(), reclaiming.collect, retire, self.url)

    def segments_nbytes(self) -> int:
        """Bytes of all segments, unfinished ones too if they can be seen. Raises `StorageError`."""
        return sum(self.sizes("seg/").values())

    def begin_save(self) -> SaveSpace:
        """Begin a save. If space is short, it waits for other saves of this process before it fails.

        It waits until the other saves call `SaveSpace.end`, after their commits, because a commit may free space.
        """
        return SaveSpace() if self.bound is None else self.bound.begin_save()

    def reclaim_with(self, reclaim: Callable[[Backend], int]) -> None:
        """Call `reclaim` before a write fails for lack of space: it deletes unneeded data and returns its bytes."""
        self._reclaim = reclaim

    def upkeep(self) -> AbstractContextManager[None]:
        """Context in which this thread may use the space that is reserved for freeing space."""
        return nullcontext()

    def keep_reserve(self) -> None:  # noqa: B027 - most media have no end
        """Reserve space for `upkeep` if none is reserved and there is enough. Never raises."""

    def free_bytes(self) -> int | None:
        """Maximum bytes that new segments can use, for people; None if the medium does not say. Never raises."""
        return None

    @abstractmethod
    def list(self, prefix: str) -> list[str]:
        """Sorted keys below the folder `prefix` (``"log/"``, or ``""``), recursively. Raises `StorageError`.

        A folder that does not exist has no keys. Temporary files of the medium are omitted.
        """

    def sizes(self, prefix: str) -> dict[str, int]:
        """The keys of `list`, each with the bytes of its object, in fewer requests if the medium can. Raises as `list`.

        A key that is deleted meanwhile is omitted.
        """
        found: dict[str, int] = {}
        for key in self.list(prefix):
            with suppress(KeyNotFoundError, ForeignObjectError):
                found[key] = self.size(key)
        return found

    def folders(self, prefix: str) -> Sequence[str]:
        """Names of the folders directly below the folder `prefix`, empty ones included if the medium has them.

        Raises `StorageError`.
        """
        return sorted({key[len(prefix) :].partition("/")[0] for key in self.list(prefix) if "/" in key[len(prefix) :]})

    @abstractmethod
    def settle(self, prefix: str) -> None:
        """Make every name that is now visible below `prefix` survive a power cut (POSIX: fsync the folder).

        Does nothing if visible objects are durable. Raises `StorageError`, and after that on every call.
        """

    @abstractmethod
    def open_sink(self, key: str, size_hint: int) -> SegmentSink:
        """Begin a new segment of about `size_hint` bytes. Raises `KeyExistsError`, `StorageError`.

        A medium that creates nothing before `SegmentSink.seal` may detect only there that the key is taken. Even then
        it refuses a second sink of the key while this process has one open (`gathered.GatheredSink` does).
        """

    @abstractmethod
    def open_source(self, key: str) -> SegmentSource:
        """Open a segment for reading.

        Raises `KeyNotFoundError`, `StorageError`; `CorruptSegmentError` if the key names something else than an object.
        """

    @abstractmethod
    def probe(self) -> None:
        """Check on the medium itself that a second create of a key fails. Leaves nothing behind.

        Raises `UnsupportedBackendError`, `StorageError`.
        """

    def medium(self) -> str:
        """The kind of medium and how bytes are written to it, in a few words for people. Never raises."""
        return self.url.partition("://")[0]

    def deleted(self) -> bool:
        """Whether the store of this handle was deleted. The handle does not find a new one: see `reopened`."""
        return False

    def above(self) -> Sequence[tuple[str, Callable[[], Backend]]]:
        """The enclosing places, nearest first: (the name there that leads here, a function that returns a handle).

        Sends no request until a handle is used. Its requests count in this backend's costs. The function raises
        `CkptError`.
        """
        return ()

    def reopened(self) -> Backend:
        """Another handle, for whatever is at this place now; this one stays as it is. Raises `StorageError`.

        A medium without handles, which is accessed by name only, returns itself.
        """
        return self

    def close(self) -> None:  # noqa: B027 - most media hold nothing open
        """Close what is held open; later calls may fail. Dropping the object has the same effect."""
