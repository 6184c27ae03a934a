"""A trainer's connection to its agent: requests, their answers, and what the agent tells unasked."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

from ckptstore.agent.client.process_state import state_of, stopped
from ckptstore.agent.protocol.frames import Channel, End, Message
from ckptstore.agent.protocol.message_fields import read_error
from ckptstore.errors import AgentBusyError, AgentError, AgentLostError, AgentSilentError
from ckptstore.host import background_threads
from ckptstore.host.caller_warnings import warn

__all__ = ["AgentLink", "SilentAgentWarning"]

LOOK_SECONDS: Final = 1.0
"""Seconds between two looks at a process that says nothing."""
SAID_SECONDS: Final = 5.0
"""Seconds for which it is stopped when that is said."""
PATIENT_SECONDS: Final = 60.0
"""Seconds for which it is stopped when what waits for it fails. One that runs is waited for as long as it takes."""
_LOG: Final = logging.getLogger("ckptstore.agent")
_open: Final[weakref.WeakSet[AgentLink]] = weakref.WeakSet()


class SilentAgentWarning(UserWarning):
    """The agent does not answer: it is stopped, or has been silent for long. Names process, state and remedy."""


class AgentLink:
    """One connection. Any thread asks; a thread of its own hears, and looks at the process while it says nothing.

    Attributes:
        pid: the agent's process.
        silent: why nothing is asked at present: the process has been stopped for long; None: it is not.
        quiet: is told when that begins. What the agent has taken, it may still do once it is continued.
        late: is given each answer that nobody waits for any more.
    """

    def __init__(
        self, channel: Channel, told: Callable[[dict[str, Any]], None], lost: Callable[[BaseException], None]
    ) -> None:
        """
        Args:
            told: is given each event, by the thread that hears.
            lost: is told why nothing more will be heard, once, after everything else.
        """
        self.pid = channel.pid
        self._channel = channel
        self._told = told
        self._at_end = lost
        self._asked: dict[int, Future[Message]] = {}
        self._next = 0
        self._lock = threading.Lock()
        self._why: AgentError | None = None
        self._lost: AgentError | None = None
        self._over = threading.Event()
        self.silent: str | None = None
        self.quiet: Callable[[AgentSilentError], None] = lambda _: None
        self.late: Callable[[AgentLink, Message], None] = lambda _, __: None
        self._abandoned: set[int] = set()
        self._heard = time.monotonic()
        self._stopped_since: float | None = None
        self._remarked = False
        self._asleep = False
        _open.add(self)
        background_threads.start(self._hear, "agent-hear")

    @property
    def lost(self) -> AgentError | None:
        """Why nothing more is heard, once everybody is told so; None: it is open."""
        if self._lost is not None:
            self._over.wait()
        return self._lost

    def ask(self, do: str, **fields: Any) -> Future[Message]:
        """Ask for something -> what answers. It fails with what the agent says, or with `AgentLostError`."""
        answer: Future[Message] = Future()
        with self._lock:
            if self._lost is not None:
                answer.set_exception(self._lost)
                return answer
            if self.silent is not None and do != "release":  # which is for when it goes on
                answer.set_exception(self._silence())
                return answer
            if not self._asked:
                self._heard = time.monotonic()
            number = self._next
            self._next += 1
            self._asked[number] = answer
            try:
                self._channel.post({"do": do, "id": number, **fields})
            except BaseException:
                del self._asked[number]
                raise
        return answer

    def call(self, do: str, **fields: Any) -> dict[str, Any]:
        """Ask, and wait. A descriptor that comes is closed."""
        message = self.answer(self.ask(do, **fields))
        message.close()
        return message.body

    def answer(self, asked: Future[Message]) -> Message:
        """Wait for an answer. Ctrl-C gives everything up that waits for an agent that is stopped."""
        try:
            return asked.result()
        except (KeyboardInterrupt, SystemExit):
            self.give_up()
            raise

    def give_up(self) -> None:
        """Whoever waits does not want to: what waits for a stopped agent fails now. One that runs goes on."""
        if self._lost is None and (why := stopped(self.pid)) is not None:
            self._fail(why)

    def _fail(self, why: str) -> None:
        with self._lock:
            self.silent = why
            asked, self._asked = self._asked, {}
            self._abandoned.update(asked)
        for answer in asked.values():
            answer.set_exception(self._silence())
        self.quiet(self._silence())

    def _silence(self) -> AgentSilentError:
        return AgentSilentError(
            f"the agent (process {self.pid}) does not answer: {self.silent}; `kill -KILL {self.pid}` ends it, and what "
            "it has in memory alone is lost then"
        )

    def _look(self) -> None:
        """Called by the thread that hears while nothing comes."""
        now = time.monotonic()
        why = stopped(self.pid)
        if why is None:
            self._stopped_since, self.silent = None, None
            if self._remarked and not self._asleep:
                self._remarked = False
                _LOG.info("the agent (process %d) goes on", self.pid)
            if self._asked and not self._asleep and now - self._heard > PATIENT_SECONDS:
                self._asleep = True  # said once until it is heard again
                self._say(
                    f"has said nothing for {PATIENT_SECONDS:g} s while an answer is waited for: {state_of(self.pid)}"
                )
            return
        since = self._stopped_since = self._stopped_since or now
        if now - since >= SAID_SECONDS and not self._remarked:
            self._remarked = True
            self._say(
                f"does not answer: {why}; `kill -KILL {self.pid}` ends it. Saves wait for it, and fail when it has "
                f"been stopped for {PATIENT_SECONDS:g} s; Ctrl-C gives up"
            )
        if now - since >= PATIENT_SECONDS and self.silent is None:
            self._fail(why)

    def _say(self, text: str) -> None:
        warn(f"the agent (process {self.pid}) {text}", SilentAgentWarning)

    def _hear(self) -> None:
        try:
            while True:
                found = self._channel.receive(self._look, LOOK_SECONDS)
                if isinstance(found, End):
                    break
                self._heard = time.monotonic()
                self._asleep = False
                self._stopped_since, self.silent = None, None
                self._take(found)
        except AgentError as error:
            self._why = error
        except BaseException as error:  # noqa: BLE001  # a thread's last words: who waits must not wait for ever
            self._why = AgentError(f"{type(error).__name__}: {error}")
        self._end()

    def _take(self, message: Message) -> None:
        body = message.body
        if "event" in body:
            message.close()
            if body["event"] == "broken":
                error = read_error(body.get("error"))
                self._why = error if isinstance(error, AgentError) else AgentError(str(error))
            else:
                self._told(body)
            return
        number = body.get("re", -1)
        answer = self._asked.pop(number, None)
        if answer is None:
            if number in self._abandoned and "error" not in body:
                self.late(self, message)
            self._abandoned.discard(number)
            message.close()
        elif "error" in body:
            message.close()
            answer.set_exception(read_error(body["error"]))
        else:
            answer.set_result(message)

    def _end(self) -> None:
        why = self._why
        if why is None or not isinstance(why, AgentBusyError):
            said = "" if why is None else f" ({why})"
            why = AgentLostError(f"the agent (process {self.pid}) is gone{said}")
        with self._lock:
            self._lost = why
            asked, self._asked = self._asked, {}
        try:
            for answer in asked.values():
                answer.set_exception(why)
            self._at_end(why)
            self._channel.close()
        finally:
            self._over.set()

    def close(self) -> None:
        """Hang up; everything that is asked still fails."""
        self._channel.hang_up()

    def leave(self) -> None:
        """In a fork, which has none of the threads: let go of the connection, which is the parent's."""
        self._channel.leave()


def _leave_all() -> None:
    for link in list(_open):
        with contextlib.suppress(OSError):
            link.leave()


# Prevents: a child that keeps the connection of a trainer open that was killed.
os.register_at_fork(after_in_child=_leave_all)
