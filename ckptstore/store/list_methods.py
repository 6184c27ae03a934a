"""What the log of a store says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptstore.errors import StoreNotFoundError
from ckptstore.formats.html_tables import Rows
from ckptstore.log import refs
from ckptstore.log.checkpoint_info import CheckpointInfo, TermInfo, describe_all, describe_terms, look_up
from ckptstore.log.log_reader import View, read
from ckptstore.restore.restore_plan import Plan, plan
from ckptstore.store.store_handle import Handle

if TYPE_CHECKING:
    from ckptstore.reports.lineage import Lineage

__all__ = ["Listing"]


class Listing(Handle):
    """The part of `Store` that tells what there is: checkpoints, terms, tags, who continues from whom."""

    def view(self, *, look_above: bool | None = None) -> View:
        """The log as it is now (READ). `look_above`: see `ckptstore.log.log_reader.read`."""
        return read(self.journal, look_above=look_above)

    def checkpoints(self) -> list[CheckpointInfo]:
        """Every promised checkpoint, by term and step."""
        columns = ("ref", "kind", "stored", "time", "tags", "metadata")
        return Rows(describe_all(self.view().catalog), "checkpoint", columns)

    def checkpoint(self, ref: str | int = "latest") -> CheckpointInfo:
        """The checkpoint that `ref` names.

        Raises:
            CheckpointNotFoundError: nothing answers to it.
            CorruptLogError: the log is damaged where ``latest`` would be decided; names the last intact checkpoint.
        """
        return look_up(self.journal, ref)

    def latest_step(self) -> int | None:
        """The step of ``latest``; None in a store without checkpoints, or where there is no store yet.

        Raises:
            StoreNotFoundError: there was one: it was deleted while it was open, or has lost its FORMAT file.
            CorruptLogError: the log is damaged where ``latest`` would be decided; names the last intact checkpoint.
        """
        try:
            latest = self.view().catalog.latest()
        except StoreNotFoundError:
            # Prevents: a run that begins from nothing, because somebody removed what it would have continued from.
            if self.backend.deleted() or self.journal.rooms():
                raise
            return None
        return None if latest is None else latest.step

    def terms(self) -> list[TermInfo]:
        """Every term, oldest first."""
        return Rows(describe_terms(self.view().catalog), "term", ("term", "parent", "time", "checkpoints"))

    def tags(self) -> dict[str, CheckpointInfo]:
        """Every tag, by name, and the checkpoint that it names."""
        from ckptstore.maintenance.tags import tags

        return tags(self.journal)

    def rules(self) -> tuple[str, ...]:
        """The store's rules of retention, as `keep` takes them; none: every checkpoint is kept."""
        from ckptstore.maintenance.pruning import rules

        return rules(self.journal)

    def plan(self, ref: str | int = "latest") -> Plan:
        """How `ref` would be restored: the cheapest chain of encodings."""
        catalog = self.view().catalog
        return plan(catalog, refs.resolve(catalog, ref).id)

    def fate(self, step: int, term: int | None = None) -> str | None:
        """What became of a checkpoint that is promised no longer: ``75@2 was dropped by a merge into 90@2``.

        Args:
            term: None: of whichever term.

        Returns:
            None: the log does not say, or not any more (a fold took the place of the record).

        Raises:
            CorruptLogError: nothing of the log can be read.
            StorageError: the medium failed.
        """
        from ckptstore.reports.retirement_history import fate

        return fate(self.journal, step, term)

    def lineage(self, limit: int | None = None, term: int | None = None, by: str | None = None) -> Lineage:
        """The checkpoints as a forest, newest first: who continues from whom, and what is wrong with the log.

        Args:
            limit: at most so many checkpoints, the newest; None: all.
            term: only the checkpoints of this term.
            by: order by the number of this name in the metadata, lowest first, instead of newest first; ``NAME:max``:
                highest first. Those without one come last.

        Raises:
            NotFoundError: no checkpoint has a number of that name.
            CorruptLogError: nothing of the log can be read.
            StorageError: the medium failed.
        """
        from ckptstore.reports.lineage import lineage

        return lineage(self.journal, limit, term, by)
