"""Prints two runs side by side for ``ckpt log A B``, as text and as JSON."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import click

from ckptstore.cli.output import number, size, table
from ckptstore.cli.range_text import counted

if TYPE_CHECKING:
    from ckptstore.log.checkpoint_info import CheckpointInfo
    from ckptstore.reports.lineage import Lineage
    from ckptstore.reports.run_comparison import SideBySide, StepPair

__all__ = ["document", "text"]

_SHOWN: Final = 12
"""Number of steps that a terminal shows without --all."""


def text(found: SideBySide, stores: tuple[str, str], limit: int | None, *, everything: bool) -> Iterator[str]:
    """Yield the summary lines, then a table step by step, newest first.

    Args:
        limit: show only this many of the newest steps.
        everything: show every step, on a terminal too.
    """
    for letter, store, run in zip("AB", stores, found.runs, strict=True):
        yield f"{click.style(letter, bold=True)}  {store}: {_facts(run)}"
    yield from _answers(found)
    pairs = list(reversed(found.pairs))
    shown = pairs if limit is None else pairs[:limit]
    if limit is None and not everything and sys.stdout.isatty() and len(pairs) > _SHOWN:
        both = [pair for pair in pairs if pair.same is not None]
        pool = both if len(both) > 1 else pairs
        most = min(_SHOWN, len(pool))
        shown = [pool[index * (len(pool) - 1) // (most - 1)] for index in range(most)]
    if shown:
        yield ""
        yield _table(found, shown)
    if len(shown) < len(pairs):
        yield f"... {len(shown):,} of {counted(len(pairs), 'step')}; --all shows every one"


def _facts(run: Lineage) -> str:
    facts = [counted(run.total, "checkpoint"), size(run.nbytes)]
    if run.steps is not None:
        first, last = run.steps
        facts.append(f"steps {first:,} to {last:,}" if first < last else f"step {first:,}")
    facts.append(f"latest {run.latest or 'unknown'}")
    return ", ".join(facts)


def _no_metric(found: SideBySide) -> str:
    """Say that neither run has the metric, and which metrics there are."""
    from ckptstore.formats.history.rule_rankings import number as ranked

    there: set[str] = set()
    for said in (info.metadata for pair in found.pairs for info in pair.infos if info is not None):
        inner = said.get("metrics")
        names = {*said, *(inner if isinstance(inner, dict) else ())} - there
        there.update(name for name in names if ranked(said, name) is not None)
    return f"no {found.metric} in either" + (f"; --metric takes: {', '.join(sorted(there))}" if there else "")


def _answers(found: SideBySide) -> Iterator[str]:
    """Yield the comparison of the metric, then of the states."""
    last = found.last_common
    if last is not None:
        a, b = last.values
        assert a is not None
        assert b is not None
        apart = "the same" if a == b else f"B is {'lower' if b < a else 'higher'} by {number(abs(b - a))}"
        yield f"{found.metric} at step {last.step:,}: A {number(a)}, B {number(b)} ({apart})"
    lowest = []
    for index, letter in enumerate("AB"):
        if (pair := found.lowest(index)) is not None and (info := pair.infos[index]) is not None:
            lowest.append(f"{letter} {number(pair.values[index])} at {info.ref}")
    yield f"lowest {found.metric}: {', '.join(lowest)}" if lowest else _no_metric(found)
    parting = found.parting
    if not parting.common:
        yield "states: no step is in both"
    elif parting.differ_from is None:
        yield f"states: the same at {counted(parting.common, 'step')} that both have"
    elif parting.same_until is None:
        yield f"states: they differ from step {parting.differ_from:,} on, the first that both have"
    else:
        yield f"states: the same up to step {parting.same_until:,}, not at step {parting.differ_from:,}"


def _table(found: SideBySide, pairs: list[StepPair]) -> str:
    measured = any(value is not None for pair in found.pairs for value in pair.values)
    name = found.metric.upper()
    headings = [">STEP", *([f">A {name}", f">B {name}", ">B-A"] if measured else [])]
    rows = []
    for pair in pairs:
        row = [f"{pair.step:,}"]
        if measured:
            a, b = pair.values
            row += [number(a), number(b), "-" if a is None or b is None else f"{b - a:+.4g}"]
        for info in pair.infos:
            row.append("-" if info is None else size(info.stored))
        rows.append([*row, {None: "only one", True: "same", False: "differ"}[pair.same]])
    return table([*headings, ">A STORED", ">B STORED", "STATES"], rows)


def document(found: SideBySide, stores: tuple[str, str], limit: int | None) -> dict[str, Any]:
    """Return the same as JSON, steps ascending."""
    parting = found.parting
    first = 0 if limit is None else max(0, len(found.pairs) - limit)
    return {
        "runs": [_run(store, run) for store, run in zip(stores, found.runs, strict=True)],
        "metric": found.metric,
        "common": parting.common,
        "same_until": parting.same_until,
        "differ_from": parting.differ_from,
        "steps": [
            {
                "step": pair.step,
                "same": pair.same,
                "a": _side(pair.infos[0], pair.values[0]),
                "b": _side(pair.infos[1], pair.values[1]),
            }
            for pair in found.pairs[first:]
        ],
    }


def _run(store: str, run: Lineage) -> dict[str, Any]:
    return {"store": store, "checkpoints": run.total, "bytes": run.nbytes, "latest": run.latest}


def _side(info: CheckpointInfo | None, value: float | None) -> dict[str, Any] | None:
    if info is None:
        return None
    return {"ref": info.ref, "value": value, "kind": info.kind, "stored_bytes": info.stored, "state": info.state}
