"""Reads objects that are still being written: waits until they are complete.

Not every medium creates an object as a whole: a file that is opened and then filled shows each prefix of its contents
(most file systems of fsspec, a folder that another program copies into). A torn object is unfinished, not necessarily
damaged. So a reader that finds a torn slot, or any other small torn object, reads it again before it judges it. All
of that waiting is done here (formats/SPEC.md 10, ON ITS WAY).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from ckptstore.backends.base import Backend
from ckptstore.errors import CkptError, ForeignObjectError, KeyNotFoundError
from ckptstore.formats.checksums import xxh3_128
from ckptstore.formats.history.folds import FOLD_LIMIT, intact
from ckptstore.formats.history.record_text import SLOT_LIMIT, torn
from ckptstore.formats.history.records import fold_of, slot_key

__all__ = [
    "STILL",
    "exists",
    "fold_bytes",
    "opened_over",
    "read_all_when_complete",
    "read_when_complete",
    "slot_bytes",
    "text_bytes",
]

STILL: Final = 3.0
"""Seconds without growth after which a torn object counts as abandoned.

A small object is sent with one call, so between two reads only the object of a killed, stopped or starved writer stays
unchanged. A process that lost its processor gets it back within a second or so; a reader that waited much longer would
delay the start of a job after a power cut. A slower writer loses nothing: the slot is complete at the next READ.
"""
LONGEST: Final = 60.0
"""Seconds after which an object that still grows is judged as it is: 20 times `STILL`, for 256 KiB that arrive slowly.
"""
_FIRST: Final = 0.001
_PAUSE: Final = 0.25
"""Seconds of the first pause, and of the longest."""
_MOST: Final = 1024

_abandoned: dict[tuple[str, str, str], str] = {}
"""(URL, run, key) -> hash of torn bytes that were abandoned, so that readers wait for them only once."""


def exists(backend: Backend, key: str) -> bool:
    """Whether an object exists, by a request for it: no decision depends on a listing."""
    try:
        backend.size(key)
    except KeyNotFoundError:
        return False
    return True


def read_when_complete(
    get: Callable[[], bytes],
    unfinished: Callable[[bytes], bool],
    followed: Callable[[], bool] = lambda: False,
    sleep: Callable[[float], None] = time.sleep,
) -> bytes:
    """An object's bytes once they are complete, or as they are if no process writes it any more.

    It is read again with growing pauses until it is complete, has not grown for `STILL` seconds, or a later object
    exists.

    Args:
        get: reads the object; its errors go to the caller.
        unfinished: whether these bytes may be the beginning of an object that is being written.
        followed: whether an object exists that is created only after this one.
        sleep: called with seconds.
    """
    data = get()
    pause, still, waited = _FIRST, 0.0, 0.0
    while unfinished(data) and still < STILL and waited < LONGEST:
        # Checked before the object is read again: if it is torn although its successor existed, it is torn for good.
        after = followed()
        if not after:
            sleep(pause)
            still, waited = still + pause, waited + pause
            pause = min(2 * pause, _PAUSE)
        found = get()
        if after:
            return found
        if found != data:
            data, still = found, 0.0
    return data


@dataclass(slots=True)
class _Torn:
    """The hash of a torn object, and for how many seconds of pauses it has not changed."""

    digest: str
    still: float = 0.0


def read_all_when_complete(
    keys: Iterable[str],
    get: Callable[[str], bytes],
    unfinished: Callable[[str, bytes], bool],
    tell: Callable[[int, int], None] = lambda _done, _total: None,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[tuple[str, bytes | CkptError]]:
    """`read_when_complete` for many objects that have no successor: waits for all torn ones at the same time.

    Args:
        get: reads the object of a key.
        unfinished: whether these bytes of it may be the beginning of an object that is being written.
        tell: called before each pause with the number of torn objects that are done, and their total number.
        sleep: called with seconds.

    Yields:
        Each key once, with its bytes, or with the error of `get`. Torn objects come last.
    """
    torn: dict[str, _Torn] = {}
    for key in keys:
        found = _get_or_error(get, key)
        if isinstance(found, CkptError) or not unfinished(key, found):
            yield key, found
        else:
            torn[key] = _Torn(xxh3_128(found))
    pause, waited, total = _FIRST, 0.0, len(torn)
    while torn:
        tell(total - len(torn), total)
        sleep(pause)
        waited += pause
        for key, before in list(torn.items()):
            found = _get_or_error(get, key)
            if not isinstance(found, CkptError) and unfinished(key, found):
                digest = xxh3_128(found)
                before.still = before.still + pause if digest == before.digest else 0.0
                before.digest = digest
                if before.still < STILL and waited < LONGEST:
                    continue
            del torn[key]
            yield key, found
        pause = min(2 * pause, _PAUSE)


def _get_or_error(get: Callable[[str], bytes], key: str) -> bytes | CkptError:
    try:
        return get(key)
    except CkptError as error:
        return error


def _slot_exists(backend: Backend, key: str) -> bool:
    try:
        return exists(backend, key)
    except ForeignObjectError:  # whatever is there, no writer can create this slot
        return True


def opened_over(backend: Backend, seq: int) -> bool:
    """Whether slot `seq`, which is complete now, may count as damaged for good because it was torn for too long.

    For the writer that created it. A process that opens a term over a torn slot compares that slot once more after its
    OPEN exists. So if nothing follows yet when the slot is complete, every term opened later has its record.
    Raises `StorageError`.
    """
    return backend.shows_parts and _slot_exists(backend, slot_key(seq + 1))


def text_bytes(
    backend: Backend, key: str, limit: int = SLOT_LIMIT, followed: Callable[[], bool] = lambda: False
) -> bytes:
    """A sealed text's bytes, once it is completely written. Raises as `Backend.get`."""
    return read_when_complete(lambda: backend.get(key, limit), torn, followed)


def slot_bytes(backend: Backend, run: str, seq: int, sleep: Callable[[float], None] = time.sleep) -> bytes:
    """A slot's bytes, once it is completely written or torn for good. Raises as `Backend.get`."""
    # Slots are created in order, so a later one shows that this one is no longer being written. (Or a term was opened
    # over it because it was torn for good.)
    return _read_waiting_once(
        backend, run, slot_key(seq), SLOT_LIMIT, torn, lambda: _slot_exists(backend, slot_key(seq + 1)), sleep
    )


def fold_bytes(backend: Backend, run: str, key: str) -> bytes:
    """A fold's bytes, once it is completely written. Raises as `Backend.get`.

    For commands that report damage. READ skips a fold that is not intact, and never waits for one.
    """
    digest16 = (fold_of(key) or (0, ""))[1]
    return _read_waiting_once(backend, run, key, FOLD_LIMIT, lambda data: not intact(data, digest16))


def _read_waiting_once(
    backend: Backend,
    run: str,
    key: str,
    limit: int,
    unfinished: Callable[[bytes], bool],
    followed: Callable[[], bool] = lambda: False,
    sleep: Callable[[float], None] = time.sleep,
) -> bytes:
    """`read_when_complete` for a key that is written only once: if it is torn for good, only one call waits."""
    place = (backend.url, run, key)
    data = read_when_complete(
        lambda: backend.get(key, limit),
        lambda data: unfinished(data) and _abandoned.get(place) != xxh3_128(data),
        followed,
        sleep,
    )
    if unfinished(data):
        while len(_abandoned) >= _MOST:
            _abandoned.pop(next(iter(_abandoned)), None)
        _abandoned[place] = xxh3_128(data)
    return data
