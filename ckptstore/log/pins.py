"""Pins: a reader's claim on segments while it restores, so that gc keeps them (formats/SPEC.md 9 and 10, PINS, GC).

A pin carries a nonce that the reader renews. A collector takes a pin for dead when its nonce has not changed for a time
on the collector's own monotonic clock; the two clocks are never compared. A pin that names a process on the collector's
host is dead as soon as that process has ended (`host.processes`). If a live reader was taken for dead, it finds a
segment missing or a checksum wrong, and starts over.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self, TypeVar

from ckptstore.backends.base import Backend
from ckptstore.errors import CkptError, ForeignObjectError, FormatError, KeyNotFoundError, ReadOnlyError, StorageError
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.record_text import MANIFEST_LIMIT, decode_pin, encode_pin, torn
from ckptstore.formats.history.records import PinRecord, pin_key, pin_of
from ckptstore.host import background_threads
from ckptstore.host.background_threads import Periodic
from ckptstore.host.caller_warnings import UnpinnedWarning, warn
from ckptstore.host.crash_points import crash_point
from ckptstore.host.processes import has_ended, identity
from ckptstore.log.journal import Journal
from ckptstore.log.log_reader import View, read
from ckptstore.log.partial_objects import read_all_when_complete

__all__ = ["DEAD_AFTER", "REFRESH_EVERY", "Pin", "PinWatch", "Survey", "claim"]

REFRESH_EVERY: Final = 30.0
"""Seconds between two renewals of a pin."""
DEAD_AFTER: Final = 600.0
"""Seconds without renewal after which a collector takes a pin for dead: 20 renewals missed."""

_INTERRUPTED_WAIT: Final = 1.0
"""Seconds that an interrupted reader waits for the pin to be removed."""

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})

_P = TypeVar("_P")


class Pin:
    """A claim on segments for the duration of a ``with``. A thread renews it.

    On a read-only medium nothing is claimed, and an `UnpinnedWarning` says so.
    """

    def __init__(self, backend: Backend, segments: Iterable[str], refresh_every: float = REFRESH_EVERY) -> None:
        """Claim nothing yet; entering the ``with`` does.

        Args:
            segments: their ids.
            refresh_every: seconds between renewals.
        """
        self._text = _Text(backend, pin_key(uuid.uuid4().hex), tuple(segments))
        # This thread removes the pin at its end, because Ctrl-C never interrupts it.
        self._renewals = Periodic(refresh_every, self._text.renew_quietly, "pin", self._text.remove)
        # Prevents: a pin that is renewed for ever because Ctrl-C came between two lines of a ``with``. The thread does
        # not reference this object, and ends when no one references it.
        weakref.finalize(self, self._renewals.stop)

    @property
    def key(self) -> str:
        """Its key in the store."""
        return self._text.key

    def __enter__(self) -> Self:
        """Claim. If the store is read-only or full, warn and continue without a pin.

        Raises:
            StorageError: the claim fails for another reason.
        """
        try:
            self._claim()
        except BaseException as error:
            self._release(hurry=isinstance(error, KeyboardInterrupt | SystemExit))
            raise
        return self

    def _claim(self) -> None:
        try:
            if self._text.backend.read_only:
                raise ReadOnlyError(f"{self._text.backend.url} is read-only")
            self.renew()
        except StorageError as error:
            # The disk may be full: then checkpoints must still be readable, for instance to copy them elsewhere.
            if not isinstance(error, ReadOnlyError) and error.errno not in _FULL:
                raise
            warn(
                f"reading unpinned: {error}. If a collector deletes a segment that is being read, start over",
                UnpinnedWarning,
            )
            return
        crash_point("pin.created")
        self._renewals.start()

    def renew(self) -> None:
        """Renew the pin now; its thread does it regularly. Raises `StorageError`."""
        self._text.renew()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._renewals.started:
            self._release(hurry=isinstance(error, KeyboardInterrupt | SystemExit))

    def _release(self, *, hurry: bool = False) -> None:
        self._renewals.stop()
        if self._renewals.started:
            # Interrupted, perhaps because the medium does not answer: then the pin expires.
            self._renewals.join(_INTERRUPTED_WAIT if hurry else None)
        elif hurry:
            background_threads.start(self._text.remove, "unpin").join(_INTERRUPTED_WAIT)
        else:
            self._text.remove()


@dataclass(frozen=True, slots=True)
class _Text:
    """The text of a pin in the store."""

    backend: Backend
    key: str
    segments: tuple[str, ...]

    def renew(self) -> None:
        self.backend.replace(self.key, encode_pin(PinRecord(secrets.token_hex(16), self.segments, identity())))

    def renew_quietly(self) -> None:
        with contextlib.suppress(StorageError):  # the next renewal is early enough: a collector waits for many
            self.renew()

    def remove(self) -> None:
        with contextlib.suppress(StorageError):  # a pin that stays expires; the restore is done
            self.backend.delete(self.key)


@contextlib.contextmanager
def claim(
    journal: Journal,
    plan: Callable[[Catalog], _P],
    segments: Callable[[_P], Sequence[str]],
    refresh_every: float = REFRESH_EVERY,
    since: View | None = None,
) -> Iterator[tuple[View, _P]]:
    """PINS: READ, plan, pin, READ again; if a planned segment was dropped, plan again.

    Args:
        plan: chooses from the catalog what to restore; its errors go to the caller.
        segments: ids of the segments that a plan reads.
        since: a view of the log that was read just now; READ continues from it.

    Yields:
        the second view and the plan, whose segments no collector deletes until the ``with`` ends.
    """
    # 1. READ.
    view = read(journal) if since is None else since
    while True:
        # 2. Plan.
        chosen = plan(view.catalog)
        ids = tuple(segments(chosen))
        # 3. Pin.
        with Pin(journal.backend, ids, refresh_every):
            # 4. READ again. A collector that read the log before our pin existed may delete what was dropped by then;
            # a segment that is still live now was live then.
            view = read(journal, view)
            if all(segment in view.catalog.segments for segment in ids):
                yield view, chosen
                return
        # 5. A planned segment was dropped: plan again.


@dataclass(frozen=True, slots=True)
class Survey:
    """What the pins claim.

    Attributes:
        segments: ids of the segments that living pins claim.
        alive: keys of living pins.
        dead: keys of pins that were not renewed for too long, or whose process has ended.
        lapsed: ids of the segments that the dead pins claimed; None: one of them is damaged, so this is unknown.
        unreadable: keys of living pins that are damaged. Their claims are unknown: collect nothing.
        records: key of a living pin -> its record: segments and reader.
    """

    segments: frozenset[str]
    alive: tuple[str, ...]
    dead: tuple[str, ...]
    unreadable: tuple[str, ...]
    records: Mapping[str, PinRecord] = field(default_factory=dict)
    lapsed: frozenset[str] | None = frozenset()


class PinWatch:
    """The collector's side. It must watch a pin for `dead_after` seconds before it may take it for dead, unless the
    pin's process is known to have ended."""

    def __init__(
        self, backend: Backend, dead_after: float = DEAD_AFTER, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Watch the pins of a store.

        Args:
            dead_after: seconds without renewal.
            clock: this process's own monotonic clock.
        """
        self._backend = backend
        self._dead_after = dead_after
        self._clock = clock
        self._seen: dict[str, tuple[bytes, float]] = {}

    def survey(self) -> Survey:
        """List and read the pins. Call it after READ, never before. Raises `StorageError`.

        Files in ``pins/`` whose names are not those of pins claim nothing, and are skipped.
        """
        segments: set[str] = set()
        dead, unreadable = [], []
        lapsed: frozenset[str] | None = frozenset()
        records: dict[str, PinRecord] = {}
        seen: dict[str, tuple[bytes, float]] = {}
        # Prevents: a collector that stops for ever because an editor or a sync client left a file here.
        keys = [key for key in self._backend.list("pins/") if pin_of(key) is not None]
        for key, found in read_all_when_complete(keys, self._get, self._unfinished):
            if isinstance(found, KeyNotFoundError):  # released since the listing
                continue
            if isinstance(found, CkptError) and not isinstance(found, ForeignObjectError):
                raise found
            data = b"" if isinstance(found, CkptError) else found  # its claims are unknown, and no reader renews it
            now = self._clock()
            before = self._seen.get(key)
            seen[key] = before if before is not None and before[0] == data else (data, now)
            if now - seen[key][1] >= self._dead_after:
                dead.append(key)
                lapsed = None if lapsed is None else _claims(data, key, lapsed)
                continue
            try:
                record = decode_pin(data, what=key)
            except FormatError:
                unreadable.append(key)
                continue
            if has_ended(record.reader):
                dead.append(key)
                lapsed = None if lapsed is None else lapsed.union(record.segments)
                continue
            records[key] = record
            segments.update(record.segments)
        self._seen = seen
        return Survey(frozenset(segments), tuple(records), tuple(dead), tuple(unreadable), records, lapsed)

    def _get(self, key: str) -> bytes:
        return self._backend.get(key, MANIFEST_LIMIT)

    def _unfinished(self, key: str, data: bytes) -> bool:
        """Whether a pin may be incomplete. Bytes that were torn at the last survey are not waited for again."""
        return torn(data) and data != self._seen.get(key, (None, 0.0))[0]


def _claims(data: bytes, key: str, others: frozenset[str]) -> frozenset[str] | None:
    """The segments that a pin names, and `others`; None if it is unreadable."""
    try:
        return others.union(decode_pin(data, what=key).segments)
    except FormatError:
        return None
