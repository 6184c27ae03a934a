"""The trainer's connection to its agent: requests, answers and events."""

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
from ckptstore.errors import AgentBusyError, AgentError, AgentLostError, AgentSilentError, UsageError
from ckptstore.host import background_threads
from ckptstore.host.caller_warnings import warn

__all__ = ["AgentLink", "SilentAgentWarning"]

LOOK_SECONDS: Final = 1.0
"""Seconds between two looks at a process that sends nothing."""
SAID_SECONDS: Final = 5.0
"""Seconds that a process is stopped before the warning."""
PATIENT_SECONDS: Final = 60.0
"""Seconds after which requests to a stopped process fail. Requests to a running process wait without limit."""
_LOG: Final = logging.getLogger("ckptstore.agent")
_open: Final[weakref.WeakSet[AgentLink]] = weakref.WeakSet()


class SilentAgentWarning(UserWarning):
    """The agent does not answer: it is stopped, or has sent nothing for long. Names process, state and remedy."""


class AgentLink:
    """One connection. Any thread sends requests. A separate thread receives, and watches the process meanwhile.

    Attributes:
        pid: the agent's process.
        silent: why requests fail now: the agent's process has been stopped for too long. None: requests work.
        quiet: called when requests begin to fail. An agent that is continued later may still do what it has accepted.
        late: called with each answer that nobody waits for any more.
    """

    def __init__(
        self, channel: Channel, told: Callable[[dict[str, Any]], None], lost: Callable[[BaseException], None]
    ) -> None:
        """
        Args:
            told: called with each event, by the thread that receives.
            lost: called once, after everything else, with the reason why the connection ended.
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
        self._hearing: int | None = None  # the thread that receives
        _open.add(self)
        background_threads.start(self._hear, "agent-hear")

    @property
    def lost(self) -> AgentError | None:
        """Why the connection ended, once `lost` was called; None: it is open."""
        if self._lost is not None:
            self._over.wait()
        return self._lost

    def ask(self, do: str, **fields: Any) -> Future[Message]:
        """Send a request -> its future answer, or the agent's error, `AgentLostError`, `AgentSilentError`."""
        answer: Future[Message] = Future()
        with self._lock:
            if self._lost is not None:
                answer.set_exception(self._lost)
                return answer
            if self.silent is not None and do != "release":  # a release may wait until the agent is continued
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
                self._abandoned.add(number)  # Ctrl-C: it may be sent, and answered
                raise
        return answer

    def call(self, do: str, **fields: Any) -> dict[str, Any]:
        """Send a request and wait for the answer. Closes a descriptor that comes with it."""
        message = self.answer(self.ask(do, **fields))
        message.close()
        return message.body

    def check_may_wait(self) -> None:
        """Raise `UsageError` in the thread that receives the answers: it would wait for itself, for ever."""
        if threading.get_ident() == self._hearing:
            raise UsageError(
                "this call waits for the agent, and this thread receives what the agent sends: PendingSave.when_done "
                "may not call it; let another thread do so"
            )

    def answer(self, asked: Future[Message]) -> Message:
        """Wait for an answer. Ctrl-C makes all requests to a stopped agent fail. Raises as `check_may_wait`."""
        self.check_may_wait()
        try:
            return asked.result()
        except (KeyboardInterrupt, SystemExit):
            self.give_up()
            raise

    def give_up(self) -> None:
        """Make all requests fail now, if the agent is stopped. Requests to a running agent continue."""
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
            f"the agent (process {self.pid}) does not answer: {self.silent}; `kill -KILL {self.pid}` ends it, and "
            "loses what it has only in memory"
        )

    def _look(self) -> None:
        """Look at the process. The thread that receives calls this while nothing arrives."""
        now = time.monotonic()
        why = stopped(self.pid)
        if why is None:
            self._stopped_since, self.silent = None, None
            if self._remarked and not self._asleep:
                self._remarked = False
                _LOG.info("the agent (process %d) continues", self.pid)
            if self._asked and not self._asleep and now - self._heard > PATIENT_SECONDS:
                self._asleep = True  # one warning until it sends again
                self._say(f"has not answered a request for {PATIENT_SECONDS:g} s: {state_of(self.pid)}")
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
        self._hearing = threading.get_ident()
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
        except BaseException as error:  # noqa: BLE001  # else requests would wait for ever
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
        """Shut the connection down; all open requests fail."""
        self._channel.hang_up()

    def leave(self) -> None:
        """Close a forked process's copy of the connection, which is the parent's."""
        self._channel.leave()


def _leave_all() -> None:
    for link in list(_open):
        with contextlib.suppress(OSError):
            link.leave()


# Prevents: a forked child that keeps the connection open after the trainer was killed.
os.register_at_fork(after_in_child=_leave_all)
