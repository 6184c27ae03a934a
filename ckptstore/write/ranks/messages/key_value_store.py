"""Send letters of any length between ranks, through a small key-value store that all of them see.

No collective is used: a collective in a background thread would interfere with those of training. Values have at most
`PIECE` bytes (torch's TCPStore cuts the connection at 8 MiB). So longer letters go in pieces, which are posted before
the letter itself. Only the timeouts depend on a clock.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol, Self

from ckptstore.errors import FormatError, MailboxError
from ckptstore.formats.checksums import xxh3_64

__all__ = [
    "LETTER_LIMIT",
    "PIECE",
    "Group",
    "LocalMailbox",
    "Mailbox",
    "ReplyDeadline",
    "fetch",
    "fetch_all",
    "found_all",
    "post",
    "withdraw",
    "withdraw_known",
]

PIECE: Final = 1 << 20
"""Most bytes of a value."""
LETTER_LIMIT: Final = 256 << 20
"""Most bytes of a letter. A part of 100,000 tensors has about 10 MB."""
_HEAD: Final = struct.Struct("<QQ")  # length, hash
_FIRST_PAUSE: Final = 0.0005
LONGEST_PAUSE: Final = 0.05
"""Seconds between two looks for the letter of another rank: the first pause, and the longest of few ranks."""
_A_LOOK: Final = 10e-6
"""Seconds of the store's host for one look: no rank looks again before all have looked once."""
LOOKS: Final = 1000.0
"""Looks a second, at most, by all ranks that have waited for long: a thousand ranks look once a second each.

Prevents: looks that grow with the square of the ranks, because more ranks wait, and each waits longer."""
_LATER: Final = 0.125
"""Pauses in between are this part of the time waited, so that a letter is found at most so much later than it came."""


class Mailbox(Protocol):
    """Keys with values that every rank of a group sees. Each thread has its own (`clone`).

    Every method raises `MailboxError` if the store behind it can no longer be reached.
    """

    def set(self, key: str, value: bytes) -> None:
        """Store at most `PIECE` bytes and a short header; replace an earlier value. Later reads see the new value."""

    def set_all(self, values: Mapping[str, bytes]) -> None:
        """`set` for each, in their order, as few requests as possible. Together they have at most 2 `PIECE` bytes."""

    def get(self, key: str) -> bytes | None:
        """The value, or None if there is none. Does not wait."""

    def get_all(self, keys: list[str]) -> list[bytes] | None:
        """The values of all of these keys; None if one has none. Does not wait."""

    def has(self, keys: list[str]) -> bool:
        """Whether all of these keys have values. Does not wait."""

    def delete(self, key: str) -> None:
        """Remove a value; do nothing if there is none."""

    def clone(self) -> Self:
        """The same store for another thread."""


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks that save together, as one of them sees them.

    Attributes:
        rank: the number of this rank, from 0; rank 0 commits.
        size: the number of ranks.
        mailbox: the mailbox that all of them see.
        ended: called during each wait for other ranks; raises if the messages still missing will never come.
    """

    rank: int
    size: int
    mailbox: Mailbox
    ended: Callable[[], None] = lambda: None


class LocalMailbox:
    """A `Mailbox` among the threads of one process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._gone = threading.Event()

    def set(self, key: str, value: bytes) -> None:
        """See `Mailbox.set`."""
        self._check()
        if len(value) > PIECE + _HEAD.size:
            raise MailboxError(f"{key}: {len(value)} bytes are too many for one value")
        self._values[key] = bytes(value)

    def set_all(self, values: Mapping[str, bytes]) -> None:
        """See `Mailbox.set_all`."""
        for key, value in values.items():
            self.set(key, value)

    def get(self, key: str) -> bytes | None:
        """See `Mailbox.get`."""
        self._check()
        return self._values.get(key)

    def get_all(self, keys: list[str]) -> list[bytes] | None:
        """See `Mailbox.get_all`."""
        return found_all(self, keys)

    def has(self, keys: list[str]) -> bool:
        """See `Mailbox.has`."""
        self._check()
        return all(key in self._values for key in keys)

    def delete(self, key: str) -> None:
        """See `Mailbox.delete`."""
        self._check()
        self._values.pop(key, None)

    def clone(self) -> Self:
        """Return itself: single operations of a dict are atomic."""
        return self

    def keys(self) -> list[str]:
        """The keys that have values, sorted."""
        return sorted(self._values)

    def die(self) -> None:
        """Make every later call fail, for all threads, as if the store's host were gone."""
        self._gone.set()

    def _check(self) -> None:
        if self._gone.is_set():
            raise MailboxError("the mailbox is gone")


@dataclass(slots=True)
class ReplyDeadline:
    """Waits for other ranks by polling: first every half millisecond, then ever less often, at least every 50 ms.

    Among more than 50 ranks the longest pause grows with their number, up to an eighth of the time waited. A wait in
    the store itself would hold its connection and could not be interrupted.

    Attributes:
        seconds: how long to wait.
        ended: called at every poll; raises if there is a reason to stop at once.
        ranks: how many ranks may wait at the same time.
    """

    seconds: float
    ended: Callable[[], None] = lambda: None
    ranks: int = 1
    _until: float = field(init=False)

    def __post_init__(self) -> None:
        self._until = time.monotonic() + self.seconds

    def wait(self, done: Callable[[], bool]) -> bool:
        """Wait -> whether `done` returned true in time. It is called at least once.

        May be called again, for the time that is left.
        """
        now = began = time.monotonic()
        shortest, longest = max(_FIRST_PAUSE, self.ranks * _A_LOOK), max(LONGEST_PAUSE, self.ranks / LOOKS)
        while not done():
            self.ended()
            # Prevents: a process that was stopped just after a look, and gives up although the answer came meanwhile.
            # The time is that before the look: once it is over, there is one more.
            left = self._until - now
            if left <= 0:
                return False
            pause = max(shortest, _LATER * (now - began))
            time.sleep(min(pause, longest, left))
            now = time.monotonic()
        return True


def found_all(mailbox: Mailbox, keys: list[str]) -> list[bytes] | None:
    """`Mailbox.get_all` of a mailbox that reads one value at a time."""
    if not mailbox.has(keys):
        return None
    values = [mailbox.get(key) for key in keys]
    found = [value for value in values if value is not None]
    return found if len(found) == len(keys) else None


def post(mailbox: Mailbox, key: str, letter: bytes, also: Mapping[str, bytes] | None = None) -> None:
    """Send a letter of at most `LETTER_LIMIT` bytes. A rank that sees it can fetch all of it.

    Args:
        also: short values that are set after it, in the same request.

    Raises:
        MailboxError: it is too long, or the store is gone.
    """
    if len(letter) > LETTER_LIMIT:
        raise MailboxError(f"{key}: a letter of {len(letter)} bytes; at most {LETTER_LIMIT} can be sent")
    head = _HEAD.pack(len(letter), xxh3_64(letter))
    short = len(letter) <= PIECE
    if not short:
        _post_pieces(mailbox, key, letter)
    last = head + letter if short else head
    if also:
        mailbox.set_all({key: last, **also})
    else:
        mailbox.set(key, last)


def _post_pieces(mailbox: Mailbox, key: str, letter: bytes) -> None:
    for number, start in enumerate(range(0, len(letter), PIECE)):
        mailbox.set(_piece(key, number), letter[start : start + PIECE])


def fetch(mailbox: Mailbox, key: str) -> bytes | None:
    """Return a letter, or None if it was not sent yet.

    Raises:
        FormatError: the value is not a letter, or the letter is incomplete.
        MailboxError: the store is gone.
    """
    value = mailbox.get(key)
    return None if value is None else _letter(mailbox, key, value)


def fetch_all(mailbox: Mailbox, keys: list[str]) -> list[bytes] | None:
    """The letters at all of these keys, or None if one was not sent yet. Raises as `fetch`."""
    values = mailbox.get_all(keys)
    return None if values is None else [_letter(mailbox, *found) for found in zip(keys, values, strict=True)]


def _letter(mailbox: Mailbox, key: str, value: bytes) -> bytes:
    """The letter that begins with `value`, the value of its key."""
    if len(value) < _HEAD.size:
        raise FormatError(f"{key}: not a letter")
    length, digest = _HEAD.unpack_from(value)
    if length > LETTER_LIMIT:
        raise FormatError(f"{key}: a letter of {length} bytes")
    body = value[_HEAD.size :]
    if length > PIECE:
        body = b"".join(mailbox.get(_piece(key, number)) or b"" for number in range(-(-length // PIECE)))
    if xxh3_64(body) != digest:
        raise FormatError(f"{key}: the letter is not whole")
    return body


def withdraw(mailbox: Mailbox, keys: Iterable[str]) -> None:
    """Remove letters, with their pieces."""
    for key in keys:
        value = mailbox.get(key)
        if value is None:
            continue
        mailbox.delete(key)
        length = _HEAD.unpack_from(value)[0] if len(value) == _HEAD.size else 0
        _delete_pieces(mailbox, key, min(length, LETTER_LIMIT))


def withdraw_known(mailbox: Mailbox, lengths: Mapping[str, int]) -> None:
    """`withdraw` for letters whose lengths are known, which need not be read again."""
    for key, length in lengths.items():
        mailbox.delete(key)
        if length > PIECE:
            _delete_pieces(mailbox, key, length)


def _delete_pieces(mailbox: Mailbox, key: str, length: int) -> None:
    for number in range(-(-length // PIECE)):
        mailbox.delete(_piece(key, number))


def _piece(key: str, number: int) -> str:
    return f"{key}.{number}"
