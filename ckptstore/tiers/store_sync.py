"""``ckpt sync``: brings a store's remote up to date once, or continuously, for a writer that has no drain."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ckptstore.errors import RemoteLostError, StorageError
from ckptstore.formats.history.records import Node
from ckptstore.formats.html_tables import HtmlTable
from ckptstore.host.progress import Progress, Tally
from ckptstore.log.journal import Journal
from ckptstore.tiers.drain import Drain, expected_there
from ckptstore.tiers.remote_rebuild import clear_remote
from ckptstore.tiers.store_pair import StorePair

__all__ = ["Synced", "drained", "sync", "sync_continuously"]


@dataclass(frozen=True, slots=True)
class Synced(HtmlTable):
    """The result of `sync`.

    Attributes:
        run: the run's uuid, which both stores have.
        checkpoints: number of checkpoints that were copied to the remote.
        segments: number of segments that were copied, with `nbytes` bytes.
        branch: REFs of checkpoints that the remote never gets, because the run was continued elsewhere; they stay in
            the store.
        over: the term that continued it, and its writer; None: the run was not continued elsewhere.
        damaged: REFs of checkpoints that are damaged here, and were left out.
        damage: a text about the damage, with the first error; None: nothing is damaged.
    """

    run: str
    checkpoints: int
    segments: int
    nbytes: int
    branch: tuple[str, ...] = ()
    over: str | None = None
    damaged: tuple[str, ...] = ()
    damage: str | None = None


def sync(pair: StorePair, progress: Progress | None = None, *, anew: bool = False) -> Synced:
    """Copy to the remote what it lacks, once. See `Store.sync`."""
    if pair.remote.backend.deleted():  # while this handle was open
        pair = replace(pair, remote=Journal(pair.remote.backend.reopened()))
    if anew:
        clear_remote(pair)
    tally = Tally(progress)
    return _once(Drain(pair, tally.advance), pair)


def drained(pair: StorePair, *, dry_run: bool = False) -> Callable[[Node], bool]:
    """Drain -> a function that says which checkpoints the remote has or had then. Raises as `Drain.once`.

    Args:
        dry_run: copy nothing, and say what the remote would have.
    """
    if dry_run:
        return expected_there(pair)
    drain = Drain(pair)
    drain.once()
    return drain.had


def _once(drain: Drain, pair: StorePair) -> Synced:
    done = drain.once()
    return Synced(
        pair.local.run, done.checkpoints, done.segments, done.nbytes, done.branch, done.over, done.damaged, done.damage
    )


def sync_continuously(
    pair: StorePair,
    every: float,
    progress: Progress | None = None,
    *,
    on_failure: Callable[[StorageError], object] = lambda _error: None,
    sleep: Callable[[float], object] = time.sleep,
) -> Iterator[Synced]:
    """Copy each commit to the remote as it is made, and yield the result of every pass that copied something.

    Ends when the run was continued elsewhere.

    Args:
        every: seconds between two polls of the store's log.
        on_failure: called when a medium failed; the pass is retried after a while.

    Raises:
        RemoteLostError: the remote is no longer what it was.
    """
    drain = Drain(pair, Tally(progress).advance)
    pause = every
    while True:
        try:
            done = _once(drain, pair)
        except RemoteLostError:
            raise
        except StorageError as error:
            on_failure(error)
            pause = min(60.0, 2 * pause)
        else:
            pause = every
            if done.checkpoints or done.segments or done.over:
                yield done
            if done.over:
                return
        sleep(pause)
