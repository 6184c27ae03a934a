"""Opening a store for writing by an agent: the one that a trainer before has left, or a new one."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Sequence
from typing import Any, Final, Literal, TypedDict, Unpack

from ckptstore.agent.client import AgentWriter
from ckptstore.agent.forms import info_form, options_form, read_info
from ckptstore.agent.inherited import Inherited, inherit
from ckptstore.agent.package import other_package
from ckptstore.agent.place import Place
from ckptstore.agent.ranks import Job, place_name
from ckptstore.agent.starting import Lost, Started, Told, found, started
from ckptstore.agent.tenure import AgentRestartWarning
from ckptstore.agent.together import Kept, Together
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
from ckptstore.write.delta_options import DeltaOptions
from ckptstore.write.diff_options import DiffOptions
from ckptstore.write.metrics import OnMetrics
from ckptstore.write.options import WriterOptions
from ckptstore.write.ranks.rank_options import RankOptions
from ckptstore.write.ranks.rank_writer_factory import to_group

__all__ = ["writer"]

_LINGER: Final = 300.0
_LONGEST: Final = 200
_BEGINNING: Final = 60.0
"""Seconds to wait for an agent that is beginning, or ending."""
_PAUSE: Final = 0.02


class Settings(TypedDict, total=False):
    """What `Store.writer` takes, too; see there."""

    staging_bytes: int
    threads: int
    max_in_flight: int
    poll_seconds: float | None
    deltas: DeltaOptions | Literal["auto"] | int | None
    diffs: DiffOptions | None
    on_metrics: OnMetrics | None
    keep: Sequence[str] | None


def writer(
    store: Store | str | os.PathLike[str],
    parent: str | int | CheckpointInfo | None = "latest",
    *,
    name: str = "",
    linger_seconds: float = _LINGER,
    group: Any = None,
    ranks: RankOptions | None = None,
    **settings: Unpack[Settings],
) -> AgentWriter:
    """Open a store for writing by a process of its own, which owns the buffers and survives this one.

    If a trainer before was killed, and its agent still lives and holds `parent`, that one goes on, in its term, and
    `AgentWriter.inherited` is the state that the trainer had reached. Else a new agent begins a new term.

    Args:
        store: one, or its path or URL; not ``memory://``, which other processes do not see.
        parent: as for `Store.writer`. With another one than the newest checkpoint the agent that is left is ended.
        name: which of the run's trainers this is (its rank): each has an agent of its own.
        linger_seconds: how long the agent waits for a successor once this process is gone; it keeps whole states in
            memory until then.
        group, ranks: as for `Store.writer`: each rank of the group calls this and gets an agent of its own, all on one
            machine; they save one checkpoint together. If all agents have kept the same, successors go on from that.
        settings: `staging_bytes`, `threads`, `max_in_flight`, `poll_seconds`, `deltas`, `diffs`, `on_metrics`, `keep`
            as for `Store.writer`.

    Raises:
        AgentBusyError: the agent of this store and name serves another process, which is alive.
        AgentError: none can be started.
        and what `Store.writer` raises.
    """
    interpreter_exit.check()
    opened = store if isinstance(store, Store) else open_store(store)
    url = _address(opened.backend)
    if not isinstance(name, str) or len(name) > _LONGEST:
        raise UsageError(f"name: {name!r:.80}; a text is needed, of at most {_LONGEST} letters")
    linger = seconds("linger_seconds", linger_seconds)
    if linger is None:
        raise UsageError("linger_seconds: a time is needed: an agent without a trainer ends after it")
    options = _options(settings)
    opener: _Opener = _Opener(opened, url, name, linger, options)
    if group is not None:
        opener = _RankOpener(opened, url, name, linger, options, Together(to_group(group), ranks or RankOptions()))
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


def _options(settings: Settings) -> WriterOptions:
    """What the agent's writer may use. Raises `UsageError`."""
    if unknown := sorted(settings.keys() - Settings.__annotations__.keys()):
        known = ", ".join(Settings.__annotations__)
        raise UsageError(f"{unknown[0]}: an agent's writer has no such option; it has {known}")
    deltas = settings.get("deltas")
    if deltas is not None and not isinstance(deltas, DeltaOptions):
        deltas = DeltaOptions(interval=deltas)
    return WriterOptions(
        settings.get("staging_bytes", DEFAULT_BUDGET),
        settings.get("threads", 2),
        settings.get("max_in_flight", 1),
        settings.get("poll_seconds", 5.0),
        deltas,
        settings.get("diffs"),
        None,
        settings.get("on_metrics"),
        settings.get("keep"),
    )


def _remark(made: AgentWriter, agent: Started) -> None:
    """Warn of what there is to be warned of."""
    for category, text in agent.remarks():
        warn(text, category)
    if differences := bridge.environment_differences(agent.greeting["environment"], bridge.environment()):
        what = f"going on from step {made.step}: the run will not be bit-identical to one that never stopped: "
        warn(what + "; ".join(differences), DeterminismWarning)


class _Opener:
    """Finds or starts the agents of one writer.

    Attributes:
        rank: which of many ranks it opens for; None: there are no others.
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
        self, parent: str | int | CheckpointInfo | None, told: Told, lost: Lost
    ) -> tuple[Started, Inherited | None]:
        """The agent to begin with, and what it has kept."""
        place = Place(self._url, self._name)
        until = time.monotonic() + _BEGINNING
        inherited: Inherited | None = None
        try:
            while True:
                left = found(place, told, lost)
                if left is not None:
                    inherited = self._taken(left, parent)
                    if self._goes_on(left, parent) and (inherited is not None or left.greeting["newest"] is None):
                        return left, inherited
                    _end(left)
                try:
                    return self._start(place, parent, None, told, lost), inherited
                except AgentBusyError:
                    # One that was starting when its trainer died has claimed its place, and is not found there yet.
                    if time.monotonic() > until:
                        raise
        finally:
            place.close()

    def again(self, after: int, told: Told, lost: Lost) -> Started:
        """Another agent, in place of one that died in term `after`."""
        self._options |= {"keep": None}  # the store's rules may have been changed since
        place = Place(self._url, self._name)
        try:
            return self._start(place, "latest", after, told, lost)
        finally:
            place.close()

    def _goes_on(self, left: Started, parent: str | int | CheckpointInfo | None) -> bool:
        """Whether an agent that is left continues from what is wanted, in this store, with these options."""
        greeting = left.greeting
        # Who speaks this protocol without knowing of rules leaves `keep` out.
        if other := other_package(greeting):
            warn(
                f"{self._url}: the agent that a trainer before has left (process {left.link.pid}) {other}: it writes "
                "what it has, and another agent is started",
                AgentRestartWarning,
            )
            return False
        return self._fits(left, parent) and {"keep": None, **greeting["options"]} == self._options

    def _fits(self, left: Started, parent: str | int | CheckpointInfo | None) -> bool:
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

    def _taken(self, left: Started, parent: str | int | CheckpointInfo | None) -> Inherited | None:
        """What it has kept, if that is what is wanted."""
        try:
            if left.greeting["newest"] is None or not self._fits(left, parent):
                return None
            return inherit(left.link.answer(left.link.ask("newest")))
        except AgentLostError:
            return None  # it ended at this moment

    def _start(
        self,
        place: Place,
        parent: str | int | CheckpointInfo | None,
        after: int | None,
        told: Told,
        lost: Lost,
        job: Job | None = None,
    ) -> Started:
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
        agent = started(place, body, told, lost, descriptors)
        if other := other_package(agent.greeting):
            warn(
                f"{self._url}: the agent (process {agent.link.pid}) {other}: the package was changed while this "
                "process ran; start the trainer again",
                AgentRestartWarning,
            )
        self._run = agent.greeting["run"]
        return agent


class _RankOpener(_Opener):
    """Starts the agent of one rank, with those of the others."""

    def __init__(
        self, store: Store, url: str, name: str, linger: float, options: WriterOptions, together: Together
    ) -> None:
        super().__init__(store, url, place_name(name, together.group.rank), linger, options)
        self.rank = together.group.rank
        self._shared = name
        self._together = together

    def first(
        self, parent: str | int | CheckpointInfo | None, told: Told, lost: Lost
    ) -> tuple[Started, Inherited | None]:
        """The agent to begin with. One that a trainer before has left writes what waits, and ends."""
        place = Place(self._url, self._name)
        try:
            flaw: BaseException | None = None
            inherited: Inherited | None = None
            kept: Kept | None = None
            try:
                inherited, kept = self._cleared(place, parent)
            except CkptError as error:
                flaw = error
            with contextlib.ExitStack() as listening:
                job, same = self._together.job(self._url, self._shared, place, listening, flaw, kept)
                return self._start(place, parent, None, told, lost, job), inherited if same else None
        finally:
            place.close()

    def _cleared(self, place: Place, parent: str | int | CheckpointInfo | None) -> tuple[Inherited | None, Kept | None]:
        """See that no agent is there -> what one has kept that was.

        Raises:
            AgentBusyError: one is that serves a trainer, or does not end.
        """
        until: float | None = None
        inherited: Inherited | None = None
        kept: Kept | None = None
        while True:
            left = found(place, told=_heard, lost=_heard)  # which waits for one that parts from the others
            until = until or time.monotonic() + _BEGINNING
            if left is not None:
                inherited, kept = self._left(left, parent), None
                if inherited is not None:
                    kept = (left.greeting["run"], left.greeting["term"], inherited.step)
                _end(left)
            elif not place.taken():
                return inherited, kept
            elif time.monotonic() > until:
                raise AgentBusyError(f"an agent that is beginning, or ending, did not do so within {_BEGINNING:g} s")
            else:
                time.sleep(_PAUSE)

    def _left(self, left: Started, parent: str | int | CheckpointInfo | None) -> Inherited | None:
        """What an agent has kept, if all ranks may go on from that: a checkpoint of as many ranks, in whole tensors."""
        if parent != "latest" or left.greeting.get("size") != self._together.group.size:
            return None
        inherited = self._taken(left, parent)
        if inherited is None or not inherited.is_whole or not inherited.durable:
            return None
        try:
            inherited.check()
        except CorruptionError as error:
            warn(f"{error}: all ranks go on from the store", UserWarning)
            return None
        return inherited


def _heard(_: object) -> None:
    """Nobody is to be told."""


def _text(parent: str | int | None) -> str | None:
    return parent if parent is None or isinstance(parent, str) else str(parent)


def _end(left: Started) -> None:
    """Have an agent that nobody goes on with write what waits, and end."""
    try:
        left.link.call("close")
    except CkptError as error:
        if not isinstance(error, AgentLostError):
            warn(f"the agent of the trainer before ended with: {error}", UserWarning)
    left.gone()


def _portable(backend: Backend) -> dict[str, Any]:
    """What the agent needs to reach the store. It goes through the socket alone, and is kept nowhere else."""
    options = dict(backend.storage_options)
    try:
        json.dumps(options)
    except (TypeError, ValueError):
        raise UsageError(f"{backend.url}: storage_options that are no JSON, which an agent cannot be told") from None
    return options


def _address(backend: Backend) -> str:
    """What the agent opens the store by. Raises `UsageError` where it would find another store, or none."""
    if (address := backend.address) is None:
        raise UsageError(
            f"{backend.url}: an agent, a process of its own, cannot open this store: it is in this one's memory, or "
            "was opened with filesystem= or by a URL with a user, password or query. Open it by a path, or by a URL "
            "with storage_options=; or save without an agent"
        )
    return address
