"""WRITER OPEN of a store with a remote: drains the rest, opens the term in the remote, then in the store.

The remote's log decides which terms exist. So no term is opened while the remote is unreachable. If the run was
continued elsewhere, the new term continues after that, and a warning names the checkpoints of this store that stay a
branch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ckptstore.backends.exclusion import exclusive_access
from ckptstore.errors import UsageError
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.checkpoint_ref import node_of
from ckptstore.formats.history.records import CheckpointId
from ckptstore.host.caller_warnings import BranchWarning, FallbackWarning, warn
from ckptstore.host.crash_points import crash_point
from ckptstore.log.checkpoint_info import CheckpointInfo
from ckptstore.log.journal import Journal
from ckptstore.log.log_reader import read
from ckptstore.log.term import Term, open_term
from ckptstore.tiers.background_drain import BackgroundDrain
from ckptstore.tiers.drain import Drain, DrainResult
from ckptstore.tiers.remote_fetch import catch_up, restore_newest
from ckptstore.tiers.store_pair import StorePair
from ckptstore.write.local_writer import LocalWriter
from ckptstore.write.writer_opening import open_writer
from ckptstore.write.writer_options import WriterOptions

__all__ = ["open_tiered_writer"]


def open_tiered_writer(
    pair: StorePair, parent: str | int | CheckpointInfo | None, options: WriterOptions
) -> LocalWriter:
    """Begin a term in both tiers, which fences every earlier writer on any machine.

    Raises:
        the errors of `Store.writer`; and:
        StorageError: the remote cannot be reached.
        UsageError: the remote holds another run; or a writer continued this store separately, so that it cannot follow.
    """
    with pair.reaching("no term was opened"):
        pair.check_there()
        restore_newest(pair)
        drain = Drain(pair)
    # Some media hold a segment in memory until it is complete: draining to them must not take gigabytes.
    here = pair.local.backend
    here.segment_bytes = min(here.segment_bytes, pair.remote.backend.segment_bytes)
    draining = BackgroundDrain(drain)

    def opener(local: Journal, chosen: Callable[[Catalog], CheckpointId | None], about: Mapping[str, Any]) -> Term:
        with pair.reaching("no term was opened"):
            return _open_in_both(StorePair(local, pair.remote, pair.bandwidth), drain, chosen, about)

    writer = open_writer(pair.local, parent, options, opener=opener, tier=draining)
    draining.start()
    return writer


def _open_in_both(
    pair: StorePair,
    drain: Drain,
    chosen: Callable[[Catalog], CheckpointId | None],
    about: Mapping[str, Any],
) -> Term:
    with exclusive_access(pair.local.backend):
        # Prevents: a term that continues from before what this machine has acknowledged, although none came between.
        done = drain.once_locked()
        crash_point("tiers.drained")
        before = drain.remote
        assert before is not None  # a pass reads it
        # Check first that this store can follow: else no writer is fenced. (Terms opened meanwhile are added below.)
        parent = chosen(before.catalog)
        told = _was_warned(done, read(pair.local).catalog, before.catalog) if done.branch else True
        try:
            catch_up(pair, before.catalog, None if parent is None else parent.node)
        except UsageError as error:
            raise UsageError(f"{error}. {done.kept(pair)}" if done.branch else str(error)) from error
        theirs = open_term(pair.remote, chosen, about)
        crash_point("tiers.remote-opened")
        there = theirs.view().catalog
        there.terms.pop(theirs.number)
        there.term = max(there.terms, default=0)
        catch_up(pair, there, None if theirs.parent is None else theirs.parent.node)
        crash_point("tiers.filled")
        ours = open_term(pair.local, theirs.parent, about, like=theirs.opened, remote=pair.remote.url)
    # Warn only now: a store that cannot follow raises instead. If warnings are errors, the next start finds the term,
    # and does not warn of the branch again.
    if not told:
        warn(f"{done.fenced(pair)}; this term continues from what the remote has", BranchWarning)
    if done.damaged:
        warn(f"{done.damage}; this term continues from what the remote has", FallbackWarning)
    return ours


def _was_warned(done: DrainResult, here: Catalog, there: Catalog) -> bool:
    """Whether a term was opened in both tiers after the last checkpoint of the branch: then that opening warned of
    it."""
    ours, theirs = here.terms.get(here.term), there.terms.get(here.term)
    both = ours is not None and theirs is not None and ours.nonce == theirs.nonce
    return both and all(node_of(ref)[0] < here.term for ref in done.branch)
