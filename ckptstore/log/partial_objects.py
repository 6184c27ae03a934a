"""Objects that a reader may see while they are written.

Not every medium creates an object whole: a file that is opened and then filled shows each prefix of what it will hold
(most file systems of fsspec, a folder that another program copies into). A torn object says that nobody has finished
it, not that it is damaged. So whoever finds the newest slot torn, or any other small object, reads it again before he
judges it. This is the one place where that is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from ckptstore.backends.base import Backend
from ckptstore.errors import CkptError, ForeignObjectError, KeyNotFoundError
from ckptstore.formats.checksums import xxh3_128
from ckptstore.formats.folds import FOLD_LIMIT, intact
from ckptstore.formats.record_text import SLOT_LIMIT, torn
from ckptstore.formats.records import fold_of, slot_key

__all__ = ["STILL", "all_arrived", "arrived", "exists", "fold_bytes", "opened_over", "slot_bytes", "text_bytes"]

STILL: Final = 3.0
"""Seconds without growth after which nobody is writing a torn object any more.

A small object is sent with one call, so between two looks at it only a writer that was killed, stopped or starved stays
as it was. A process that has lost its processor gets it back within a second or so; a reader that waited much longer
would keep a job from starting after a power cut. Who is slower loses nothing: the slot is whole at the next look.
"""
LONGEST: Final = 60.0
"""Seconds after which an object that still grows is taken as it is: 20 times `STILL`, for the last byte of 256 KiB."""
_FIRST: Final = 0.001
_PAUSE: Final = 0.25
"""Seconds of the first pause, and of the longest."""
_MOST: Final = 1024

_given_up: dict[tuple[str, str, str], str] = {}
"""(URL, run, key) -> hash of the torn bytes that nobody was writing any more, so that this is waited for once."""


def exists(backend: Backend, key: str) -> bool:
    """Whether an object is there, by asking for it: no decision rests on a listing."""
    try:
        backend.size(key)
    except KeyNotFoundError:
        return False
    return True


def arrived(
    get: Callable[[], bytes],
    unfinished: Callable[[bytes], bool],
    followed: Callable[[], bool] = lambda: False,
    sleep: Callable[[float], None] = time.sleep,
) -> bytes:
    """An object's bytes once they are whole, or as they are where nobody writes it any more.

    It is read again with growing pauses until it is whole, has not grown for `STILL` seconds, or something was created
    after it.

    Args:
        get: reads it; whatever it raises goes to the caller.
        unfinished: whether these bytes may be the beginning of what is being written.
        followed: whether there is an object that is only created after this one.
        sleep: called with seconds.
    """
    data = get()
    pause, still, waited = _FIRST, 0.0, 0.0
    while unfinished(data) and still < STILL and waited < LONGEST:
        # Asked before the object is read again: what is torn although its successor was there is torn for good.
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
    """What was found of a torn object, and for how many seconds of pauses it has been the same."""

    digest: str
    still: float = 0.0


def all_arrived(
    keys: Iterable[str],
    get: Callable[[str], bytes],
    unfinished: Callable[[str, bytes], bool],
    tell: Callable[[int, int], None] = lambda _done, _total: None,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[tuple[str, bytes | CkptError]]:
    """`arrived`, of many objects that have no successor: all torn ones are waited for at the same time.

    Args:
        get: reads the object of a key.
        unfinished: whether these bytes of it may be the beginning of what is being written.
        tell: told, before each pause, for how many torn objects the wait is over, and how many there were.
        sleep: called with seconds.

    Yields:
        Each key once, with its bytes, or with what `get` raised. Torn ones come last.
    """
    torn: dict[str, _Torn] = {}
    for key in keys:
        found = _asked(get, key)
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
            found = _asked(get, key)
            if not isinstance(found, CkptError) and unfinished(key, found):
                digest = xxh3_128(found)
                before.still = before.still + pause if digest == before.digest else 0.0
                before.digest = digest
                if before.still < STILL and waited < LONGEST:
                    continue
            del torn[key]
            yield key, found
        pause = min(2 * pause, _PAUSE)


def _asked(get: Callable[[str], bytes], key: str) -> bytes | CkptError:
    try:
        return get(key)
    except CkptError as error:
        return error


def _taken(backend: Backend, key: str) -> bool:
    try:
        return exists(backend, key)
    except ForeignObjectError:  # whatever lies there, no writer can go on
        return True


def opened_over(backend: Backend, seq: int) -> bool:
    """Whether slot `seq`, which is whole by now, may count as damaged for good, because it was torn for too long.

    For the writer that created it. An opener compares a torn slot before its OPEN once more when the OPEN is there. So
    if nothing follows yet when the slot is whole, every term that is opened from now on has what the slot holds.
    Raises `StorageError`.
    """
    return backend.shows_parts and _taken(backend, slot_key(seq + 1))


def text_bytes(
    backend: Backend, key: str, limit: int = SLOT_LIMIT, followed: Callable[[], bool] = lambda: False
) -> bytes:
    """A sealed text's bytes, once it is not on its way any more. Raises as `Backend.get`."""
    return arrived(lambda: backend.get(key, limit), torn, followed)


def slot_bytes(backend: Backend, run: str, seq: int, sleep: Callable[[float], None] = time.sleep) -> bytes:
    """A slot's bytes, once it is not on its way any more: it is whole, or torn for good. Raises as `Backend.get`."""
    # Slots are created in order, so a later one shows that nobody is writing this one. (Or somebody opened a term over
    # it, because it was torn for good.)
    return _once(backend, run, slot_key(seq), SLOT_LIMIT, torn, lambda: _taken(backend, slot_key(seq + 1)), sleep)


def fold_bytes(backend: Backend, run: str, key: str) -> bytes:
    """A fold's bytes, once it is not on its way any more. Raises as `Backend.get`.

    For whoever reports damage. READ passes over a fold that is not whole, and waits for none.
    """
    digest16 = (fold_of(key) or (0, ""))[1]
    return _once(backend, run, key, FOLD_LIMIT, lambda data: not intact(data, digest16))


def _once(
    backend: Backend,
    run: str,
    key: str,
    limit: int,
    unfinished: Callable[[bytes], bool],
    followed: Callable[[], bool] = lambda: False,
    sleep: Callable[[float], None] = time.sleep,
) -> bytes:
    """`arrived`, of an object whose key is never written with other bytes: what is torn for good is waited for once."""
    place = (backend.url, run, key)
    data = arrived(
        lambda: backend.get(key, limit),
        lambda data: unfinished(data) and _given_up.get(place) != xxh3_128(data),
        followed,
        sleep,
    )
    if unfinished(data):
        while len(_given_up) >= _MOST:
            _given_up.pop(next(iter(_given_up)), None)
        _given_up[place] = xxh3_128(data)
    return data
