"""Restore plans as people and machines read them; shared by ``ckpt restore --explain`` and ``ckpt inspect``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from ckptstore.cli.output import between, duration, short_key, size, table
from ckptstore.cli.range_text import kind_name

if TYPE_CHECKING:
    from ckptstore.reports.restore_explanation import Explanation, PlanStep

__all__ = ["plan_line", "plan_step", "plan_table"]


def plan_step(step: PlanStep) -> dict[str, Any]:
    """One step as JSON."""
    return {
        "ref": step.ref,
        "kind": step.kind,
        "base": step.base,
        "segments": list(step.segments),
        "tensors": step.tensors,
        "bytes_read": step.bytes_read,
        "bytes_decoded": step.bytes_decoded,
        "seconds": round(step.seconds, 4),
    }


_SHOWN: Final = 10
"""Steps that a table shortened has from its beginning, and from its end."""


def plan_table(found: Explanation, *, whole: bool = True) -> str:
    """The plan as a table, base first. On a terminal segments have short names.

    Args:
        whole: False: of a long chain the first and last steps, with a line between that says how many are left out.
    """
    if whole or len(found.steps) <= 2 * _SHOWN + 1:
        return _table(found.steps)
    left = len(found.steps) - 2 * _SHOWN
    lines = _table(found.steps[:_SHOWN] + found.steps[-_SHOWN:]).splitlines()
    above = 1 + sum(max(1, len(step.segments)) for step in found.steps[:_SHOWN])
    return "\n".join([*lines[:above], f"... and {left:,} more (--all)", *lines[above:]])


def _table(steps: Sequence[PlanStep]) -> str:
    short = sys.stdout.isatty()
    return table(
        ["CHAIN", "KIND", "BASE", ">TENSORS", ">READ", ">DECODE", ">TIME", "SEGMENT"],
        [
            [
                step.ref if not number else "",
                kind_name(step.kind) if not number else "",
                (step.base or "-") if not number else "",
                f"{step.tensors:,}" if not number else "",
                size(step.bytes_read) if not number else "",
                size(step.bytes_decoded) if not number else "",
                duration(step.seconds) if not number else "",
                short_key(segment, short=short),
            ]
            for step in steps
            for number, segment in enumerate(step.segments)
        ],
    )


def plan_line(found: Explanation) -> str:
    """The plan in a line: ``restores from: 181@6 full > 241@6 delta > 59 step diffs (reads 106 MiB, 2 to 5 s)``."""
    costs = ", ".join(filter(None, (f"reads {size(found.bytes_read)}", between(found.span))))
    return f"restores from: {' > '.join(_forms(found))} ({costs})"


def _forms(found: Explanation) -> Iterator[str]:
    for kind, steps in groupby(found.steps, key=lambda step: step.kind):
        refs = [step.ref for step in steps]
        name = kind_name(kind)
        yield f"{refs[0]} {name}" if len(refs) == 1 else f"{len(refs):,} {name}s"
