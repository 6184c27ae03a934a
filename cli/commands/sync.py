"""``ckpt sync``: bring to a store's second tier what it lacks."""

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
"""When the run was continued elsewhere, and checkpoints of this store are a branch."""


@make_command(
    "sync",
    examples=[
        "ckpt sync runs/gpt s3://bucket/gpt              # once; again: what is new",
        "ckpt sync runs/gpt                              # to the remote that the store remembers",
        "ckpt sync runs/gpt s3://bucket/gpt --follow     # from now on, beside a run that is writing",
        "ckpt sync runs/gpt --anew                       # somebody deleted the remote, or a part of it",
    ],
)
@STORE
@click.argument("remote", type=PLACE, metavar="[REMOTE]", required=False)
@click.option("--follow", is_flag=True, help="Go on, as the store grows, until interrupted.")
@click.option(
    "--every",
    type=click.FloatRange(min=0.05, max=86_400),
    default=2.0,
    metavar="SECONDS",
    help="With --follow: between two looks at the store. Default: 2.",
)
@click.option("--bandwidth", type=RATE, help="Bring at most so much in a second: 50MB/s.")
@click.option(
    "--anew",
    is_flag=True,
    help="If a part of the remote is gone, delete what is left of it first. Refused if it has what STORE has not.",
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
    """Bring to a second tier what it lacks.

    REMOTE is a path or URL: an empty place, or this run's second tier or copy. Without it, the one that the store
    remembers. Segments go first, then the log, in its order. If it was interrupted, the same command goes on.
    Credentials come from the environment. With --json and --follow it prints one document a line.
    """
    last = 0
    if follow:
        if anew:
            opened(store).sync(remote, bandwidth=bandwidth, anew=True)
        for done in opened(store).sync_forever(
            remote, every=every, bandwidth=bandwidth, on_failure=lambda error: note(f"{error}; trying again")
        ):
            last = _tell(store, remote, done, emit_line if as_json else None)
        return last
    with progress("draining") as advance:
        done = opened(store).sync(remote, bandwidth=bandwidth, anew=anew, progress=advance)
    return _tell(store, remote, done, emit if as_json else None)


def _tell(store: str, remote: str | None, done: Synced, print_json: Callable[[dict[str, Any]], None] | None) -> int:
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
            note(f"{done.damage}; `ckpt verify {store}` says what else is")
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
