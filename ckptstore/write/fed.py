"""Deltas and step diffs under a byte budget: the caller's side of what is copied unit by unit as it is coded.

A save waits for its turn: what came before is coded, and a full before it durable. From there on the committer's
thread codes, and the caller copies, until the last byte is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from ckptstore.formats.state import FlatState
from ckptstore.host.progress import Progress, Tally
from ckptstore.host.threads import default_threads, started_pool
from ckptstore.log.checkpoints import CheckpointInfo
from ckptstore.write.committer import Committer
from ckptstore.write.feeding import Feed, Feeding
from ckptstore.write.ledger import Claim, Labels
from ckptstore.write.metrics import Measured
from ckptstore.write.places import Place, Places
from ckptstore.write.steps.updates import Update, with_sparse_copies

__all__ = ["FedSaves"]


class FedSaves:
    """What the saves of a writer of deltas or step diffs share that has a budget of memory."""

    def __init__(
        self,
        memory: int,
        places: Places,
        *,
        with_diffs: bool,
        submit: Callable[[Callable[[], None]], Future[None]],
        tend: Callable[[], object],
        background: Callable[[Callable[[], None]], object],
    ) -> None:
        """
        Args:
            memory: bytes of host memory beside the base.
            places: of saves in flight.
            submit: has the committer's thread do something.
            tend: upkeep of the log, after it.
            background: has memory touched while others work.
        """
        self.feeding = Feeding(memory, started_pool(default_threads(), "ckptstore-copy"), background)
        self._places = places
        self._with_diffs = with_diffs
        self._submit = submit
        self._tend = tend

    def save(
        self,
        committer: Committer,
        flat: FlatState,
        updates: Sequence[Update],
        step: int,
        labels: Labels,
        measured: Measured,
        *,
        now: bool = False,
        progress: Progress | None = None,
    ) -> Claim:
        """Copy `flat`, as it is coded: training goes on when this returns -> what answers with what was committed.

        Args:
            now: with what waits for its batch. It takes no place in flight: its caller waits for it.
            progress: told how many of the state's bytes are done.

        Raises:
            what stopped an earlier save, of which nobody has been told.
            UsageError: the memory does not suffice for what is coded at once.
            WriterClosedError: it was closed, or another term began.
            whatever copying raised. The step may be given again.
        """
        place = None if now else self._place(committer, step, measured)
        claim = Claim(committer.saves, step)
        committer.saves.watch(step, claim.done)
        if not now:
            measured.ends_with(claim.done)
        feed = self.feeding.feed(flat)
        nbytes = sum(source.nbytes for source in flat.tensors.values())
        try:
            taken = with_sparse_copies(updates)

            def store() -> None:
                if self._with_diffs:
                    claim.take()  # the next one is coded against it
                    Tally(progress, nbytes).advance(nbytes)
                    committer.diff_fed(feed, taken, step, claim.done, labels)
                    if now:
                        committer.flush()
                else:
                    info = committer.persist_fed(feed, step, labels=labels, claim=claim.take, progress=progress)
                    claim.done.set_result(info)

            self._submit(lambda: self._work(committer, feed, step, (claim, place), store))
            self._tend()
            measured.waited += feed.run()
        except BaseException as error:
            if not claim.give_up(error):
                feed.over.wait()  # the committer's thread has begun it, and gives it up
            if place is not None:
                place.leave()
            raise
        self.feeding.prepare(nbytes)  # for the next one, if this was a full
        return claim

    def _place(self, committer: Committer, step: int, measured: Measured) -> Place:
        """A place in flight for a step, whose claim is released where none is given."""
        try:
            place, waited = self._places.take()
        except BaseException:
            committer.saves.release(step, None)
            raise
        measured.waited += waited
        return place

    def _work(
        self,
        committer: Committer,
        feed: Feed,
        step: int,
        ends: tuple[Claim, Place | None],
        store: Callable[[], None],
    ) -> None:
        """In the committer's thread."""
        claim, place = ends
        try:
            if not claim.done.done():  # else it was given up before its turn
                store()
        except BaseException as error:
            self._failed(committer, feed, step, claim, error)
            raise
        finally:
            feed.finish()
            if place is not None:
                place.leave()

    @staticmethod
    def _failed(committer: Committer, feed: Feed, step: int, claim: Claim, error: BaseException) -> None:
        """Say that a step was not saved, to whoever has not been told."""
        if claim.done.done() or not (claim.taken or claim.take()):
            return
        if feed.told or feed.spoiled:  # by the call
            committer.saves.release(step, error)
            claim.done.set_exception(error)
        else:
            committer.fail(step, error, claim.done)

    def result(self, committer: Committer, claim: Claim, step: int) -> CheckpointInfo:
        """What was committed, once it is; raises what stopped it, of which nobody has to be told again."""
        try:
            return claim.done.result()
        except BaseException as error:
            if not claim.give_up(error):  # Ctrl-C, and it is being committed: it may be history when this raises
                claim.done.exception()
            committer.saves.seen(step)
            raise

    def close(self) -> None:
        """Let go of memory. May be repeated."""
        self.feeding.close()
