"""DRAIN: copies what a store has to its remote, in the order of its log: segments, then the slot that names them.

After a crash the remote's own log says where to continue; no other state is kept. If another process has taken a slot,
the drain reads the log again: if that was another drain of the same term, this one continues after it; if it was
another machine's OPEN, the rest of this store is a branch.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import NoReturn

from ckptstore.backends.base import Backend
from ckptstore.backends.exclusion import exclusive_access
from ckptstore.errors import (
    CorruptLogError,
    CorruptSegmentError,
    FencedError,
    StorageError,
    StoreNotFoundError,
    UsageError,
)
from ckptstore.formats.history.catalog import REMOTE, Catalog
from ckptstore.formats.history.records import COPYING_KEY, FORMAT_KEY, Node, SegmentEntry, ref_of
from ckptstore.formats.html_tables import counted
from ckptstore.host.bandwidth import rate_limited
from ckptstore.host.crash_points import crash_point
from ckptstore.host.progress import Advance
from ckptstore.log import fold_writer
from ckptstore.log.journal import Journal
from ckptstore.log.log_copy import CopyOrigin, DamagedCopyError, LogCopy
from ckptstore.log.log_reader import View, read
from ckptstore.log.pins import Pin
from ckptstore.maintenance.copies.parallel_copies import SegmentCopies
from ckptstore.maintenance.copies.store_copy import check_apart, check_known
from ckptstore.maintenance.copies.transfer import Transfer
from ckptstore.tiers.drain_selection import drainable, foreign_terms, lag_between, remote_holds, remote_retired
from ckptstore.tiers.remote_check import absent, check_same, check_whole, lost
from ckptstore.tiers.remote_requests import RequestAnswers
from ckptstore.tiers.store_pair import StorePair
from ckptstore.write.second_tier import Lag

__all__ = ["Drain", "DrainResult", "lag_of"]

_TRIES = 8
"""Number of times in a row that another drain of the same run may be faster."""
_THREADS = 2
_BASE_GONE = "its base was retired there; checkpoints that do not build on it are drained again"


@dataclass(frozen=True, slots=True)
class DrainResult:
    """The result of one pass.

    Attributes:
        checkpoints: number of checkpoints that were copied to the remote.
        segments: number of segments that were copied, with `nbytes` bytes.
        branch: REFs of checkpoints that the remote never gets: the run was continued elsewhere. They stay in the store.
        over: the term that continued it, and its writer; None: the run was not continued elsewhere.
        damaged: REFs of checkpoints that are damaged in the store and were left out.
        why: the first error; None: nothing is damaged.
    """

    checkpoints: int = 0
    segments: int = 0
    nbytes: int = 0
    branch: tuple[str, ...] = ()
    over: str | None = None
    damaged: tuple[str, ...] = ()
    why: str | None = None

    @property
    def damage(self) -> str | None:
        """A text about the damage; None: nothing is damaged."""
        if not self.damaged:
            return None
        named = f"{', '.join(self.damaged[:3])}{' ...' if len(self.damaged) > 3 else ''}"
        return f"{named} ({counted(len(self.damaged), 'checkpoint')}) cannot be brought to the remote: {self.why}"

    def fenced(self, pair: StorePair) -> FencedError:
        """The error for a writer of the store when the run was continued elsewhere."""
        kept = self.kept(pair) if self.branch else "nothing is lost"
        # Without `over`, the branch belongs to an older term: it was left out or overtaken in that term, and no other
        # process continues it.
        elsewhere = f"the run was continued elsewhere: {self.over}"
        why = "a later term has begun without it" if self.over is None else elsewhere
        return FencedError(f"{pair.remote.url}: {why}; {kept}")

    def kept(self, pair: StorePair) -> str:
        """A text that names the checkpoints that the remote never gets."""
        left = f"{', '.join(self.branch[:3])}{' ...' if len(self.branch) > 3 else ''}"
        count = counted(len(self.branch), "checkpoint")
        return f"{left} ({count}) not in the remote: kept in {pair.local.url} as a branch"


class Drain:
    """Copies what a store has to its remote, pass by pass. One thread at a time calls `once`.

    Attributes:
        pair: the store and its remote.
        remote: the last view of the remote's log; None: not read yet. The view does not change.
        at_work: whether a pass is running that does not wait for another process.
        moved: number of bytes that were copied, including those that still wait for `bandwidth`.
    """

    def __init__(self, pair: StorePair, advance: Advance = lambda _nbytes: None) -> None:
        """
        Args:
            advance: called with the numbers of bytes that are copied.
        """
        self.pair = pair
        self.remote: View | None = None
        self._begun = False  # whether the remote is an unfinished copy
        self._local: View | None = None
        self._damaged: dict[str, str] = {}  # segment -> its error
        self.at_work = False
        self.moved = 0
        self._held = rate_limited(pair.bandwidth, advance)
        self._answers = RequestAnswers(pair.remote)
        check_apart(pair.local.backend, pair.remote.backend)

    @property
    def damaged(self) -> Set[str]:
        """Segments that are damaged in the store, and left out."""
        return self._damaged.keys()

    def has(self, node: Node) -> bool:
        """Whether the remote has a checkpoint, or a record of its newest term retired it: certain, unlike `had`."""
        here, there = self._local, self.remote
        if here is None or there is None:
            return False
        retired = node[0] == there.catalog.term and node[1] in there.catalog.spent
        if retired and there.catalog.find(node) is None:
            return node[0] not in foreign_terms(here.catalog, there.catalog)
        return remote_holds(here.catalog, there.catalog)(node)

    def had(self, node: Node) -> bool:
        """Whether the remote has a checkpoint of the store, or had it and has retired it, as far as is known."""
        here, there = self._local, self.remote
        if here is None or there is None:
            return False
        promised = node in there.catalog.checkpoints and remote_holds(here.catalog, there.catalog)(node)
        return promised or remote_retired(here.catalog, there.catalog)(node)

    def asked(self) -> bool:
        """Whether another process requests a change of the remote. Looks now and then: each look is a listing."""
        return self._answers.asked()

    def once(self, patience: Callable[[], bool] = lambda: True) -> DrainResult:
        """Copy everything that the store has now. If another process is doing that, wait for it.

        Args:
            patience: see `exclusive_access`.

        Raises:
            UsageError: the remote holds something else.
            RemoteLostError: the remote is no longer what it was.
            CorruptionError: the store is damaged; what was copied so far stays.
            StorageError: a medium failed; what was copied so far stays.
        """
        with exclusive_access(self.pair.local.backend, patience) as mine:
            return self.once_locked(patience) if mine else self._raise_busy(self.pair.local.backend)

    @staticmethod
    def _raise_busy(backend: Backend) -> NoReturn:
        # Prevents: a writer that is closed meanwhile, and reports everything as drained although nothing was.
        raise StorageError(errno.EBUSY, "another process has locked it (a drain, a copy, a repair)", backend.url)

    def behind(self) -> bool:
        """Whether the store's log has grown since the last pass. Sends no request to the remote."""
        try:
            return self._local is None or read(self.pair.local, self._local).end != self._local.end
        except (CorruptLogError, StorageError):
            return True  # the pass reports the error

    def once_locked(self, patience: Callable[[], bool] = lambda: True) -> DrainResult:
        """`once`, for a caller that has locked the store; this locks the remote. Raises as `once`."""
        with exclusive_access(self.pair.remote.backend, patience, make=self.remote is None) as mine:
            if not mine:
                self._raise_busy(self.pair.remote.backend)
            self.at_work = True
            try:
                return self._passes()
            finally:
                self.at_work = False

    def _moved(self, nbytes: int) -> None:
        self.moved += nbytes  # from several threads: it only has to change
        self._held(nbytes)

    def _passes(self) -> DrainResult:
        tries = 0
        while tries < _TRIES:
            replica = self._opened()
            self._begun = replica.begun
            before = replica.view()
            self._update_view(replica)
            try:
                done = self._pass(replica)
                if done.over is None:
                    self._answers.give(replica, Journal(replica.backend, self.pair.local.format))
            except CorruptSegmentError as error:
                self._leave_out(error)
                continue
            except UsageError as error:
                tries += 1
                seen = self._reread()
                if seen is None or seen.end <= before.end:
                    raise UsageError(str(error)) from error
                continue  # another process took the slot: find out first which one
            self._maintain(replica)
            return done
        raise StorageError(f"{self.pair.remote.url}: other drains were faster, {_TRIES} times in a row")

    def _opened(self) -> LogCopy:
        """The remote's log, ready to be added to, after checking that it is still what it was."""
        here, there = self.pair.local, Journal(self.pair.remote.backend, self.pair.local.format)
        # Prevents: the next pass mistaking an unfinished copy of this pass for a store, and never finishing it.
        since = None if self._begun else self.remote
        if since is not None:
            check_same(here.url, there, since)
        origin = CopyOrigin(here.format, "copy", "full: all of a tier")
        try:
            replica = LogCopy(there.backend, origin, since, on_record=self._update_view)
        except DamagedCopyError as error:
            raise lost(here.url, there.url, "a slot of its log is damaged or missing") from error
        except UsageError as error:
            if Journal(there.backend).rooms() and absent(there, FORMAT_KEY) and absent(there, COPYING_KEY):
                raise lost(here.url, there.url, "its FORMAT file is gone: a part of the store was deleted") from error
            raise
        if since is None and not replica.begun:
            check_whole(here.url, there, replica.view())
        return replica

    def _leave_out(self, error: CorruptSegmentError) -> None:
        """Continue without the segments that an error names: a damaged one must not block all later ones."""
        assert self._local is not None  # a pass reads it first
        found = {one for one in self._local.catalog.segments if one in str(error)} - self._damaged.keys()
        if not found:
            raise error
        self._damaged.update(dict.fromkeys(found, str(error)))

    def _update_view(self, replica: LogCopy) -> None:
        self.remote = replica.view()

    def _reread(self) -> View | None:
        """The remote's current log, read from its beginning; None: it is unreadable."""
        self.remote = None
        try:
            return read(Journal(self.pair.remote.backend, self.pair.local.format), look_above=True)
        except CorruptLogError:
            return None

    def _pass(self, replica: LogCopy) -> DrainResult:
        local, there = self.pair.local, replica.catalog
        with self._claimed(replica) as (here, wanted, branch):
            refs = tuple(ref_of(node) for node in branch)
            if over := _overtaking_term(here, there):
                return DrainResult(branch=refs, over=over)
            had = len(there.checkpoints)
            crash_point("drain.read")
            copies = _Copies(local.backend, replica.backend, local.run, _THREADS, self._moved)
            left = _left_out(here, there, wanted, branch)
            lacks = dict(reversed(left))  # ascending, so the lowest of each term is kept
            transfer = Transfer(wanted, replica, copies, lacks, here)
            replica.backend.check_space(sum(entry.size for entry in transfer.missing()))
            transfer.run()
            if replica.begun:
                replica.finish()
                self._begun = False
        crash_point("drain.done")
        why = None
        if left:
            why = next(iter(self._damaged.values()), _BASE_GONE)
        brought = len(there.checkpoints) - had
        return DrainResult(brought, copies.brought, copies.nbytes, refs, damaged=tuple(map(ref_of, left)), why=why)

    @contextlib.contextmanager
    def _claimed(self, replica: LogCopy) -> Iterator[tuple[Catalog, Catalog, tuple[Node, ...]]]:
        """The store's catalog, the part of it to drain, and the branch; pinned while segments are copied."""
        while True:
            self._local = read(self.pair.local, self._local)
            here = self._local.catalog
            _check_sound(self.pair.local, here)
            wanted, branch = drainable(here, replica.catalog, self._damaged.keys())
            _remove_own_url(wanted, self.pair.remote.url)
            needed = [name for name in wanted.segments if name not in replica.catalog.segments]
            if not needed:
                yield here, wanted, branch
                return
            with Pin(self.pair.local.backend, needed):
                again = read(self.pair.local, self._local)
                if all(name in again.catalog.segments for name in needed):
                    yield here, wanted, branch
                    return

    def _maintain(self, replica: LogCopy) -> None:
        """Fold the remote's log if that is worth it: a restore from it then reads one object instead of thousands."""
        view = replica.view()
        if not fold_writer.due(view.end, view.fold_seq, len(view.catalog.checkpoints)):
            return
        journal = Journal(replica.backend, self.pair.local.format)
        fold_writer.fold(journal, view)
        fold_writer.trim(journal, view)
        self.remote = View(view.catalog, view.end, view.end - 1)


class _Copies(SegmentCopies):
    """`SegmentCopies`, with a crash point after each group of segments."""

    def bring(self, segments: Sequence[SegmentEntry]) -> None:
        """See `SegmentCopies`."""
        if not segments:
            return
        super().bring(segments)
        crash_point("drain.segments")


def _remove_own_url(wanted: Catalog, url: str) -> None:
    """Remove the remote's own URL from the terms it gets: opened under another path it would redirect to itself."""
    for number, opened in wanted.terms.items():
        if opened.extra.get(REMOTE) == url:
            extra = {name: value for name, value in opened.extra.items() if name != REMOTE}
            wanted.terms[number] = replace(opened, extra=extra)


def _overtaking_term(here: Catalog, there: Catalog) -> str | None:
    """The term of the remote that ended the store's newest one; None: there is none."""
    foreign = foreign_terms(here, there)
    if not foreign and there.term <= here.term:
        return None
    number = foreign[0] if foreign and foreign[0] in there.terms else there.term
    writer = there.terms[number].writer
    about = ", ".join(f"{name} {writer[name]}" for name in ("host", "pid", "for") if name in writer)
    return f"term {number}" + (f" ({about})" if about else "")


def _left_out(here: Catalog, there: Catalog, wanted: Catalog, branch: Sequence[Node]) -> list[Node]:
    """Checkpoints that the remote should have but does not get: they, or what they build on, are damaged."""
    if len(wanted.checkpoints) + len(branch) == len(here.checkpoints):
        return []
    gone, others = remote_retired(here, there), set(branch)
    left = (node for node in sorted(here.checkpoints) if node not in wanted.checkpoints and node not in others)
    return [node for node in left if there.find(node) is None and not gone(node)]


def _check_sound(journal: Journal, catalog: Catalog) -> None:
    if catalog.damage or catalog.lost > catalog.term:
        raise CorruptLogError(f"{journal.url}: the log is damaged: it is unknown what must be drained")
    check_known(journal.url, journal.format, catalog)


def lag_of(pair: StorePair) -> Lag:
    """How far the remote is behind, by reading both logs.

    Raises:
        StoreNotFoundError, CorruptLogError, StorageError: one of them cannot be read.
    """
    here = read(pair.local).catalog
    if pair.remote.run != pair.local.run:
        other = f"{pair.remote.url}: there is the store of another run, {pair.remote.run}"
        return lag_between(here, Catalog(), other)
    there = read(Journal(pair.remote.backend, pair.remote.format)).catalog
    return lag_between(here, there, _remote_ahead(pair, here, there))


def expected_there(pair: StorePair) -> Callable[[Node], bool]:
    """A function that says of a checkpoint of the store whether the remote has it, had it, or gets it in the next pass.

    It reads both logs and copies nothing. Damage of the store is only found when a pass reads the segments; damaged
    checkpoints are never copied.

    Raises:
        UsageError: the remote holds something else.
        CorruptLogError, StorageError: one of the logs cannot be read.
    """
    here, there = read(pair.local).catalog, Catalog()
    _check_sound(pair.local, here)
    with contextlib.suppress(StoreNotFoundError):  # a remote that the next pass makes
        if pair.remote.run != pair.local.run:
            raise UsageError(
                f"{pair.remote.url}: there is the store of another run, {pair.remote.run}, not {pair.local.run}"
            )
        there = read(Journal(pair.remote.backend, pair.remote.format), look_above=True).catalog
    holds, gone = remote_holds(here, there), remote_retired(here, there)
    brought = Catalog() if _overtaking_term(here, there) else drainable(here, there)[0]

    def has(node: Node) -> bool:
        return (node in there.checkpoints and holds(node)) or gone(node) or node in brought.checkpoints

    return has


def _remote_ahead(pair: StorePair, here: Catalog, there: Catalog) -> str | None:
    """A text about newer checkpoints that the remote has and the store lacks; None: there are none."""
    mine, theirs = here.latest(), there.latest()
    if theirs is None or here.find(theirs.node) is not None or (mine is not None and theirs.node < mine.node):
        return None
    newest = "nothing" if mine is None else mine.id.ref
    return (
        f"{pair.remote.url} is ahead: it has {theirs.id.ref}, this store {newest}. The run was continued elsewhere, or "
        "this store was set back to an older copy"
    )
