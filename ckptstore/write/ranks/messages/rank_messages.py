"""Encode the letters between a rank and the committer, and the committer's answers, as compressed JSON.

They come from processes of the same job, so they are not treated as hostile input. A letter that cannot be read makes
the step fail.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import zstandard

from ckptstore import errors
from ckptstore.errors import (
    CkptError,
    DivergedReplicasError,
    FailedRankError,
    FormatError,
    RankMismatchError,
    StorageError,
)
from ckptstore.formats import jsontext
from ckptstore.formats.history.records import CheckpointId, SegmentEntry
from ckptstore.formats.segment_files.layout import chunk_extents
from ckptstore.formats.segment_files.segment import Chunk, TensorEntry
from ckptstore.log.checkpoint_info import CheckpointInfo
from ckptstore.write.policy.orders import Order
from ckptstore.write.ranks.messages.key_value_store import LETTER_LIMIT

__all__ = [
    "BatchPart",
    "CommitVerdict",
    "OpenedTerm",
    "RankPart",
    "pack",
    "pack_order",
    "told",
    "unpack",
    "unpack_order",
]

_KNOWN: Final = {
    kind.__name__: kind
    for kind in (
        errors.FencedError,
        errors.CommitUnknownError,
        errors.StoreReplacedError,
        errors.StepOrderError,
        errors.MissingRankError,
        errors.FailedRankError,
        errors.UnmadeStateError,
        errors.MailboxError,
        errors.AgentLostError,
    )
}


def pack(value: Any) -> bytes:
    """Encode a value as JSON in a letter."""
    return zstandard.ZstdCompressor(level=1).compress(jsontext.dumps(value))


def unpack(letter: bytes, where: str) -> Any:
    """The inverse of `pack`. Raises `FormatError`."""
    try:
        text = zstandard.ZstdDecompressor().decompress(letter, max_output_size=LETTER_LIMIT)
    except zstandard.ZstdError as error:
        raise FormatError(f"{where}: {error}") from error
    return jsontext.loads(text, what=where, max_bytes=LETTER_LIMIT, max_depth=jsontext.MAX_DEPTH + 8)


@dataclass(frozen=True, slots=True)
class RankPart:
    """What one rank has written of a step; it is durable already.

    Attributes:
        rank: the rank that wrote it.
        agreement: id of the agreement whose division it follows.
        segments: in order.
        entries: what they hold; of the chunks only the decoded hashes.
        digests: state digests of the rank's replicas, by name.
        tree: the tree of the rank's state.
        abandoned: segments that the rank began in this term and that will never be committed.
    """

    rank: int
    agreement: str = ""
    segments: tuple[SegmentEntry, ...] = ()
    entries: tuple[TensorEntry, ...] = ()
    digests: Mapping[str, int] = field(default_factory=dict)
    tree: Any = None
    abandoned: tuple[str, ...] = ()

    def packed(self) -> bytes:
        """As a letter."""
        return pack(self._row())

    @staticmethod
    def packed_all(parts: Sequence[RankPart]) -> bytes:
        """Encode the parts of several steps as one letter."""
        return pack([part._row() for part in parts])

    def _row(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "agreement": self.agreement,
            "segments": [_segment_row(one) for one in self.segments],
            "entries": [_entry_row(entry) for entry in self.entries],
            "digests": [[name, f"{number:016x}"] for name, number in self.digests.items()],
            "tree": self.tree,
            "abandoned": list(self.abandoned),
        }

    @classmethod
    def unpacked(cls, letter: bytes, where: str) -> RankPart:
        """The inverse of `packed`. Raises `FormatError`."""
        return cls._of_row(unpack(letter, where), where)

    @classmethod
    def unpacked_all(cls, letter: bytes, where: str) -> list[RankPart]:
        """The inverse of `packed_all`. Raises `FormatError`."""
        return [cls._of_row(row, where) for row in unpack(letter, where)]

    @classmethod
    def _of_row(cls, row: dict[str, Any], where: str) -> RankPart:
        try:
            return cls(
                row["rank"],
                row["agreement"],
                tuple(SegmentEntry(*one) for one in row["segments"]),
                tuple(_entry(one) for one in row["entries"]),
                {name: int(number, 16) for name, number in row["digests"]},
                row["tree"],
                tuple(row["abandoned"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"{where}: not a part") from error


@dataclass(frozen=True, slots=True)
class BatchPart:
    """What one rank has written of several steps at once; it is durable already.

    Attributes:
        rank: the rank that wrote it.
        segments: in order.
        used: for each step the ids of the segments that hold something of it.
        costs: for each step its bytes in these segments.
        abandoned: see `RankPart`.
    """

    rank: int
    segments: tuple[SegmentEntry, ...]
    used: tuple[tuple[str, ...], ...]
    costs: tuple[int, ...]
    abandoned: tuple[str, ...]

    def packed(self) -> bytes:
        """As a letter."""
        rows = [_segment_row(one) for one in self.segments]
        return pack([self.rank, rows, [list(ids) for ids in self.used], list(self.costs), list(self.abandoned)])

    @classmethod
    def unpacked(cls, letter: bytes, where: str) -> BatchPart:
        """The inverse of `packed`. Raises `FormatError`."""
        try:
            rank, rows, used, costs, abandoned = unpack(letter, where)
            segments = tuple(SegmentEntry(*row) for row in rows)
            return cls(rank, segments, tuple(tuple(ids) for ids in used), tuple(costs), tuple(abandoned))
        except (TypeError, ValueError) as error:
            raise FormatError(f"{where}: not a part") from error


def _segment_row(one: SegmentEntry) -> list[Any]:
    return [one.id, one.term, one.size, one.header, one.hash]


def _entry_row(entry: TensorEntry) -> list[Any]:
    place = None if entry.offset is None else [list(entry.global_shape or ()), list(entry.offset)]
    hashes = "".join(chunk.decoded_hash or "" for chunk in entry.chunks)
    return [entry.name, entry.dtype, list(entry.shape), hashes, place]


def _entry(row: list[Any]) -> TensorEntry:
    name, dtype, shape, hashes, place = row
    entry = TensorEntry(name, dtype, tuple(shape), ())
    chunks = tuple(
        Chunk(0, 0, length, "", hashes[16 * number : 16 * number + 16])
        for number, (_, length) in enumerate(chunk_extents(entry.nbytes))
    )
    whole, offset = (None, None) if place is None else (tuple(place[0]), tuple(place[1]))
    return dataclasses.replace(entry, chunks=chunks, global_shape=whole, offset=offset)


@dataclass(frozen=True, slots=True)
class CommitVerdict:
    """The result of a step, or of the steps of a batch, for every rank.

    Attributes:
        infos: the committed checkpoints, of whose segments only the first, with the tree; empty if nothing was
            committed.
        error: why nothing was committed.
    """

    infos: tuple[CheckpointInfo, ...] = ()
    error: CkptError | None = None

    def packed(self) -> bytes:
        """As a letter."""
        if self.error is not None:
            return pack({"error": _error_members(self.error)})
        return pack({"infos": [dataclasses.asdict(info) for info in self.infos]})

    @classmethod
    def unpacked(cls, letter: bytes, where: str) -> CommitVerdict:
        """The inverse of `packed`; an error of a kind that only rank 0 raises becomes a `FailedRankError`."""
        found = unpack(letter, where)
        if "error" in found:
            return cls(error=_error(found["error"]))
        infos = []
        for members in found["infos"]:
            for name in ("segments", "tags"):
                members[name] = tuple(members[name])
            infos.append(CheckpointInfo(**members))
        return cls(tuple(infos))


def pack_order(order: Order) -> bytes:
    """Encode an order as a letter."""
    base = None if order.base is None else list(order.base)
    return pack([base, order.gap, order.keep, [list(one) for one in order.forget], order.after, order.last])


def unpack_order(letter: bytes, where: str) -> Order:
    """The inverse of `pack_order`. Raises `FormatError`."""
    try:
        base, gap, keep, forget, after, last = unpack(letter, where)
        ids = tuple(CheckpointId(*one) for one in forget)
        return Order(None if base is None else CheckpointId(*base), gap, keep, ids, after, last)
    except (TypeError, ValueError) as error:
        raise FormatError(f"{where}: not an order") from error


def told(error: BaseException) -> CkptError:
    """Return an error of rank 0 as the other ranks raise it."""
    return error if isinstance(error, CkptError) else FailedRankError(f"rank 0: {type(error).__name__}: {error}")


def _error_members(error: CkptError) -> dict[str, Any]:
    members: dict[str, Any] = {"kind": type(error).__name__, "text": str(error)}
    if isinstance(error, DivergedReplicasError):
        members |= {"tensor": error.tensor, "rank": error.rank, "step": error.step}
    if isinstance(error, RankMismatchError):
        members["agree_anew"] = error.agree_anew
    return members


def _error(members: Mapping[str, Any]) -> CkptError:
    kind, text = members["kind"], members["text"]
    if kind == DivergedReplicasError.__name__:
        return DivergedReplicasError(text, members["tensor"], members["rank"], members["step"])
    if kind == RankMismatchError.__name__:
        return RankMismatchError(text, agree_anew=members["agree_anew"])
    if kind in _KNOWN:
        return _KNOWN[kind](text)
    if kind == StorageError.__name__:
        return StorageError(f"rank 0: {text}")
    return FailedRankError(f"rank 0 could not commit: {kind}: {text}")


@dataclass(frozen=True, slots=True)
class OpenedTerm:
    """The term that rank 0 has opened, for the other ranks.

    Attributes:
        run: the store's run.
        term, nonce: of the term.
        slot: the slot of its OPEN record.
        parent: the checkpoint that it continues from.
        url: URL with which rank 0 opened the store, for messages.
        coding: what rank 0's options store besides fulls: ``deltas=``, ``diffs=``, both or nothing.
    """

    run: str
    term: int
    nonce: str
    slot: int
    parent: CheckpointId | None
    url: str
    coding: str = ""

    def packed(self) -> bytes:
        """As a letter."""
        return pack({**dataclasses.asdict(self), "parent": None if self.parent is None else list(self.parent)})

    @classmethod
    def unpacked(cls, letter: bytes, where: str) -> OpenedTerm:
        """The inverse of `packed`."""
        found = unpack(letter, where)
        parent = found.pop("parent")
        return cls(parent=None if parent is None else CheckpointId(*parent), **found)
