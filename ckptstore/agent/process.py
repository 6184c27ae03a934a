"""Runs an agent's process from its trainer's ``start`` message to its end. `startup` passes the trainer's socket.

The process ends when the trainer closes its writer, on SIGTERM (after pending saves are written), or when no successor
of the trainer connects within ``linger_seconds``.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from ckptstore.agent.protocol.agent_address import AgentAddress
from ckptstore.agent.protocol.frames import PROTOCOL, Channel, End, peer_of
from ckptstore.agent.protocol.message_fields import (
    error_form,
    number,
    read,
    read_info,
    read_options,
    texts,
    warning_form,
)
from ckptstore.agent.protocol.rank_job import RankJob
from ckptstore.agent.server.rank_keeper import RankKeeper
from ckptstore.agent.server.rank_saves import RankSaves
from ckptstore.agent.server.shutdown_wait import shutdown_wait_of
from ckptstore.agent.server.snapshot_keeper import LocalKeeper, SnapshotKeeper
from ckptstore.agent.server.trainer_session import SessionEnd, TrainerSession
from ckptstore.errors import AgentBusyError, AgentError, AgentLostError, CkptError, StoreReplacedError
from ckptstore.host import background_threads
from ckptstore.store import open as open_store
from ckptstore.write.writer_opening import open_writer

__all__ = ["main"]

_CLAIM_SECONDS: Final = 1.0

_Why: TypeAlias = Callable[[], str | None]


@dataclass(frozen=True, slots=True)
class _Start:
    """The members of the ``start`` message."""

    url: str
    name: str
    run: str | None
    parent: Any
    after: int | None
    options: dict[str, Any]
    environment: dict[str, Any]
    linger: float
    job: RankJob | None

    @classmethod
    def of(cls, body: dict[str, Any]) -> _Start:
        if body["do"] != "start" or body["protocol"] != PROTOCOL:
            raise AgentError(
                f"{body['do']!r:.20} of protocol {body['protocol']!r:.20}; version {PROTOCOL} begins with start"
            )
        url, name = texts([body["url"], body["name"]])
        parent = body["parent"]
        if isinstance(parent, dict):
            parent = read_info(parent)
        elif parent is not None:
            (parent,) = texts([parent])
        run, after = body.get("run"), body.get("after")
        options, environment = dict(body["options"]), dict(body["environment"])
        job = None if body.get("ranks") is None else RankJob.read(body["ranks"])
        return cls(url, name, run, parent, after, options, environment, number(body["linger_seconds"]), job)


class _Ending:
    """Whether the agent has to end (SIGTERM, or a lost agent of another rank).

    Attributes:
        wake: a descriptor that is readable once it has to.
        why: the reason, if it is not a signal.
    """

    def __init__(self) -> None:
        reading, writing = socket.socketpair()
        reading.setblocking(False)
        writing.setblocking(False)
        self._ends = reading, writing  # kept open
        self.why: str | None = None
        self.wake = reading.fileno()
        signal.signal(signal.SIGTERM, lambda *_: None)  # the wakeup descriptor below is what counts
        for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(ignored, signal.SIG_IGN)
        signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        # Prevents: an agent that nobody can end, because its trainer was started with SIGTERM blocked.
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    def told(self) -> bool:
        """Whether the agent has to end. Any thread may call it."""
        poll = select.poll()
        poll.register(self.wake, select.POLLIN)
        return bool(poll.poll(0))

    def end(self, why: str) -> None:
        """Make the agent end. Any thread may call it."""
        self.why = why
        with contextlib.suppress(BlockingIOError):  # the byte is there already
            self._ends[1].send(b"!")


class _Listener:
    """Accepts connections in a thread. One trainer is served at a time; others are refused.

    Attributes:
        serving: the trainer that is served now; None: no trainer.
    """

    def __init__(self, place: AgentAddress, wake: int, serving: Channel) -> None:
        self.serving: Channel | None = serving
        self._socket = place.listen()
        self._wake = wake
        self._arrived: Channel | None = None
        self._lock = threading.Lock()
        self._bell, self._bells = socket.socketpair()
        background_threads.start(self._accept, "agent-accept")

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # closed
            if peer_of(connection)[1] != os.getuid():
                connection.close()  # root may connect in spite of the file mode
                continue
            channel = Channel(connection, wake=self._wake)
            if not self._admitted(channel):
                channel.post({"event": "broken", "error": error_form(AgentBusyError(_BUSY.format(os.getpid())))})
                channel.finish(1.0)

    def _admitted(self, channel: Channel) -> bool:
        """Accept a trainer as the next one -> False: a live trainer is served, or another one waits."""
        with self._lock:
            serving, before = self.serving, self._arrived
            if serving is not None and serving.alive():
                return False
            # Prevents: a trainer refused because of one that hung up while this process was stopped.
            if before is not None and before.alive():
                return False
            self._arrived = channel
            if before is None:
                self._bells.send(b"!")
        if before is not None:
            before.close()
        return True

    def waits(self) -> bool:
        """Whether a trainer has connected that is not served yet. Any thread may call it."""
        return self._arrived is not None

    def next(self, seconds: float) -> Channel | None:
        """Wait for the next trainer; None: none came within `seconds`, or the agent has to end."""
        bell = self._bell.fileno()
        ready = select.select([bell, self._wake], [], [], seconds)[0]
        if bell not in ready or self._wake in ready:
            return None
        with self._lock:
            self._bell.recv(1)
            self.serving, self._arrived = self._arrived, None
            return self.serving

    def close(self) -> None:
        """Accept no more connections."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if self._arrived is not None:
            self._arrived.close()


_BUSY: Final = (
    "the agent (process {}) of this run and trainer serves another process, which is alive: two trainers never share "
    "one: end that process, or give each trainer a store of its own (or agent.writer(name=...))"
)


def _opened(
    start: _Start, storage: dict[str, Any], channel: Channel, ending: _Ending
) -> tuple[SnapshotKeeper, list[list[str]]]:
    """Open the store for writing -> the keeper of the agent's states, and warnings for the trainer."""
    keeper: SnapshotKeeper
    options = read("options", start.options, read_options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        store = open_store(start.url, storage_options=storage)
        if start.run is not None and store.run != start.run:
            raise StoreReplacedError(
                f"{start.url}: holds the store of run {store.run} instead of run {start.run}; nothing was written"
            )
        if start.job is None:
            made = open_writer(store.journal, start.parent, options, environment=start.environment, after=start.after)
            keeper = LocalKeeper(store, made, options.max_in_flight)
        else:
            shutdown_wait = shutdown_wait_of(start.job.options.timeout, start.linger, ending.told)
            saves = RankSaves.opened(
                store,
                start.parent,
                options,
                start.job,
                start.environment,
                ending.end,
                lambda: channel.alive() and not ending.told(),
                shutdown_wait,
            )
            keeper = RankKeeper(store, saves, options.max_in_flight)
    told = [warning_form(one.category, str(one.message)) for one in caught]
    return keeper, told


def _serve(
    start: _Start,
    place: AgentAddress,
    channel: Channel,
    keeper: SnapshotKeeper,
    told: list[list[str]],
    why: _Why,
) -> SessionEnd:
    """Serve one trainer after another -> why the last session ended.

    Args:
        why: returns why the agent ends, if neither its trainer nor a signal is the reason.
    """
    about: dict[str, Any] = {"options": start.options, "environment": start.environment}
    if start.job is not None:
        about["size"] = start.job.size
    session = TrainerSession(keeper, channel, about)
    assert channel.wake is not None  # `main` gives it
    listener = _Listener(place, channel.wake, channel)
    shutdown_wait = keeper.shutdown_wait
    shutdown_wait.wanted = listener.waits

    def show(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
        session.warn(category, str(message))

    warnings.simplefilter("always")
    warnings.showwarning = show  # the trainer shows what the writer warns of
    try:
        channel.post({"re": 0, "pid": os.getpid(), "warnings": told, **session.greeting()})
        while (over := session.serve()) is SessionEnd.GONE:
            listener.serving = None
            waited = shutdown_wait.spent
            keeper.settle()
            # The time that the agent waited for other ranks counts, too.
            successor = listener.next(max(0.0, start.linger - (shutdown_wait.spent - waited)))
            if successor is None:
                break
            session = TrainerSession(keeper, successor, about)
        if over is not SessionEnd.CLOSED:
            keeper.persist_quietly()
            with contextlib.suppress(CkptError):  # a failed save was reported to the trainer, if it is there
                keeper.close()
            if reasons := [one for one in (why(), keeper.lost) if one is not None]:
                session.break_off(AgentLostError("; ".join(reasons)))
        session.finish()
        return over
    finally:
        listener.close()


def run(channel: Channel, ending: _Ending) -> int:
    """Run an agent for the trainer at the other end of `channel` -> the exit status."""
    found = channel.receive()
    if isinstance(found, End):
        return 0
    found.close()
    place: AgentAddress | None = None
    try:
        storage = dict(found.body.pop("storage_options", {}))  # holds credentials, which errors must not quote
        start = read("start", found.body, _Start.of)
        place = AgentAddress(start.url, start.name)
        place.claim(_CLAIM_SECONDS)
        keeper, told = _opened(start, storage, channel, ending)
    except (CkptError, MemoryError, RuntimeError) as error:
        channel.post({"re": 0, "error": error_form(error)})
        channel.finish()
        if place is not None:
            place.vacate()
        return 1
    try:
        over = _serve(start, place, channel, keeper, told, lambda: ending.why)
        keeper.leave(farewell=over is SessionEnd.CLOSED)
    finally:
        place.vacate()
    return 0


def main() -> int:
    """Entry point of `startup` and of ``python -m ckptstore.agent.process FD``."""
    ending = _Ending()
    descriptor = int(sys.argv[1])
    os.chdir("/")  # keeps no mount busy but the store's
    return run(Channel(socket.socket(fileno=descriptor), wake=ending.wake), ending)


if __name__ == "__main__":
    sys.exit(main())
