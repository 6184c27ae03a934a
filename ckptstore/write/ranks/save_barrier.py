"""Agree on the step after which all ranks save, or end, when only one of them was asked to.

Ranks are not at the same step, and a signal may reach only one of them. So they agree, in rounds:

1. A rank that received a request posts ``wish``.
2. Every rank promises not to go beyond its current step without an answer: it posts ``promise/<rank>``, the number of
   the step, and the requests that it received itself.
3. When all ranks have promised, rank 0 posts ``answer``: the highest of the steps, and all requests.

No rank is beyond that step, and every rank reaches it. A thread posts these messages, so a rank promises even while its
script waits in a collective. The script itself waits only at the end of the promised step, and only for messages that
threads post. A rank that leaves posts ``left``. From then on no agreement is made, and each rank continues alone.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection
from typing import Final

from ckptstore.errors import CkptError, MailboxError, MissingRankError
from ckptstore.host import interpreter_exit
from ckptstore.host.background_threads import Periodic
from ckptstore.write.ranks.messages.key_value_store import Group, ReplyDeadline, fetch, post, withdraw
from ckptstore.write.ranks.messages.rank_messages import pack, unpack

__all__ = ["SaveBarrier"]

_LOOK_SECONDS: Final = 0.1
_LOOKS_A_SECOND: Final = 1000
"""Polls by all ranks together; the mailbox takes 60 us for each."""


class SaveBarrier:
    """One rank's side of the agreement, from `start` to `leave`."""

    def __init__(
        self, group: Group, base: str, step: int, asked: Callable[[], Collection[str]], timeout: float
    ) -> None:
        """
        Args:
            base: prefix of all keys; the same on all ranks, and used by nothing else.
            step: the last step that is done.
            asked: returns the current requests to this rank; a thread calls it.
            timeout: seconds that ranks wait for each other.
        """
        self._group = group
        self._base = base
        self._asked = asked
        self._timeout = timeout
        self._box = group.mailbox.clone()
        self._changed = threading.Condition()
        self._step = step
        self._promised: int | None = None
        self._agreed: dict[int, frozenset[str]] = {}
        self._answered: set[str] = set()  # requests that were agreed and are not done yet
        self._round = 0
        self._over = False
        self._late = False
        self._parted = False
        seconds = max(_LOOK_SECONDS, group.size / _LOOKS_A_SECOND)
        self._looks = Periodic(seconds, self._look, "accord")

    def start(self) -> None:
        """Start polling for the requests of other ranks."""
        self._looks.start()

    def after(self, step: int) -> frozenset[str]:
        """Note that a step is done -> what all ranks do now.

        Waits if this rank has promised not to continue without an answer.

        Raises:
            MissingRankError: no answer came in time. The ranks agree on nothing more.
        """
        with self._changed:
            self._step = step
            free = self._changed.wait_for(lambda: self._promised is None or step < self._promised, 2 * self._timeout)
            if not free or self._late:
                self._end()
                self._late = False
                raise MissingRankError(
                    f"step {step}: the ranks did not agree within {self._timeout:g} s on the step after which they "
                    "save or end, as one of them was asked to; each continues by itself"
                )
            return self._agreed.pop(step, frozenset())

    def done(self) -> None:
        """Note that this rank has done what was agreed last. The same request may come again."""
        with self._changed:
            self._answered.clear()

    def say_farewell(self, step: int, seconds: float) -> bool:
        """Tell the others that the action agreed for `step` is done -> whether all ranks say so within `seconds`.

        With 0 seconds it tells the others and does not wait.
        """
        self._parted = True
        keys = [f"{self._base}/farewell/{step}/{rank}" for rank in range(self._group.size)]
        try:
            self._box.set(keys[self._group.rank], b"1")
            return ReplyDeadline(seconds, ranks=len(keys)).wait(lambda: self._box.has(keys))
        except MailboxError:
            return False

    def leave(self) -> None:
        """Stop taking part. The others are told, unless this rank has said farewell."""
        self._part()
        self._looks.join(_LOOK_SECONDS)

    def _part(self) -> None:
        self._looks.stop()
        self._give_up()
        if self._parted:
            return
        self._parted = True
        with contextlib.suppress(MailboxError):
            self._box.set(f"{self._base}/left/{self._group.rank}", b"1")

    # -- the polling thread

    def _look(self) -> None:
        if self._over or interpreter_exit.under_way():  # a script that ends without closing also leaves
            self._part()
            return
        try:
            if self._promise():
                self._hear()
        except CkptError:  # the mailbox is gone; the next save raises that
            self._give_up()

    def _promise(self) -> bool:
        """Promise not to go beyond the current step, if any rank has asked for a round -> whether one has."""
        asked = set(self._asked()) - self._answered
        wish = self._key("wish", self._round)
        if not asked and not self._box.has([wish]):
            return False
        with self._changed:
            self._promised = self._step + 1
        key = f"{self._key('promise', self._round)}/{self._group.rank}"
        post(self._box, key, pack([self._promised, sorted(asked)]))
        self._box.set(wish, b"1")
        return True

    def _hear(self) -> None:
        """Wait for the answer; rank 0 posts it."""
        key, left = self._key("answer", self._round), f"{self._base}/left/0"
        if self._group.rank == 0:
            self._answer(key)
        deadline = ReplyDeadline(self._timeout, ranks=self._group.size)
        in_time = deadline.wait(lambda: self._over or self._box.has([key]) or self._box.has([left]))
        letter = None if self._over else fetch(self._box, key)
        step, asked = (None, []) if letter is None else unpack(letter, key)
        with self._changed:
            if step is None:
                self._late = self._late or not in_time
                self._end()
                return
            self._promised = None
            self._agreed[step] = self._agreed.get(step, frozenset()) | frozenset(asked)
            self._answered |= set(asked)
            self._round += 1
            self._changed.notify_all()
        if self._group.rank == 0:
            self._clear(self._round - 2)

    def _answer(self, key: str) -> None:
        """Rank 0: wait for all promises, then post the highest step. If a rank has left or is late, post None."""
        ranks = range(self._group.size)
        promises = [f"{self._key('promise', self._round)}/{rank}" for rank in ranks]
        left = [f"{self._base}/left/{rank}" for rank in ranks]
        gone = False

        def there() -> bool:
            nonlocal gone
            missing = [rank for rank in ranks if not self._box.has([promises[rank]])]
            gone = self._over or any(self._box.has([left[rank]]) for rank in missing)
            return gone or not missing

        in_time = ReplyDeadline(self._timeout, ranks=len(ranks)).wait(there)
        if gone or not in_time:
            self._late = self._late or not in_time
            post(self._box, key, pack([None, []]))
            return
        found = [unpack(letter, at) for at in promises if (letter := fetch(self._box, at)) is not None]
        asked = sorted({one for _, wanted in found for one in wanted})
        post(self._box, key, pack([max(step for step, _ in found), asked]))

    def _give_up(self) -> None:
        with self._changed:
            self._end()

    def _end(self) -> None:
        """Take part in no further round, and wake the waiting thread."""
        self._over = True
        self._promised = None
        self._changed.notify_all()

    def _key(self, what: str, number: int) -> str:
        return f"{self._base}/{number}/{what}"

    def _clear(self, number: int) -> None:
        """Rank 0: remove the messages of a round. No rank reads them any more: all took part in the next one."""
        if number < 0:
            return
        promises = [f"{self._key('promise', number)}/{rank}" for rank in range(self._group.size)]
        withdraw(self._box, [*promises, self._key("answer", number)])
        self._box.delete(self._key("wish", number))
