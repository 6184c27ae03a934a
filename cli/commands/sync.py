"""Implements ``ckpt sync``: copies what a store's second tier lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from ckptstore.cli.arguments import PLACE, STORE, opened
from ckptstore.cli.arguments import command as make_command
from ckptstore.cli.output import emit, emit_line, note, progress, size
from ckptstore.cli.quantities import RATE
from ckptstore.cli.range_text import counted, ranges
from ckptstore.cli.text_wrap import say
from ckptstore.errors import CorruptionError, FencedError

if TYPE_CHECKING:
    from ckptstore import Synced

ELSEWHERE = FencedError.exit_code
"""Exit code if the run was continued elsewhere, and checkpoints of this store are a branch."""


@make_command(
    "sync",
    examples=[
        "ckpt sync runs/gpt s3://bucket/gpt              # once; again: what is new",
        "ckpt sync runs/gpt                              # to the remote that the store remembers",
        "ckpt sync runs/gpt s3://bucket/gpt --follow     # from now on, while a run is writing",
        "ckpt sync runs/gpt --anew                       # somebody deleted the remote, or a part of it",
    ],
)
@STORE
@click.argument("remote", type=PLACE, metavar="[REMOTE]", required=False)
@click.option("--follow", is_flag=True, help="Continue, as the store grows, until interrupted.")
@click.option(
    "--every",
    type=click.FloatRange(min=0.05, max=86_400),
    default=2.0,
    metavar="SECONDS",
    help="With --follow: time between two polls of the store. Default: 2.",
)
@click.option("--bandwidth", type=RATE, help="Send at most this much per second: 50MB/s.")
@click.option(
    "--anew",
    is_flag=True,
    help="If a part of the remote is gone, delete the rest first. Refused if the remote has data that STORE lacks.",
)
def command(
    store: str,
    remote: str | None,
    follow: bool,
    every: float,
    bandwidth: float | None,
    anew: bool,
    as_json: bool,
) -> int:
    """Copy to a second tier what is missing there.

    REMOTE is a path or URL: an empty place, or this run's second tier or copy. Default: the one that the store
    remembers. Segments are copied first, then the log, in its order. After an interruption the same command continues.
    Credentials come from the environment. With --json and --follow it prints one document per line.
    """
    last = 0
    if follow:
        if anew:
            opened(store).sync(remote, bandwidth=bandwidth, anew=True)
        for done in opened(store).sync_forever(
            remote, every=every, bandwidth=bandwidth, on_failure=lambda error: note(f"{error}; trying again")
        ):
            last = _print_result(store, remote, done, emit_line if as_json else None)
        return last
    with progress("draining") as advance:
        done = opened(store).sync(remote, bandwidth=bandwidth, anew=anew, progress=advance)
    return _print_result(store, remote, done, emit if as_json else None)


def _print_result(
    store: str, remote: str | None, done: Synced, print_json: Callable[[dict[str, Any]], None] | None
) -> int:
    """Print the result as text, or with `print_json` as JSON -> the exit code."""
    if print_json is not None:
        print_json(_json(store, remote, done))
    else:
        what = f"{counted(done.segments, 'segment')}, {size(done.nbytes)}"
        say(f"drained {counted(done.checkpoints, 'checkpoint')}: {what}")
        if done.over:
            say(f"the run was continued elsewhere: {done.over}")
        if done.branch:
            say(f"not in the remote, kept here as a branch: {ranges(done.branch)}")
            note("they can be read and exported here; a writer continues from what the remote has")
        if done.damage:
            say(f"left out, damaged here: {ranges(done.damaged)}")
            note(f"{done.damage}; `ckpt verify {store}` names all that is damaged")
    if done.damaged:
        return CorruptionError.exit_code
    return ELSEWHERE if done.branch else 0


def _json(store: str, remote: str | None, done: Synced) -> dict[str, Any]:
    return {
        "store": store,
        "remote": remote,
        "run": done.run,
        "checkpoints": done.checkpoints,
        "segments": done.segments,
        "bytes": done.nbytes,
        "branch": list(done.branch),
        "over": done.over,
        "damaged": list(done.damaged),
    }
