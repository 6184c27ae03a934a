"""``ckpt sync``: a store's remote brought up to date by hand, or kept so beside a writer without a drain."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ckptstore.errors import RemoteLostError, StorageError
from ckptstore.formats.html_tables import HtmlTable
from ckptstore.formats.records import Node
from ckptstore.host.progress import Progress, Tally
from ckptstore.log.journal import Journal
from ckptstore.tiers.drain import Drain, to_be_there
from ckptstore.tiers.remote_rebuild import clear
from ckptstore.tiers.store_pair import Pair

__all__ = ["Synced", "drained", "follow", "sync"]


@dataclass(frozen=True, slots=True)
class Synced(HtmlTable):
    """What `sync` did.

    Attributes:
        run: the run's uuid, which both have.
        checkpoints: how many the remote has got.
        segments: how many, of `nbytes` bytes.
        branch: REFs of what it never gets, because the run was continued elsewhere; they stay in the store.
        over: by which term that was, and who opened it; None: it was not.
        damaged: REFs of what is damaged here, and was left out.
        damage: that in words, with the first error; None: nothing is.
    """

    run: str
    checkpoints: int
    segments: int
    nbytes: int
    branch: tuple[str, ...] = ()
    over: str | None = None
    damaged: tuple[str, ...] = ()
    damage: str | None = None


def sync(pair: Pair, progress: Progress | None = None, *, anew: bool = False) -> Synced:
    """Bring to the remote what it lacks, once. See `Store.sync`."""
    if pair.remote.backend.deleted():  # under this handle
        pair = replace(pair, remote=Journal(pair.remote.backend.reopened()))
    if anew:
        clear(pair)
    tally = Tally(progress)
    return _once(Drain(pair, tally.advance), pair)


def drained(pair: Pair, *, dry_run: bool = False) -> Callable[[Node], bool]:
    """Says what the remote has or had, when everything that is here now was brought there. Raises as `Drain.once`.

    Args:
        dry_run: bring nothing, and say what it then would have.
    """
    if dry_run:
        return to_be_there(pair)
    drain = Drain(pair)
    drain.once()
    return drain.had


def _once(drain: Drain, pair: Pair) -> Synced:
    done = drain.once()
    return Synced(
        pair.local.run, done.checkpoints, done.segments, done.nbytes, done.branch, done.over, done.damaged, done.damage
    )


def follow(
    pair: Pair,
    every: float,
    progress: Progress | None = None,
    *,
    on_failure: Callable[[StorageError], object] = lambda _error: None,
    sleep: Callable[[float], object] = time.sleep,
) -> Iterator[Synced]:
    """Bring to the remote whatever is committed, as it is -> what each pass did that did something. Ends when the run
    was continued elsewhere.

    Args:
        every: seconds between two looks at the store's log.
        on_failure: told of media that failed; it goes on, after a while.

    Raises:
        RemoteLostError: the remote is not any more what it was.
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
