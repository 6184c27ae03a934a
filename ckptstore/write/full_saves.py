"""The save path of uncompressed fulls, several at once: the caller copies, lanes make durable, one thread commits.

A full is copied unit by unit into memory with a byte budget (`host.arenas`), and frees it unit by unit as it is
written. Writing does not begin while everything can still be copied without waiting: two cores that hash would double
the time of the copy, for which training waits. When memory runs short, the lane of the full begins at once.

COMMITs go through the one thread that commits, in the order in which the segments become durable: SPEC.md 7.4 lets a
term commit an older step after a newer one, and `latest` stays the highest. So no save waits for a slower earlier one,
and after a kill of the process the newest acknowledged checkpoint is there.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from ckptstore.backends.sharing import SaveSpace
from ckptstore.formats import uncached_copy
from ckptstore.formats.sources import place_of
from ckptstore.formats.states.state import FlatState
from ckptstore.frameworks import bridge
from ckptstore.host.arenas import Arenas
from ckptstore.host.cancellable_calls import current_scope, in_scope
from ckptstore.host.progress import Progress
from ckptstore.host.threads import SleepingPool, default_threads, started_pool
from ckptstore.segments.staged_units import DescribedTensor, StagedState, StagedUnits, copies_of, copy_now
from ckptstore.segments.units import UnitPlan, plan_units
from ckptstore.write.committer import Committer
from ckptstore.write.lanes import Lanes
from ckptstore.write.save_path import SavePath
from ckptstore.write.saves.job import Job
from ckptstore.write.stage import Copies
from ckptstore.write.steps.updates import Updates

__all__ = ["FullSave", "FullSaves"]

_T = TypeVar("_T")


class FullSaves(SavePath):
    """The save path that all uncompressed fulls of a writer share.

    Attributes:
        memory: the memory into which they are copied.
    """

    def __init__(
        self,
        lanes: int,
        begin_save: Callable[[], SaveSpace],
        threads: int,
        memory: int | None,
        *,
        commit: ThreadPoolExecutor,
        tend: Callable[[], None],
        background: Callable[[Callable[[], None]], object],
        segment_bytes: int,
    ) -> None:
        """
        Args:
            lanes: how many fulls are written at once.
            begin_save: `Backend.begin_save` of the medium.
            threads: how many threads write in each lane.
            memory: bytes of host memory; None: the size of the state times the number of lanes.
            commit: the thread that sends every COMMIT.
            tend: upkeep that this thread does after each save.
            background: submits work that touches memory in the background.
            segment_bytes: `Backend.segment_bytes` of the medium.
        """
        super().__init__()
        self.memory = Arenas(memory)
        self._segment_bytes = segment_bytes
        self._count = lanes
        self._commit = commit
        self._tend = tend
        self._background = background
        self._copied: set[FullSave] = set()  # fulls that are being copied
        self._lanes = Lanes(lanes, threads, begin_save, self._end_of)
        self._copiers = SleepingPool(default_threads(), "ckptstore-copy")
        self._waiters: ThreadPoolExecutor | None = None  # made for the first state on a device

    # -- the caller's side

    def wake(self) -> None:
        """See `SavePath.wake`."""
        self._copiers.wake()
        self._lanes.wake()

    def expect(self, nbytes: int) -> None:
        """Touch memory for a state of about `nbytes` bytes in the background, if none was expected before."""
        if not self.memory.held:
            # A state divides into units of half a chunk or more, each of which shares a page with the next.
            self.memory.expect(nbytes + nbytes // 512 + (1 << 16), self._count)
            self._touch()

    def prepare(self, flat: FlatState) -> None:
        """See `SavePath.prepare`. A second call does nothing."""
        self.memory.expect(self._plan(flat).space, self._count)
        self._touch()
        if (device := bridge.device_of(flat.tensors)) is not None:
            self._register(device)

    def _plan(self, flat: FlatState) -> UnitPlan:
        tensors = tuple(
            (name, source.dtype, tuple(source.shape), *place_of(source)) for name, source in flat.tensors.items()
        )
        return plan_units(tensors, self._segment_bytes)

    def _touch(self) -> None:
        for run in self.memory.touch():
            self._later(run)

    def _register(self, device: Any) -> None:
        """Register this memory with the device, so that it copies into it directly from the next save on."""
        for memory in self.memory.mappings():
            self._later(partial(bridge.register, memory, device))

    def _later(self, work: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # closed meanwhile, which must not fail a save
            self._background(work)

    def save(
        self, committer: Committer, job: Job, flat: FlatState, updates: Updates | None, progress: Progress | None
    ) -> None:
        """See `SavePath.save`."""
        del updates  # fulls need none; the writer has warned of that
        self._write(committer, job, flat, progress=progress)

    def adopt(self, committer: Committer, job: Job, copies: Copies) -> None:
        """See `SavePath.adopt`."""
        with copies.given(job):
            self._write(committer, job, copies.state.flat, arrive=copies.arrive, let_go=copies.let_go)

    def _write(
        self,
        committer: Committer,
        job: Job,
        flat: FlatState,
        *,
        progress: Progress | None = None,
        arrive: Callable[[], None] = lambda: None,
        let_go: Callable[[], None] = lambda: None,
    ) -> None:
        """Write a state in a lane, from the memory in which it lies.

        Args:
            arrive: called before the state is read.
            let_go: called when the state is no longer read, unless the job was given up before its turn.
        """

        def work(writers: ThreadPoolExecutor) -> None:
            if not job.start():
                return
            try:
                arrive()
                made = committer.make(flat, job, writers=writers, progress=progress)
                job.done.set_result(self.commit(lambda: committer.publish(made, job)))
            except BaseException as error:  # noqa: BLE001  # the save reports it
                committer.fail(job, error)
            finally:
                let_go()
                job.finish()
                self.tend()

        self.submit(lambda writers: in_scope(job.scope, lambda: work(writers))())

    def begin(self, committer: Committer, job: Job, flat: FlatState, updates: Updates | None) -> None:
        """See `SavePath.begin`. Raises the error of the copy."""
        del updates
        plan = self._plan(flat)
        self.memory.expect(plan.space, self._count)
        full = FullSave(self, committer, job, flat, plan)
        try:
            with self._lock:
                self._check_taking()
                self._copied.add(full)
            full.copy(flat)
            self._touch()  # memory for the next full, while this one is written
            if full.device is not None:
                self._register(full.device)
            if plan.space >= uncached_copy.LARGE:
                self._later(uncached_copy.prepare)
        except BaseException as error:
            job.give_up(error)
            raise
        finally:
            with self._lock:
                self._copied.discard(full)

    # -- services for a `FullSave`

    def submit(self, work: Callable[[ThreadPoolExecutor], None]) -> None:
        """Give a full that is copied, or that waits for memory, to the next free lane."""
        with self._lock:
            self._check_taking()
            self._lanes.submit(work)

    def waiter(self, work: Callable[[], None]) -> Future[None]:
        """Run a wait for a device in a thread for such waits, which takes the copies in the device's order.

        The threads that copy must not wait: tensors in host memory, and their caller, would wait for the device, too.
        """
        with self._lock:
            if self._waiters is None:
                self._waiters = started_pool(1, "ckptstore-device")
        return self._waiters.submit(work)

    def copier(self, work: Callable[[], None]) -> Future[None]:
        """Run a copy in the threads that copy."""
        return self._copiers.submit(work)

    def commit(self, work: Callable[[], _T]) -> _T:
        """Run `work` in the committer's thread -> its result."""
        return self._commit.submit(in_scope(current_scope(), work)).result()

    def _end_of(self, space: SaveSpace) -> None:
        """End the space of a save. Its upkeep, submitted before, retires its checkpoint if a newer save was faster."""
        try:
            self._commit.submit(space.end)
        except RuntimeError:  # closed meanwhile
            space.end()

    def tend(self) -> None:
        """Submit upkeep of the log. No save waits for it."""
        self._commit.submit(self._tend)

    # -- for the writer

    def after(self, work: Callable[[], _T]) -> Future[_T]:
        """See `SavePath.after`."""
        return self._lanes.after(lambda: self.commit(work))

    def end(self, error: BaseException) -> None:
        """See `SavePath.end`."""
        super().end(error)
        with self._lock:
            copied = list(self._copied)
        for full in copied:
            full.job.give_up(error)
        self.memory.wake()

    def close(self) -> None:
        """See `SavePath.close`."""
        self._copiers.shutdown()
        if self._waiters is not None:
            self._waiters.shutdown()
        self._lanes.close()
        self.memory.close()


class FullSave:
    """A full that is copied, and that may be written while it is copied.

    Attributes:
        job: its save.
        device: the device that copies some of its tensors; None: all of them are in host memory.
    """

    def __init__(self, fulls: FullSaves, committer: Committer, job: Job, flat: FlatState, plan: UnitPlan) -> None:
        self.job = job
        self._fulls = fulls
        self._committer = committer
        self._gone: BaseException | None = None
        self._begun = False
        self._copying = False
        self._writing = False
        self._left = False
        self._lock = threading.Lock()
        self._arrivals = StagedUnits(self._check)
        tensors = {name: DescribedTensor(source) for name, source in flat.tensors.items()}
        self._queue = bridge.copy_queue(flat.tensors)
        self.device = bridge.device_of(flat.tensors)
        digests = bridge.device_digests(flat.tensors) if self._queue is None else self._queue.digests()
        self._state = StagedState(flat.tree, dict(tensors), plan, self._arrivals, digests)
        job.stops_with(self._stop)

    def copy(self, flat: FlatState) -> None:
        """Copy every unit of `flat`, waiting for memory if there is none, and have the units written."""
        self._copying = True
        segments = self._state.plan.segments
        alone = len(segments) == 1 and len(segments[0][2]) <= 1
        submit = copy_now if alone else self._fulls.copier

        def waited(seconds: float) -> None:
            self.job.measured.waited += seconds

        try:
            # If a unit is not wanted any more, the save has failed, which `done` reports; the state may change.
            self._arrivals.bring(
                copies_of(self._state.plan, flat.tensors, submit, self._queue, self._fulls.waiter),
                self._fulls.memory,
                waited,
                short=self._short,
                unwanted=self._check_wanted,
                queue=self._queue,
            )
        finally:
            self._queue = None  # it holds references to the caller's tensors
            self._release()
        self._begin()

    def _release(self) -> None:
        """Note that its caller has copied it, or has stopped."""
        with self._lock:
            self._copying = False
            unwanted = self._gone is not None and not self._writing
        if unwanted:
            self._leave()

    def _short(self) -> None:
        self._check_wanted()
        self._begin()

    def _check_wanted(self) -> None:
        if self._gone is not None:
            raise self._gone

    def _check(self) -> None:
        """Raise the reason if nothing more of it must be written."""
        self._check_wanted()  # first: otherwise copied units would still be written, for nothing
        if self._committer.ended is not None:
            raise self._committer.ended

    def _begin(self) -> None:
        with self._lock:
            if not self._begun:
                self._check_wanted()  # `submit` would refuse, too: a full is given up during its copy only on closing
                self._fulls.submit(self._work)
                self._begun = True

    def _work(self, writers: ThreadPoolExecutor) -> None:
        """Hash and write units as they arrive, commit, and set the result of the job. Runs in a lane."""
        job, committer = self.job, self._committer
        with self._lock:
            if self._left or not job.start():
                return  # given up before its turn: the thread that gave it up, or copies it, frees its memory
            self._writing = True
        try:
            made = committer.make(self._state, job, writers=writers)
            job.done.set_result(self._fulls.commit(lambda: committer.publish(made, job)))
        except BaseException as error:  # noqa: BLE001  # the save reports it
            if not self._arrivals.spoiled:  # otherwise the caller, whose copy failed, reports the error
                committer.fail(job, error)
        finally:
            self._leave()
            job.finish()
            self._fulls.tend()

    def _stop(self) -> None:
        """Stop, because the job was given up."""
        error = self.job.done.exception()
        assert error is not None
        with self._lock:
            self._gone = error
            busy = self._copying or self._writing
        self._arrivals.fail(error)
        if not busy:  # otherwise the busy thread frees the memory
            self._leave()

    def _leave(self) -> None:
        """Free the memory and the place in flight that it still holds. A second call does nothing."""
        with self._lock:
            left, self._left = self._left, True
        if left:
            return
        self._arrivals.discard()
        self.job.leave()
