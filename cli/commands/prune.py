"""Implements ``ckpt prune``: retires the checkpoints that no rule keeps."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import click

from ckptstore.cli.arguments import RULE, STORE, answer_options, opened
from ckptstore.cli.arguments import command as make_command
from ckptstore.cli.commands.compact import exit_code
from ckptstore.cli.output import duration, emit, note, progress, size, table
from ckptstore.cli.range_text import checkpoints, counted, ranges
from ckptstore.cli.text_wrap import say

if TYPE_CHECKING:
    from ckptstore import Collected, CompactReport, Pruned

_ANY_SIZE: Final = 1 << 62
"""Every store is smaller: no full is turned into a delta to make it smaller still."""


@make_command(
    "prune",
    examples=[
        "ckpt prune runs/gpt --dry-run                            # what the store's rules keep and retire",
        "ckpt prune runs/gpt --gc                                 # a training run is writing: it is asked",
        "ckpt prune runs/gpt --compact --gc                       # also free what kept checkpoints build on",
        "ckpt prune runs/gpt --keep last:10 --keep best:loss:3 --take-over",
    ],
)
@STORE
@click.option(
    "--keep",
    "rules",
    type=RULE,
    multiple=True,
    metavar="RULE",
    help="Use this rule instead of the store's (ckpt keep); may be repeated.",
)
@click.option(
    "--compact",
    "rewrite",
    is_flag=True,
    help="If kept checkpoints build on retired ones, rewrite them, as ckpt compact does. Fulls stay fulls.",
)
@click.option("--gc", "collect", is_flag=True, help="Also delete the segments that nothing needs, as ckpt gc does.")
@click.option("--dry-run", is_flag=True, help="Change nothing: show what each rule keeps, and what is retired.")
@answer_options
def command(
    store: str,
    rules: tuple[str, ...],
    rewrite: bool,
    collect: bool,
    dry_run: bool,
    take_over: bool,
    timeout: float,
    as_json: bool,
) -> int:
    """Retire the checkpoints that no rule keeps.

    The newest checkpoint is always kept, and so is one with a tag. A retired checkpoint that others build on stays
    stored, unless --compact rewrites these; `ckpt gc`, or --gc, deletes the rest.
    """
    target = opened(store)
    done = target.prune(*rules, dry_run=dry_run, take_over=take_over, timeout=timeout)
    compacted = None
    if rewrite and done.held and not dry_run:
        with progress("compacting") as advance:
            # Prevents: a full that was made to be mapped (`ckpt compact --plain`), and becomes a delta again.
            compacted = target.compact(target_bytes=_ANY_SIZE, take_over=take_over, timeout=timeout, progress=advance)
        left = target.prune(*rules, dry_run=True)
        done = replace(done, held=left.held, held_nbytes=left.held_nbytes)
    collected = None
    if collect:
        with progress("deleting") as advance:
            collected = target.gc(dry_run=dry_run, progress=advance)
    if as_json:
        emit(_json(store, done, collected, dry_run) | {"compact": None if compacted is None else _compact(compacted)})
    else:
        _print(done, collected, dry_run, compacted)
        if done.held and compacted is None:
            command_line = f"`ckpt compact {shlex.quote(store)} --gc`"
            note(f"{command_line} rewrites the kept checkpoints, so that these can be deleted")
    return 0 if compacted is None else exit_code(compacted)


def _compact(done: CompactReport) -> dict[str, Any]:
    return {
        "moves": len(done.moves),
        "made": sum(move.result == "done" for move in done.moves),
        "bytes_before": done.bytes_before,
        "bytes_after": done.bytes_after,
    }


def _json(store: str, done: Pruned, collected: Collected | None, dry_run: bool) -> dict[str, Any]:
    return {
        "store": store,
        "dry_run": dry_run,
        "rules": list(done.rules),
        "checkpoints": done.checkpoints,
        "kept": [{"by": reason, "checkpoints": list(refs)} for reason, refs in done.kept.items()],
        "retired": list(done.retired),
        "held": list(done.held),
        "bytes_held": done.held_nbytes,
        "dropped": list(done.dropped),
        "bytes_dropped": done.dropped_nbytes,
        "gc": None
        if collected is None
        else {
            "segments": len(collected.segments),
            "bytes": collected.nbytes,
            "pinned_bytes": collected.pinned_nbytes,
        },
    }


def _print(done: Pruned, collected: Collected | None, dry_run: bool, compacted: CompactReport | None) -> None:
    rows = [[reason, f"{len(refs):,}", ranges(refs)] for reason, refs in done.kept.items()]
    click.echo(table(["KEPT BY", ">COUNT", "CHECKPOINTS"], rows))
    gone = f": {ranges(done.retired)}" if done.retired else ""
    verbs = ("would keep", "would retire") if dry_run else ("kept", "retired")
    say(f"{verbs[0]} {done.checkpoints:,}, {verbs[1]} {len(done.retired):,}{gone}")
    if done.held:
        those, whose = ("it", "its") if len(done.held) == 1 else ("them", "their")
        say(
            f"retired but still stored, because others build on {those}: {checkpoints(done.held)} "
            f"({size(done.held_nbytes)} of {whose} own)"
        )
    if compacted is not None:
        made = sum(move.result == "done" for move in compacted.moves)
        say(
            f"compacted, {counted(made, 'move')}: {size(compacted.bytes_before)} -> {size(compacted.bytes_after)}, "
            f"slowest restore {duration(compacted.restore_seconds_before)} -> "
            f"{duration(compacted.restore_seconds_after)}"
        )
        for move in compacted.moves:
            if move.reason:
                note(f"{move.kind} {ranges(move.stored)}: {move.reason}")
    freed = done.dropped_nbytes
    if collected is None:
        if done.dropped:
            what = "would free" if dry_run else "frees"
            unneeded = counted(len(done.dropped), "segment", "is", "are")
            note(f"{unneeded} no longer needed: `ckpt gc` {what} {size(freed)}")
    elif dry_run:
        say(
            f"would delete {counted(len(done.dropped) + len(collected.segments), 'segment')}: "
            f"{size(freed + collected.nbytes)}"
        )
    else:
        say(f"deleted {counted(len(collected.segments), 'segment')}: {size(collected.nbytes)}")
        if collected.pinned:
            note(f"{size(collected.pinned_nbytes)} stay until their readers are done: run `ckpt gc` then")
