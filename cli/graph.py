"""Draws a forest of checkpoints as text columns, as ``git log --graph`` draws commits."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterator, Mapping, Sequence
from typing import TypeVar

__all__ = ["draw"]

Node = TypeVar("Node", bound=Hashable)


def draw(
    nodes: Sequence[Node], parents: Mapping[Node, Node | None], known: Container[Node] | None = None
) -> Iterator[tuple[str, Node | None]]:
    """Yield the lines of the graph: (columns, node), or (columns, None) for a line that only joins branches.

    Args:
        nodes: newest first; a node's parent comes after it.
        parents: the parent of each node; an unknown parent counts as none.
        known: nodes that exist even if the drawing ends before them; default: those of `nodes`.

    Each column ("lane") waits for the next node of its branch. Lanes that wait for the same node are joined above it.
    """
    known = set(nodes) if known is None else known
    lanes: list[Node | None] = []
    for node in nodes:
        here = [index for index, waiting in enumerate(lanes) if waiting == node]
        if not here:
            here = [lanes.index(None) if None in lanes else len(lanes)]
            lanes[here[0] : here[0] + 1] = [node]
        first = here[0]
        for index in reversed(here[1:]):
            yield _join(lanes, first, index), None
            del lanes[index]
        yield (
            " ".join("*" if index == first else "|" if lane is not None else " " for index, lane in enumerate(lanes)),
            node,
        )
        parent = parents.get(node)
        lanes[first] = parent if parent in known else None
        while lanes and lanes[-1] is None:
            lanes.pop()


def _join(lanes: Sequence[Node | None], into: int, lane: int) -> str:
    """Return the line on which `lane` joins `into` and the lanes to its right move one column left."""
    marks = ["|" if waiting is not None else " " for waiting in lanes]
    text = " ".join(marks[: into + 1])
    for index in range(into + 1, lane):
        text += "_" + marks[index]
    text += "/"
    for index in range(lane + 1, len(lanes)):
        text += " /" if lanes[index] is not None else "  "
    return text
