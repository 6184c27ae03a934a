"""Prepares a merge, steps 1 to 3: choose and pin, write, read back (`diff_merge` lists all steps)."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from ckptstore.errors import CorruptSegmentError, FencedError
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.commit_checks import check_commit
from ckptstore.formats.history.records import CheckpointEntry, Encoding, Node
from ckptstore.host.crash_points import crash_point
from ckptstore.host.progress import Progress
from ckptstore.log.change import CatalogChange
from ckptstore.log.journal import Journal
from ckptstore.log.pins import claim
from ckptstore.maintenance.merge.chunk_copies import copied_bytes, copy_encodings, merged_draft
from ckptstore.maintenance.merge.delta_merge import reencode
from ckptstore.maintenance.merge.merge_check import check_copies, check_state, opened_plan
from ckptstore.maintenance.merge.merge_range import MergeSelection, Range, select_range, unneeded
from ckptstore.maintenance.merge.prepared_merge import MergedSegments, Prepared
from ckptstore.maintenance.merge.restore_cost import restore_cost
from ckptstore.maintenance.merge.rewrite_context import RewriteContext
from ckptstore.restore.restore_rates import measure_rates

__all__ = ["MergePreparation"]


class MergePreparation(RewriteContext):
    """Prepares merges with threads and memory that last for a ``with``."""

    def __init__(self, journal: Journal, owned: int | None, progress: Progress | None, *, dry_run: bool) -> None:
        """Take threads and memory.

        Args:
            owned: the term that this process owns; None: another process owns the newest one.
            progress: called with (bytes done, bytes in all).
            dry_run: write nothing.
        """
        super().__init__(journal, progress, dry_run=dry_run)
        self._owned = owned

    def prepare(self, wanted: Range) -> Prepared:
        """Write the segments to commit, and verify them. Raises as `merge`."""
        # 1. READ, choose, pin, READ again.
        with claim(
            self._journal,
            lambda catalog: select_range(catalog, wanted),
            lambda selection: selection.segments,
        ) as (view, chosen):
            catalog = view.catalog
            if self._owned is not None and catalog.term != self._owned:
                raise FencedError(f"{self._journal.url}: term {catalog.term} began after term {self._owned}")
            self.term = catalog.term
            with self.removing_on_failure(), self.fenced_if_newer_term():
                # 2. Write.
                made = self._make(catalog, chosen, keep_steps=wanted.keep_steps)
                # 3. Read it back.
                if made.segments and not self._dry_run:
                    self._check(catalog, chosen, made)
                self.remove({segment.id for segment in made.segments})
                crash_point("merge.verified")
                return self._prepared(catalog, chosen, made)

    def _prepared(self, catalog: Catalog, chosen: MergeSelection, made: MergedSegments) -> Prepared:
        change, later = self._change(catalog, chosen, made)
        record = change.record(self.term)
        check_commit(catalog, record)
        dropped = set(record.drops)
        if later:
            dropped |= set(unneeded(catalog.apply(record, catalog.next_seq), later, (), ()))
        with opened_plan(self._backend, catalog, chosen.target, chosen.chain.encodings) as found:
            rates = measure_rates(found)
        return Prepared(
            self.term,
            chosen,
            made,
            change,
            later,
            tuple(catalog.segments[segment] for segment in sorted(dropped)),
            restore_cost(catalog, chosen.chain.encodings, rates),
            restore_cost(catalog, made.chain, rates),
        )

    def _make(self, catalog: Catalog, chosen: MergeSelection, *, keep_steps: bool) -> MergedSegments:
        """Write the form that leaves the fewest bytes in the store: new segments minus those that can be dropped."""
        kept = MergedSegments("kept", chosen.chain.encodings)
        if not chosen.rewrites:
            return kept
        if keep_steps:
            return self._copy(catalog, chosen)
        fewest = -_freed(catalog, chosen, ())
        copied = fewest + 1
        if chosen.copyable:
            stored = copied_bytes(self._backend, catalog, chosen.merged)
            copied = stored - _freed(catalog, chosen, chosen.merged)
        reencoded = self._reencode(catalog, chosen)
        if reencoded.nbytes - _freed(catalog, chosen, reencoded.encodings) <= min(copied, fewest):
            return reencoded
        return self._copy(catalog, chosen) if copied <= fewest else kept

    def _copy(self, catalog: Catalog, chosen: MergeSelection) -> MergedSegments:
        stored = copied_bytes(self._backend, catalog, chosen.merged)
        self.tally.total += stored if self._dry_run else 2 * stored + chosen.target.nbytes
        segments, encodings = copy_encodings(
            self.session, self._backend, catalog, chosen.merged, run=self._journal.run, term=self.term
        )
        moved = {edge.checkpoint: edge for edge in encodings}
        chain = tuple(moved.get(edge.checkpoint, edge) for edge in chosen.chain.encodings)
        return MergedSegments("concatenated", chain, tuple(segments), tuple(encodings))

    def _reencode(self, catalog: Catalog, chosen: MergeSelection) -> MergedSegments:
        self.tally.total += (1 if self._dry_run else 2) * chosen.target.nbytes
        below = chosen.prefix
        with contextlib.ExitStack() as stack:
            opened = [
                stack.enter_context(opened_plan(self._backend, catalog, entry, encodings))
                for entry, encodings in (
                    (chosen.target, chosen.chain.encodings),
                    *([(_entry(catalog, below[-1].checkpoint), below)] if below else []),
                )
            ]
            segments, edge, state = reencode(
                self.session,
                opened[0],
                opened[1] if below else None,
                lambda edge: merged_draft([edge], catalog, self._journal.run, self.term),
            )
        if state != chosen.target.state:
            raise CorruptSegmentError(
                f"checkpoint {chosen.target.ref}: its chain gives another state than the log says"
            )
        chain = (edge,) if edge.base is None else (*below, edge)
        return MergedSegments("materialized", chain, tuple(segments), (edge,))

    def _check(self, catalog: Catalog, chosen: MergeSelection, made: MergedSegments) -> None:
        if made.method == "concatenated":
            check_copies(self._backend, catalog, made.segments, made.encodings, self._pool, self._staging, self.advance)
        with opened_plan(self._backend, catalog, chosen.target, made.chain, made.segments) as found:
            check_state(found, self._pool, self._staging, self.advance)

    def _change(
        self, catalog: Catalog, chosen: MergeSelection, made: MergedSegments
    ) -> tuple[CatalogChange, tuple[Node, ...]]:
        """Return the change, and the checkpoints that only a second change can retire."""
        renewed = {edge.checkpoint for edge in made.encodings}
        # An encoding may only be added for a checkpoint that stays promised in the same change. So a chain's
        # checkpoints are moved first, and retired in a second change.
        later = chosen.retired if renewed & set(chosen.retired) else ()
        retires = () if later else chosen.retired
        drops = unneeded(catalog, retires, renewed, made.encodings)
        return CatalogChange(made.segments, encodings=made.encodings, drops=drops, retires=retires), later


def _freed(catalog: Catalog, chosen: MergeSelection, added: Sequence[Encoding]) -> int:
    """Return the bytes of the segments that nothing needs once these encodings replace the present ones."""
    renewed = {edge.checkpoint for edge in added}
    return sum(catalog.segments[segment].size for segment in unneeded(catalog, chosen.retired, renewed, added))


def _entry(catalog: Catalog, node: Node) -> CheckpointEntry:
    entry = catalog.find(node)
    assert entry is not None, node  # it has an encoding
    return entry
