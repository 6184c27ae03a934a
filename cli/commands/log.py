"""Implements ``ckpt log``: lists the checkpoints of a store."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from ckptstore.cli.arguments import PLACE, STORE, opened
from ckptstore.cli.arguments import command as make_command
from ckptstore.cli.output import emit, moment, note, number, paged, printable, size, table, writing
from ckptstore.cli.range_text import counted, kind_name
from ckptstore.cli.ref_syntax import like_a_ref
from ckptstore.cli.text_wrap import columns, fitted
from ckptstore.formats.history.checkpoint_ref import node_of

if TYPE_CHECKING:
    from ckptstore.log.checkpoint_info import CheckpointInfo, TermInfo
    from ckptstore.reports.lineage import Lineage
    from ckptstore.store import Store

_MOST = 4
_LONGEST = 24
_FEWEST = 3
"""Minimum number of consecutive step diffs that are folded into one line."""
_NARROW = 100
"""Columns below which a terminal gets no seconds and no year."""
_COLORS = ("cyan", "green", "magenta", "blue", "bright_cyan", "bright_magenta")


@make_command(
    "log",
    examples=[
        "ckpt log runs/gpt",
        "ckpt log runs/gpt -n 20",
        "ckpt log runs/gpt --sort loss -n 5       # the best five; accuracy:max for the highest",
        "ckpt log runs/gpt --term 3 --json",
        "ckpt log runs/a runs/b                   # two runs side by side, step by step",
    ],
)
@STORE
@click.argument("other", type=PLACE, required=False, metavar="[STORE]")
@click.option("-n", "--limit", type=click.IntRange(min=0), metavar="N", help="Only the N newest, each on a line.")
@click.option("--term", type=click.IntRange(min=1), metavar="TERM", help="Only the checkpoints of this term.")
@click.option(
    "--sort", "by", metavar="NAME[:max]", help="Lowest (or highest) first by this number of the metadata; no graph."
)
@click.option("--all", "unfolded", is_flag=True, help="Each step diff on a line of its own, on a terminal too.")
@click.option("--no-pager", is_flag=True, help="Print everything without a pager.")
@click.option("--metric", metavar="NAME", help="With two stores: number of the metadata to compare. Default: loss.")
def command(
    store: str,
    other: str | None,
    limit: int | None,
    term: int | None,
    by: str | None,
    unfolded: bool,
    no_pager: bool,
    metric: str | None,
    as_json: bool,
) -> None:
    """List checkpoints, newest first, with forks as a graph.

    A branch begins where a writer continued from an earlier checkpoint. On a terminal, consecutive step diffs are one
    line, and a list that is longer than the screen goes through PAGER.

    Two stores are shown side by side, step by step, each along the history of its newest checkpoint.
    """
    if other is not None:
        if like_a_ref(other):
            error = click.UsageError(f"{other} is not a store to compare {store} with")
            error.add_note(f"`ckpt inspect {shlex.quote(store)} {other}` shows that checkpoint")
            raise error
        if term is not None or by is not None:
            raise click.UsageError("--term and --sort are for one store; two are compared step by step")
        _compare_runs((store, other), limit, metric or "loss", as_json, everything=unfolded, pager=not no_pager)
        return
    if metric is not None:
        raise click.UsageError("--metric is for two stores; for one store pass --sort with a number of the metadata")
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
                "writer": found.writer.state,
                "host": found.writer.host,
                "pid": found.writer.pid,
            }
        )
    elif not found.total or (not shown and term is not None):
        if term is not None:
            note(f"no checkpoint in term {term}")
        else:
            note(_why_nothing(target, found))
    else:
        terminal = sys.stdout.isatty()
        fold = terminal and not unfolded and limit is None and by is None
        layout = _Layout(found, shutil.get_terminal_size().columns if terminal else None, fold=fold)
        body = [] if not shown else layout.graph() if by is None else layout.listing()
        said = [_head(found), *([_writing(found)] if terminal else []), *body, *_closing(found, term)]
        paged(said, pager=not no_pager)


def _why_nothing(store: Store, found: Lineage) -> str:
    if not found.damage:
        return "no checkpoint yet"
    return f"`ckpt repair {shlex.quote(store.url)} DST` makes a store from what is left in the segments"


def _compare_runs(
    stores: tuple[str, str], limit: int | None, metric: str, as_json: bool, *, everything: bool, pager: bool
) -> None:
    from ckptstore.cli.two_runs import document, text

    found = opened(stores[0]).side_by_side(opened(stores[1]), metric)
    for store, run in zip(stores, found.runs, strict=True):
        for damage in run.damage:
            note(f"{store}: {damage}")
    if as_json:
        emit(document(found, stores, limit))
    else:
        room = columns()
        told = text(found, stores, limit, everything=everything)
        paged([one if "\n" in one else fitted(one, room) for one in told], pager=pager)


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


def _head(found: Lineage) -> str:
    """Summarize the store in a line: ``327 checkpoints, 636 MiB, 6 terms, steps 5 to 300, latest 300@6``."""
    facts = [counted(found.total, "checkpoint"), size(found.nbytes)]
    facts.append(counted(sum(1 for one in found.terms if one.checkpoints), "term"))
    if found.steps is not None:
        first, last = found.steps
        facts.append(f"steps {first:,} to {last:,}" if first < last else f"step {first:,}")
    if found.latest is not None:
        facts.append(f"latest {found.latest}")
    return click.style(fitted(", ".join(facts), columns()), bold=True)


def _writing(found: Lineage) -> str:
    return fitted(writing(found.writer), columns())


class _Layout:
    """Lays out the list for a terminal of `columns` columns, or (None) for a pipe."""

    def __init__(self, found: Lineage, columns: int | None, *, fold: bool) -> None:
        self._found, self._columns = found, columns
        self._has_metadata = any(info.metadata for info in found.checkpoints)
        self._groups = _folded(found) if fold else {info.ref: [info] for info in found.checkpoints}

    def graph(self) -> list[str]:
        """Return lines, newest first, with a graph that leads to each checkpoint's parent."""
        from ckptstore.cli.graph import draw

        # Draw only the shown part, but of the whole graph: a branch looks like one even if its root is not shown.
        known = {*self._found.parents, *filter(None, self._found.parents.values())}
        inside = {info.ref for group in self._groups.values() for info in group[1:]}
        parents = {ref: parent for ref, parent in self._found.parents.items() if ref not in inside}
        parents |= {ref: self._found.parents[group[-1].ref] for ref, group in self._groups.items()}
        whole = len(self._found.checkpoints) == self._found.total
        rows: list[tuple[str, list[CheckpointInfo]]] = []
        for lanes, ref in draw(list(parents), parents, known):
            if ref in self._groups:
                rows.append((lanes, self._groups[ref]))
            elif ref is None and rows and whole:
                rows.append((lanes, []))
        return self._table(rows)

    def listing(self) -> list[str]:
        """Return lines in the requested order, without a graph."""
        return self._table([(None, [info]) for info in self._found.checkpoints])

    def _table(self, rows: Sequence[tuple[str | None, list[CheckpointInfo]]]) -> list[str]:
        drawn = any(lanes is not None for lanes, _ in rows)
        headings = [*([""] if drawn else []), "CHECKPOINT", "KIND", ">STORED", "TIME", ""]
        cells = [[*([lanes or ""] if drawn else []), *self._cells(group)] for lanes, group in rows]
        lines = table(headings, [[*row, ""] for row in cells], fit=False).splitlines()
        margin = max(map(len, map(click.unstyle, lines))) + 2
        lines[0] += " " * (margin - len(click.unstyle(lines[0]))) + click.style(
            "METADATA" * self._has_metadata, bold=True
        )
        found = [lines[0].rstrip()]
        for (lanes, group), line in zip(rows, lines[1:], strict=True):
            found += self._with_names(line, lanes, group, margin) if group else [line]
        return found

    def _cells(self, group: list[CheckpointInfo]) -> list[str]:
        if not group:
            return [""] * 4
        newest = group[0]
        if len(group) > 1:
            name, kind = f"{group[-1].step}..{newest.ref}", f"{len(group):,} {kind_name(newest.kind)}s"
        else:
            # A step diff builds on the checkpoint before it. A terminal does not repeat that.
            base = newest.base if self._columns is None or newest.kind != "gradient" else None
            name, kind = newest.ref, kind_name(newest.kind) + (f" of {base}" if base else "")
        kind += ", lossy" if newest.lossy else ""
        when = moment(newest.time)
        if self._columns is not None and self._columns < _NARROW and len(when) == len("2026-11-23 03:16:18"):
            when = when[len("2026-") : -len(":18")]
        color = _COLORS[newest.term % len(_COLORS)]
        return [click.style(name, fg=color), kind, size(sum(info.stored for info in group)), when]

    def _with_names(self, line: str, lanes: str | None, group: list[CheckpointInfo], margin: int) -> Iterator[str]:
        """Yield a checkpoint's line with its names and metadata; names that do not fit get a line of their own."""
        info = group[0]
        names = ["latest"] if info.ref == self._found.latest else []
        names += [f"tag:{tag}" for tag in info.tags]
        said = _metadata_words(info.metadata)
        line += " " * (margin - len(click.unstyle(line)))
        room = None if self._columns is None else self._columns - margin
        below = room is not None and len(" ".join(names)) > room
        if names and not below:
            line += _styled(names) + "  "
            room = None if room is None else room - len(" ".join(names)) - 2
        if room is not None and len(said) > room:
            said = _cut(said, room)
        yield (line + said).rstrip()
        if below:
            ends = self._found.parents.get(group[-1].ref) is None
            yield f"{(lanes or '').replace('*', ' ' if ends else '|')}  {_styled(names)}"


def _cut(said: str, room: int) -> str:
    """Return as many whole words of metadata as fit: half a number would be another number."""
    first, *_ = words = said.split(", ")
    while words and len(", ".join(words)) + len(", ...") > room:
        words.pop()
    return ", ".join([*words, "..."]) if words else first if len(first) <= room else ""


def _styled(names: Sequence[str]) -> str:
    return " ".join(click.style(name, fg="yellow" if name != "latest" else None, bold=True) for name in names)


def _folded(found: Lineage) -> dict[str, list[CheckpointInfo]]:
    """Map the newest REF of each line to its checkpoint and the step diffs folded into it.

    A checkpoint with a name gets its own line, and so does one that another term continues from.
    """
    named = {found.latest} | {info.ref for info in found.checkpoints if info.tags}
    roots = {parent for ref, parent in found.parents.items() if parent and node_of(parent)[0] != node_of(ref)[0]}
    groups: list[list[CheckpointInfo]] = []
    for info in found.checkpoints:
        alone = info.kind != "gradient" or info.ref in named or info.ref in roots
        last = groups[-1][-1] if groups else None
        if alone or last is None or last.kind != "gradient" or last.ref in named | roots:
            groups.append([info])
        elif found.parents[last.ref] == info.ref and last.lossy == info.lossy:
            groups[-1].append(info)
        else:
            groups.append([info])
    lines = [[group] if len(group) >= _FEWEST else [[info] for info in group] for group in groups]
    return {group[0].ref: group for line in lines for group in line}


def _metadata_words(metadata: Mapping[str, Any]) -> str:
    """Format a few words of metadata: ``loss 2.317, run a``. Nested values are only in --json."""
    inner = metadata.get("metrics")
    flat = {**metadata, **inner} if isinstance(inner, Mapping) else metadata
    words = [
        f"{name} {number(value) if isinstance(value, float) else str(value)[:_LONGEST]}"
        for name, value in flat.items()
        if isinstance(value, bool | int | float | str)
    ]
    text = ", ".join(words[:_MOST]) + (", ..." if len(words) > _MOST else "")
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _closing(found: Lineage, term: int | None) -> Iterator[str]:
    if found.checkpoints and len(found.checkpoints) < found.total and term is None:
        yield f"... and {found.total - len(found.checkpoints):,} more"
    newest = found.terms[0]
    if found.checkpoints and newest.checkpoints == 0 and term is None:
        since = f"from {newest.parent}" if newest.parent else "from scratch"
        purpose = found.writer.purpose
        what = "; nothing saved in it yet" if purpose is None else f" by a take-over, to {printable(purpose)}"
        yield f"term {newest.term} was opened {moment(newest.time)} {since}{what}"
