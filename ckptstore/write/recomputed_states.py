"""Copies of states of which devices send only a part: the host computes the rest from the state of the save before.

A writer of one process copies whole states so, a rank its shares of them (`steps.recomputed_steps`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager

from ckptstore.formats.states.state import FlatState, TensorSource
from ckptstore.frameworks import bridge
from ckptstore.host.threads import started_pool
from ckptstore.write.capture.snapshot import Snapshot
from ckptstore.write.saves.save_metrics import Crossing, from_devices
from ckptstore.write.stage import Copies
from ckptstore.write.steps.recomputed_steps import Recomputing, Sent
from ckptstore.write.steps.updates import Hold, Update, dense_gradients

__all__ = ["RecomputedStates", "Sending"]


class RecomputedStates:
    """Keeps the last state, from which the next one is computed. The thread that saves calls it.

    Attributes:
        active: states are computed again. If not, devices send whole states, and only what crosses is counted.
    """

    def __init__(self, recomputing: Recomputing | None) -> None:
        """
        Args:
            recomputing: computes; None: nothing does.
        """
        self.active = recomputing is not None
        self._recomputing = recomputing
        self._thread: ThreadPoolExecutor | None = None
        self._newest: tuple[Snapshot, Callable[[], None]] | None = None  # the last state, and a function that frees it

    @contextmanager
    def sending(
        self, flat: FlatState, found: Sequence[Update], hold: Hold | None, crossing: Crossing
    ) -> Iterator[Sending]:
        """Queue what devices send of a state besides its copy. Within this ``with``, copy, and call `Sending.copied`.

        Args:
            found: what the optimizers did.
            hold: see `Found.hold`.
            crossing: counts what devices send. It has the bytes of the whole state already.
        """
        before, self._newest = self._newest, None
        sending = Sending(self, self._sent(flat, found, hold, crossing, before), before, hold, crossing)
        try:
            yield sending
        finally:
            sending.end()

    def _sent(
        self,
        flat: FlatState,
        found: Sequence[Update],
        hold: Hold | None,
        crossing: Crossing,
        before: tuple[Snapshot, Callable[[], None]] | None,
    ) -> Sent | None:
        """Queue what devices send of a step -> what that is; None: they send the whole state."""
        if bridge.device_of(flat.tensors) is None:
            return None
        crossing.nbytes += from_devices(dense_gradients(found))
        if self._recomputing is None:
            return None  # it was not asked for
        if hold is None:
            crossing.sent_whole = "nothing makes the optimizers wait, or their step is not known"
            return None
        sent = self._recomputing.sent(flat, found, None if before is None else before[0].flat)
        if sent is None:
            crossing.sent_whole = self._recomputing.why
            return None
        crossing.nbytes -= sum(flat.tensors[name].nbytes for name in sent.names)
        crossing.nbytes += sum(one.nbytes for one in sent.tensors.values()) + 8 * len(sent.names)
        return sent

    def follows(self, snapshot: Snapshot | None) -> None:
        """Note that the last state is that of `snapshot`: if it is another one, the next is not computed from it."""
        if self._newest is not None and self._newest[0] is not snapshot:
            self.forget()

    def forget(self) -> None:
        """Forget the last state: the next one does not follow from it."""
        before, self._newest = self._newest, None
        if before is not None:
            before[1]()

    def keep(self, snapshot: Snapshot) -> None:
        """Compute the next state from this one."""
        if self.active:
            self._newest = snapshot, snapshot.held()

    def compute(
        self, sent: Sent, base: Snapshot, release: Callable[[], None], copies: Copies, crossing: Crossing
    ) -> Future[None]:
        """Have a step computed in a thread -> a future that is done when the state is in host memory, or lost.

        Args:
            base: the state before. `release` is called when it is not needed any more.
        """
        assert self._recomputing is not None
        recomputing = self._recomputing
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()
        state, gradients = copies.state, copies.gradients
        arrive = state.completed_with(done)

        def work() -> None:
            old: FlatState | None = base.flat
            try:
                try:
                    base.arrive()
                except Exception:  # noqa: BLE001  # the save before reports it; here all tensors are read
                    old = None
                arrive()
                if gradients is not None:
                    gradients.arrive()
                also = {} if gradients is None else gradients.flat.tensors
                crossing.resent = recomputing.computed(sent, old, state.flat, copies.updates, also)
                crossing.nbytes += crossing.resent
            except BaseException as error:  # noqa: BLE001  # `Snapshot.arrive` raises it
                done.set_exception(error)
            else:
                done.set_result(None)
            finally:
                release()

        try:
            if self._thread is None:
                self._thread = started_pool(1, "ckptstore-recompute")
            self._thread.submit(work)
        except RuntimeError:  # no thread can be started, or the interpreter is ending
            work()
        return done

    def close(self) -> None:
        """Wait for the thread, and forget the last state."""
        if self._thread is not None:
            self._thread.shutdown()
        self.forget()


class Sending:
    """What devices send of one state, within `RecomputedStates.sending`.

    Attributes:
        names: of the tensors that need not be copied.
        tensors: other tensors that have to be copied, with the gradients, by names that are no numbers.
    """

    def __init__(
        self,
        states: RecomputedStates,
        sent: Sent | None,
        before: tuple[Snapshot, Callable[[], None]] | None,
        hold: Hold | None,
        crossing: Crossing,
    ) -> None:
        self.names: frozenset[str] = frozenset() if sent is None else sent.names
        self.tensors: Mapping[str, TensorSource] = {} if sent is None else sent.tensors
        self._states = states
        self._sent = sent
        self._before = before
        self._hold = hold
        self._crossing = crossing

    def copied(self, copies: Copies) -> None:
        """The copies are made, or queued: the rest is computed now, and the optimizers wait before they change it.

        The owner of `copies` frees their memory.
        """
        if self._sent is not None:
            assert self._before is not None
            assert self._hold is not None
            (base, release), self._before = self._before, None
            done = self._states.compute(self._sent, base, release, copies, self._crossing)
            self._hold(lambda: _settled(done))
        self._states.keep(copies.state)

    def end(self) -> None:
        """Free the state before, unless a thread computes from it."""
        before, self._before = self._before, None
        if before is not None:
            before[1]()


def _settled(done: Future[None]) -> None:
    """Wait until the state of a save is in host memory, or lost."""
    wait([done])
