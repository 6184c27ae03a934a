"""A change of the catalog, as whoever wants it describes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptstore.formats.records import CheckpointEntry, CommitRecord, Encoding, Node, SegmentEntry

__all__ = ["Change"]


@dataclass(frozen=True, slots=True)
class Change:
    """The members of a `CommitRecord` that its author chooses; see there. The others are the term's."""

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
        """The record by which `term` makes this change."""
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
