"""Answers the requests of one trainer. docs/agent.md lists requests and answers.

The agent's main thread takes requests one after the other, and never blocks. What takes time (a buffer that is not
free yet, a flush, a rollback) is answered later, by another thread.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from ckptstore.agent.protocol.frames import PROTOCOL, Channel, End, Message
from ckptstore.agent.protocol.message_fields import (
    StateLayout,
    error_form,
    info_form,
    read,
    read_labels,
    read_layout,
    texts,
    warning_form,
    whole_number,
)
from ckptstore.agent.protocol.package_version import package
from ckptstore.agent.server.agent_snapshot import FilledBuffer, UnprovenState, UnwrittenState
from ckptstore.agent.server.replica_replay import ReplicaReplay, read_replica, warmed
from ckptstore.agent.server.shared_buffers import SharedBuffer
from ckptstore.agent.server.snapshot_keeper import SnapshotKeeper
from ckptstore.errors import AgentError, CkptError
from ckptstore.host.threads import started_pool
from ckptstore.write.saves.ledger import PendingSave

__all__ = ["SessionEnd", "TrainerSession"]

_LAYOUTS: Final = 16
_MOST_NAMES: Final = 1000


class SessionEnd(enum.Enum):
    """Why a session ended."""

    CLOSED = "the trainer has closed its writer"
    GONE = "the trainer is gone"
    TOLD = "the agent was told to end"


class TrainerSession:
    """Serves one trainer."""

    def __init__(self, keeper: SnapshotKeeper, channel: Channel, about: dict[str, Any]) -> None:
        """
        Args:
            about: members of every greeting: what the agent was started with.
        """
        self._keeper = keeper
        self._channel = channel
        self._about = about
        self._layouts: dict[int, StateLayout] = {}
        self._next = 0
        self._mapped: set[int] = set()  # buffers whose descriptor the trainer has
        self._later: ThreadPoolExecutor = started_pool(1, "ckptstore-agent-later")
        self._over: SessionEnd | None = None
        self._replicas: dict[int, ReplicaReplay] = {}  # only the newest
        self._does: dict[str, Callable[[int, dict[str, Any]], None]] = {
            "hello": self._hello,
            "layout": self._layout,
            "prepare": self._prepare,
            "buffer": self._buffer,
            "beside": self._beside,
            "release": self._release,
            "save": self._save,
            "warm": self._warm,
            "replica": self._replicate,
            "advance": self._advance,
            "persist": self._persist,
            "hurry": self._hurry,
            "cancel": self._cancel,
            "newest": self._newest,
            "wait": self._wait,
            "poll": self._poll,
            "tag": self._tag,
            "untag": self._untag,
            "rollback": self._rollback,
            "close": self._close,
        }

    def serve(self) -> SessionEnd:
        """Answer requests until the trainer closes its writer, or is gone, or sends an invalid message."""
        try:
            while self._over is None:
                found = self._channel.receive()
                if isinstance(found, End):
                    self._over = SessionEnd.GONE if found is End.GONE else SessionEnd.TOLD
                    break
                self._answer(found)
        except AgentError as error:
            self._channel.post({"event": "broken", "error": error_form(error)})
            self._over = SessionEnd.GONE
        self._later.shutdown()
        if self._over is not SessionEnd.TOLD:  # else saves are written first, and reported
            self._channel.finish()
        return self._over

    def warn(self, category: type[Warning], text: str) -> None:
        """Send a warning to the trainer."""
        self._channel.post({"event": "warning", "warning": warning_form(category, text)})

    def break_off(self, error: AgentError) -> None:
        """Tell the trainer why this agent ends."""
        self._channel.post({"event": "broken", "error": error_form(error)})

    def finish(self) -> None:
        """Send what was posted, and close the connection."""
        self._channel.finish()

    def _answer(self, message: Message) -> None:
        message.close()  # trainers send no descriptors
        body = message.body
        number, does = body.get("id"), body.get("do")
        if type(number) is not int or not isinstance(does, str):
            raise AgentError(f"a message without id and do: {body!r:.200}")
        work = self._does.get(does)
        try:
            if work is None:
                raise AgentError(f"{does!r:.40}: unknown request; this agent speaks protocol {PROTOCOL}")
            work(number, body)
        except (CkptError, MemoryError) as error:
            self._fail(number, error)
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            self._fail(number, AgentError(f"{does}: {type(error).__name__}: {error}"))

    def _reply(self, number: int, descriptor: int | None = None, **body: Any) -> None:
        self._channel.post({"re": number, **body}, descriptor)

    def _fail(self, number: int, error: BaseException) -> None:
        self._channel.post({"re": number, "error": error_form(error)})

    def _in_turn(self, number: int, work: Callable[[], dict[str, Any] | None]) -> None:
        """Do what takes time in another thread, in the order of the requests, and answer then."""

        def run() -> None:
            try:
                answer = work()
            except BaseException as error:  # noqa: BLE001  # the trainer gets it as the answer
                self._fail(number, error)
            else:
                self._reply(number, **(answer or {}))

        self._later.submit(run)

    # -- requests

    def _hello(self, number: int, body: dict[str, Any]) -> None:
        if body["protocol"] != PROTOCOL:
            raise AgentError(f"protocol {body['protocol']!r:.20}; this agent speaks {PROTOCOL}")
        self._in_turn(number, self.greeting)

    def greeting(self) -> dict[str, Any]:
        """The answer to ``hello`` and ``start``."""
        keeper = self._keeper
        newest = keeper.newest
        kept = None
        if newest is not None:
            kept = {"step": newest.step, "durable": newest.durable is not None}
        return {
            "protocol": PROTOCOL,
            **self._about,
            "run": keeper.run,
            "term": keeper.term,
            "latest": info_form(keeper.latest),
            "newest": kept,
            "stale": keeper.stale(),
            **package(),
        }

    def _layout(self, number: int, body: dict[str, Any]) -> None:
        layout = read("layout", body["tensors"], read_layout)
        if len(self._layouts) >= _LAYOUTS:
            del self._layouts[min(self._layouts)]
        self._layouts[self._next] = layout
        offsets = [layout.plan.offsets[one.name] for one in layout.tensors]
        self._reply(number, layout=self._next, nbytes=layout.plan.size, offsets=offsets)
        self._next += 1

    def _known(self, body: dict[str, Any]) -> StateLayout:
        layout = self._layouts.get(body["layout"])
        if layout is None:
            raise AgentError(f"layout {body['layout']!r:.20} is unknown, or no longer known")
        return layout

    def _prepare(self, number: int, body: dict[str, Any]) -> None:
        layout, count = self._known(body), whole_number(body["count"], 64)

        def work() -> None:
            self._keeper.pool.prepare(layout.plan.size, count)

        self._in_turn(number, work)

    def _buffer(self, number: int, body: dict[str, Any]) -> None:
        def lent(buffer: SharedBuffer | MemoryError) -> None:
            if isinstance(buffer, MemoryError):
                self._fail(number, buffer)
            else:
                self._lend(number, buffer)

        self._keeper.pool.lend(self._known(body).plan.size, lent)

    def _beside(self, number: int, body: dict[str, Any]) -> None:
        self._lend(number, self._keeper.pool.lend_beside(whole_number(body["nbytes"], 1 << 46)))

    def _lend(self, number: int, buffer: SharedBuffer) -> None:
        fresh = buffer.number not in self._mapped
        self._mapped.add(buffer.number)
        descriptor = buffer.shared.descriptor if fresh else None
        self._reply(number, descriptor, buffer=buffer.number, nbytes=buffer.nbytes)

    def _release(self, number: int, body: dict[str, Any]) -> None:
        buffer = whole_number(body["buffer"])

        def work() -> None:
            self._keeper.pool.give_back(self._keeper.pool.lent(buffer))

        if self._replicas:  # after the steps that may read it
            self._in_turn(number, work)
            return
        work()
        self._reply(number)

    def _save(self, number: int, body: dict[str, Any]) -> None:
        step = whole_number(body["step"])
        filled = FilledBuffer(
            whole_number(body["buffer"]),
            self._known(body),
            body["tree"],
            *read_labels(body),
            body.get("updates"),
            None if body.get("gradients") is None else whole_number(body["gradients"]),
        )

        def work() -> None:
            if not body.get("persist", True):
                self._keeper.hold(filled, step)
                return
            try:
                self._keeper.save(filled, step, self._tell)
            except AgentError as error:  # the request was invalid: the writer was given nothing
                self._forgone(body, error)
                raise

        if self._replicas:  # after the steps that the agent still has to take
            self._in_turn(number, work)
            return
        work()
        self._reply(number)

    def _warm(self, number: int, _: dict[str, Any]) -> None:
        self._later.submit(self._quietly, warmed)
        self._reply(number)

    def _replicate(self, number: int, body: dict[str, Any]) -> None:
        replica = read_replica(body, self._known(body), self._keeper)
        self._replicas = {number: replica}
        self._keeper.replicates()
        self._later.submit(self._quietly, replica.prepare)
        self._reply(number, replica=number)

    def _quietly(self, work: Callable[[], None]) -> None:
        """Do preparatory work. If it fails, the request that needs it reports why."""
        with contextlib.suppress(Exception):
            work()

    def _advance(self, number: int, body: dict[str, Any]) -> None:
        replica = self._replicas.get(body["replica"])
        if replica is None:
            raise AgentError(f"replica {body['replica']!r:.20} is unknown, or no longer known")

        def work() -> dict[str, Any]:
            try:
                persist = body["persist"]
                if type(persist) is not bool:
                    raise AgentError(f"persist: {persist!r:.80} in place of true or false")
                made = self._made(replica, body)
            except BaseException as error:
                self._forgone(body, error)
                raise
            if isinstance(made, UnprovenState):
                names = [made.layout.tensors[number].name for number in made.unproven]
                self._keeper.keep_unproven(made)
                self._forgone(body, AgentError(f"{names[0]} is not what training has"))
                return {"differs": names[:_MOST_NAMES], "unproven": [list(one) for one in made.unproven.items()]}
            self._keeper.keep(made)
            if persist:
                self._persisted(made.step, None)
            return {}

        self._in_turn(number, work)

    def _made(self, replica: ReplicaReplay, body: dict[str, Any]) -> UnwrittenState | UnprovenState:
        try:
            return read("advance", body, replica.advance)
        except RuntimeError as error:  # torch's, if an optimizer cannot use what it was given
            raise AgentError(f"the step cannot be repeated: {error}") from error

    def _forgone(self, body: dict[str, Any], why: BaseException) -> None:
        """A step that was not computed is not written. Tell the other ranks, which may have computed it."""
        if body.get("persist", True) and type(body.get("step")) is int:
            self._keeper.forgo(body["step"], why)

    def _persist(self, number: int, body: dict[str, Any]) -> None:
        labels = read_labels(body)
        step = whole_number(body["step"])

        def work() -> dict[str, Any]:
            newest = self._keeper.newest
            if newest is None or newest.step != step:
                error = AgentError(f"step {step} is not the newest")
                self._forgone(body, error)
                raise error
            self._persisted(step, labels)
            return {}

        self._in_turn(number, work)

    def _persisted(self, step: int, labels: tuple[Any, Sequence[str]] | None) -> None:
        """Start to write the newest state. A failure is reported as for any save."""
        try:
            self._keeper.persist(self._tell, labels)
        except (CkptError, MemoryError) as error:
            self._channel.post({"event": "failed", "step": step, "error": error_form(error)})

    def _tell(self, pending: PendingSave) -> None:
        error = pending.exception()
        if error is not None:
            self._channel.post({"event": "failed", "step": pending.step, "error": error_form(error)})
        else:
            self._channel.post({"event": "saved", "step": pending.step, "info": info_form(pending.result())})

    def _hurry(self, number: int, body: dict[str, Any]) -> None:
        pending = self._keeper.pending(whole_number(body["step"]))
        if pending is not None:
            pending.hurry()
        self._reply(number)

    def _cancel(self, number: int, body: dict[str, Any]) -> None:
        pending = self._keeper.pending(whole_number(body["step"]))
        self._reply(number, cancelled=pending is not None and pending.cancel())

    def _newest(self, number: int, _: dict[str, Any]) -> None:
        newest = self._keeper.newest
        if newest is None:
            raise AgentError("nothing is kept")

        def work() -> None:
            self._reply(
                number,
                newest.buffer.shared.descriptor,
                step=newest.step,
                durable=newest.durable is not None,
                state=self._keeper.hash_of(newest),
                tensors=newest.layout.rows(),
                tree=newest.flat.tree,
                nbytes=newest.layout.plan.size,
                offsets=[newest.layout.plan.offsets[one.name] for one in newest.layout.tensors],
            )

        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001  # the trainer gets it as the answer
                self._fail(number, error)

        self._later.submit(run)

    def _wait(self, number: int, _: dict[str, Any]) -> None:
        self._in_turn(number, self._keeper.wait)

    def _poll(self, number: int, _: dict[str, Any]) -> None:
        self._in_turn(number, self._keeper.poll)

    def _tag(self, number: int, body: dict[str, Any]) -> None:
        name, ref = texts([body["name"], body["ref"]])
        self._in_turn(number, lambda: {"info": info_form(self._keeper.tag(name, ref))})

    def _untag(self, number: int, body: dict[str, Any]) -> None:
        (name,) = texts([body["name"]])
        self._in_turn(number, lambda: self._keeper.untag(name))

    def _rollback(self, number: int, body: dict[str, Any]) -> None:
        (ref,) = texts([body["ref"]])

        def work() -> dict[str, Any]:
            parent = self._keeper.rollback(ref)
            return {"term": self._keeper.term, "latest": info_form(parent)}

        self._in_turn(number, work)

    def _close(self, number: int, _: dict[str, Any]) -> None:
        answered = False  # by the thread that does the work

        def stay() -> None:
            nonlocal answered
            answered = True
            self._reply(number, stays=True)

        def work() -> None:
            try:
                self._keeper.persist_quietly()  # a step that was not due, or that the medium was too slow for
                self._keeper.close(held_up=stay)
            except BaseException as error:  # noqa: BLE001  # the trainer gets it as the answer, if it is still here
                if not answered:
                    self._fail(number, error)
            else:
                if not answered:
                    self._reply(number)

        self._later.submit(work)
        self._over = SessionEnd.CLOSED
