"""Merges the diffs of a range into one segment, through a live writer or in its place; retires its fulls on request.

1. READ, choose, pin, READ again (`ckptstore.log.pins.claim`).
2. Write the new segment under ``seg/<t>/`` of the newest term t, durable.
3. Read it back: every checkpoint in it matches the log, and the end of the range is decoded bit for bit.
4. Ask the writer of t to commit it, to drop what it replaces and to retire checkpoints (SPEC 10, REQUESTS). With
   ``take_over``, open a term and commit it there.

A kill at any instant leaves a store in which every checkpoint is unchanged, and at most a segment that nothing names:
gc deletes it once a newer term has begun. This module deletes only segments that it never reported to a writer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from ckptstore.errors import FencedError, ReadOnlyError
from ckptstore.formats.history.records import ref_of
from ckptstore.formats.html_tables import HtmlTable
from ckptstore.host.option_checks import seconds
from ckptstore.host.progress import Progress
from ckptstore.log.change import CatalogChange
from ckptstore.log.change_committer import ChangeCommitter, ChangeRequester, TakeOver
from ckptstore.log.journal import Journal
from ckptstore.log.log_reader import read
from ckptstore.maintenance.merge.merge_preparation import MergePreparation
from ckptstore.maintenance.merge.merge_range import Range, select_range, unneeded
from ckptstore.maintenance.merge.prepared_merge import Method, Prepared
from ckptstore.maintenance.merge.restore_cost import RestoreCost

__all__ = ["Answer", "Merged", "merge"]

_TRIES: Final = 3
Answer = Literal["accepted", "refused", "void", "waiting", "planned"]


@dataclass(frozen=True, slots=True)
class Merged(HtmlTable):
    """The result of a merge, or with ``dry_run`` its plan.

    Attributes:
        first, last: REFs of A and B.
        method: ``concatenated``: chunks copied as they are; ``materialized``: B encoded again, as one delta or a full;
            ``kept``: B stays as it is stored, because it needs none of the others or neither would save bytes.
        answer: ``accepted``; ``refused`` or ``void``: nothing changed; ``waiting``: there is no answer yet, and the
            merge may still be accepted; ``planned``: a dry run.
        reason: why it was refused or is void; empty otherwise.
        merged: REFs of the checkpoints whose encodings were merged into one segment.
        retired: REFs of the retired checkpoints.
        held: REF of a checkpoint that would have been retired, too -> what holds it.
        fulls: REFs of the fulls of the range that stay as they are.
        written: keys of the new segments; `written_nbytes`: their bytes.
        dropped: keys of segments that nothing needs now, for gc; `dropped_nbytes`: their bytes.
        before, after: cost of restoring the last checkpoint of the range.
        logical: bytes of its state.
    """

    first: str
    last: str
    method: Method
    answer: Answer
    reason: str
    merged: tuple[str, ...]
    retired: tuple[str, ...]
    held: Mapping[str, str]
    fulls: tuple[str, ...]
    written: tuple[str, ...]
    written_nbytes: int
    dropped: tuple[str, ...]
    dropped_nbytes: int
    before: RestoreCost
    after: RestoreCost
    logical: int


def merge(
    journal: Journal,
    wanted: str | Range,
    *,
    keep_steps: bool = False,
    take_over: bool = False,
    dry_run: bool = False,
    timeout: float | None = 60.0,
    progress: Progress | None = None,
    on_loss: Callable[[tuple[str, ...]], object] | None = None,
) -> Merged:
    """Merge the diffs of a range into one segment.

    Args:
        wanted: ``A..B``, two REFs of one term: the checkpoints with A <= step <= B; or a `Range`, which also says what
            stays.
        keep_steps: if `wanted` is a text: keep every checkpoint of the range restorable by copying stored chunks
            unchanged. Without it only B of the diffs stays (with `Range.fulls`: only B of all), in the form that leaves
            the fewest bytes: its chain copied, or B encoded as one delta. A checkpoint that has a tag, that another
            term continues from or that a retention rule keeps stays, too (`Merged.held`).
        take_over: open a term and commit there, which fences a live writer. Without it the live writer is asked.
        dry_run: write nothing; do the work, and return the result.
        timeout: seconds to wait for the live writer's answer; None: without limit.
        progress: called with (bytes done, bytes in all).
        on_loss: called with the checkpoints that can no longer be restored afterwards, if any, before anything is
            written. An exception in it is raised here.

    Raises:
        UsageError: `wanted` is not a range, there is nothing to merge, or `timeout` is not a time.
        CheckpointNotFoundError: A or B does not exist.
        CorruptionError: the stored data is not what was saved. Nothing was changed.
        ReadOnlyError, StorageError: the medium cannot be written, or failed. Segments not yet requested are removed.
        FencedError: another writer took over the store; without `take_over`: that happened again and again.
        CommitUnknownError: only with `take_over`: it is unknown whether it was committed.
    """
    timeout = seconds("timeout", timeout)
    if journal.backend.read_only and not dry_run:
        raise ReadOnlyError(f"{journal.url}: read-only, nothing can be merged")
    chosen_range = wanted if isinstance(wanted, Range) else Range(wanted, keep_steps)
    view = read(journal)
    chosen = select_range(view.catalog, chosen_range)  # raises usage errors before a take-over fences a writer
    if on_loss is not None and chosen.retired:
        on_loss(tuple(map(ref_of, chosen.retired)))
    author: ChangeCommitter | None = None
    if not dry_run:
        author = TakeOver(journal, "merge", several=True) if take_over else ChangeRequester(journal, timeout, view)
    owned = None if author is None else author.owned
    with MergePreparation(journal, owned, progress, dry_run=dry_run) as work:
        prepared = _prepare(work, chosen_range, tries=1 if owned is not None else _TRIES)
    if author is None:
        return _merged(prepared, "planned", "")
    return _merged(prepared, *_commit(author, prepared, f"merge {chosen_range.text}"))


def _prepare(work: MergePreparation, wanted: Range, *, tries: int) -> Prepared:
    """Prepare, and retry if a newer term begins: segments written for one term are useless in the next."""
    while True:
        try:
            return work.prepare(wanted)
        except FencedError:
            tries -= 1
            if not tries:
                raise


def _commit(author: ChangeCommitter, prepared: Prepared, what: str) -> tuple[Answer, str]:
    """Commit one change; or two, if checkpoints have to be moved before they can be retired."""
    outcome = author.commit(prepared.term, what, prepared.change)
    if outcome.answer != "accepted" or not prepared.later:
        return outcome.answer, "" if outcome.answer == "accepted" else outcome.reason
    catalog = author.catalog()
    retires = tuple(node for node in prepared.later if node in catalog.checkpoints)
    change = CatalogChange(retires=retires, drops=unneeded(catalog, retires, (), ()))
    outcome = author.commit(prepared.term, f"{what}: retire what was merged", change)
    if outcome.answer == "accepted":
        return "accepted", ""
    return outcome.answer, f"the range is in one segment, but nothing is retired yet: {outcome.reason or 'no answer'}"


def _merged(prepared: Prepared, answer: Answer, reason: str) -> Merged:
    chosen, made = prepared.selection, prepared.made
    return Merged(
        first=chosen.first.ref,
        last=chosen.last.ref,
        method=made.method,
        answer=answer,
        reason=reason,
        merged=tuple(ref_of(edge.checkpoint) for edge in chosen.merged) if made.segments else (),
        retired=tuple(map(ref_of, chosen.retired)),
        held=chosen.held,
        fulls=chosen.fulls,
        written=tuple(segment.key for segment in made.segments),
        written_nbytes=made.nbytes,
        dropped=tuple(segment.key for segment in prepared.dropped),
        dropped_nbytes=sum(segment.size for segment in prepared.dropped),
        before=prepared.before,
        after=prepared.after,
        logical=chosen.target.nbytes,
    )
