"""DRAIN: what a store has is brought to its remote, in the order of its log: segments, then the slot that names them.

Where to go on after a crash the remote's own log says; nothing else is remembered. A slot that somebody else has taken
sends the drain back to reading: was it another drain of the same term, it goes on behind; was it another machine's
OPEN, what is left is a branch.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import NoReturn

from ckptstore.backends.base import Backend
from ckptstore.backends.exclusion import alone
from ckptstore.errors import (
    CorruptLogError,
    CorruptSegmentError,
    FencedError,
    StorageError,
    StoreNotFoundError,
    UsageError,
)
from ckptstore.formats.catalog import REMOTE, Catalog
from ckptstore.formats.html_tables import counted
from ckptstore.formats.records import COPYING_KEY, FORMAT_KEY, Node, SegmentEntry, ref_of
from ckptstore.host.bandwidth import held_to
from ckptstore.host.crash_points import crash_point
from ckptstore.host.progress import Advance
from ckptstore.log import fold_writer
from ckptstore.log.journal import Journal
from ckptstore.log.log_copy import DamagedReplicaError, Origin, Replica
from ckptstore.log.log_reader import View, read
from ckptstore.log.pins import Pin
from ckptstore.maintenance.copies.parallel_copies import SegmentCopies
from ckptstore.maintenance.copies.store_copy import check_apart, check_known
from ckptstore.maintenance.copies.transfer import Transfer
from ckptstore.tiers.drain_selection import drainable, foreign_terms, holding, lag_between, pruned
from ckptstore.tiers.remote_check import absent, check_same, check_whole, lost
from ckptstore.tiers.remote_requests import Answers
from ckptstore.tiers.store_pair import Pair
from ckptstore.write.second_tier import Lag

__all__ = ["Drain", "Drained", "lag_of"]

_TRIES = 8
"""Times in a row that another drain of the same run may be faster."""
_THREADS = 2
_BASE_GONE = "what it builds on was retired there; what does not build on that goes there again"


@dataclass(frozen=True, slots=True)
class Drained:
    """What one pass did.

    Attributes:
        checkpoints: how many the remote has got.
        segments: how many, of `nbytes` bytes.
        branch: REFs of what it never gets: the run was continued elsewhere. They stay in the store.
        over: the term by which it was, and who opened it; None: it was not.
        damaged: REFs of what is damaged in the store and was left out; with `why`.
        why: the first error; None: nothing is.
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
        """What is damaged, in words; None: nothing is."""
        if not self.damaged:
            return None
        named = f"{', '.join(self.damaged[:3])}{' ...' if len(self.damaged) > 3 else ''}"
        return f"{named} ({counted(len(self.damaged), 'checkpoint')}) cannot be brought to the remote: {self.why}"

    def fenced(self, pair: Pair) -> FencedError:
        """What a writer of the store is told when the run was continued elsewhere."""
        kept = self.kept(pair) if self.branch else "nothing is lost"
        # Of an older term is what was left out of it, or was overtaken then: nobody is at work elsewhere for that.
        elsewhere = f"the run was continued elsewhere: {self.over}"
        why = "a later term has begun without it" if self.over is None else elsewhere
        return FencedError(f"{pair.remote.url}: {why}; {kept}")

    def kept(self, pair: Pair) -> str:
        """What the remote never gets, in words."""
        left = f"{', '.join(self.branch[:3])}{' ...' if len(self.branch) > 3 else ''}"
        count = counted(len(self.branch), "checkpoint")
        return f"{left} ({count}) not in the remote: kept in {pair.local.url} as a branch"


class Drain:
    """Brings what a store has to its remote, pass by pass. One thread at a time calls `once`.

    Attributes:
        pair: the store and its remote.
        remote: the remote's log as it was seen last; None: not yet. Stays as it is.
        at_work: whether a pass is under way and waits for nobody else.
        moved: bytes that were brought there, before what they waited for `bandwidth`.
    """

    def __init__(self, pair: Pair, advance: Advance = lambda _nbytes: None) -> None:
        """
        Args:
            advance: told the bytes that are copied.
        """
        self.pair = pair
        self.remote: View | None = None
        self._begun = False  # to make a store of the remote, which is not finished
        self._local: View | None = None
        self._damaged: dict[str, str] = {}  # segment -> what is wrong with it
        self.at_work = False
        self.moved = 0
        self._held = held_to(pair.bandwidth, advance)
        self._answers = Answers(pair.remote)
        check_apart(pair.local.backend, pair.remote.backend)

    @property
    def damaged(self) -> Set[str]:
        """Segments that are damaged here, and left out."""
        return self._damaged.keys()

    def has(self, node: Node) -> bool:
        """Whether the remote has a checkpoint, or a record of its newest term retired it: no guess, as `had` may be."""
        here, there = self._local, self.remote
        if here is None or there is None:
            return False
        retired = node[0] == there.catalog.term and node[1] in there.catalog.spent
        if retired and there.catalog.find(node) is None:
            return node[0] not in foreign_terms(here.catalog, there.catalog)
        return holding(here.catalog, there.catalog)(node)

    def had(self, node: Node) -> bool:
        """Whether the remote has a checkpoint of the store, or had it and has retired it since, as far as is known."""
        here, there = self._local, self.remote
        if here is None or there is None:
            return False
        promised = node in there.catalog.checkpoints and holding(here.catalog, there.catalog)(node)
        return promised or pruned(here.catalog, there.catalog)(node)

    def asked(self) -> bool:
        """Whether somebody asks for a change of the remote. Looks now and then: that is a listing."""
        return self._answers.asked()

    def once(self, patience: Callable[[], bool] = lambda: True) -> Drained:
        """Bring there all that is there now. If another process is at it, wait for that.

        Args:
            patience: see `alone`.

        Raises:
            UsageError: the remote holds something else.
            RemoteLostError: it is not any more what it was.
            CorruptionError: the store is damaged; what was brought so far stays.
            StorageError: a medium failed; the same.
        """
        with alone(self.pair.local.backend, patience) as mine:
            return self.once_alone(patience) if mine else self._kept_out(self.pair.local.backend)

    @staticmethod
    def _kept_out(backend: Backend) -> NoReturn:
        # Prevents: a writer that is closed meanwhile takes nothing brought for everything brought.
        raise StorageError(errno.EBUSY, "another process is at work there", backend.url)

    def behind(self) -> bool:
        """Whether the store's log has grown since the last pass. Asks nothing of the remote."""
        try:
            return self._local is None or read(self.pair.local, self._local).end != self._local.end
        except (CorruptLogError, StorageError):
            return True  # the pass says what is wrong

    def once_alone(self, patience: Callable[[], bool] = lambda: True) -> Drained:
        """`once`, by who has locked others out of the store; out of the remote it locks them. Raises as `once`."""
        with alone(self.pair.remote.backend, patience, make=self.remote is None) as mine:
            if not mine:
                self._kept_out(self.pair.remote.backend)
            self.at_work = True
            try:
                return self._passes()
            finally:
                self.at_work = False

    def _moved(self, nbytes: int) -> None:
        self.moved += nbytes  # of several threads: it only has to change
        self._held(nbytes)

    def _passes(self) -> Drained:
        tries = 0
        while tries < _TRIES:
            replica = self._opened()
            self._begun = replica.begun
            before = replica.view()
            self._note(replica)
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
                continue  # somebody else took the slot: who it was is looked at first
            self._maintain(replica)
            return done
        raise StorageError(f"{self.pair.remote.url}: other drains were faster, {_TRIES} times in a row")

    def _opened(self) -> Replica:
        """The remote's log, to be added to: after a look whether it is what it was."""
        here, there = self.pair.local, Journal(self.pair.remote.backend, self.pair.local.format)
        # Prevents: the next pass takes what this one has begun for a store, and never makes one of it.
        since = None if self._begun else self.remote
        if since is not None:
            check_same(here.url, there, since)
        origin = Origin(here.format, "copy", "full: all of a tier")
        try:
            replica = Replica(there.backend, origin, since, on_record=self._note)
        except DamagedReplicaError as error:
            raise lost(here.url, there.url, "a slot of its log is damaged or missing") from error
        except UsageError as error:
            if Journal(there.backend).rooms() and absent(there, FORMAT_KEY) and absent(there, COPYING_KEY):
                raise lost(here.url, there.url, "its FORMAT file is gone: a part of the store was deleted") from error
            raise
        if since is None and not replica.begun:
            check_whole(here.url, there, replica.view())
        return replica

    def _leave_out(self, error: CorruptSegmentError) -> None:
        """Go on without the segments that an error names: one that is damaged must not keep all later ones here."""
        assert self._local is not None  # a pass reads it first
        found = {one for one in self._local.catalog.segments if one in str(error)} - self._damaged.keys()
        if not found:
            raise error
        self._damaged.update(dict.fromkeys(found, str(error)))

    def _note(self, replica: Replica) -> None:
        self.remote = replica.view()

    def _reread(self) -> View | None:
        """The remote's log as it is now, read from its beginning; None: it has none."""
        self.remote = None
        try:
            return read(Journal(self.pair.remote.backend, self.pair.local.format), look_above=True)
        except CorruptLogError:
            return None

    def _pass(self, replica: Replica) -> Drained:
        local, there = self.pair.local, replica.catalog
        with self._claimed(replica) as (here, wanted, branch):
            refs = tuple(ref_of(node) for node in branch)
            if over := _over(here, there):
                return Drained(branch=refs, over=over)
            had = len(there.checkpoints)
            crash_point("drain.read")
            copies = _Copies(local.backend, replica.backend, local.run, _THREADS, self._moved)
            left = _left_out(here, there, wanted, branch)
            lacks = dict(reversed(left))  # ascending, so the lowest of a term stays
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
        return Drained(brought, copies.brought, copies.nbytes, refs, damaged=tuple(map(ref_of, left)), why=why)

    @contextlib.contextmanager
    def _claimed(self, replica: Replica) -> Iterator[tuple[Catalog, Catalog, tuple[Node, ...]]]:
        """The store's catalog, what is wanted of it, and the branch; pinned, where segments are to be copied."""
        while True:
            self._local = read(self.pair.local, self._local)
            here = self._local.catalog
            _check_sound(self.pair.local, here)
            wanted, branch = drainable(here, replica.catalog, self._damaged.keys())
            _leave_itself_out(wanted, self.pair.remote.url)
            needed = [name for name in wanted.segments if name not in replica.catalog.segments]
            if not needed:
                yield here, wanted, branch
                return
            with Pin(self.pair.local.backend, needed):
                again = read(self.pair.local, self._local)
                if all(name in again.catalog.segments for name in needed):
                    yield here, wanted, branch
                    return

    def _maintain(self, replica: Replica) -> None:
        """Fold the remote's log where that pays: whoever restores from it reads one object, and not thousands."""
        view = replica.view()
        if not fold_writer.due(view.end, view.fold_seq, len(view.catalog.checkpoints)):
            return
        journal = Journal(replica.backend, self.pair.local.format)
        fold_writer.fold(journal, view)
        fold_writer.trim(journal, view)
        self.remote = View(view.catalog, view.end, view.end - 1)


class _Copies(SegmentCopies):
    """`SegmentCopies`, with a crash point behind each group of segments."""

    def bring(self, segments: Sequence[SegmentEntry]) -> None:
        """See `SegmentCopies`."""
        if not segments:
            return
        super().bring(segments)
        crash_point("drain.segments")


def _leave_itself_out(wanted: Catalog, url: str) -> None:
    """No tier is its own remote: who opens it under another path would be sent to the one that this machine knows."""
    for number, opened in wanted.terms.items():
        if opened.extra.get(REMOTE) == url:
            extra = {name: value for name, value in opened.extra.items() if name != REMOTE}
            wanted.terms[number] = replace(opened, extra=extra)


def _over(here: Catalog, there: Catalog) -> str | None:
    """By which term of the remote the store's newest is over; None: by none."""
    foreign = foreign_terms(here, there)
    if not foreign and there.term <= here.term:
        return None
    number = foreign[0] if foreign and foreign[0] in there.terms else there.term
    writer = there.terms[number].writer
    about = ", ".join(f"{name} {writer[name]}" for name in ("host", "pid", "for") if name in writer)
    return f"term {number}" + (f" ({about})" if about else "")


def _left_out(here: Catalog, there: Catalog, wanted: Catalog, branch: Sequence[Node]) -> list[Node]:
    """What the remote is to have and does not get: it is damaged, or what it builds on is."""
    if len(wanted.checkpoints) + len(branch) == len(here.checkpoints):
        return []
    gone, others = pruned(here, there), set(branch)
    left = (node for node in sorted(here.checkpoints) if node not in wanted.checkpoints and node not in others)
    return [node for node in left if there.find(node) is None and not gone(node)]


def _check_sound(journal: Journal, catalog: Catalog) -> None:
    if catalog.damage or catalog.lost > catalog.term:
        raise CorruptLogError(f"{journal.url}: the log is damaged: nobody knows what is to be drained")
    check_known(journal.url, journal.format, catalog)


def lag_of(pair: Pair) -> Lag:
    """How far the remote is behind, by reading both logs.

    Raises:
        StoreNotFoundError, CorruptLogError, StorageError: one of them cannot be read.
    """
    here = read(pair.local).catalog
    if pair.remote.run != pair.local.run:
        other = f"{pair.remote.url}: there is the store of another run, {pair.remote.run}"
        return lag_between(here, Catalog(), other)
    there = read(Journal(pair.remote.backend, pair.remote.format)).catalog
    return lag_between(here, there, _ahead(pair, here, there))


def to_be_there(pair: Pair) -> Callable[[Node], bool]:
    """Says of a checkpoint of the store whether the remote has it, or had it, or has it after the next pass.

    By reading both logs: nothing is brought. What is damaged here turns out when it is read, and never gets there.

    Raises:
        UsageError: the remote holds something else.
        CorruptLogError, StorageError: one of them cannot be read.
    """
    here, there = read(pair.local).catalog, Catalog()
    _check_sound(pair.local, here)
    with contextlib.suppress(StoreNotFoundError):  # a remote that the next pass makes
        if pair.remote.run != pair.local.run:
            raise UsageError(
                f"{pair.remote.url}: there is the store of another run, {pair.remote.run}, not {pair.local.run}"
            )
        there = read(Journal(pair.remote.backend, pair.remote.format), look_above=True).catalog
    holds, gone = holding(here, there), pruned(here, there)
    brought = Catalog() if _over(here, there) else drainable(here, there)[0]

    def has(node: Node) -> bool:
        return (node in there.checkpoints and holds(node)) or gone(node) or node in brought.checkpoints

    return has


def _ahead(pair: Pair, here: Catalog, there: Catalog) -> str | None:
    """What the remote has and the store does not, if that is newer; None: nothing."""
    mine, theirs = here.latest(), there.latest()
    if theirs is None or here.find(theirs.node) is not None or (mine is not None and theirs.node < mine.node):
        return None
    newest = "nothing" if mine is None else mine.id.ref
    return (
        f"{pair.remote.url} is ahead: it has {theirs.id.ref}, this store {newest}. The run was continued elsewhere, or "
        "this store was set back to an older copy"
    )
