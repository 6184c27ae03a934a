"""Reverse index of a catalog's encodings: which checkpoints read a segment or build on a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from ckptstore.formats.history.columns import EncodingRows
from ckptstore.formats.history.records import Encoding, Node
from ckptstore.formats.history.tables import NodeTable

__all__ = ["EdgeIndex"]

_K = TypeVar("_K")


class EdgeIndex:
    """Reverse index: which checkpoints read a segment, and which build on a checkpoint.

    Entries for stored rows are never removed. So a caller must check the encodings that are in the catalog now.
    """

    __slots__ = ("_dependents", "_users", "rows")

    def __init__(self, encodings: NodeTable[tuple[Encoding, ...]]) -> None:
        assert isinstance(encodings.rows, EncodingRows)
        self.rows = encodings.rows
        self._users: dict[str, set[Node]] = {}
        self._dependents: dict[Node, set[Node]] = {}
        for edges in encodings.changes.values():
            for edge in edges or ():
                self.add(edge)

    def add(self, edge: Encoding) -> None:
        """Add an encoding that is among the changes."""
        for segment in edge.segments:
            self._users.setdefault(segment, set()).add(edge.checkpoint)
        if edge.base is not None:
            self._dependents.setdefault(edge.base.node, set()).add(edge.checkpoint)

    def remove(self, edge: Encoding, kept: Sequence[Encoding]) -> None:
        """Remove an encoding that is gone. `kept` are the remaining encodings of its checkpoint.

        Prevents: an index that grows with every save of a run whose catalog stays small, because it retires.
        """
        for segment in edge.segments:
            if not any(segment in other.segments for other in kept):
                _discard(self._users, segment, edge.checkpoint)
        if edge.base is not None and not any(
            other.base is not None and other.base.node == edge.base.node for other in kept
        ):
            _discard(self._dependents, edge.base.node, edge.checkpoint)

    def users(self, segment: str) -> set[Node]:
        """Return the checkpoints that have, or had, an encoding that reads `segment`."""
        return self._users.get(segment, set()).union(self.rows.users(segment) if self.rows.columns[0] else ())

    def dependents(self, node: Node) -> set[Node]:
        """Return the checkpoints that have, or had, an encoding against `node`."""
        return self._dependents.get(node, set()).union(self.rows.dependents(node) if self.rows.columns[0] else ())


def _discard(index: dict[_K, set[Node]], key: _K, node: Node) -> None:
    found = index.get(key)
    if found is not None:
        found.discard(node)
        if not found:
            del index[key]
