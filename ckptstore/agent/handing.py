"""States handed over to an agent: a buffer is borrowed, filled, given to it, and what becomes of it is heard."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from ckptstore.agent.changes import Packed, updates_form
from ckptstore.agent.forms import Layout, labels_form, read_error, read_info, read_warning
from ckptstore.agent.inherited import Inherited
from ckptstore.agent.lending import Lending, Lent
from ckptstore.agent.replicating import Failed
from ckptstore.agent.starting import Started
from ckptstore.errors import (
    AgentError,
    AgentLostError,
    CommitUnknownError,
    FencedError,
    StoreReplacedError,
    UnmadeStateError,
    WriterClosedError,
    WriterError,
)
from ckptstore.formats.state import FlatState, TensorSource
from ckptstore.frameworks import bridge
from ckptstore.host import exiting
from ckptstore.host.buffers import Bytes
from ckptstore.host.caller_warnings import UnexplainedStepWarning, warn
from ckptstore.host.threads import default_threads, run_all, started_pool
from ckptstore.log.checkpoints import CheckpointInfo
from ckptstore.log.refs import step_number
from ckptstore.store import Store
from ckptstore.write.filling import Filling
from ckptstore.write.layered import Begun
from ckptstore.write.ledger import Failures, Labels, PendingSave, Saves
from ckptstore.write.metrics import Measured, Meter
from ckptstore.write.options import WriterOptions
from ckptstore.write.snapshot import copy_jobs
from ckptstore.write.steps.updates import Found, Update, Updates, looked_up

__all__ = ["AgentRestartWarning", "Begin", "Fill", "FilledByOwner", "HandingOver"]

Fill: TypeAlias = Callable[[Bytes, Sequence[int]], Sequence[Update]]
"""Copies a state to memory, each tensor to where it begins there (in their order) -> what the optimizers did."""

Begin = Callable[[int, Callable[[dict[str, Any]], None], Callable[[BaseException], None]], Started]
"""Starts another agent in place of one that died: the term that has to be the newest, what is told, what is lost."""


class AgentRestartWarning(UserWarning):
    """The agent had died; another one is started, and its first checkpoint is a full."""


@dataclass(frozen=True, slots=True)
class FilledByOwner:
    """How a state is copied by its owner: what copies it, its layout, since when training has waited."""

    fill: Fill
    layout: Layout
    began: float | None


class HandingOver:
    """The part of `AgentWriter` that brings states to its agent, and finds another one when that has died.

    Attributes:
        url, term, parent, inherited, rank: see `AgentWriter`.
    """

    def __init__(self, store: Store, options: WriterOptions, begin: Begin, rank: int | None = None) -> None:
        """Use `ckptstore.agent.writer`, which calls `attach` as well.

        Args:
            rank: which of the ranks this is that save together; None: this process alone saves.
        """
        self.rank = rank
        self.url = store.url
        self.term = -1
        self.parent: CheckpointInfo | None = None
        self.inherited: Inherited | None = None
        self._store = store
        self._options = options
        self._begin = begin
        self._agent: Started | None = None
        self._over: WriterError | None = None
        self._failures = Failures()
        self._saves = Saves(-1, None, self._failures)
        self._futures: dict[int, Future[CheckpointInfo]] = {}
        self._lending = Lending()
        self._copiers = started_pool(default_threads(), "ckptstore-copy")
        self._meter = Meter(options.on_metrics)
        self._beside = started_pool(1, "ckptstore-agent-beside")  # what waits, for who must not
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._ended: Future[None] | None = None
        self._interrupted = False  # by Ctrl-C, so that whoever leaves is told what that waits for
        self._begun: Begun | None = None
        self._stays = False  # the agent, which waits for those of other ranks
        self._remarked = False
        self._laid_out: tuple[Mapping[str, TensorSource], Layout] = ({}, Layout(()))

    def _serve(self, greeting: Mapping[str, Any]) -> CheckpointInfo | None:
        latest = read_info(greeting["latest"])
        self.term = greeting["term"]
        self._saves = Saves(self.term, latest, self._failures)
        return latest

    # -- saving

    def _save(
        self,
        state: Any,
        step: int,
        labels: Labels,
        updates: Updates | None,
        filling: FilledByOwner | None = None,
    ) -> PendingSave:
        if filling is None:
            self._laid_out = {}, Layout(())  # who has planned no more lets go of its tensors
        step = step_number(step)
        began = time.monotonic() if filling is None or filling.began is None else filling.began
        agent, flat = self._admit(state, step)
        measured = self._meter.begin(flat, step, began)
        done: Future[CheckpointInfo] = Future()
        try:
            layout = Layout.of(flat.tensors) if filling is None else filling.layout
            lent = self._lend(agent, layout, step)
            measured.waited = lent.waited
            try:
                if filling is not None:
                    updates = filling.fill(lent.memory, lent.offsets) or None
                else:
                    run_all(self._copiers, copy_jobs([(one, lent.place(name)) for name, one in flat.tensors.items()]))
                changes, beside = self._changes(lent, updates, flat)
                try:
                    self._send(lent, flat.tree, (step, labels, done), changes)
                except BaseException:
                    if beside is not None:
                        beside.give_back()
                    raise
            except BaseException:
                lent.give_back()
                raise
            return self._pending_save(step, done, measured)
        except BaseException as error:
            self._saves.release(step, error)
            measured.failed(error)
            raise
        finally:
            measured.returned()

    def _lend(self, agent: Started, layout: Layout, step: int) -> Lent:
        try:
            return self._lending.lend(agent.link, layout)
        except AgentLostError:
            # It died after it had been found alive: nothing is lost but this call's time.
            agent = self._connected()
            self._saves.check(step)
            self._saves.take(step)
            return self._lending.lend(agent.link, layout)

    def _changes(self, lent: Lent, updates: Updates | None, flat: FlatState) -> tuple[dict[str, Any], Lent | None]:
        """What the optimizers did, as a message says it, and the buffer with copies of the gradients."""
        found = self._updates(updates, flat)
        if not found:
            return {}, None
        packed = Packed()
        form = updates_form(found, lent.layout, packed)
        if not packed.nbytes:
            return {"updates": form}, None
        beside = self._lending.lend_beside(lent.link, packed.nbytes)
        try:
            run_all(self._copiers, copy_jobs(packed.copies(beside.memory)))
        except BaseException:
            beside.give_back()
            raise
        return {"updates": form, "gradients": beside.number}, beside

    def _send(
        self, lent: Lent, tree: Any, save: tuple[int, Labels, Future[CheckpointInfo]], changes: dict[str, Any]
    ) -> None:
        """Say that a buffer is filled, and what with: from now on it is the newest state."""
        step, labels, done = save
        self._futures[step] = done
        self.inherited = None  # its memory may be filled again from now on
        try:
            lent.save({"step": step, "tree": tree, **labels_form(labels), **changes}, partial(self._failed, step))
        except BaseException:
            self._futures.pop(step, None)
            raise

    def _pending_save(self, step: int, done: Future[CheckpointInfo], measured: Measured) -> PendingSave:
        measured.ends_with(done)
        self._saves.watch(step, done)
        seen = partial(self._saves.seen, step)
        return PendingSave(step, done, seen, partial(self._hurry, step), partial(self._cancel, step))

    def _promised(self, flat: FlatState, step: int, began: float) -> tuple[PendingSave, Failed]:
        """A step that the agent is to write of its own memory -> its save, and who is told if that becomes nothing."""
        self._check_open()
        self._failures.raise_unseen()
        self._saves.check(step)
        self._saves.take(step)
        measured = self._meter.begin(flat, step, began)
        done: Future[CheckpointInfo] = Future()
        self._futures[step] = done
        pending = self._pending_save(step, done, measured)
        measured.returned()
        return pending, partial(self._failed, step)

    def _layered(
        self,
        lent: Lent,
        now: FlatState,
        save: tuple[int, Labels, Updates | None],
        copying: tuple[Filling, Measured],
    ) -> PendingSave:
        """Hand a layer-wise save over once its last layer is copied, which a thread waits for."""
        step, labels, updates = save
        filling, measured = copying
        done: Future[CheckpointInfo] = Future()
        changes, beside = self._changes(lent, updates, now)
        saves = self._saves

        def work() -> None:
            try:
                filling.check()
                self._send(lent, now.tree, (step, labels, done), changes)
            except BaseException as error:  # noqa: BLE001  # its saver hears of it
                filling.stop()
                for one in (lent, beside):
                    if one is not None:
                        one.give_back()
                if not done.done():
                    saves.fail(step, error, done)

        try:
            self._check_open()
            pending = self._pending_save(step, done, measured)
            self._beside.submit(work)
        except BaseException:
            if beside is not None:
                beside.give_back()
            raise
        return pending

    def _hurry(self, step: int) -> None:
        with contextlib.suppress(AgentError, RuntimeError):  # what is lost is told where it is waited for
            self._beside.submit(self._ask_quietly, "hurry", step)

    def _ask_quietly(self, do: str, step: int) -> bool:
        agent = self._agent
        try:
            return bool(agent is not None and agent.link.call(do, step=step).get("cancelled"))
        except AgentError:
            return False

    def _cancel(self, step: int) -> bool:
        done = self._futures.get(step)
        cancelled = self._ask_quietly("cancel", step)
        if cancelled and done is not None:
            wait([done])  # its event has come by then, or comes
        return cancelled

    # -- what the agent tells

    def told(self, body: dict[str, Any]) -> None:
        """An event of the agent's; called by the thread that hears."""
        step = body.get("step", -1)
        if body.get("event") == "saved":
            done = self._futures.pop(step, None)
            info = read_info(body["info"])
            if done is not None and info is not None and not done.done():
                done.set_result(info)
        elif body.get("event") == "failed":
            self._failed(step, read_error(body["error"]))
        elif body.get("event") == "warning":
            category, text = read_warning(body["warning"])
            with contextlib.suppress(Warning):  # where warnings are errors: this thread has others to tell
                warn(text, category)

    def _failed(self, step: int, error: BaseException) -> None:
        done = self._futures.pop(step, None)
        if isinstance(error, FencedError | CommitUnknownError | StoreReplacedError):
            self._over = error
        if done is None or done.done():
            return
        if isinstance(error, CancelledError | UnmadeStateError):  # as was asked for, or training goes on without it
            self._saves.release(step, error)
            done.set_exception(error)
            return
        if isinstance(error, AgentLostError):
            error = AgentLostError(f"step {step} may or may not be in the store: {error}")
        self._saves.fail(step, error, done)

    def lost(self, error: BaseException) -> None:
        """The agent is gone; called by the thread that hears."""
        self._lending.forget()
        for step in sorted(self._futures.copy()):
            self._failed(step, error)

    # -- the agent

    def _admit(self, state: Any, step: int) -> tuple[Started, FlatState]:
        """Everything that can be refused is refused here."""
        self._check_open()
        if self._begun is not None:
            self._begun.settle()
        self._failures.raise_unseen()
        agent = self._connected()
        self._saves.check(step)
        flat = self._flattened(state)
        self._saves.take(step)
        return agent, flat

    def _flattened(self, state: Any) -> FlatState:
        return state if isinstance(state, FlatState) else bridge.flattened(state, sharded=self.rank is not None)

    def _connected(self) -> Started:
        """The agent; another one where it has died, with a term of its own that begins with a full."""
        self._check_open()
        agent = self._agent
        assert agent is not None  # `attach` comes first
        if agent.link.lost is None:
            return agent
        if self.rank is not None:
            self._over = WriterClosedError(
                f"term {self.term} is over on every rank, because {agent.link.lost}: open another writer on all of "
                "them, as when training is started again"
            )
            raise self._over
        agent.gone()
        try:
            following = self._begin(self.term, self.told, self.lost)
        except (FencedError, StoreReplacedError) as error:
            self._over = error
            raise
        lost, before = agent.link.lost, self.term
        self._agent = agent = following
        self.inherited = None
        self._serve(following.greeting)
        told = "".join(f"; {text}" for _, text in following.remarks())
        warn(
            f"{self.url}: {lost}; term {before} is over, and an agent of term {self.term} goes on, with a full{told}",
            AgentRestartWarning,
        )
        return agent

    def _check_open(self) -> None:
        if self._process != os.getpid():
            raise WriterClosedError(
                f"the writer of term {self.term} belongs to process {self._process}, not to its fork"
            )
        if self._over is not None:
            raise self._over
        if self._ended is not None:
            why = f" because the interpreter is ending: {exiting.ADVICE}" if exiting.under_way() else ""
            raise WriterClosedError(f"the writer of term {self.term} is closed{why}")

    def _updates(self, updates: Updates | None, flat: FlatState) -> Sequence[Update]:
        if updates is None:
            return ()
        if self._options.diffs is None:
            self._remark(
                "updates= is ignored, and every step is stored whole or as a delta: step diffs need a writer with "
                "diffs=DiffOptions(...)"
            )
            return ()
        found = looked_up(updates, flat)
        if isinstance(found, Found) and found.left_out is not None:
            self._remark(found.left_out)
        return found

    def _remark(self, text: str) -> None:
        """Say once what is not used of `updates`."""
        if not self._remarked:
            self._remarked = True
            warn(text, UnexplainedStepWarning)
