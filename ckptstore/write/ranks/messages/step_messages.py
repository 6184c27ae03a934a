"""Post the letters of one step, and wait for those of the other ranks.

Keys begin with run, term, step and attempt, so that a letter of an earlier attempt is never taken for one of this
attempt. A rank that fails posts the reason under ``failed``; every rank that waits raises it at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from ckptstore.errors import FailedRankError, MissingRankError, UnmadeStateError
from ckptstore.formats.checksums import xxh3_128
from ckptstore.write.ranks.messages.key_value_store import Mailbox, ReplyDeadline, fetch, post, withdraw
from ckptstore.write.ranks.messages.rank_messages import pack, unpack
from ckptstore.write.ranks.messages.silent_ranks import SilentRanks

__all__ = ["Exchange", "attempt_id"]

_LOOK_AROUND: Final = 1.0
"""Seconds between two checks of the steps that the missing ranks are at."""
_LOOK_FOR_ENDED: Final = 0.1
"""Seconds between two checks for ranks that save no more: few ranks ever post that, and each check is a request."""


def attempt_id(nonce: str, step: int, attempt: int) -> str:
    """The uuid of the segment that holds the tree of a step. Every rank can compute it before the segment is written.

    Args:
        nonce: of the term.
        attempt: how often the step failed before.
    """
    return xxh3_128(f"{nonce}/{step}/{attempt}".encode())


@dataclass(slots=True)
class Exchange:
    """The letters of one attempt at one step, as one thread of one rank sends and receives them.

    Attributes:
        mailbox: this thread's.
        base: prefix of all keys of the term.
        step: the step.
        attempt: how often the step failed before.
        rank, size: of the group.
        ended: raises if waiting has to stop.
        silence: the ranks that timed out.
        given: when this rank's caller saved the step, on the monotonic clock.
    """

    mailbox: Mailbox
    base: str
    step: int
    attempt: int
    rank: int
    size: int
    ended: Callable[[], None]
    silence: SilentRanks = field(default_factory=SilentRanks)
    given: float = field(default_factory=time.monotonic)
    _last_look: float = field(default=0.0, init=False)
    _last_look_for_ended: float = field(default=0.0, init=False)

    @property
    def prefix(self) -> str:
        """Prefix of its keys."""
        return f"{self.base}/{self.step}.{self.attempt}"

    def using(self, mailbox: Mailbox) -> Exchange:
        """The same exchange for another thread."""
        return replace(self, mailbox=mailbox)

    def key(self, what: str, rank: int | None = None) -> str:
        """Key of a letter: one for all ranks, or one per rank."""
        return f"{self.prefix}/{what}" if rank is None else f"{self.prefix}/{what}/{rank}"

    def post(self, what: str, letter: bytes, rank: int | None = None) -> None:
        """Send a letter."""
        post(self.mailbox, self.key(what, rank), letter)

    def fail(self, error: BaseException) -> None:
        """Post that this rank will not do its part, and why."""
        reason = f"{type(error).__name__}: {error}"
        self.post("failed", pack([self.rank, reason, isinstance(error, UnmadeStateError)]))

    def failed(self) -> FailedRankError | None:
        """The failure that a rank has posted; None: none has."""
        letter = fetch(self.mailbox, self.key("failed"))
        if letter is None:
            return None
        rank, reason, unmade = unpack(letter, self.key("failed"))
        kind = UnmadeStateError if unmade else FailedRankError
        return kind(f"step {self.step} was not saved: rank {rank}: {reason}")

    def every(self, what: str, deadline: ReplyDeadline, doing: str) -> list[bytes]:
        """Wait for the letter of every rank -> the letters, in the order of the ranks.

        Args:
            doing: what a missing rank did not do, for the error.

        Raises:
            MissingRankError: not all came in time; or a missing rank has continued with a later step; or since this
                step was saved, an earlier step's wait for it has timed out.
            FailedRankError: a rank posted that it failed.
        """
        keys = [self.key(what, rank) for rank in range(self.size)]

        def there() -> bool:
            if self.mailbox.has(keys):
                return True
            if (error := self.failed()) is not None:
                raise error
            self._check_ended(rank for rank, key in enumerate(keys) if not self.mailbox.has([key]))
            self._look_around(keys)
            # Prevents: N steps in flight that wait for a dead rank one after the other, for N times the timeout.
            if self.silence.since(self.given) and (why := self.silence.about(self._missing(keys), self.given)):
                raise MissingRankError(f"step {self.step} was not saved, {why}")
            return False

        if not deadline.wait(there):
            missing = self._missing(keys)
            why = self._late(missing, deadline.seconds, doing)
            self.silence.note(missing, self.step, why)
            raise MissingRankError(f"step {self.step} was not saved: {why}")
        letters = [fetch(self.mailbox, key) for key in keys]
        return [letter if letter is not None else b"" for letter in letters]

    def _missing(self, keys: Sequence[str]) -> list[int]:
        return [rank for rank, key in enumerate(keys) if not self.mailbox.has([key])]

    def first(self, keys: list[str], deadline: ReplyDeadline, *, patient: bool = True) -> bytes | None:
        """Wait for a letter of rank 0 -> the letter at the first of these keys that has one; None: none came in time.

        Returns None at once if an earlier step's wait for rank 0 has timed out since this step was saved.

        Args:
            patient: the deadline leaves rank 0 enough time to wait for other ranks itself. False: a timeout does not
                show that rank 0 is lost.

        Raises:
            MissingRankError: no letter will come, because rank 0 saves no such step any more.
        """

        def there() -> bool:
            if any(self.mailbox.has([key]) for key in keys):
                return True
            self._check_ended((0,))
            return patient and self.silence.about((0,), self.given) is not None

        if not deadline.wait(there) and patient:
            self.silence.note((0,), self.step, "rank 0 does not answer")
        return next((letter for key in keys if (letter := fetch(self.mailbox, key)) is not None), None)

    def see(self) -> None:
        """Post that this rank knows the step's result: it reads no more letters of the step."""
        self.mailbox.set(self.key("seen", self.rank), b"1")

    def seen(self) -> bool:
        """Whether every rank except 0 has called `see`."""
        return self.mailbox.has([self.key("seen", rank) for rank in range(1, self.size)])

    def hurry(self) -> None:
        """Ask rank 0 to write the batch that begins with this step now."""
        self.mailbox.set(self.key("hurry"), b"1")

    def hurried(self) -> bool:
        """Whether a rank has called `hurry`."""
        return self.mailbox.has([self.key("hurry")])

    def arrived(self) -> None:
        """Post that this rank has handed in its part: it will hand in no part of an earlier step."""
        self.mailbox.set(f"{self.base}/at/{self.rank}", str(self.step).encode())

    def _check_ended(self, ranks: Iterable[int]) -> None:
        """Prevents: waiting for the part of a rank whose trainer is dead, while its agent lives."""
        now = time.monotonic()
        if now - self._last_look_for_ended < _LOOK_FOR_ENDED:
            return
        self._last_look_for_ended = now
        if not self.mailbox.has([f"{self.base}/over"]):
            return
        for rank in ranks:
            last = self.mailbox.get(f"{self.base}/over/{rank}")
            if last is not None and int(last) < self.step:
                raise MissingRankError(
                    f"step {self.step} was not saved: the trainer of rank {rank} ended before it passed this step on; "
                    f"its last step is {int(last)}"
                )

    def _look_around(self, keys: list[str]) -> None:
        """Prevents: a wait of minutes for the part of a rank that saves other steps."""
        now = time.monotonic()
        if now - self._last_look < _LOOK_AROUND:
            return
        self._last_look = now
        for rank, key in enumerate(keys):
            at = self.mailbox.get(f"{self.base}/at/{rank}")
            if at is not None and int(at) > self.step and not self.mailbox.has([key]):
                raise MissingRankError(
                    f"step {self.step} was not saved: rank {rank} has saved step {int(at)}, and not this one: "
                    "all ranks have to save the same steps"
                )

    def _late(self, missing: list[int], seconds: float, doing: str) -> str:
        some = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        ranks = f"rank {some}" if len(missing) == 1 else f"ranks {some}"
        places = [self.mailbox.get(f"{self.base}/at/{rank}") for rank in missing[:1]]
        last = f"; the last step of rank {missing[0]} is {int(places[0])}" if places and places[0] else ""
        return f"{ranks} did not {doing} within {seconds:g} s{last}"

    def clear(self) -> None:
        """Remove every letter of this attempt. Rank 0 calls it once all ranks have seen the result."""
        for what in ("items", "division", "share", "part"):
            withdraw(self.mailbox, [self.key(what, rank) for rank in range(self.size)])
        for rank in range(self.size):
            self.mailbox.delete(self.key("seen", rank))
        common = ("verdict", "failed", "order", "batch", "states")
        withdraw(self.mailbox, [self.key(what) for what in common])
        self.mailbox.delete(self.key("hurry"))
