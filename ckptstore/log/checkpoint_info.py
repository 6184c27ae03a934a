"""Describes checkpoints and terms: the public `CheckpointInfo` and `TermInfo`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptstore.errors import CorruptLogError
from ckptstore.formats.history import metadata
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.records import CheckpointEntry, CheckpointId, Node, ref_of
from ckptstore.formats.html_tables import HtmlTable
from ckptstore.log import refs
from ckptstore.log.journal import Journal
from ckptstore.log.log_reader import read

__all__ = [
    "CheckpointInfo",
    "TermInfo",
    "damage_of",
    "describe",
    "describe_all",
    "describe_checkpoint",
    "describe_terms",
    "look_up",
]


@dataclass(frozen=True, slots=True)
class CheckpointInfo(HtmlTable):
    """A committed checkpoint.

    Attributes:
        step: number of optimizer steps done; a resumed run continues with iteration `step`.
        term: the term that committed it.
        state: hash of the whole state (32 hex digits).
        kind: ``full``, ``delta`` or ``gradient``: the encoding of the smallest stored form.
        time: seconds since the Unix epoch when it was committed; information only.
        nbytes: logical bytes of all tensors.
        stored: bytes on the medium of the encodings of this checkpoint, without their bases.
        tensors: number of distinct tensors.
        segments: ids of the segments of those encodings. What a writer of many ranks returns on another rank than 0 has
            only the first, which holds the tree, and those of this rank: `Store.checkpoint` returns all.
        base: REF of the checkpoint that the smallest form builds on, or None.
        lossy: no stored form restores the saved bits.
        tags: its tags.
        metadata: the metadata that was passed to `Writer.save`.
        extra: other members that the writer recorded.
    """

    step: int
    term: int
    state: str
    kind: str
    time: float
    nbytes: int
    stored: int
    tensors: int
    segments: tuple[str, ...]
    base: str | None = None
    lossy: bool = False
    tags: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ref(self) -> str:
        """``STEP@TERM``, the name that every command takes."""
        return ref_of((self.term, self.step))

    @property
    def id(self) -> CheckpointId:
        """The identity with which deltas name their base."""
        return CheckpointId(self.term, self.step, self.state)


@dataclass(frozen=True, slots=True)
class TermInfo(HtmlTable):
    """A term: the records of one writer.

    Attributes:
        term: its number; higher is newer.
        parent: REF of the checkpoint it continued from, or None.
        time: seconds since the Unix epoch when it was opened; information only.
        checkpoints: number of checkpoints it holds.
        extra: what the writer recorded about itself (its environment).
    """

    term: int
    parent: str | None
    time: float
    checkpoints: int
    extra: Mapping[str, Any] = field(default_factory=dict)


def describe_all(catalog: Catalog) -> list[CheckpointInfo]:
    """The public view of every promised checkpoint, ordered by term and step."""
    return describe(catalog, catalog.checkpoints.values())


def describe(catalog: Catalog, entries: Iterable[CheckpointEntry]) -> list[CheckpointInfo]:
    """The public view of catalog entries, in their order."""
    tags: dict[Node, list[str]] = {}
    for tag, node in catalog.tags.items():
        tags.setdefault(node, []).append(tag)
    return [described(catalog, entry, tags.get(entry.node, ())) for entry in entries]


def describe_checkpoint(catalog: Catalog, entry: CheckpointEntry) -> CheckpointInfo:
    """The public view of a catalog entry."""
    return described(catalog, entry, [tag for tag, target in catalog.tags.items() if target == entry.node])


def describe_terms(catalog: Catalog) -> list[TermInfo]:
    """The public view of every term, oldest first."""
    return [
        TermInfo(
            number,
            opened.parent and opened.parent.ref,
            opened.time,
            catalog.checkpoints.holds(number),
            dict(opened.writer),
        )
        for number, opened in sorted(catalog.terms.items())
    ]


def damage_of(catalog: Catalog) -> tuple[str, ...]:
    """The damage of the log, one sentence each: the damaged slots, and why ``latest`` is undecided."""
    found = [f"log slot {seq} is damaged or missing" for seq in catalog.damage]
    try:
        catalog.latest()
    except CorruptLogError as error:
        found.append(str(error))
    return tuple(found)


def look_up(journal: Journal, ref: str | int) -> CheckpointInfo:
    """The checkpoint that `ref` names now.

    Raises:
        CheckpointNotFoundError: no checkpoint matches it.
        CorruptLogError: the damage of the log leaves ``latest`` undecided; names the last intact checkpoint.
    """
    catalog = read(journal).catalog
    return describe_checkpoint(catalog, refs.resolve(catalog, ref))


def described(catalog: Catalog, entry: CheckpointEntry, tags: Iterable[str]) -> CheckpointInfo:
    node = entry.node
    every = catalog.encodings.get(node, ())
    # An encoding whose base is gone stays listed while others read its segment, but it restores nothing.
    encodings = [one for one in every if one.base is None or catalog.find(one.base.node) is not None] or every
    cheapest = min(encodings, key=lambda encoding: encoding.bytes, default=None)
    base = None if cheapest is None or cheapest.base is None else cheapest.base.ref
    return CheckpointInfo(
        step=entry.step,
        term=entry.term,
        state=entry.state,
        kind="lost" if cheapest is None else cheapest.kind,
        time=entry.time,
        nbytes=entry.nbytes,
        stored=sum(encoding.bytes for encoding in encodings),
        tensors=entry.tensors,
        segments=tuple(dict.fromkeys(segment for encoding in encodings for segment in encoding.segments)),
        base=base,
        lossy=all(encoding.lossy for encoding in encodings) if encodings else False,
        tags=tuple(sorted(tags)),
        metadata=metadata.read(entry.extra.get(metadata.MEMBER)),
        extra={name: value for name, value in entry.extra.items() if name != metadata.MEMBER},
    )
