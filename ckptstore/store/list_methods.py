"""The methods of `Store` that list what the log says: checkpoints, terms, tags, rules, lineage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptstore.errors import StoreNotFoundError
from ckptstore.formats.html_tables import Rows
from ckptstore.log import refs
from ckptstore.log.checkpoint_info import CheckpointInfo, TermInfo, describe_all, describe_terms, look_up
from ckptstore.log.log_reader import View, read
from ckptstore.store.store_handle import StoreHandle

if TYPE_CHECKING:
    from ckptstore.reports.lineage import Lineage
    from ckptstore.restore.restore_plan import Plan

__all__ = ["ListMethods"]


class ListMethods(StoreHandle):
    """The methods of `Store` that list checkpoints, terms, tags, rules and parents."""

    def view(self, *, look_above: bool | None = None) -> View:
        """The current log (READ). `look_above`: see `ckptstore.log.log_reader.read`."""
        return read(self.journal, look_above=look_above)

    def checkpoints(self) -> list[CheckpointInfo]:
        """Every promised checkpoint, in the order of terms, and of steps within a term: the oldest first."""
        columns = ("ref", "kind", "stored", "time", "tags", "metadata")
        return Rows(describe_all(self.view().catalog), "checkpoint", columns)

    def checkpoint(self, ref: str | int = "latest") -> CheckpointInfo:
        """The checkpoint that `ref` names.

        Raises:
            CheckpointNotFoundError: no checkpoint matches it.
            CorruptLogError: the damage of the log leaves ``latest`` undecided; names the last intact checkpoint.
        """
        return look_up(self.journal, ref)

    def latest_step(self) -> int | None:
        """The step of ``latest``; None if the store has no checkpoints, or if there is no store yet.

        Raises:
            StoreNotFoundError: the store was deleted while it was open, or has lost its FORMAT file.
            CorruptLogError: the damage of the log leaves ``latest`` undecided; names the last intact checkpoint.
        """
        try:
            latest = self.view().catalog.latest()
        except StoreNotFoundError:
            # Prevents: a run that starts from scratch because the store that it would have continued from was removed.
            if self.backend.deleted() or self.journal.rooms():
                raise
            return None
        return None if latest is None else latest.step

    def terms(self) -> list[TermInfo]:
        """Every term, oldest first."""
        return Rows(describe_terms(self.view().catalog), "term", ("term", "parent", "time", "checkpoints"))

    def tags(self) -> dict[str, CheckpointInfo]:
        """Every tag with the checkpoint that it names."""
        from ckptstore.maintenance.tags import tags

        return tags(self.journal)

    def rules(self) -> tuple[str, ...]:
        """The store's retention rules, in the form that `keep` takes; empty: every checkpoint is kept."""
        from ckptstore.maintenance.pruning import rules

        return rules(self.journal)

    def plan(self, ref: str | int = "latest") -> Plan:
        """How `ref` would be restored: the cheapest chain of encodings."""
        from ckptstore.restore.restore_plan import plan

        catalog = self.view().catalog
        return plan(catalog, refs.resolve(catalog, ref).id)

    def fate(self, step: int, term: int | None = None) -> str | None:
        """What happened to a checkpoint that is no longer promised: ``75@2 was dropped by a merge into 90@2``.

        Args:
            term: term of the checkpoint; None: any term.

        Returns:
            None: the log does not say, or a fold has replaced the record that did.

        Raises:
            CorruptLogError: no part of the log can be read.
            StorageError: the medium failed.
        """
        from ckptstore.reports.retirement_history import fate

        return fate(self.journal, step, term)

    def lineage(self, limit: int | None = None, term: int | None = None, by: str | None = None) -> Lineage:
        """The checkpoints as a forest, newest first: the parent of each, and the damage of the log.

        Args:
            limit: at most this many checkpoints, the newest ones; None: all.
            term: only the checkpoints of this term.
            by: order by the number of this name in the metadata, lowest first, instead of newest first; ``NAME:max``:
                highest first. Checkpoints without such a number come last.

        Raises:
            NotFoundError: no checkpoint has a number of that name.
            CorruptLogError: no part of the log can be read.
            StorageError: the medium failed.
        """
        from ckptstore.reports.lineage import lineage

        return lineage(self.journal, limit, term, by)
