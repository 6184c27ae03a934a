"""Describes a change of the catalog: the members of a COMMIT that its author chooses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptstore.formats.history.records import CheckpointEntry, CommitRecord, Encoding, Node, SegmentEntry

__all__ = ["CatalogChange"]


@dataclass(frozen=True, slots=True)
class CatalogChange:
    """The members of a `CommitRecord` that its author chooses; see there. The term adds the others."""

    segments: tuple[SegmentEntry, ...] = ()
    checkpoints: tuple[CheckpointEntry, ...] = ()
    encodings: tuple[Encoding, ...] = ()
    drops: tuple[str, ...] = ()
    retires: tuple[Node, ...] = ()
    tags: Mapping[str, Node | None] = field(default_factory=dict)
    requests: Mapping[str, str | None] = field(default_factory=dict)
    keep: tuple[str, ...] | None = None
    swept: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    def record(self, term: int) -> CommitRecord:
        """The record with which `term` commits this change."""
        return CommitRecord(
            term,
            segments=self.segments,
            checkpoints=self.checkpoints,
            encodings=self.encodings,
            drops=self.drops,
            retires=self.retires,
            tags=self.tags,
            requests=self.requests,
            keep=self.keep,
            swept=self.swept,
            extra=self.extra,
        )
