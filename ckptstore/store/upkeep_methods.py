"""The methods of `Store` that maintain it: verify, retention, gc, merge, compact, copies, tags."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, Self

from ckptstore.backends import open_backend
from ckptstore.errors import CheckpointNotFoundError, UsageError
from ckptstore.host.progress import as_progress
from ckptstore.log.checkpoint_info import CheckpointInfo
from ckptstore.store.store_handle import StoreHandle

if TYPE_CHECKING:
    from ckptstore.host.progress import Progress
    from ckptstore.maintenance.compact import CompactReport
    from ckptstore.maintenance.copies import Copied
    from ckptstore.maintenance.garbage_collection import Collected
    from ckptstore.maintenance.merge import Merged
    from ckptstore.maintenance.pruning import Pruned
    from ckptstore.maintenance.retirement import Retired
    from ckptstore.maintenance.verify.verification import VerificationReport

__all__ = ["UpkeepMethods"]


class UpkeepMethods(StoreHandle):
    """The methods of `Store` that maintain it: verify, retention, gc, merge, compact, copies, tags."""

    def verify(
        self,
        ref: str | int | None = None,
        *,
        deep: bool = False,
        progress: Progress | bool | None = None,
        threads: int | None = None,
    ) -> VerificationReport:
        """Check every byte of the store, and the descriptions in its segments.

        Args:
            ref: check only the segments that this checkpoint can be restored from; the log is checked as a whole.
            deep: also decode and replay every checkpoint, each chain once. Memory: the descriptions of everything that
                builds on one full, and for each thread a payload and a few chunks.
            progress: called with (bytes done, total bytes) of what is checked, from any thread, one call at a time.
            threads: number of threads that read and decode; None: up to four.

        Raises:
            StoreNotFoundError, CheckpointNotFoundError: there is no such store or checkpoint.
            StorageError: the medium failed where the report cannot contain it (a listing, the log).
        """
        from ckptstore.maintenance.verify.verification import verify

        try:
            return verify(self.journal, ref, deep=deep, progress=as_progress(progress), threads=threads)
        except CheckpointNotFoundError as error:
            remote = self._remote_url_with(ref)
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
        """Delete the segments that nothing needs. May run at any time, while writers and readers are active.

        Args:
            dry_run: delete nothing; report what would be deleted.
            wait: seconds to keep retrying while readers pin segments that nothing else needs.
            pin_ttl: seconds without renewal after which a reader counts as dead (at least 60; `wait` must be as long).
                None: 600.
            progress: called with (bytes deleted, bytes to delete).

        Returns:
            what was deleted, and what stays and which readers hold it.

        Raises:
            UsageError: `wait` is not a time, or `pin_ttl` is so short that live readers would count as dead.
            ReadOnlyError: the store cannot be written (except with `dry_run`).
            CorruptLogError: the log cannot be read.
            StorageError: the medium failed. A later call deletes the rest.
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
        """Merge the diffs of a range of checkpoints into one segment, with a live writer or without one.

        Args:
            steps: ``A..B``, two REFs of one term: the checkpoints with A <= step <= B.
            keep_steps: every checkpoint of the range stays. Without it, of the checkpoints stored as diffs only B
                stays, and those that a tag names, that another term continues from or that a retention rule keeps
                (`Merged.held` lists them).
            fulls: retire its fulls, too: only B of the range stays. Not with `keep_steps`.
            dry_run: write nothing; do the work, and report the result.
            take_over: open a term and commit there, which fences a live writer. Without it the live writer is asked.
            timeout: seconds to wait for the live writer's answer; None or infinity: no limit.
            progress: called with (bytes done, total bytes).
            on_loss: called, before anything is written, with the checkpoints that can no longer be restored afterwards,
                if there are any. An exception that it raises is raised here.

        Returns:
            what happened to the range; `Merged.answer` says whether it was committed.

        Raises:
            UsageError: not a range, or there is nothing to merge.
            CheckpointNotFoundError: A or B does not exist.
            CorruptionError: the stored data is not what was saved. Nothing was changed.
            ReadOnlyError, StorageError: the medium cannot be written, or failed.
            FencedError, CommitUnknownError: another writer took the store over; it is unknown whether it was committed.
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
        plain: Sequence[str | int] = (),
        compress_plain: bool = False,
        bandwidth: int | None = None,
        dry_run: bool = False,
        take_over: bool = False,
        timeout: float | None = 60.0,
        progress: Progress | bool | None = None,
    ) -> CompactReport:
        """Store kept checkpoints again in another form, so that bases that no rule keeps can be deleted: with a live
        writer or without one.

        Every existing checkpoint stays, bit for bit: what was written is read back and compared before anything is
        given up. `gc` then frees the space. Moves are committed one by one; after an interruption the next call
        continues with the rest.

        Args:
            max_depth: number of deltas and steps that the restore of any checkpoint may apply to its full; None: any.
            max_restore_seconds: how long any restore may take on this machine; None: no limit.
            target_bytes: total bytes of all segments below which no more restore time is spent to save bytes; None: as
                few bytes as possible.
            only: ``A..B``, two REFs of one term: store only these again; it has to include those of `plain`. None: all
                that are worth it.
            plain: REFs of checkpoints to store as uncompressed fulls, which `file_of` and ``load(mmap=True)`` map. The
                log notes it, and later compactions leave them as they are. A full that the writer itself stored
                uncompressed needs no rewrite and gets no note.
            compress_plain: fulls that earlier calls stored for their `plain` may be compressed again.
            bandwidth: at most this many bytes of state are decoded, encoded and read back a second; None: no limit.
            dry_run: change nothing; report what would be done. Sizes are estimated from samples.
            take_over: open a term and commit there, which fences a live writer. Without it the live writer is asked.
            timeout: seconds to wait for the live writer's answer to each move; None or infinity: no limit.
            progress: called with (bytes done, total bytes).

        Returns:
            what was done, what was not, and why.

        Raises:
            UsageError: an option is invalid.
            CorruptLogError: the log is damaged. Nothing was changed.
            ReadOnlyError, StorageError: the medium cannot be written, or failed. Earlier moves stay committed.
            FencedError, CommitUnknownError: another writer took the store over; it is unknown whether it was committed.
        """
        from ckptstore.maintenance.compact import CompactLimits, compact

        return compact(
            self.journal,
            CompactLimits(max_depth, max_restore_seconds, target_bytes, plain, compress_plain),
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
        """Retire checkpoints: they are no longer promised. Those that others build on stay stored; `gc` deletes what
        nothing needs.

        A live writer is asked. It polls for requests every 5 s (`Store.writer`'s `poll_seconds`) and after each save;
        this call never fences it.

        Args:
            refs: the checkpoints, of any term. Neither the latest one nor one that a tag names.
            dry_run: change nothing; report the result.
            take_over: for a store without a live writer: open a term and commit there. This fences a live writer.
            timeout: seconds to wait for the live writer's answer; None or infinity: no limit.

        Returns:
            the checkpoints that were retired, those of them that stay stored, and the segments that are dropped.

        Raises:
            UsageError: no REF, the latest checkpoint, or one that a tag names.
            CheckpointNotFoundError: no checkpoint matches a REF.
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
        """Set the store's retention rules -> the rules. `rules` returns the current ones.

        A checkpoint is kept if one of the rules keeps it. Every writer applies the rules: a save retires what no rule
        keeps any more. `gc` deletes the files: a `Checkpointer` calls it, with your own writer you do. The newest
        checkpoint is always kept, and so is every tagged one. A live writer is asked, as in `retire`.

        Args:
            rules: ``last:N``: the N newest on the line of the newest. ``every:N``: each whose step is a multiple of N.
                ``best:METRIC:N``: the N of that line whose metadata have the lowest METRIC (``best:METRIC:N:max``: the
                highest). ``newer-than:7d``: those saved in the 7 days (s, m, h, d, w) before the newest was.
                ``branches``: those that are not on the line of the newest, because a run went back. ``tagged``: only
                those that are kept in any case. ``space:4GB``, ``space:3states``: keeps nothing, and limits the
                space of all checkpoints.
            everything: remove the rules: every checkpoint is kept.
            take_over, timeout: as for `retire`.

        Raises:
            UsageError: a rule is invalid, none is given without `everything`, or no writer ever opened the store.
            RequestRefusedError, RequestTimeoutError and the others: as `retire`.
        """
        from ckptstore.maintenance.pruning import set_rules

        if everything == bool(rules):
            raise UsageError("keep: give rules, or everything=True to have none; rules() says which there are")
        if not all(isinstance(rule, str) for rule in rules):
            raise UsageError("keep: rules are texts, each a separate argument: keep('last:10', 'every:100')")
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
            rules: as in `keep`; this call uses them instead of the store's. None given: the store's.
            dry_run: change nothing; report the result.
            take_over, timeout: as for `retire`.

        Returns:
            what each rule keeps, what is retired, and which retired checkpoints stay because others build on them.

        Raises:
            UsageError: a rule is invalid, or there are none.
            CorruptLogError: the log is damaged. Nothing was changed.
            StorageError: the second tier cannot be reached, or is missing. Nothing was changed.
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
        """Tag a checkpoint of any term: ``tag:NAME`` names it from then on. An existing tag moves.

        A live writer is asked, as in `retire`; in the process that has the writer use `Writer.tag`.

        Args:
            name: 1-128 letters, digits and ``_.+/-``, beginning with a letter, digit or ``_``.
            ref: the checkpoint; the REF is resolved now.
            take_over, timeout: as for `retire`.

        Returns:
            the checkpoint, with its tags.

        Raises:
            UsageError: not a valid tag name.
            CheckpointNotFoundError: no checkpoint matches `ref`.
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
        """Copy checkpoints to another place on any medium: same run, terms, states, tags and metadata.

        Every byte is compared with its hash on the way. With a live writer, the copy has what the log said at one
        instant. The same call continues an interrupted copy, and adds new checkpoints to a complete one.

        Args:
            target: a path, a URL or a `Store`: an empty place, or a copy of this run that no writer has opened.
            refs: the checkpoints to copy, each with what it builds on (which is not promised there). Empty: every
                promised checkpoint with every encoding, and every term.
            form: ``stored``: segments byte for byte. ``full``: each checkpoint decoded, and stored uncompressed.
            progress: called with (bytes done, total bytes).
            threads: number of segments that are copied at once; None: up to four.

        Returns:
            what the copy has now, and what this call copied.

        Raises:
            UsageError: the target is something else, is in this store, or a writer continued it on its own.
            CheckpointNotFoundError: no checkpoint matches a REF.
            CorruptionError: this store is damaged (`repair` copies what is intact).
            ReadOnlyError, StorageError: a medium failed, or cannot be written.
        """
        from ckptstore.maintenance.copies import copy

        there = target.backend if isinstance(target, StoreHandle) else open_backend(target, create=True)
        return copy(self.journal, there, refs, form=form, progress=as_progress(progress), threads=threads)
