"""How a writer takes states: at once, in the background, as somebody else has copied them, layer by layer."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final

from ckptstore.errors import UsageError
from ckptstore.formats.reference import step_number
from ckptstore.formats.state import FlatState
from ckptstore.frameworks import bridge
from ckptstore.host.caller_warnings import warns_last
from ckptstore.host.carriers import Scope
from ckptstore.host.progress import Progress, told
from ckptstore.host.reentrance import codes_of, refuse_within
from ckptstore.host.threads import started_pool
from ckptstore.log.checkpoints import CheckpointInfo
from ckptstore.write.coded import Copies
from ckptstore.write.committer import Committer
from ckptstore.write.filling import Filling
from ckptstore.write.layered import Begun, LayeredSave, Owner, checked_layers
from ckptstore.write.ledger import Labels, PendingSave
from ckptstore.write.lifetime import Lifetime
from ckptstore.write.metrics import Measured
from ckptstore.write.snapshot import Snapshot
from ckptstore.write.steps.updates import Update, Updates

__all__ = ["SAVING", "Taking"]

_GRACE: Final = 2.0
"""Seconds for which a save that was interrupted waits for the medium, so that it ends in the ordinary way."""


class Taking(Lifetime):
    """The calls of a `Writer` that are given a state."""

    @warns_last
    def save(
        self,
        state: Any,
        step: int,
        *,
        metadata: Mapping[str, Any] | None = None,
        tags: str | Sequence[str] = (),
        updates: Updates | None = None,
        progress: Progress | bool | None = None,
    ) -> CheckpointInfo:
        """Make `state` durable as the checkpoint of `step`; it may be loaded by anyone when this returns.

        Args:
            state: nested dict of tensors, numbers, strings, lists, RNG states ..., or a `FlatState` (one that was taken
                apart already); must not change meanwhile.
            step: optimizer steps done, above every step that this term continues from; numpy's integers, too.
            metadata: what is to be known of the checkpoint wherever the store is listed (a loss, a commit, a note): a
                mapping of texts, numbers, booleans, None, lists and mappings, at most 16 KiB as JSON. It is in
                `CheckpointInfo.metadata`.
            tags: a name or names for it, given in the same commit; a tag that exists moves.
            updates: what the optimizers did since the save before (`training.OptimizerStep`), for step diffs, which
                only a writer with `diffs` makes. With a `DiffOptions.batch` above 1, everything that waits is written.
            progress: called as bytes are copied, from other threads; the total is the state's bytes. True: a line on
                stderr.

        Raises:
            UnsupportedStateError: something in `state` cannot be stored; names its key path. Nothing was written.
            StepOrderError: the step exists, or is not above the parent's. Nothing was written.
            UsageError: `metadata` or `tags` cannot be stored; or a signal handler calls this while the same thread is
                inside `save`, `save_async` or `begin`. Nothing was written.
            StorageError: the medium failed. The checkpoint does not exist; the writer may go on.
            FencedError: a newer term exists. This writer is finished.
            CommitUnknownError: the checkpoint may or may not exist. This writer is finished.
        """
        refuse_within(self, SAVING)
        step = step_number(step)
        progress = told(progress)
        labels = Labels.of(metadata, tags)
        self._coded.explaining.remark_unused(updates)
        began = time.monotonic()
        committer, flat = self._admit(state, step)
        measured = self._meter.begin(flat, step, began)
        try:
            if self._fed is None:
                info = self._saved(committer, flat, step, labels, updates, progress)
            else:
                found = self._found(committer, flat, step, updates)
                fed = self._fed.save(committer, flat, found, step, labels, measured, now=True, progress=progress)
                info = self._fed.result(committer, fed, step)
        except BaseException as error:
            committer.complete(error)
            measured.ended(None, error)
            raise
        else:
            measured.ended(info)
        finally:
            measured.returned()
        return info

    def _saved(
        self,
        committer: Committer,
        flat: FlatState,
        step: int,
        labels: Labels,
        updates: Updates | None,
        progress: Progress | None,
    ) -> CheckpointInfo:
        interrupted, scope = threading.Event(), Scope()
        future: Future[CheckpointInfo] | None = None
        try:
            if self._fulls is not None:
                future = self._fulls.save(
                    committer, flat, step, labels=labels, progress=progress, interrupted=interrupted, scope=scope
                )
                return future.result()
            future = self._coded.save(committer, flat, step, labels, updates, progress, interrupted, scope)
            return future.result()
        except BaseException as error:
            # Ctrl-C while the other thread still reads the caller's tensors: the caller will change them, so the commit
            # must not happen any more. Wait until the thread has let go of them.
            interrupted.set()
            failure = error if future is None else _outcome(future, scope)
            if failure is not None:
                committer.saves.release(step, failure)
                committer.saves.seen(step)
            raise

    @warns_last
    def save_async(
        self,
        state: Any,
        step: int,
        *,
        metadata: Mapping[str, Any] | None = None,
        tags: str | Sequence[str] = (),
        updates: Updates | None = None,
    ) -> PendingSave:
        """Copy `state` to host memory and make it durable in the background; the state may change when this returns.

        Args:
            state, step, metadata, tags: as for `save`.
            updates: as for `save`; gradients are copied, too.

        Waits while `max_in_flight` earlier saves are not durable yet, and while `memory` is spent (`on_metrics` is told
        how long). An error that nobody asked for with `result` is raised by the next call, or on leaving the ``with``.

        Raises:
            as `save`; what concerns the medium comes from `PendingSave.result`.
        """
        refuse_within(self, SAVING)
        step = step_number(step)
        labels = Labels.of(metadata, tags)
        self._coded.explaining.remark_unused(updates)
        began = time.monotonic()
        committer, flat = self._admit(state, step)
        measured = self._meter.begin(flat, step, began)
        try:
            if self._fulls is not None:
                full = self._fulls.begin(committer, flat, step, labels, measured)
                pending = PendingSave(step, full.done, lambda: committer.saves.seen(step), cancel=full.cancel)
                return pending._followed_by(self._tier)
            if self._fed is not None:
                found = self._found(committer, flat, step, updates)
                fed = self._fed.save(committer, flat, found, step, labels, measured)
                return PendingSave(
                    step,
                    fed.done,
                    lambda: committer.saves.seen(step),
                    self._coded.hurry(committer, step),
                    fed.cancel,
                )._followed_by(self._tier)
            # What is coded waits for its turn in the committer's thread.
            copies = self._copied(committer, flat, step, updates, measured)
            return self._coded.hand_over(committer, copies, step, labels, measured)._followed_by(self._tier)
        except BaseException as error:
            measured.failed(error)
            raise
        finally:
            measured.returned()

    @warns_last
    def adopt(
        self,
        snapshot: Snapshot,
        step: int,
        *,
        metadata: Mapping[str, Any] | None = None,
        tags: str | Sequence[str] = (),
        updates: Sequence[Update] = (),
        gradients: Snapshot | None = None,
        began: float | None = None,
        waited: float = 0.0,
    ) -> PendingSave:
        """Make durable what somebody else has copied, laid out as its segments will be (`agent`): without a copy.

        Waits for nothing: how many are in flight is for whoever owns the memory to bound. It may be used again once
        `Snapshot.free` is called, which for a base of deltas is much later than `Snapshot.land`.

        Args:
            snapshot: the state; unchanged until it is free.
            step, metadata, tags: as for `save`.
            updates: as for `save`, looked up already; they may refer to what `gradients` holds.
            gradients: what owns the memory of the gradients.
            began, waited: since when training has waited for the copy (``time.monotonic()``), and how many seconds of
                that for earlier saves: for `on_metrics`. None: it has not.

        Raises:
            as `save_async`. The memory is the caller's again then: `land` and `free` it.
        """
        refuse_within(self, SAVING)
        step = step_number(step)
        labels = Labels.of(metadata, tags)
        began = time.monotonic() if began is None else began
        committer, flat = self._admit(snapshot.flat, step)
        measured = self._meter.begin(flat, step, began)
        measured.waited = waited
        try:
            if self._fulls is not None:
                claim = self._fulls.adopt(committer, snapshot, step, labels, measured)
                return PendingSave(step, claim.done, lambda: committer.saves.seen(step), cancel=claim.cancel)
            copies = Copies(snapshot, updates, gradients)
            return self._coded.hand_over(committer, copies, step, labels, measured)
        except BaseException as error:
            measured.failed(error)
            raise
        finally:
            measured.returned()

    def prepare(self, state: Any) -> None:
        """Say what `save_async` will be given, so that it finds its memory ready. Returns at once, and writes nothing.

        Memory that nobody has used yet costs several times what copying to it does, so the first `save_async` of a run
        keeps training waiting for longer than the others. Call this when the state is complete (the optimizer's moments
        are there) and something else is to be done still: the memory is touched in the background. A second time does
        nothing.

        Args:
            state: as for `save`; only its tensors' names, types and shapes matter.

        Raises:
            UnsupportedStateError: something in `state` cannot be stored.
            WriterClosedError, FencedError: as `save`.
        """
        self._check_open()
        flat = state if isinstance(state, FlatState) else bridge.flattened(state)
        if self._fulls is not None:
            self._fulls.prepare_for(flat)
            return
        self._snapshots.prepare(flat)
        if self._fed is not None:
            self._fed.feeding.prepare(sum(source.nbytes for source in flat.tensors.values()))

    def _found(self, committer: Committer, flat: FlatState, step: int, updates: Updates | None) -> Sequence[Update]:
        try:
            return self._coded.explaining.found(updates, flat)
        except BaseException as error:
            committer.saves.release(step, error)
            raise

    def _copied(
        self, committer: Committer, flat: FlatState, step: int, updates: Updates | None, measured: Measured
    ) -> Copies:
        try:
            return self._coded.copy(flat, updates, measured)
        except BaseException as error:
            committer.saves.release(step, error)
            if isinstance(error, RuntimeError):
                self._check_open()  # closed by another thread, and its pool with it
            raise

    @warns_last
    def begin(self, state: Any, step: int, layers: Mapping[str, Sequence[str]], *, direct: bool = False) -> LayeredSave:
        """Begin a save whose snapshot is filled layer by layer, as layers are updated (LightCheck, section III-B).

        `training.LayerwiseSnapshots` does this for torch's optimizers. One at a time: it is finished or abandoned
        before the next save.

        Args:
            state: as for `save_async`; the tensors of `layers` may still change, each until it is `ready`. Of others
                only dtype and shape are looked at here.
            step: as for `save`.
            layers: names of tensors (`FlatState.tensors`) by the name of the layer that they belong to.
            direct: copy straight into mapped segments of a medium that has them (``pmem://``), through no host memory.
                Only without `deltas` and `diffs`.

        Waits while `max_in_flight` earlier snapshots are not durable yet.

        Raises:
            as `save_async`.
            UsageError: a tensor is in two layers, or not in the state; the medium cannot be copied into.
            StorageError: `direct`, and the medium failed or is full.
        """
        refuse_within(self, SAVING)
        step = step_number(step)
        committer, flat = self._admit(state, step)

        try:
            checked_layers(flat, layers)
            if self._layer_pool is None:
                self._layer_pool = started_pool(self._options.threads, "ckptstore-layers")
            if direct:
                snapshot = self._coded.mapped(committer, self._deltas, flat, step, self.url)
            else:
                snapshot = self._reserved(flat)
        except BaseException as error:
            committer.saves.release(step, error)
            raise
        owner = self._owner(committer, snapshot, step)
        begun = LayeredSave(step, flat, layers, snapshot, self._layer_pool, owner)
        self._begun = Begun(begun)
        return begun

    def _owner(self, committer: Committer, snapshot: Snapshot, step: int) -> Owner:
        """What a snapshot that is filled by layers is given back to, finished or not."""

        def give_up(error: BaseException | None = None) -> None:
            snapshot.land()
            snapshot.free()
            committer.saves.release(step, error)

        def hand_over(now: FlatState, labels: Labels, updates: Updates | None, filling: Filling) -> PendingSave:
            self._begun = None
            measured = self._meter.begin(now, step, time.monotonic())
            try:
                try:
                    self._check_open()
                    changes = self._coded.copied_updates(now, updates)
                except BaseException as error:
                    filling.stop()
                    give_up(error)
                    raise
                copies = Copies(snapshot, *changes, filling)
                return self._coded.hand_over(committer, copies, step, labels, measured)._followed_by(self._tier)
            except BaseException as error:
                measured.failed(error)
                raise
            finally:
                measured.returned()

        return Owner(hand_over, give_up, self._check_open)

    def _reserved(self, flat: FlatState) -> Snapshot:
        if self._fed is not None:
            raise UsageError("begin: a snapshot that is filled layer by layer is a whole state; leave out memory=")
        return self._snapshots.reserve(flat)

    def _admit(self, state: Any, step: int) -> tuple[Committer, FlatState]:
        """Everything that can be refused is refused here, before a byte is written."""
        self._check_open()
        if self._begun is not None:
            self._begun.settle()
        self._failures.raise_unseen()
        if self._tier is not None:
            self._tier.admit()
        committer = self._committer
        committer.saves.check(step)
        flat = state if isinstance(state, FlatState) else bridge.flattened(state)
        committer.saves.take(step)
        return committer, flat


def _outcome(future: Future[CheckpointInfo], scope: Scope) -> BaseException | None:
    """Why a save that nobody waits for any more failed; None: it did not. Its requests are left alone after a while."""
    try:
        return future.exception(_GRACE)
    except TimeoutError:
        scope.abandon()  # a server that says nothing would keep it for minutes
    return future.exception()


SAVING: Final = codes_of(Taking.save, Taking.save_async, Taking.begin)
"""Calls that wait for others while they hold something that those may need."""
