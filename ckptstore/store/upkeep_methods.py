"""How a store is kept small and whole."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, Self

from ckptstore.backends import open_backend
from ckptstore.errors import CheckpointNotFoundError, UsageError
from ckptstore.host.progress import as_progress
from ckptstore.log.checkpoint_info import CheckpointInfo
from ckptstore.store.store_handle import Handle

if TYPE_CHECKING:
    from ckptstore.host.progress import Progress
    from ckptstore.maintenance.compact import CompactReport
    from ckptstore.maintenance.copies import Copied
    from ckptstore.maintenance.garbage_collection import Collected
    from ckptstore.maintenance.merge import Merged
    from ckptstore.maintenance.pruning import Pruned
    from ckptstore.maintenance.retirement import Retired
    from ckptstore.maintenance.verify.verification import VerificationReport

__all__ = ["Upkeep"]


class Upkeep(Handle):
    """The part of `Store` that looks after it: verify, retention, gc, merge, compact, copies, tags."""

    def verify(
        self,
        ref: str | int | None = None,
        *,
        deep: bool = False,
        progress: Progress | bool | None = None,
        threads: int | None = None,
    ) -> VerificationReport:
        """Check every byte of the store, and what its segments say.

        Args:
            ref: of the segments check only those that this checkpoint can be restored from; the log is checked whole.
            deep: decode and replay every checkpoint, too, each chain once. Memory: the descriptions of what builds on
                one full, and for each thread a payload and a few chunks.
            progress: told (bytes done, bytes in all) of what is checked, from any thread, one call at a time.
            threads: threads that read and decode; None: up to four.

        Raises:
            StoreNotFoundError, CheckpointNotFoundError: there is none.
            StorageError: the medium failed where nothing else can be said (a listing, the log).
        """
        from ckptstore.maintenance.verify.verification import verify

        try:
            return verify(self.journal, ref, deep=deep, progress=as_progress(progress), threads=threads)
        except CheckpointNotFoundError as error:
            remote = self._remote_that_has(ref)
            if remote is None:
                raise
            raise CheckpointNotFoundError(f"{error}; {remote} has it: verify that store") from error

    def gc(
        self,
        *,
        dry_run: bool = False,
        wait: float = 0.0,
        pin_ttl: float | None = None,
        progress: Progress | bool | None = None,
    ) -> Collected:
        """Delete the segments that nothing needs. May run at any time, beside writers and readers.

        Args:
            dry_run: delete nothing, and say what would go.
            wait: seconds to look again while readers pin what nothing else needs.
            pin_ttl: seconds without renewal after which a reader is dead (at least 60; needs a `wait` as long).
                None: 600.
            progress: told (bytes deleted, bytes to delete).

        Returns:
            what was deleted, and what stays because of whom.

        Raises:
            UsageError: `wait` is no time, or `pin_ttl` is so short that living readers would be taken for dead.
            ReadOnlyError: the store cannot be written (except with `dry_run`).
            CorruptLogError: the log cannot be read.
            StorageError: the medium failed. What was deleted is gone, the rest goes another time.
        """
        from ckptstore.log.pins import DEAD_AFTER
        from ckptstore.maintenance.garbage_collection import collect_patiently

        dead_after = DEAD_AFTER if pin_ttl is None else pin_ttl
        return collect_patiently(
            self.journal, wait=wait, dead_after=dead_after, dry_run=dry_run, progress=as_progress(progress)
        )

    def merge(
        self,
        steps: str,
        *,
        keep_steps: bool = False,
        fulls: bool = False,
        dry_run: bool = False,
        take_over: bool = False,
        timeout: float | None = 60.0,
        progress: Progress | bool | None = None,
        on_loss: Callable[[tuple[str, ...]], object] | None = None,
    ) -> Merged:
        """Fold the diffs of a range of checkpoints into one segment, beside a live writer or instead of one.

        Args:
            steps: ``A..B``, two REFs of one term: the checkpoints with A <= step <= B.
            keep_steps: every checkpoint of the range stays. Without it B alone of its diffs does, and what a tag names,
                another term continues from or a rule of retention keeps (`Merged.held` says which).
            fulls: its fulls go, too: B alone of the range stays. Not with `keep_steps`.
            dry_run: write nothing; do the work, and say what would become of it.
            take_over: open a term and commit there, which fences a live writer. Without it the live writer is asked.
            timeout: seconds to wait for the live writer's answer; None or infinity: as long as it takes.
            progress: told (bytes done, bytes in all).
            on_loss: told which checkpoints can no longer be restored afterwards, if any, before anything is written;
                what it raises is raised here.

        Returns:
            what became of the range; `Merged.answer` says whether it was committed.

        Raises:
            UsageError: not a range, or there is nothing to merge.
            CheckpointNotFoundError: A or B is not there.
            CorruptionError: what is stored is not what was saved. Nothing was changed.
            ReadOnlyError, StorageError: the medium cannot be written, or failed.
            FencedError, CommitUnknownError: another writer took the store over; whether it was committed is not known.
        """
        from ckptstore.maintenance.merge import Range, merge

        return merge(
            self.journal,
            Range(steps, keep_steps, fulls),
            take_over=take_over,
            dry_run=dry_run,
            timeout=timeout,
            progress=as_progress(progress),
            on_loss=on_loss,
        )

    def compact(
        self,
        *,
        max_depth: int | None = None,
        max_restore_seconds: float | None = None,
        target_bytes: int | None = None,
        only: str | None = None,
        bandwidth: int | None = None,
        dry_run: bool = False,
        take_over: bool = False,
        timeout: float | None = 60.0,
        progress: Progress | bool | None = None,
    ) -> CompactReport:
        """Store kept checkpoints anew, so that bases that nobody keeps can go: beside a live writer, or instead of one.

        Every checkpoint that is there stays, bit for bit: what was written is read back and compared before anything
        is given up. `gc` then frees the space. One move after the other is committed; if this is stopped, the next
        call goes on with what is left.

        Args:
            max_depth: deltas and steps that the restore of any checkpoint may apply to its full; None: any number.
            max_restore_seconds: how long any restore may take on this machine; None: as long as it does.
            target_bytes: bytes of all segments at which no more bytes are saved at the cost of restore time; None: as
                few as can be had.
            only: ``A..B``, two REFs of one term: nothing but these is stored anew. None: whatever is worth it.
            bandwidth: bytes of state decoded, coded and read back in a second at most; None: as fast as it goes.
            dry_run: change nothing; say what would be done. Sizes are guessed from samples.
            take_over: open a term and commit there, which fences a live writer. Without it the live writer is asked.
            timeout: seconds to wait for the live writer's answer to each move; None or infinity: as long as it takes.
            progress: told (bytes done, bytes in all).

        Returns:
            what was done, what was not, and why.

        Raises:
            UsageError: an option is none.
            CorruptLogError: the log is damaged. Nothing was changed.
            ReadOnlyError, StorageError: the medium cannot be written, or failed. Moves before stay made.
            FencedError, CommitUnknownError: another writer took the store over; whether it was committed is not known.
        """
        from ckptstore.maintenance.compact import Limits, compact

        return compact(
            self.journal,
            Limits(max_depth, max_restore_seconds, target_bytes),
            only=only,
            bandwidth=bandwidth,
            dry_run=dry_run,
            take_over=take_over,
            timeout=timeout,
            progress=as_progress(progress),
        )

    def retire(
        self, *refs: str | int, dry_run: bool = False, take_over: bool = False, timeout: float | None = 60.0
    ) -> Retired:
        """Promise checkpoints no longer. What others build on stays stored; `gc` deletes what nothing needs.

        A live writer is asked, which looks for requests every 5 s (`Store.writer`'s `poll_seconds`) and after each
        save; it is never fenced by this.

        Args:
            refs: the checkpoints, of any term. Not the latest one, and none that a tag names.
            dry_run: change nothing, and say what would become of them.
            take_over: no writer is alive: open a term and commit there, which fences a writer that is.
            timeout: seconds to wait for the live writer's answer; None or infinity: as long as it takes.

        Returns:
            what was retired, what of it stays stored, and what is dropped.

        Raises:
            UsageError: no REF, the latest checkpoint, or one that a tag names.
            CheckpointNotFoundError: nothing answers to a REF.
            RequestRefusedError: the writer refused. Nothing was changed.
            RequestTimeoutError: no answer came in time. The request stays, and may still be accepted.
            ReadOnlyError, StorageError: the medium cannot be written, or failed.
            FencedError, CommitUnknownError: only with `take_over`: another writer took the store over meanwhile.
        """
        from ckptstore.maintenance.retirement import retire

        return retire(self.journal, refs, dry_run=dry_run, take_over=take_over, timeout=timeout)

    def keep(
        self, *rules: str, everything: bool = False, take_over: bool = False, timeout: float | None = 60.0
    ) -> tuple[str, ...]:
        """Have the store keep checkpoints by these rules from now on -> the rules. `rules` says which there are.

        They are a union, and every writer keeps to them: what a save makes superfluous it retires. `gc` deletes the
        files: a `Checkpointer` calls it by itself, beside a writer of your own you do. The newest checkpoint stays in
        any case, and so does what a tag names. A live writer is asked, as in `retire`.

        Args:
            rules: ``last:N``: the N newest of the line of the newest. ``every:N``: each whose step is a multiple of N.
                ``best:METRIC:N``: the N of that line whose metadata have the lowest METRIC (``best:METRIC:N:max``: the
                highest). ``newer-than:7d``: those saved in the 7 days (s, m, h, d, w) before the newest was.
                ``branches``: those that are not on the line of the newest, because a run went back. ``tagged``:
                nothing but what stays in any case.
            everything: no rules any more: every checkpoint is kept.
            take_over, timeout: as for `retire`.

        Raises:
            UsageError: one is no rule, none is given without `everything`, or nobody has ever written to the store.
            RequestRefusedError, RequestTimeoutError and the others: as `retire`.
        """
        from ckptstore.maintenance.pruning import set_rules

        if everything == bool(rules):
            raise UsageError("keep: give rules, or everything=True to have none; rules() says which there are")
        if not all(isinstance(rule, str) for rule in rules):
            raise UsageError("keep: rules are texts, each an argument of its own: keep('last:10', 'every:100')")
        return set_rules(self.journal, rules, take_over=take_over, timeout=timeout)

    def prune(
        self,
        *rules: str,
        dry_run: bool = False,
        take_over: bool = False,
        timeout: float | None = 60.0,
    ) -> Pruned:
        """Retire what no rule keeps; `gc` then deletes what nothing needs. A live writer is asked, as in `retire`.

        Args:
            rules: see `keep`; instead of the store's, this time. None given: the store's.
            dry_run: change nothing, and say what would become of the store.
            take_over, timeout: as for `retire`.

        Returns:
            what each rule keeps, what is retired, and what of that stays because others build on it.

        Raises:
            UsageError: one is no rule, or there are none.
            CorruptLogError: the log is damaged. Nothing was changed.
            StorageError: the second tier cannot be reached, or is not there any more. Nothing was changed.
            RequestRefusedError, RequestTimeoutError and the others: as `retire`.
        """
        from ckptstore.maintenance.pruning import prune

        drained = None
        if (pair := self._pair()) is not None:
            from ckptstore.tiers.store_sync import drained as drained_there

            with pair.reaching("nothing was pruned"):
                pair.check_there()
                drained = drained_there(pair, dry_run=dry_run)
        return prune(
            self.journal, rules or None, dry_run=dry_run, take_over=take_over, timeout=timeout, drained=drained
        )

    def tag(
        self, name: str, ref: str | int = "latest", *, take_over: bool = False, timeout: float | None = 60.0
    ) -> CheckpointInfo:
        """Name a checkpoint of any term, ``tag:NAME`` from then on; a tag that exists moves.

        A live writer is asked, as in `retire`; in the process that has the writer use `Writer.tag`.

        Args:
            name: 1-128 letters, digits and ``_.+/-``, beginning with a letter, digit or ``_``.
            ref: the checkpoint, as it is now.
            take_over, timeout: as for `retire`.

        Returns:
            the checkpoint, with its tags.

        Raises:
            UsageError: no tag name.
            CheckpointNotFoundError: nothing answers to `ref`.
            RequestRefusedError, RequestTimeoutError and the others: as `retire`.
        """
        from ckptstore.maintenance.tags import tag

        return tag(self.journal, name, ref, take_over=take_over, timeout=timeout)

    def untag(self, name: str, *, take_over: bool = False, timeout: float | None = 60.0) -> None:
        """Remove a tag; the checkpoint stays.

        Args:
            take_over, timeout: as for `retire`.

        Raises:
            CheckpointNotFoundError: there is no such tag.
            RequestRefusedError, RequestTimeoutError and the others: as `retire`.
        """
        from ckptstore.maintenance.tags import untag

        untag(self.journal, name, take_over=take_over, timeout=timeout)

    def copy(
        self,
        target: str | os.PathLike[str] | Self,
        refs: Sequence[str | int] = (),
        *,
        form: Literal["stored", "full"] = "stored",
        progress: Progress | bool | None = None,
        threads: int | None = None,
    ) -> Copied:
        """Copy checkpoints to another place, on whatever medium: same run, terms, states, tags and metadata.

        Every byte is compared with its hash on the way. Beside a live writer what is copied is what the log said at one
        instant. A copy that was interrupted is gone on with by the same call; one that is complete takes what is new.

        Args:
            target: a path, a URL or a `Store`: an empty place, or a copy of this run that nobody wrote to.
            refs: the checkpoints, each with what it builds on (which is not promised there); none: everything that is
                promised, with every encoding, and every term.
            form: ``stored``: segments byte for byte. ``full``: each checkpoint decoded, and stored uncompressed.
            progress: told (bytes done, bytes in all).
            threads: segments that are copied at once; None: up to four.

        Returns:
            what is there now, and what was copied this time.

        Raises:
            UsageError: the target is something else, lies in this store, or went on by itself.
            CheckpointNotFoundError: nothing answers to a REF.
            CorruptionError: this store is damaged (`repair` copies what is intact).
            ReadOnlyError, StorageError: a medium failed, or cannot be written.
        """
        from ckptstore.maintenance.copies import copy

        there = target.backend if isinstance(target, Handle) else open_backend(target, create=True)
        return copy(self.journal, there, refs, form=form, progress=as_progress(progress), threads=threads)
