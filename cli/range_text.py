"""Formats lists of checkpoints as ranges and with the right noun: ``46..70@2, 144@3``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ckptstore.errors import UsageError
from ckptstore.formats.history.checkpoint_ref import node_of

__all__ = ["checkpoints", "counted", "kind_name", "ranges"]

_SHORTEST = (3, 4)
"""Minimum number of checkpoints in a range: of consecutive steps, of evenly spaced ones. Fewer are named one by one."""
_KINDS = {"gradient": "step diff"}


def counted(count: int, noun: str, *verb: str) -> str:
    """Format a count with its noun: ``1,204 checkpoints``; with a singular and a plural verb: ``1 file is``."""
    said = f" {verb[count != 1]}" if verb else ""
    return f"{count:,} {noun}{'' if count == 1 else 's'}{said}"


def checkpoints(refs: Sequence[str]) -> str:
    """Format ``29 checkpoints: 46..70@2, 144@3``; a single one only by its REF."""
    return refs[0] if len(refs) == 1 else f"{counted(len(refs), 'checkpoint')}: {ranges(refs)}"


def kind_name(kind: str) -> str:
    """Return the user's name for the format's `kind`: a ``gradient`` is a step diff."""
    return _KINDS.get(kind, kind)


def ranges(refs: Iterable[str]) -> str:
    """Format REFs by term and step, evenly spaced ones as a range. Text that is no ``STEP@TERM`` comes last, unchanged.

    Nothing is omitted: ``46..70@2, 144@3``. Ranges of steps that are not consecutive state the distance:
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
