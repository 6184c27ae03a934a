"""``ckpt log``: the checkpoints of a store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from ckptstore.cli.arguments import STORE, opened
from ckptstore.cli.arguments import command as make_command
from ckptstore.cli.output import emit, moment, note, number, size, table

if TYPE_CHECKING:
    from ckptstore.log.checkpoints import CheckpointInfo, TermInfo
    from ckptstore.reports.lineage import Lineage

_MOST = 4
_LONGEST = 24


@make_command(
    "log",
    examples=[
        "ckpt log runs/gpt",
        "ckpt log runs/gpt -n 20",
        "ckpt log runs/gpt --sort loss -n 5       # the best five; accuracy:max for the highest",
        "ckpt log runs/gpt --term 3 --json",
    ],
)
@STORE
@click.option("-n", "--limit", type=click.IntRange(min=0), metavar="N", help="Only the N newest.")
@click.option("--term", type=click.IntRange(min=1), metavar="TERM", help="Only the checkpoints of this term.")
@click.option(
    "--sort", "by", metavar="NAME[:max]", help="Lowest (or highest) first by this number of the metadata; no graph."
)
def command(store: str, limit: int | None, term: int | None, by: str | None, as_json: bool) -> None:
    """List checkpoints, newest first, with forks as a graph.

    A branch begins where a writer went back and continued from an earlier checkpoint.
    """
    target = opened(store)
    found = target.lineage(limit, term, by)
    shown = found.checkpoints
    for damage in found.damage:
        note(damage)
    if as_json:
        emit(
            {
                "store": store,
                "run": target.run,
                "latest": found.latest,
                "checkpoints": [_checkpoint(info, found) for info in shown],
                "terms": [_term(info) for info in found.terms if term in (None, info.term)],
                "damage": list(found.damage),
            }
        )
    elif shown:
        click.echo(_text(found) if by is None else _listing(found))
        _closing(found, term)
    elif found.total and term is None:
        click.echo(f"{found.total:,} checkpoints")  # none of them was asked for
    else:
        note("no checkpoint yet" if term is None else f"no checkpoint in term {term}")


def _checkpoint(info: CheckpointInfo, found: Lineage) -> dict[str, Any]:
    return {
        "ref": info.ref,
        "step": info.step,
        "term": info.term,
        "parent": found.parents[info.ref],
        "kind": info.kind,
        "base": info.base,
        "lossy": info.lossy,
        "time": info.time,
        "bytes": info.nbytes,
        "stored_bytes": info.stored,
        "tensors": info.tensors,
        "tags": list(info.tags),
        "metadata": dict(info.metadata),
        "state": info.state,
    }


def _term(info: TermInfo) -> dict[str, Any]:
    return {"term": info.term, "parent": info.parent, "time": info.time, "checkpoints": info.checkpoints}


def _text(found: Lineage) -> str:
    from ckptstore.cli.graph import draw

    infos = {info.ref: info for info in found.checkpoints}
    said = any(info.metadata for info in found.checkpoints)
    rows: list[list[str]] = []
    # The graph is drawn as far as it is shown, but of the whole: a branch whose root is below looks like a branch.
    known = {*found.parents, *filter(None, found.parents.values())}
    for columns, ref in draw(list(found.parents), found.parents, known):
        if ref in infos:
            rows.append([columns, *_cells(infos[ref], found, said)])
        elif ref is None and rows and len(infos) == found.total:
            rows.append([columns] + [""] * (6 if said else 5))
    return table(["", *_headings(said)], rows)


def _listing(found: Lineage) -> str:
    """In the order that was asked for, which no graph can follow."""
    return table(_headings(True), [_cells(info, found, True) for info in found.checkpoints])


def _headings(said: bool) -> list[str]:
    return ["CHECKPOINT", "KIND", ">STORED", "TIME", *(["METADATA"] if said else []), ""]


def _cells(info: CheckpointInfo, found: Lineage, said: bool) -> list[str]:
    names = (["latest"] if info.ref == found.latest else []) + [f"tag:{tag}" for tag in info.tags]
    kind = info.kind + (f" of {info.base}" if info.base else "") + (", lossy" if info.lossy else "")
    metadata = [_said(info.metadata)] if said else []
    return [info.ref, kind, size(info.stored), moment(info.time), *metadata, " ".join(names)]


def _said(metadata: Mapping[str, Any]) -> str:
    """A few words of metadata: ``loss 2.317, run a``; what is deeper is in --json."""
    inner = metadata.get("metrics")
    flat = {**metadata, **inner} if isinstance(inner, Mapping) else metadata
    words = [
        f"{name} {number(value) if isinstance(value, float) else str(value)[:_LONGEST]}"
        for name, value in flat.items()
        if isinstance(value, bool | int | float | str)
    ]
    text = ", ".join(words[:_MOST]) + (", ..." if len(words) > _MOST else "")
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _closing(found: Lineage, term: int | None) -> None:
    if len(found.checkpoints) < found.total and term is None:
        click.echo(f"... and {found.total - len(found.checkpoints):,} more")
    newest = found.terms[0]
    if newest.checkpoints == 0 and term is None:
        since = f"from {newest.parent}" if newest.parent else "from nothing"
        click.echo(f"term {newest.term} was opened {moment(newest.time)} {since}; nothing saved in it yet")
