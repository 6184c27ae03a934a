"""Opens a store for writing by an agent: the agent that an earlier trainer left, or a new one."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Sequence
from typing import Any, Final, Literal, TypedDict, Unpack

from ckptstore.agent.client.agent_launch import OnEvent, OnLost, RunningAgent, find_agent, start_agent
from ckptstore.agent.client.agent_rendezvous import AgentRendezvous, KeptStep
from ckptstore.agent.client.agent_term import AgentRestartWarning
from ckptstore.agent.client.agent_writer import AgentWriter
from ckptstore.agent.client.inherited_state import Inherited, read_inherited
from ckptstore.agent.protocol.agent_address import AgentAddress
from ckptstore.agent.protocol.message_fields import info_form, options_form, read_info
from ckptstore.agent.protocol.package_version import other_package
from ckptstore.agent.protocol.rank_job import RankJob, place_name
from ckptstore.backends.base import Backend
from ckptstore.errors import AgentBusyError, AgentLostError, CkptError, CorruptionError, UsageError
from ckptstore.frameworks import bridge
from ckptstore.host import interpreter_exit
from ckptstore.host.buffers import DEFAULT_BUDGET
from ckptstore.host.caller_warnings import DeterminismWarning, WarningsLast, warn
from ckptstore.host.option_checks import seconds
from ckptstore.log.checkpoint_info import CheckpointInfo
from ckptstore.store import Store
from ckptstore.store import open as open_store
from ckptstore.write.policy.delta_options import DeltaOptions
from ckptstore.write.policy.diff_options import DiffOptions
from ckptstore.write.ranks.rank_options import RankOptions
from ckptstore.write.ranks.rank_writer_factory import to_group
from ckptstore.write.saves.save_metrics import OnMetrics
from ckptstore.write.writer_options import WriterOptions

__all__ = ["writer"]

_LINGER: Final = 300.0
_LONGEST: Final = 200
_BEGINNING: Final = 60.0
"""Seconds to wait for an agent that starts or ends."""
_PAUSE: Final = 0.02


class AgentSettings(TypedDict, total=False):
    """Options that `Store.writer` has, too; see there."""

    staging_bytes: int
    threads: int
    max_in_flight: int
    poll_seconds: float | None
    deltas: DeltaOptions | Literal["auto"] | int | None
    diffs: DiffOptions | None
    on_metrics: OnMetrics | None
    keep: Sequence[str] | None
    space: int | str | None


def writer(
    store: Store | str | os.PathLike[str],
    parent: str | int | CheckpointInfo | None = "latest",
    *,
    name: str = "",
    linger_seconds: float = _LINGER,
    group: Any = None,
    ranks: RankOptions | None = None,
    **settings: Unpack[AgentSettings],
) -> AgentWriter:
    """Open a store for writing by a separate process, which owns the buffers and survives this one.

    If an earlier trainer was killed, and its agent still lives and continues from `parent`, that agent continues in its
    term, and `AgentWriter.inherited` is the newest state of that trainer. Otherwise a new agent opens a new term.

    Args:
        store: a store, its path or URL; not ``memory://``, which another process cannot open.
        parent: as for `Store.writer`. If it is not the newest checkpoint, a running agent is ended.
        name: identifies this trainer among the run's trainers (for example its rank); each has its own agent.
        linger_seconds: how long the agent waits for a successor once this process is gone. It keeps whole states in
            memory until then.
        group, ranks: as for `Store.writer`. Each rank of the group calls this and gets its own agent, all on one
            machine; they save one checkpoint together. If all agents kept the same step, successors continue from it.
        settings: `staging_bytes`, `threads`, `max_in_flight`, `poll_seconds`, `deltas`, `diffs`, `on_metrics`, `keep`,
            `space` as for `Store.writer`.

    Raises:
        AgentBusyError: the agent of this store and name serves another live process.
        AgentError: no agent can be started.
        and what `Store.writer` raises.
    """
    interpreter_exit.check()
    opened = store if isinstance(store, Store) else open_store(store)
    url = _address(opened.backend)
    if not isinstance(name, str) or len(name) > _LONGEST:
        raise UsageError(f"name: {name!r:.80}; a text is needed, of at most {_LONGEST} letters")
    linger = seconds("linger_seconds", linger_seconds)
    if linger is None:
        raise UsageError("linger_seconds: give a number of seconds, after which an agent without a trainer ends")
    options = _options(settings)
    opener: _Opener = _Opener(opened, url, name, linger, options)
    if group is not None:
        opener = _RankOpener(
            opened, url, name, linger, options, AgentRendezvous(to_group(group), ranks or RankOptions())
        )
    elif ranks is not None:
        raise UsageError("ranks= says how the ranks of a group save together: give group=, too")
    made = AgentWriter(opened, options, opener.again, opener.rank)
    try:
        with WarningsLast():
            agent, inherited = opener.first(parent, made.told, made.lost)
            made.attach(agent, inherited)
            _remark(made, agent)
    except BaseException:
        made.close()
        raise
    return made


def _options(settings: AgentSettings) -> WriterOptions:
    """The options of the agent's writer. Raises `UsageError`."""
    if unknown := sorted(settings.keys() - AgentSettings.__annotations__.keys()):
        known = ", ".join(AgentSettings.__annotations__)
        raise UsageError(f"{unknown[0]}: an agent's writer has no such option; it has {known}")
    deltas = settings.get("deltas")
    if deltas is not None and not isinstance(deltas, DeltaOptions):
        deltas = DeltaOptions(interval=deltas)
    diffs = settings.get("diffs")
    if isinstance(diffs, DiffOptions) and diffs.recompute:
        raise UsageError(
            "recompute: not with an agent; strategy='replica' of a Checkpointer computes steps in the agent"
        )
    return WriterOptions(
        settings.get("staging_bytes", DEFAULT_BUDGET),
        settings.get("threads", 2),
        settings.get("max_in_flight", 1),
        settings.get("poll_seconds", 5.0),
        deltas,
        diffs,
        None,
        settings.get("on_metrics"),
        settings.get("keep"),
        settings.get("space"),
    )


def _remark(made: AgentWriter, agent: RunningAgent) -> None:
    """Pass the agent's warnings on, and warn of a changed environment."""
    for category, text in agent.warnings():
        warn(text, category)
    if differences := bridge.environment_differences(agent.greeting["environment"], bridge.environment()):
        what = f"continuing from step {made.step}: the run will not be bit-identical to one that never stopped: "
        warn(what + "; ".join(differences), DeterminismWarning)


class _Opener:
    """Finds or starts the agents of one writer.

    Attributes:
        rank: the rank of this process; None: it saves alone.
    """

    def __init__(self, store: Store, url: str, name: str, linger: float, options: WriterOptions) -> None:
        self._store = store
        self._url = url
        self._storage = _portable(store.backend)
        self._name = name
        self._linger = linger
        self._options = options_form(options)
        self._run: str | None = None
        self.rank: int | None = None

    def first(
        self, parent: str | int | CheckpointInfo | None, told: OnEvent, lost: OnLost
    ) -> tuple[RunningAgent, Inherited | None]:
        """Find or start the first agent -> it, and the state that an earlier trainer's agent kept."""
        place = AgentAddress(self._url, self._name)
        until = time.monotonic() + _BEGINNING
        inherited: Inherited | None = None
        try:
            while True:
                left = find_agent(place, told, lost)
                if left is not None:
                    inherited = self._inherited_state(left, parent)
                    if self._goes_on(left, parent) and (inherited is not None or left.greeting["newest"] is None):
                        return left, inherited
                    _end(left)
                try:
                    return self._start(place, parent, None, told, lost), inherited
                except AgentBusyError:
                    # If a trainer died while its agent started, that agent holds the lock and does not listen yet.
                    if time.monotonic() > until:
                        raise
        finally:
            place.close()

    def again(self, after: int, told: OnEvent, lost: OnLost) -> RunningAgent:
        """Start another agent after one died in term `after`."""
        self._options |= {"keep": None, "space": None}  # the store's rules may have been changed since
        place = AgentAddress(self._url, self._name)
        try:
            return self._start(place, "latest", after, told, lost)
        finally:
            place.close()

    def _goes_on(self, left: RunningAgent, parent: str | int | CheckpointInfo | None) -> bool:
        """Whether a running agent continues from `parent`, in this store, with these options."""
        greeting = left.greeting
        if other := other_package(greeting):
            warn(
                f"{self._url}: the agent that an earlier trainer left (process {left.link.pid}) {other}: it writes "
                "pending saves and ends, and another agent is started",
                AgentRestartWarning,
            )
            return False
        return self._fits(left, parent) and bool(greeting["options"] == self._options)

    def _fits(self, left: RunningAgent, parent: str | int | CheckpointInfo | None) -> bool:
        greeting = left.greeting
        if parent is None or greeting["stale"] or greeting["run"] != self._store.run:
            return False
        latest = read_info(greeting["latest"])
        if parent == "latest":
            return True
        if latest is None:
            return False
        wanted = parent if isinstance(parent, CheckpointInfo) else self._store.checkpoint(parent)
        return wanted.ref == latest.ref and wanted.state == latest.state

    def _inherited_state(self, left: RunningAgent, parent: str | int | CheckpointInfo | None) -> Inherited | None:
        """The state that an agent kept, if it continues from `parent`."""
        try:
            if left.greeting["newest"] is None or not self._fits(left, parent):
                return None
            return read_inherited(left.link.answer(left.link.ask("newest")))
        except AgentLostError:
            return None  # it ended at this moment

    def _start(
        self,
        place: AgentAddress,
        parent: str | int | CheckpointInfo | None,
        after: int | None,
        told: OnEvent,
        lost: OnLost,
        job: RankJob | None = None,
    ) -> RunningAgent:
        body: dict[str, Any] = {
            "url": self._url,
            "storage_options": self._storage,
            "name": self._name,
            "run": self._run,
            "parent": info_form(parent) if isinstance(parent, CheckpointInfo) else _text(parent),
            "after": after,
            "options": self._options,
            "environment": bridge.environment(),
            "linger_seconds": self._linger,
            "ranks": None if job is None else job.form(),
        }
        descriptors = () if job is None or job.listener is None else (job.listener,)
        agent = start_agent(place, body, told, lost, descriptors)
        if other := other_package(agent.greeting):
            warn(
                f"{self._url}: the agent (process {agent.link.pid}) {other}: the package was changed while this "
                "process ran; start the trainer again",
                AgentRestartWarning,
            )
        self._run = agent.greeting["run"]
        return agent


class _RankOpener(_Opener):
    """Starts the agent of one rank, together with those of the others."""

    def __init__(
        self, store: Store, url: str, name: str, linger: float, options: WriterOptions, together: AgentRendezvous
    ) -> None:
        super().__init__(store, url, place_name(name, together.group.rank), linger, options)
        self.rank = together.group.rank
        self._shared = name
        self._together = together

    def first(
        self, parent: str | int | CheckpointInfo | None, told: OnEvent, lost: OnLost
    ) -> tuple[RunningAgent, Inherited | None]:
        """Start the first agent -> it, and the inherited state.

        An agent that an earlier trainer left writes its pending saves and ends first.
        """
        place = AgentAddress(self._url, self._name)
        try:
            flaw: BaseException | None = None
            inherited: Inherited | None = None
            kept: KeptStep | None = None
            try:
                inherited, kept = self._clear_place(place, parent)
            except CkptError as error:
                flaw = error
            with contextlib.ExitStack() as listening:
                job, same = self._together.job(self._url, self._shared, place, listening, flaw, kept)
                return self._start(place, parent, None, told, lost, job), inherited if same else None
        finally:
            place.close()

    def _clear_place(
        self, place: AgentAddress, parent: str | int | CheckpointInfo | None
    ) -> tuple[Inherited | None, KeptStep | None]:
        """End the agent that an earlier trainer left -> the state that it kept, and that state's run, term and step.

        Both are None if there was no agent, or if its state cannot be used.

        Raises:
            AgentBusyError: the agent serves a live trainer, or does not end in time.
        """
        until: float | None = None
        inherited: Inherited | None = None
        kept: KeptStep | None = None
        while True:
            left = find_agent(place, told=_ignore, lost=_ignore)  # waits while it still agrees with others
            until = until or time.monotonic() + _BEGINNING
            if left is not None:
                inherited, kept = self._left(left, parent), None
                if inherited is not None:
                    kept = (left.greeting["run"], left.greeting["term"], inherited.step)
                _end(left)
            elif not place.taken():
                return inherited, kept
            elif time.monotonic() > until:
                raise AgentBusyError(f"an agent that starts or ends did not do so within {_BEGINNING:g} s")
            else:
                time.sleep(_PAUSE)

    def _left(self, left: RunningAgent, parent: str | int | CheckpointInfo | None) -> Inherited | None:
        """The state that an agent kept, if all ranks may use it: a checkpoint of as many ranks, without shards."""
        if parent != "latest" or left.greeting.get("size") != self._together.group.size:
            return None
        inherited = self._inherited_state(left, parent)
        if inherited is None or not inherited.is_whole or not inherited.durable:
            return None
        try:
            inherited.check()
        except CorruptionError as error:
            warn(f"{error}: all ranks continue from the store", UserWarning)
            return None
        return inherited


def _ignore(_: object) -> None:
    """Ignore an event or a loss."""


def _text(parent: str | int | None) -> str | None:
    return parent if parent is None or isinstance(parent, str) else str(parent)


def _end(left: RunningAgent) -> None:
    """Have an unused agent write its pending saves and end; wait until it has ended."""
    try:
        left.link.call("close")
    except CkptError as error:
        if not isinstance(error, AgentLostError):
            warn(f"the agent of the earlier trainer ended with: {error}", UserWarning)
    left.await_exit()


def _portable(backend: Backend) -> dict[str, Any]:
    """The store's `storage_options`. They are sent through the socket only, and stored nowhere."""
    options = dict(backend.storage_options)
    try:
        json.dumps(options)
    except (TypeError, ValueError):
        raise UsageError(f"{backend.url}: storage_options for an agent may hold only JSON values") from None
    return options


def _address(backend: Backend) -> str:
    """The URL by which the agent opens the store. Raises `UsageError` if it would find another store, or none."""
    if (address := backend.address) is None:
        raise UsageError(
            f"{backend.url}: an agent, a separate process, cannot open this store: it is in this process's memory, or "
            "was opened with filesystem= or by a URL with a user, password or query. Open it by a path, or by a URL "
            "with storage_options=; or save without an agent"
        )
    return address
