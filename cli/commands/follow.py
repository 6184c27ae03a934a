"""Implements ``ckpt follow``: fetches each new checkpoint of a run that another process or machine writes."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckptstore.cli.arguments import STORE, opened, select_option
from ckptstore.cli.arguments import command as make_command
from ckptstore.cli.output import duration, emit_line, moment, note, pause, progress, size
from ckptstore.cli.range_text import counted, kind_name
from ckptstore.cli.text_wrap import columns, say

if TYPE_CHECKING:
    from ckptstore import Followed

_NARROW = 100
"""Minimum columns of a terminal for the day; below this it shows only the time."""


@make_command(
    "follow",
    examples=[
        "ckpt follow s3://bucket/gpt --out policy.safetensors",
        "ckpt follow runs/gpt --select 'model.*' --out policy.safetensors --exec 'kill -HUP $(cat server.pid)'",
        "ckpt follow runs/gpt --each --json       # one JSON object per line and checkpoint",
        "ckpt follow runs/gpt --out policy.safetensors --once",
    ],
)
@STORE
@click.option("--out", type=click.Path(path_type=Path), metavar="PATH", help="A file that each checkpoint replaces.")
@select_option("Only tensors that match; may be repeated.")
@click.option("--exec", "run", metavar="CMD", help="Run after each one, with CKPT_REF, CKPT_STEP, CKPT_OUT set.")
@click.option("--after", metavar="REF", help="Start after this one. Default: start with the newest.")
@click.option("--each", is_flag=True, help="Take every checkpoint in order. Default: only the newest new one.")
@click.option(
    "--every", type=float, default=2.0, metavar="SECONDS", help="Time between two polls, >= 0.01. Default: 2."
)
@click.option("--timeout", type=click.FloatRange(min=0), metavar="SECONDS", help="Exit after this long without one.")
@click.option("--once", is_flag=True, help="Take what is new, and exit.")
def command(
    store: str,
    out: Path | None,
    select: tuple[str, ...],
    run: str | None,
    after: str | None,
    each: bool,
    every: float,
    timeout: float | None,
    once: bool,
    as_json: bool,
) -> None:
    """Fetch each new checkpoint of a run that another process or machine writes.

    Each checkpoint is built from the previous one, which stays in memory: only the data between the two is fetched,
    and everything is verified. PATH is replaced when the new file is complete and durable. The next call continues
    from the checkpoint in PATH. Ctrl-C ends the command.
    """
    with progress("reading") as advance:
        follower = opened(store).follow(
            after,
            out=out,
            select=select or None,
            framework="numpy",
            each=each,
            poll=every,
            timeout=0.0 if once else timeout,
            progress=advance,
        )
        with follower:
            found = None
            try:
                for found in follower:
                    pause(advance)
                    _print_checkpoint(found, out, as_json)
                    if run is not None:
                        _run(run, found, out)
                    if once and not each:
                        break
            except KeyboardInterrupt:
                pass
            if found is None and not as_json:
                note("no new checkpoint was seen")


def _print_checkpoint(found: Followed, out: Path | None, as_json: bool) -> None:
    if as_json:
        emit_line(_json(found, out))
        return
    how = f"from {found.base}" if found.base is not None else "from the store"
    when = moment(time.time())
    if (room := columns()) is not None and room < _NARROW:
        when = when[-len("04:35:39") :]
    words = [when, found.info.ref, f"{how}: {' + '.join(_counted(found.plan))}", size(found.bytes_read)]
    words.append(f"in {duration(found.seconds)}")
    if found.skipped:
        words.append(f"{found.skipped} skipped")
    if found.branched:
        words.append("another branch" if found.fork is None else f"another branch, from {found.fork}")
    say("  ".join(words))


def _counted(kinds: tuple[str, ...]) -> list[str]:
    if not kinds:
        return ["already in memory"]
    counts = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
    return [kind_name(kind) if count == 1 else counted(count, kind_name(kind)) for kind, count in counts.items()]


def _json(found: Followed, out: Path | None) -> dict[str, Any]:
    return {
        "ref": found.info.ref,
        "step": found.info.step,
        "term": found.info.term,
        "state": found.info.state,
        "time": found.info.time,
        "out": None if out is None else str(out),
        "base": found.base,
        "plan": list(found.plan),
        "skipped": found.skipped,
        "branched": found.branched,
        "fork": found.fork,
        "bytes_read": found.bytes_read,
        "requests": found.requests,
        "seconds": round(found.seconds, 3),
    }


def _run(words: str, found: Followed, out: Path | None) -> None:
    told = {"CKPT_REF": found.info.ref, "CKPT_STEP": str(found.info.step), "CKPT_OUT": "" if out is None else str(out)}
    code = subprocess.run(words, shell=True, env=os.environ | told, check=False).returncode
    if code:
        note(f"{found.info.ref}: the command exited with {code}")
