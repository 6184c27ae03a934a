"""Implements ``ckpt merge``: merges the diffs of a range into one segment, and with --fulls its fulls, too."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from ckptstore.cli.arguments import RANGE, STORE, answer_options, opened
from ckptstore.cli.arguments import command as make_command
from ckptstore.cli.output import duration, emit, note, progress, size, table
from ckptstore.cli.range_text import checkpoints, counted, ranges
from ckptstore.cli.text_wrap import say
from ckptstore.errors import RequestError

if TYPE_CHECKING:
    from ckptstore.maintenance.merge import Merged, RestoreCost

NOT_MERGED = RequestError.exit_code
"""Exit code if the change was refused or void, or the run did not answer in time."""


@make_command(
    "merge",
    examples=[
        "ckpt merge runs/gpt 1000..1100 --dry-run",
        "ckpt merge runs/gpt 1000..1100                  # a training run is writing: it is asked",
        "ckpt merge runs/gpt 1000@2..latest --keep-steps --take-over",
        "ckpt merge runs/gpt 1..900 --fulls              # all of the range, fulls too; only 900 stays",
    ],
)
@STORE
@click.argument("steps", type=RANGE, metavar="A..B")
@click.option("--keep-steps", is_flag=True, help="Keep every step of the range, all of them in one segment.")
@click.option("--fulls", is_flag=True, help="Retire the fulls of the range, too: only B stays.")
@click.option("--dry-run", is_flag=True, help="Write nothing: do the work, and show the result.")
@click.option("--yes", is_flag=True, help="On a terminal, do not ask before checkpoints are given up.")
@answer_options
def command(
    store: str,
    steps: str,
    keep_steps: bool,
    fulls: bool,
    dry_run: bool,
    yes: bool,
    take_over: bool,
    timeout: float,
    as_json: bool,
) -> int:
    """Merge the diffs of a range into one segment.

    The range is the checkpoints of one term with A <= step <= B. B stays, bit for bit. The deltas and step diffs before
    it can no longer be restored, except with --keep-steps. Fulls stay (except with --fulls), and so does a checkpoint
    that has a tag, that another term continues from or that a retention rule keeps. Written data is read back and
    compared before anything is given up. Then `ckpt gc` frees the space.
    """

    def tell(lost: tuple[str, ...]) -> None:
        note(f"{counted(len(lost), 'checkpoint')} can no longer be restored after this: {ranges(lost)}")
        asked = sys.stdin.isatty() and sys.stderr.isatty() and not (yes or dry_run or as_json)
        if asked and not click.confirm("Merge (--keep-steps would keep them)?", err=True):
            note("nothing was changed")
            raise click.exceptions.Exit(1)

    target = opened(store)
    with progress("merging") as advance:
        done = target.merge(
            steps,
            keep_steps=keep_steps,
            fulls=fulls,
            take_over=take_over,
            dry_run=dry_run,
            timeout=timeout,
            progress=advance,
            on_loss=tell,
        )
    if as_json:
        emit(_json(store, done))
    else:
        _print(done, timeout)
    return 0 if done.answer in ("accepted", "planned") else NOT_MERGED


def _json(store: str, done: Merged) -> dict[str, Any]:
    return {
        "store": store,
        "first": done.first,
        "last": done.last,
        "answer": done.answer,
        "reason": done.reason,
        "method": done.method,
        "merged": list(done.merged),
        "retired": list(done.retired),
        "held": [{"ref": ref, "why": why} for ref, why in done.held.items()],
        "fulls": list(done.fulls),
        "written": list(done.written),
        "bytes_written": done.written_nbytes,
        "dropped": list(done.dropped),
        "bytes_dropped": done.dropped_nbytes,
        "bytes": done.logical,
        "restore_before": _cost(done.before),
        "restore_after": _cost(done.after),
    }


def _cost(cost: RestoreCost) -> dict[str, Any]:
    return {
        "bytes_read": cost.nbytes,
        "segments": cost.segments,
        "links": cost.links,
        "seconds": round(cost.seconds, 4),
    }


_METHODS = {
    "concatenated": "chunks copied as they are",
    "materialized": "encoded again",
    "kept": "stays stored as it is",
}


def _print(done: Merged, timeout: float) -> None:
    would = "would be " if done.answer != "accepted" else ""
    last = done.merged[-1] if done.merged else done.last
    if done.merged:
        say(f"{would}merged into one segment: {checkpoints(done.merged)}")
    say(f"{last}: {_METHODS[done.method]}")
    if done.retired:
        say(f"{would}retired: {checkpoints(done.retired)}")
    for ref, why in done.held.items():
        say(f"stays: {ref}, {why}")
    if done.fulls:
        say(f"fulls, which stay: {ranges(done.fulls)}")
    if not done.written and not done.dropped:
        say("no segment can be dropped: checkpoints outside the range are in the same segments, or build on them")
        _closing(done, timeout)
        return
    click.echo(
        table(
            ["", ">STORED", f">TO RESTORE {last}", ">SEGMENTS", ">LINKS", ">TIME"],
            [
                ["before", size(done.dropped_nbytes), *_row(done.before)],
                ["after", size(done.written_nbytes), *_row(done.after)],
            ],
        )
    )
    _closing(done, timeout)


def _row(cost: RestoreCost) -> list[str]:
    return [size(cost.nbytes), f"{cost.segments:,}", f"{cost.links:,}", duration(cost.seconds)]


def _closing(done: Merged, timeout: float) -> None:
    if done.answer == "accepted":
        if done.dropped:
            unneeded = counted(len(done.dropped), "segment", "is", "are")
            note(f"{unneeded} no longer needed: `ckpt gc` frees {size(done.dropped_nbytes)}")
        return
    if done.answer == "planned":
        measured = "; sizes are measured, not estimated" if done.written or done.dropped else ""
        note(f"nothing was written (--dry-run){measured}")
        return
    if done.reason:
        note(done.reason)
    if done.answer == "waiting":
        note(
            f"no answer in {timeout:g} s. A live run looks for requests every 5 s and after each save, and may still "
            "accept this one; a newer term makes it void. If no run is writing: --take-over"
        )
    else:
        note(f"{done.answer}: nothing was changed; run the same command to plan again")
