"""Commits a change without an open writer: asks the live writer to commit it, or takes the store over."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, Protocol

from ckptstore._version import __version__
from ckptstore.errors import RequestTimeoutError
from ckptstore.formats.history.catalog import CLOSED, Catalog, TermEntry
from ckptstore.formats.history.records import CheckpointId
from ckptstore.host.crash_points import crash_point
from ckptstore.host.option_checks import seconds
from ckptstore.log import requests
from ckptstore.log.change import CatalogChange
from ckptstore.log.journal import Journal
from ckptstore.log.log_reader import View, read, same_history
from ckptstore.log.requests import Outcome
from ckptstore.log.term import open_term

__all__ = [
    "ASKED",
    "ChangeCommitter",
    "ChangeRequester",
    "LastWriter",
    "TakeOver",
    "WriterState",
    "check_writer_alive",
    "known_writer",
    "last_writer",
]

WriterState = Literal["alive", "gone", "closed", "unknown", "none"]
ASKED: ContextVar[Callable[[str | None, int | None, float | None], object] | None] = ContextVar("ASKED", default=None)
"""Called before a `ChangeRequester` waits: host and process id of the writer, and the timeout in seconds."""
_SLACK: Final = 5.0
"""Seconds by which a process may appear to have started after it opened its term."""

_ACCEPTED: Final = Outcome("accepted")


class ChangeCommitter(Protocol):
    """Commits changes to the catalog, or asks the live writer to commit them.

    Attributes:
        owned: the term that this process owns; None: another process owns the newest one.
    """

    @property
    def owned(self) -> int | None: ...  # noqa: D102 - described above

    def commit(self, term: int, what: str, change: CatalogChange) -> Outcome:
        """Make one change in `term`, all or nothing. Changes that a request may not contain are refused (`post`)."""

    def catalog(self) -> Catalog:
        """The log as this author sees it now."""


class ChangeRequester:
    """Asks the writer of the newest term, and waits for its answer. It never fences the writer.

    Attributes:
        view: the last view of the log. After `commit` it contains the answer. Each READ continues from it.
    """

    owned: int | None = None

    def __init__(self, journal: Journal, timeout: float | None, view: View) -> None:
        """Ask the process that owns the newest term.

        Args:
            timeout: seconds to wait for each answer; None or infinity: no limit.
            view: the log as it was read just now. If no writer is alive, this raises before any work is done.

        Raises:
            RequestTimeoutError: no writer is alive.
            UsageError: `timeout` is not a time.
        """
        self._journal = journal
        self._timeout = seconds("timeout", timeout)
        self._told = False
        self.view = view
        check_writer_alive(journal, view.catalog)

    def commit(self, term: int, what: str, change: CatalogChange) -> Outcome:
        """Post a request -> its outcome, ``waiting`` if no answer came in time.

        Raises:
            RequestTimeoutError: the writer is known to be gone. Nothing was posted.
            StorageError: the medium failed.
        """
        catalog = self.catalog()
        if catalog.term == term:  # else the outcome says that the request is void
            check_writer_alive(self._journal, catalog)
        about = f"{what} ({platform.node()}, pid {os.getpid()})"
        request = requests.post(self._journal, term, about, change)
        crash_point("request.posted")
        if (tell := ASKED.get()) is not None and not self._told:
            self._told = True
            tell(*known_writer(catalog)[1:], self._timeout)
        return requests.wait(self._journal, request, look=self.catalog, timeout=self._timeout)

    def catalog(self) -> Catalog:
        """READ: only the records after the last view, or everything if the log is no longer the one that was read."""
        known = self.view if same_history(self._journal, self.view) else None
        self.view = read(self._journal, known)
        return self.view.catalog


class TakeOver:
    """Opens a term that continues from the latest checkpoint, which fences the writer before."""

    def __init__(self, journal: Journal, purpose: str, *, several: bool = False, view: View | None = None) -> None:
        """Take the store over.

        Args:
            purpose: one word that says what for; the log keeps it.
            several: more changes may follow the first: no commit says that the term may end with it.
            view: the log as it was read just now, with a look above its end; None: it is read here.

        Raises:
            FencedError: other writers opened terms first, every time.
            CorruptLogError: the damage of the log leaves ``latest`` undecided.
            ReadOnlyError, StorageError, UnsupportedBackendError: the medium cannot be written, or not safely.
        """
        journal.backend.probe()
        info = {"version": __version__, "host": platform.node(), "pid": os.getpid(), "for": purpose}
        self._term = open_term(journal, _latest, info, view=view)
        self.owned: int | None = self._term.number
        self._extra = {} if several else {CLOSED: True}

    def commit(self, term: int, what: str, change: CatalogChange) -> Outcome:  # noqa: ARG002  # the log takes no text
        """Commit. A single change also says that the term may end with it. Raises as `Term.commit`."""
        self._term.commit(replace(change, extra={**change.extra, **self._extra}).record(term))
        return _ACCEPTED

    @property
    def view(self) -> View:
        """The log as this term has acknowledged it."""
        return self._term.view()

    def catalog(self) -> Catalog:
        """The catalog as this term has acknowledged it."""
        return self.view.catalog


def _latest(catalog: Catalog) -> CheckpointId | None:
    latest = catalog.latest()
    return None if latest is None else latest.id


# ------------------------------------------------------------------------------------------------ the last writer


def check_writer_alive(journal: Journal, catalog: Catalog) -> None:
    """Raise if no live writer can answer a request.

    Raises:
        RequestTimeoutError: the process on this host that opened the newest term is gone, or the term is closed.
    """
    state, _, pid = known_writer(catalog)
    if state not in ("gone", "closed"):
        return
    why = f"process {pid} on this host is gone" if state == "gone" else f"term {catalog.term} is closed"
    error = RequestTimeoutError(f"{journal.url}: no writer is active ({why}), so none can answer")
    error.add_note("repeat with --take-over (in Python: take_over=True)")
    raise error


@dataclass(frozen=True, slots=True)
class LastWriter:
    """The last writer, as far as it is known without asking it.

    Attributes:
        state: as `ckptstore.RunInfo.writer`.
        host, pid: host and process id of that writer; None: its OPEN does not say.
        time: seconds since the Unix epoch, by the writer's clock: when the newest checkpoint of the newest term was
            committed or, if that is later, when the term began; None: no writer ever opened the store.
        purpose: if a take-over opened the newest term: what for, in one word (``tag``, ``prune``); None: a run opened
            it. After a take-over `state` says how the run before it ended (``closed``, or else ``gone``); the other
            attributes are those of the take-over.
    """

    state: WriterState = "none"
    host: str | None = None
    pid: int | None = None
    time: float | None = None
    purpose: str | None = None


def last_writer(catalog: Catalog) -> LastWriter:
    """What is known of the last writer."""
    opened = catalog.terms.get(catalog.term)
    highest = catalog.checkpoints.highest(catalog.term)
    times = [] if opened is None or not opened.known else [opened.time]
    times += [] if highest is None else [catalog.checkpoints[highest].time]
    state, host, pid = known_writer(catalog)
    purpose = None if opened is None else _purpose(opened)
    if purpose is not None:
        state = _state_before_takeover(catalog)
    return LastWriter(state, host, pid, max(times, default=None), purpose)


def _purpose(opened: TermEntry) -> str | None:
    """The purpose of the take-over that opened a term; None: a run opened it."""
    purpose = opened.writer.get("for")
    return purpose if isinstance(purpose, str) else None


def _state_before_takeover(catalog: Catalog) -> WriterState:
    """How the newest term that a run opened ended. The take-over fenced its writer, so it writes no more."""
    runs = (term for term, opened in catalog.terms.items() if _purpose(opened) is None)
    last = max(runs, default=None)
    if last is None:
        return "closed"
    return "closed" if catalog.terms[last].extra.get(CLOSED) is True else "gone"


def known_writer(catalog: Catalog) -> tuple[WriterState, str | None, int | None]:
    """``writer``, ``host`` and ``pid`` of a `RunInfo`: the last writer, and what is known of its process."""
    opened = catalog.terms.get(catalog.term)
    told: Mapping[str, Any] = {} if opened is None else opened.writer
    host, pid = told.get("host"), told.get("pid")
    host, pid = host if isinstance(host, str) else None, pid if type(pid) is int else None
    return _state(opened, host, pid), host, pid


def _state(opened: TermEntry | None, host: str | None, pid: int | None) -> WriterState:
    if opened is None:
        return "none"
    if opened.extra.get(CLOSED) is True:
        return "closed"
    return _alive(host, pid, opened.time)


def _alive(host: str | None, pid: int | None, opened: float) -> WriterState:
    """What this host's process list says of the process that opened a term at the time `opened`."""
    if host is None or pid is None or pid < 1 or host != platform.node():
        return "unknown"
    if not Path("/proc/1/stat").exists():  # no process list, or it shows only the user's own processes
        return "unknown"
    try:
        # The process's name, in parentheses, may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except (FileNotFoundError, ProcessLookupError):  # the latter: it ended between the opening and the reading
        return "gone"
    except (OSError, ValueError, IndexError):
        return "unknown"
    if fields[0] in "ZX":
        return "gone"
    # Another process may have this number by now. Age alone does not prove it, since clocks may have been set.
    return "alive" if time.time() - (uptime - began) <= opened + _SLACK else "unknown"
