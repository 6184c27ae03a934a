"""Restore plans as people and machines read them; shared by ``ckpt restore --explain`` and ``ckpt inspect``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptstore.cli.output import duration, size, table

if TYPE_CHECKING:
    from ckptstore.reports.explaining import Explanation, PlanStep

__all__ = ["plan_step", "plan_table"]


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


def plan_table(found: Explanation) -> str:
    """The plan as a table, base first."""
    return table(
        ["CHAIN", "KIND", "BASE", ">TENSORS", ">READ", ">DECODE", ">TIME", "SEGMENT"],
        [
            [
                step.ref if not number else "",
                step.kind if not number else "",
                (step.base or "-") if not number else "",
                f"{step.tensors:,}" if not number else "",
                size(step.bytes_read) if not number else "",
                size(step.bytes_decoded) if not number else "",
                duration(step.seconds) if not number else "",
                segment,
            ]
            for step in found.steps
            for number, segment in enumerate(step.segments)
        ],
    )
