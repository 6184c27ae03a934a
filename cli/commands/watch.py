"""Implements ``ckpt watch``: shows a run that is being written."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from ckptstore.cli.arguments import STORE
from ckptstore.cli.arguments import command as make_command
from ckptstore.cli.output import age, emit_line, moment, note, number, size, spark, who
from ckptstore.cli.range_text import counted

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ckptstore import RunStatus

_BARS = 60
_CHANGES = 5


@make_command(
    "watch",
    examples=[
        "ckpt watch runs/gpt                      # Ctrl-C ends it",
        "ckpt watch runs/gpt --metric accuracy --every 10",
        "ckpt watch runs/gpt --wait --json        # one JSON object per line and change",
        "ckpt watch s3://bucket/gpt --once",
    ],
)
@STORE
@click.option(
    "--every", type=float, default=2.0, metavar="SECONDS", help="Time between polls: 0.01 to 86400. Default: 2."
)
@click.option("--metric", default="loss", metavar="NAME", help="Number of the metadata to follow. Default: loss.")
@click.option("--once", is_flag=True, help="Print the state of the run, and exit.")
@click.option("--wait", is_flag=True, help="If there is no store yet, wait until there is one.")
def command(store: str, every: float, metric: str, once: bool, wait: bool, as_json: bool) -> None:
    """Follow a run that is being written.

    It shows the newest checkpoint, who writes, bytes, speed, a metric of the metadata and the space left. On a terminal
    it redraws a few lines; in a pipe it prints a line for every change. It takes no lock, and Ctrl-C ends it.
    """
    import ckptstore

    target = ckptstore.open(store, create=None if wait else False)
    looks = target.watch(every, metric=metric, wait=wait, quiet=True)
    last: RunStatus | None = None
    try:
        if wait:
            _note_waiting(target)
        with _shown(as_json) as show:
            for status in looks:
                first, last = last is None, status
                show(status, first)
                if once:
                    return
    except KeyboardInterrupt:
        _end(last, as_json)


def _note_waiting(target: Any) -> None:
    from ckptstore.errors import StoreNotFoundError

    try:
        target.format  # noqa: B018  # raises if there is none
    except StoreNotFoundError:
        note(f"waiting for a store at {target.url}")


@contextmanager
def _shown(as_json: bool) -> Iterator[Callable[[RunStatus, bool], None]]:
    """Yield a function that shows a status and whether it is the first: a display on a terminal, lines elsewhere."""
    if not as_json and sys.stdout.isatty():
        from rich.console import Console

        console = Console()
        if not console.is_dumb_terminal:
            from rich.live import Live

            changes: deque[str] = deque(maxlen=_CHANGES)
            with Live(console=console, auto_refresh=False, redirect_stderr=False, redirect_stdout=False) as live:

                def draw(status: RunStatus, _first: bool) -> None:
                    changes.extend(f"{moment(status.time)[-8:]}  {change}" for change in status.changes)
                    live.update(_display(status, changes, console), refresh=True)

                yield draw
            return

    def tell(status: RunStatus, first: bool) -> None:
        if first or status.changes:
            _print_status(status, as_json, final=False)

    yield tell


def _end(last: RunStatus | None, as_json: bool) -> None:
    """Print the last status after Ctrl-C. A terminal already shows it."""
    if last is None:
        note("no store was seen")
    elif as_json or not sys.stdout.isatty():
        _print_status(last, as_json, final=True)


def _print_status(status: RunStatus, as_json: bool, *, final: bool) -> None:
    if as_json:
        emit_line(_json(status, final))
        return
    said = "ended" if final else "; ".join(status.changes)
    click.echo("  ".join([moment(status.time), *_facts(status)]) + (f"  {said}" if said else ""))


def _json(status: RunStatus, final: bool) -> dict[str, Any]:
    step, value = status.values[-1] if status.values else (None, None)
    return {
        "store": status.url,
        "run": status.run,
        "time": status.time,
        "changes": [] if final else list(status.changes),
        "final": final,
        "latest": status.latest,
        "step": status.step,
        "saved": status.saved,
        "lag": status.lag,
        "checkpoints": status.checkpoints,
        "term": status.term,
        "terms": status.terms,
        "parent": status.parent,
        "steps_per_second": status.steps_per_second,
        "bytes_per_step": status.bytes_per_step,
        "bytes_per_second": status.bytes_per_second,
        "ratio": status.ratio,
        "bytes": status.nbytes,
        "free_bytes": status.free,
        "metric": {"name": status.metric, "step": step, "value": value},
        "writer": status.writer,
        "host": status.host,
        "pid": status.pid,
        "damage": status.damage,
        "requests": status.requests,
    }


def _facts(status: RunStatus) -> list[str]:
    """Return the known facts, each in a few words. Unknown ones are omitted."""
    facts = [status.latest or "no checkpoint", *_saved(status)]
    if status.steps_per_second is not None:
        facts.append(f"{number(status.steps_per_second)} steps/s")
    facts += _rates(status)
    if status.values:
        facts.append(f"{status.metric} {number(status.values[-1][1])}")
    facts += [f"{counted(status.checkpoints, 'checkpoint')} in {size(status.nbytes)}", *_free(status)]
    return [*facts, f"term {status.term:,}", _writer(status), *_damage(status)]


def _saved(status: RunStatus) -> list[str]:
    return [] if status.lag is None else [f"saved {age(status.lag)} ago"]


def _writer(status: RunStatus) -> str:
    return who(status.writer, status.host, status.pid) if status.writer != "none" else "nobody yet"


def _free(status: RunStatus) -> list[str]:
    return [] if status.free is None else [f"{size(status.free)} free"]


def _rates(status: RunStatus) -> list[str]:
    facts = []
    if status.bytes_per_step is not None:
        facts.append(f"{size(round(status.bytes_per_step))}/step")
    if status.bytes_per_second is not None:
        facts.append(f"{size(round(status.bytes_per_second))}/s")
    if status.ratio is not None:
        facts.append(f"{status.ratio:.2f}x smaller" if status.ratio >= 1 else f"{1 / status.ratio:.2f}x larger")
    return facts


def _damage(status: RunStatus) -> list[str]:
    return [f"{counted(status.damage, 'log slot')} damaged"] if status.damage else []


def _begun(status: RunStatus) -> list[str]:
    """Return the newest term. It may have no checkpoint yet, or belong to a command that took over the store."""
    since = "" if status.parent is None else f", from {status.parent}"
    return [f"term {status.term:,}{since}"] if status.term else []


def _display(status: RunStatus, changes: deque[str], console: Console) -> Table:
    """Return the lines of a terminal."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()

    def row(name: str, *facts: str) -> None:
        grid.add_row(Text(name), Text("   ".join(facts) or "-"))

    row("run", status.url, moment(status.time))
    row("newest", status.latest or "no checkpoint", *_saved(status))
    row("writer", _writer(status))
    row("checkpoints", f"{status.checkpoints:,}", *_begun(status))
    row("stored", size(status.nbytes), *_rates(status), *_free(status))
    row("speed", *([] if status.steps_per_second is None else [f"{number(status.steps_per_second)} steps/s"]))
    if status.values:
        values = [value for _, value in status.values]
        row(status.metric, number(values[-1]), spark(values, min(_BARS, max(1, console.width - 30)), console.encoding))
    if damage := _damage(status):
        row("damage", f"{damage[0]}: `ckpt verify` names them")
    for place, change in enumerate(changes):
        row("" if place else "lately", change)
    return grid
