"""``ckpt prune``: retire what no rule keeps."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import click

from ckptstore.cli.arguments import RULE, STORE, answer_options, opened
from ckptstore.cli.arguments import command as make_command
from ckptstore.cli.output import emit, note, progress, size, table
from ckptstore.cli.range_text import checkpoints, counted, ranges
from ckptstore.cli.text_wrap import say

if TYPE_CHECKING:
    from ckptstore import Collected, Pruned


@make_command(
    "prune",
    examples=[
        "ckpt prune runs/gpt --dry-run                            # what the store's rules keep, and what goes",
        "ckpt prune runs/gpt --gc                                 # a training run is writing: it is asked",
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
    help="Go by this rule instead of the store's (ckpt keep); may be repeated.",
)
@click.option("--gc", "collect", is_flag=True, help="Delete what nothing needs any more, too, as ckpt gc does.")
@click.option("--dry-run", is_flag=True, help="Change nothing: show what each rule keeps, and what would go.")
@answer_options
def command(
    store: str,
    rules: tuple[str, ...],
    collect: bool,
    dry_run: bool,
    take_over: bool,
    timeout: float,
    as_json: bool,
) -> None:
    """Give up the checkpoints that no rule keeps.

    The newest checkpoint always stays, and so does what has a tag. What others build on stays stored; `ckpt gc`, or
    --gc, deletes the rest.
    """
    target = opened(store)
    done = target.prune(*rules, dry_run=dry_run, take_over=take_over, timeout=timeout)
    collected = None
    if collect:
        with progress("deleting") as advance:
            collected = target.gc(dry_run=dry_run, progress=advance)
    if as_json:
        emit(_json(store, done, collected, dry_run))
    else:
        _print(done, collected, dry_run)
        if done.held:
            command_line = f"`ckpt compact {shlex.quote(store)} --gc`"
            note(f"{command_line} stores anew what is kept, so that bases that nobody keeps can go")


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


def _print(done: Pruned, collected: Collected | None, dry_run: bool) -> None:
    rows = [[reason, f"{len(refs):,}", ranges(refs)] for reason, refs in done.kept.items()]
    click.echo(table(["KEPT BY", ">COUNT", "CHECKPOINTS"], rows))
    gone = f": {ranges(done.retired)}" if done.retired else ""
    verbs = ("would keep", "would retire") if dry_run else ("kept", "retired")
    say(f"{verbs[0]} {done.checkpoints:,}, {verbs[1]} {len(done.retired):,}{gone}")
    if done.held:
        those, whose = ("it", "its") if len(done.held) == 1 else ("them", "their")
        say(
            f"retired and stored still, because others build on {those}: {checkpoints(done.held)} "
            f"({size(done.held_nbytes)} of {whose} own)"
        )
    freed = done.dropped_nbytes
    if collected is None:
        if done.dropped:
            what = "would free" if dry_run else "frees"
            unneeded = counted(len(done.dropped), "segment", "is", "are")
            note(f"{unneeded} needed no more: `ckpt gc` {what} {size(freed)}")
    elif dry_run:
        say(
            f"would delete {counted(len(done.dropped) + len(collected.segments), 'segment')}: "
            f"{size(freed + collected.nbytes)}"
        )
    else:
        say(f"deleted {counted(len(collected.segments), 'segment')}: {size(collected.nbytes)}")
        if collected.pinned:
            note(f"{size(collected.pinned_nbytes)} stay until their readers are done: `ckpt gc` then")
