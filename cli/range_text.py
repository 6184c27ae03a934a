"""Checkpoints in a row, as ranges, and with the noun that goes with their number: ``46..70@2, 144@3``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ckptstore.errors import UsageError
from ckptstore.formats.checkpoint_ref import node_of

__all__ = ["checkpoints", "counted", "kind_name", "ranges"]

_SHORTEST = (3, 4)
"""Checkpoints that make a range, if they are neighbours and if not: of fewer each is named."""
_KINDS = {"gradient": "step diff"}


def counted(count: int, noun: str, *verb: str) -> str:
    """``1 checkpoint``, ``1,204 checkpoints``; with a verb for one and for many: ``1 file is``, ``2 files are``."""
    said = f" {verb[count != 1]}" if verb else ""
    return f"{count:,} {noun}{'' if count == 1 else 's'}{said}"


def checkpoints(refs: Sequence[str]) -> str:
    """``29 checkpoints: 46..70@2, 144@3``; one is named alone."""
    return refs[0] if len(refs) == 1 else f"{counted(len(refs), 'checkpoint')}: {ranges(refs)}"


def kind_name(kind: str) -> str:
    """How people call what the format calls `kind`: a ``gradient`` is a step diff."""
    return _KINDS.get(kind, kind)


def ranges(refs: Iterable[str]) -> str:
    """REFs by term and step, evenly spaced ones as a range; whatever is no ``STEP@TERM`` comes last, as it is.

    Nothing is left out: ``46..70@2, 144@3``; steps that are not neighbours say how far apart they are:
    ``5..30@1 by 5``.
    """
    nodes, others = [], []
    for ref in refs:
        try:
            nodes.append(node_of(ref))
        except UsageError:
            others.append(ref)
    return ", ".join([*_spaced(sorted(set(nodes))), *others])


def _spaced(nodes: Sequence[tuple[int, int]]) -> Iterator[str]:
    start = 0
    while start < len(nodes):
        term, first = nodes[start]
        end, gap = start + 1, 0
        while end < len(nodes) and nodes[end][0] == term:
            apart = nodes[end][1] - nodes[end - 1][1]
            if gap not in (0, apart):
                break
            gap = apart
            end += 1
        if end - start < _SHORTEST[gap > 1]:
            yield f"{first}@{term}"
            start += 1
        else:
            yield f"{first}..{nodes[end - 1][1]}@{term}" + (f" by {gap}" if gap > 1 else "")
            start = end
