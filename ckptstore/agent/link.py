"""A trainer's connection to its agent: requests, their answers, and what the agent tells unasked."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

from ckptstore.agent.forms import read_error
from ckptstore.agent.frames import Channel, End, Message
from ckptstore.errors import AgentBusyError, AgentError, AgentLostError
from ckptstore.host import background

__all__ = ["Link"]

_open: Final[weakref.WeakSet[Link]] = weakref.WeakSet()


class Link:
    """One connection. Any thread asks; a thread of its own hears.

    Attributes:
        pid: the agent's process.
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
        _open.add(self)
        background.start(self._hear, "agent-hear")

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
        message = self.ask(do, **fields).result()
        message.close()
        return message.body

    def _hear(self) -> None:
        try:
            while True:
                found = self._channel.receive()
                if isinstance(found, End):
                    break
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
        answer = self._asked.pop(body.get("re", -1), None)
        if answer is None:
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
