"""A forest of checkpoints as text columns, as ``git log --graph`` draws commits."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterator, Mapping, Sequence
from typing import TypeVar

__all__ = ["draw"]

Node = TypeVar("Node", bound=Hashable)


def draw(
    nodes: Sequence[Node], parents: Mapping[Node, Node | None], known: Container[Node] | None = None
) -> Iterator[tuple[str, Node | None]]:
    """Lines of the graph: (columns, node), or (columns, None) for a line that only joins branches.

    Args:
        nodes: newest first; a node's parent comes after it.
        parents: the node each continues from; a parent that is not known counts as none.
        known: nodes that exist, although the drawing may end before them; by default those of `nodes`.

    Every column ("lane") waits for the next node of its branch; lanes that wait for one node are joined above it.
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
    """The line on which `lane` joins `into` and the lanes right of it move one column left."""
    marks = ["|" if waiting is not None else " " for waiting in lanes]
    text = " ".join(marks[: into + 1])
    for index in range(into + 1, lane):
        text += "_" + marks[index]
    text += "/"
    for index in range(lane + 1, len(lanes)):
        text += " /" if lanes[index] is not None else "  "
    return text
