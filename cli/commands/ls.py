"""``ckpt ls``: the runs below a folder."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from ckptstore.cli.arguments import PLACE
from ckptstore.cli.arguments import command as make_command
from ckptstore.cli.hints import hint_for
from ckptstore.cli.output import age, emit, note, size, table, who
from ckptstore.cli.text_wrap import columns

if TYPE_CHECKING:
    from ckptstore import RunInfo

_WIDE = 100
"""Columns of a terminal from which on growth is shown."""
_GROWTH = 4


@make_command(
    "ls",
    examples=["ckpt ls", "ckpt ls runs", "ckpt ls s3://bucket/runs", "ckpt ls /data/checkpoints --json"],
    alone=True,
)
@click.argument("folder", metavar="[DIR]", type=PLACE, default=".")
def command(folder: str, as_json: bool) -> None:
    """List the runs below a folder: how far, how large, how old.

    DIR is a folder, a bucket or a part of one; if left out, the working folder. No link is followed. A folder that
    cannot be read is named, and so is a store that is damaged.
    """
    import ckptstore

    try:
        found = ckptstore.find_runs(folder)
    except ckptstore.NotFoundError as error:  # a folder, not a store: exit code 2, as for every file that is not there
        missing = ckptstore.UsageError(str(error))
        if (hint := hint_for(error)) is not None:
            missing.add_note(hint)
        raise missing from None
    for path, why in found.unreadable:
        note(f"{path}: {why}")
    if as_json:
        unreadable = [{"path": path, "why": why} for path, why in found.unreadable]
        emit({"folder": folder, "runs": [_json(run) for run in found.runs], "unreadable": unreadable})
    elif found.runs:
        headings = ["RUN", ">NEWEST", ">CHECKPOINTS", ">STORED", ">IN 1,000 STEPS", ">LAST", "WRITER"]
        rows = [_row(run) for run in found.runs]
        if (room := columns()) is not None and room < _WIDE:
            for row in (headings, *rows):
                del row[_GROWTH]
        click.echo(table(headings, rows))
        for run in found.runs:
            if run.error is not None:
                note(f"{run.path}: {run.error}")
    else:
        note(f"no store in {folder} or below")


def _json(run: RunInfo) -> dict[str, Any]:
    return {
        "path": run.path,
        "error": run.error,
        "run": run.run,
        "checkpoints": run.checkpoints,
        "latest": run.latest,
        "step": run.step,
        "bytes": run.nbytes,
        "bytes_per_1000_steps": run.growth,
        "time": run.time,
        "writer": run.writer,
        "host": run.host,
        "pid": run.pid,
    }


def _row(run: RunInfo) -> list[str]:
    if run.run is None:
        return [run.path, "?", "?", "?", "?", "?", "cannot be read"]
    return [
        run.path,
        run.latest or "-",
        f"{run.checkpoints:,}",
        size(run.nbytes),
        "-" if run.growth is None else size(round(run.growth)),
        "-" if run.time is None else age(time.time() - run.time),
        who(run.writer, run.host, run.pid) if run.error is None else "damaged",
    ]
