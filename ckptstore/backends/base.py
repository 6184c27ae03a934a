"""The one interface between the engine and a medium: objects named by keys.

Keys are relative, ``/``-separated ASCII (``log/00000000000000000007``; see `checked_key`). Small objects (log slots,
folds, pins) are created and read whole; segments are written through a `SegmentSink` and read through a
`SegmentSource`, both by position and from several threads at once. A backend knows nothing of the format.

What the commit protocol needs of a medium (design: COMMIT, GC, PINS), and the conformance suite checks:

1. `Backend.create` has exactly one winner per key, and what it acknowledged survives a power cut.
2. A sealed segment survives a power cut before `SegmentSink.seal` returns.
3. Listings of ``pins/`` and ``req/`` are strongly consistent. No decision rests on a listing of ``log/``.

What is visible is not yet durable: an object that another process (or a create of ours that failed halfway) left may
vanish in a power cut. Before acting on what was merely read (acknowledging a commit after reading it back, deleting
what a slot dropped) call `Backend.settle`; it fails for good where an fsync failed.
"""

from __future__ import annotations

import errno
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from ckptstore.backends.costs import Costs
from ckptstore.backends.sharing import SaveSpace
from ckptstore.errors import ForeignObjectError, StorageError, UsageError

if TYPE_CHECKING:
    from ckptstore.host.buffers import Bytes  # numpy: listing a store does not need it

OBJECT_LIMIT: Final = 256 << 20
"""Bytes that `Backend.get` reads where the caller sets no limit of its own."""

SEGMENT_BYTES: Final = (4 << 30) - (64 << 20)
"""Bytes of tensors that a segment has at most, a single larger tensor aside: with its header no more than 4 GiB."""

_KEY: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*")


def checked_key(key: str) -> str:
    """`key` itself, if it may name an object.

    Components are ASCII letters, digits, ``_``, ``.`` and ``-``, and begin with neither dot nor hyphen: no key leads
    out of the store, whatever a hostile record says. Raises `UsageError`.
    """
    if not _KEY.fullmatch(key):
        raise UsageError(f"{key!r} is no key of a store")
    return key


def checked_folder(prefix: str) -> str:
    """`prefix` itself, if it is ``""`` or a key followed by ``/``. Raises `UsageError`."""
    if prefix and not (prefix.endswith("/") and _KEY.fullmatch(prefix[:-1])):
        raise UsageError(f"{prefix!r} is no folder of a store")
    return prefix


def too_long(name: str, size: int, limit: int) -> ForeignObjectError:
    """The error of an object whose size says that it is none of the store's."""
    return ForeignObjectError(f"{name}: {size} bytes, at most {limit} are allowed")


class SegmentSink(ABC):
    """A new segment being written. `write` may be called from several threads, before `seal`.

    Its name may show in listings from the start; it counts once a committed record names it.
    """

    @abstractmethod
    def write(self, offset: int, data: memoryview) -> None:
        """Write `data` at `offset`; both multiples of `BLOCK`, memory aligned to `BLOCK`. Blocks never overlap.

        The last block may be padded past the segment's end; `seal` cuts the file to its length. The caller may
        reuse the memory as soon as this returns. Raises `StorageError`, also once sealed or aborted.
        """

    def map(self, offset: int, length: int) -> memoryview | None:  # noqa: ARG002 - most media have none
        """Bytes `offset` to `offset` + `length` > 0 of the segment as writable memory, or None if the medium has none.

        For whoever can copy straight to the medium (a device's memory, layer by layer). Any alignment; what it holds
        before it is written is not defined. It counts as written once `persist` has returned, or `seal`. After `seal`
        or `abort` it must not be touched: what is stored then damages the segment, or ends the process.

        Raises `StorageError`: no space, or sealed or given up.
        """
        return None

    def block(self, length: int) -> Bytes | None:  # noqa: ARG002 - most media have none
        """Page-aligned memory that `write` takes over instead of copying it, or None if the medium has none.

        For a medium that keeps what is written in memory until the segment is whole. Whoever got it fills it, writes it
        or part of it, and forgets it.
        """
        return None

    refers: bool = False
    """Whether `refer` is there."""

    shared: bool = False
    """Whether another process may be making this segment, too, of the same bytes, and have made it known: a copy. Where
    that cannot be kept out `abort` leaves what may be there."""

    def refer(self, offset: int, data: memoryview) -> None:
        """Have `data` in the segment from where it lies, uncopied: any offset, length and address; never two overlap.

        Of a medium that takes a segment as a whole (`refers`). `data` must not change before `seal` has returned, or
        `abort`: what a request that was given up still sends after that belongs to no segment.

        Raises `StorageError`: the medium cannot, or the segment is sealed or given up.
        """
        raise StorageError(errno.EOPNOTSUPP, f"this medium copies what it is given: {len(data)} bytes at {offset}")

    def persist(self, offset: int, length: int) -> None:
        """Get what was stored through `map` into these bytes to the medium: `seal` has less left to do.

        By any thread, once those that stored have said that they are done. Raises `StorageError`; then `abort`.
        """
        raise StorageError(errno.EOPNOTSUPP, f"nothing of this segment is mapped: {length} bytes at {offset}")

    @abstractmethod
    def seal(self, size: int) -> None:
        """Cut to exactly `size` bytes and make contents and name durable, once.

        Raises `StorageError`; then `abort`, and write the segment anew: a failed sync is never repeated. Also
        `KeyExistsError`, of a medium that makes nothing before this.
        """

    @abstractmethod
    def abort(self) -> None:
        """Give the segment up and remove what was written, as far as possible. Never raises; harmless after `seal`."""


class SegmentSource(ABC):
    """An open segment. Reads by position, thread-safe."""

    size: int
    held: bool = True
    """Whether no writer can overwrite these bytes, with another segment's, while this is open or mapped. Where it is
    False (a file system without locks) they are compared with their hashes in any case, and `map` gives a copy."""

    @abstractmethod
    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill `out`, any writable contiguous memory, with the bytes from `offset`.

        Raises `CorruptSegmentError` if the object ends before, `StorageError` on I/O errors and once closed.
        """

    def map(self) -> memoryview | None:
        """The whole segment as private, copy-on-write memory, or None if the medium has none.

        What is written to it stays there (torch has no read-only tensors). It outlives this object and lives as long
        as the memoryview. Raises `StorageError`.
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
        url: what the user gave, for messages.
        read_only: no write will succeed (read-only mount or credentials); readers then go unpinned.
        cheap_looks: listing ``log/``, or reading one more slot, costs next to nothing. So every reader looks for slots
            above the end of the log, and a writer before each commit whether the slot before is still the one it knows.
        anchored: every call reaches the store that the first one reached, whatever takes its place (a handle on a
            folder). Where it is False, who commits has to look first whether the store is still the same.
        shows_parts: an object may be seen before it is whole, while it is created. Where it is True, who commits has to
            look afterwards whether somebody has opened a term over the slot, because it was torn for too long.
        segment_bytes: bytes of tensors that one segment may have; more are divided. A medium that holds a segment in
            memory until it is sealed wants less than others.
        sends_late: a segment goes to the medium when it is sealed, not as it is written: worth filling the next one
            meanwhile, in memory for two.
        costs: requests and bytes so far, where a medium charges for them; None: it does not.
    """

    url: str
    read_only: bool = False
    cheap_looks: bool = False
    anchored: bool = False
    segment_bytes: int = SEGMENT_BYTES
    sends_late: bool = False

    @property
    def shows_parts(self) -> bool:
        """See the class."""
        return False

    @property
    def costs(self) -> Costs | None:
        """Counters of requests and bytes; None: requests of this medium cost nothing."""
        return None

    @property
    def storage_options(self) -> Mapping[str, Any]:
        """What another process needs besides the URL to reach this store. May hold credentials: never to be shown."""
        return {}

    @property
    def address(self) -> str | None:
        """By which path or URL another process of this machine opens this store, from any folder. None: it cannot."""
        return self.url

    @property
    def recycling(self) -> str:
        """For people: whether new segments overwrite the space of deleted ones (``on: ...``, ``off: ...``), and why."""
        return "off: not on this kind of medium"

    @abstractmethod
    def get(self, key: str, limit: int = OBJECT_LIMIT) -> bytes:
        """The whole object, of at most `limit` bytes: what is longer costs nothing.

        Raises:
            KeyNotFoundError: it is absent.
            ForeignObjectError: it is longer, or there is something that is no object (a folder, a link, a pipe).
            StoreNotFoundError: the store was deleted while it was open.
            StorageError: the medium failed.
        """

    @abstractmethod
    def size(self, key: str) -> int:
        """Length in bytes. Raises as `get`."""

    @abstractmethod
    def create(self, key: str, data: bytes) -> None:
        """Create-if-absent, whole and durable on return.

        Raises `KeyExistsError` if the key is present (then nothing changed). Any other `StorageError` leaves it
        *unknown* whether the object exists: the caller reads back, and settles before it trusts what it found. Unless
        `StorageError.unsent` says that this attempt has made nothing and never will.
        """

    @abstractmethod
    def replace(self, key: str, data: bytes) -> None:
        """Create or overwrite atomically: a reader sees the old or the new bytes. For pins only.

        After a power cut the key may be absent, or hold older bytes; what it holds is whole.

        Raises `StorageError`.
        """

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove; a missing key is no error. Raises `StorageError`."""

    def release(self, key: str) -> None:
        """`delete` a segment; the medium may keep its space for new ones (`shrink_spare`). Raises `StorageError`.

        Only for what no living reader has claimed: a pin that was taken for dead allows deleting, and no more.
        """
        self.delete(key)

    def shrink_spare(self, limit: int) -> int:  # noqa: ARG002 - most media keep nothing
        """Delete what is kept of released segments beyond `limit` bytes -> bytes still kept. Raises nothing."""
        return 0

    def check_space(self, nbytes: int) -> None:  # noqa: B027 - most media do not know
        """Raise `StorageError` (ENOSPC) if `nbytes` of new segments cannot fit. Where that is not certain: no word."""

    def begin_save(self) -> SaveSpace:
        """A save begins, beside others of this process: short of space, it waits for them before it fails.

        It waits for saves that are under way until `SaveSpace.end`: that comes after the commit, which may free space.
        """
        return SaveSpace()

    def reclaim_with(self, reclaim: Callable[[Backend], int]) -> None:  # noqa: B027 - most media have no end
        """Call `reclaim` before a write fails for want of space: it deletes what nothing needs, and gives its bytes."""

    def upkeep(self) -> AbstractContextManager[None]:
        """Within it, what this thread creates may take space that is reserved for those who make space."""
        return nullcontext()

    def keep_reserve(self) -> None:  # noqa: B027 - most media have no end
        """Reserve space for `upkeep`, if none is and there is enough. Raises nothing."""

    def free_bytes(self) -> int | None:
        """Bytes that new segments may take at most, for people; None: the medium does not say. Never raises."""
        return None

    @abstractmethod
    def list(self, prefix: str) -> list[str]:
        """Sorted keys below the folder `prefix` (``"log/"``, or ``""``), recursively. Raises `StorageError`.

        A folder that does not exist has no keys. Temporary files of the medium are left out.
        """

    def folders(self, prefix: str) -> Sequence[str]:
        """Names of the folders directly below the folder `prefix`; where a medium has any, empty ones, too.

        Raises `StorageError`.
        """
        return sorted({key[len(prefix) :].partition("/")[0] for key in self.list(prefix) if "/" in key[len(prefix) :]})

    @abstractmethod
    def settle(self, prefix: str) -> None:
        """Make every name now visible below `prefix` survive a power cut (POSIX: fsync the folder).

        Nothing to do where what is visible is durable. Raises `StorageError`, and from then on each time.
        """

    @abstractmethod
    def open_sink(self, key: str, size_hint: int) -> SegmentSink:
        """Begin a new segment of about `size_hint` bytes (never exact). Raises `KeyExistsError`, `StorageError`.

        A medium that makes nothing before `SegmentSink.seal` may find out only there that the key is taken.
        """

    @abstractmethod
    def open_source(self, key: str) -> SegmentSource:
        """Open a segment for reading.

        Raises `KeyNotFoundError`, `StorageError`; `CorruptSegmentError` if there is something that is no object.
        """

    @abstractmethod
    def probe(self) -> None:
        """Check on the medium itself that a double create fails; leave nothing behind.

        Raises `UnsupportedBackendError`, `StorageError`.
        """

    def medium(self) -> str:
        """What the store lies on and how bytes get there, in a few words for people. Never raises."""
        return self.url.partition("://")[0]

    def deleted(self) -> bool:
        """Whether the store that this handle reached was deleted. It does not come back: see `reopened`."""
        return False

    def above(self) -> Sequence[tuple[str, Callable[[], Backend]]]:
        """The places that this one lies within, nearest first: (the name there that leads here, what gives a handle).

        Nothing is asked before a handle is used. What is asked then counts here. Giving one raises `CkptError`.
        """
        return ()

    def reopened(self) -> Backend:
        """Another handle, on what is at this place now; this one is left as it is. Raises `StorageError`.

        A medium without handles, which is asked by names alone, is its own.
        """
        return self

    def close(self) -> None:  # noqa: B027 - most media hold nothing open
        """Give up what is held open; whatever is called afterwards may fail. Letting go of the object does as well."""
