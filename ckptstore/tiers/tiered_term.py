"""WRITER OPEN of a store with a remote: what is left is drained, the term is opened there, and then here.

The remote's log decides whose a term is. So who cannot reach it opens nothing; and who finds the run continued
elsewhere goes on behind that, and says which checkpoints of this store stay a branch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ckptstore.backends.exclusion import alone
from ckptstore.errors import UsageError
from ckptstore.formats.catalog import Catalog
from ckptstore.formats.checkpoint_ref import node_of
from ckptstore.formats.records import CheckpointId
from ckptstore.host.caller_warnings import BranchWarning, FallbackWarning, warn
from ckptstore.host.crash_points import crash_point
from ckptstore.log.checkpoint_info import CheckpointInfo
from ckptstore.log.journal import Journal
from ckptstore.log.log_reader import read
from ckptstore.log.term import Term, open_term
from ckptstore.tiers.background_drain import Draining
from ckptstore.tiers.drain import Drain, Drained
from ckptstore.tiers.remote_fetch import catch_up, restore_newest
from ckptstore.tiers.store_pair import Pair
from ckptstore.write.local import LocalWriter
from ckptstore.write.opening import open_writer
from ckptstore.write.options import WriterOptions

__all__ = ["open_tiered_writer"]


def open_tiered_writer(pair: Pair, parent: str | int | CheckpointInfo | None, options: WriterOptions) -> LocalWriter:
    """Begin a term in both tiers, which fences every earlier writer, on whatever machine.

    Raises:
        as `Store.writer`; and:
        StorageError: the remote cannot be reached.
        UsageError: the remote holds another run; or this store has gone on by itself and cannot follow.
    """
    with pair.reaching("no term was opened"):
        pair.check_there()
        restore_newest(pair)
        drain = Drain(pair)
    # Some media hold a segment in memory until it is whole: what is drained to them shall not take gigabytes.
    here = pair.local.backend
    here.segment_bytes = min(here.segment_bytes, pair.remote.backend.segment_bytes)
    draining = Draining(drain)

    def opener(local: Journal, chosen: Callable[[Catalog], CheckpointId | None], about: Mapping[str, Any]) -> Term:
        with pair.reaching("no term was opened"):
            return _open_in_both(Pair(local, pair.remote, pair.bandwidth), drain, chosen, about)

    writer = open_writer(pair.local, parent, options, opener=opener, tier=draining)
    draining.start()
    return writer


def _open_in_both(
    pair: Pair,
    drain: Drain,
    chosen: Callable[[Catalog], CheckpointId | None],
    about: Mapping[str, Any],
) -> Term:
    with alone(pair.local.backend):
        # Prevents: a term that continues from behind what this machine has acknowledged, though nobody came between.
        done = drain.once_alone()
        crash_point("tiers.drained")
        before = drain.remote
        assert before is not None  # a pass reads it
        # What cannot follow fences nobody. (What is opened meanwhile is caught up with below.)
        parent = chosen(before.catalog)
        told = _was_told(done, read(pair.local).catalog, before.catalog) if done.branch else True
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
    # Only now: who cannot follow is told that, and not that a term continues. Where warnings are errors, the next start
    # finds the term, and is told nothing of a branch that it has left behind.
    if not told:
        warn(f"{done.fenced(pair)}; this term continues from what the remote has", BranchWarning)
    if done.damaged:
        warn(f"{done.damage}; this term continues from what the remote has", FallbackWarning)
    return ours


def _was_told(done: Drained, here: Catalog, there: Catalog) -> bool:
    """Whether a term was opened in both tiers since the last checkpoint of the branch: opening it has said so."""
    ours, theirs = here.terms.get(here.term), there.terms.get(here.term)
    both = ours is not None and theirs is not None and ours.nonce == theirs.nonce
    return both and all(node_of(ref)[0] < here.term for ref in done.branch)
