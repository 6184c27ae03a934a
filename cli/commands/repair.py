"""Implements ``ckpt repair``: makes a new store from the intact parts of a damaged one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ckptstore.cli.arguments import PLACE, STORE
from ckptstore.cli.arguments import command as make_command
from ckptstore.cli.output import emit, note, progress, size
from ckptstore.cli.range_text import checkpoints, counted, ranges
from ckptstore.cli.text_wrap import say
from ckptstore.errors import CorruptionError

if TYPE_CHECKING:
    from ckptstore import Repaired

LOST = CorruptionError.exit_code
"""Exit code if a checkpoint, or a tag, is lost."""
_MOST = 20


@make_command(
    "repair",
    examples=[
        "ckpt repair runs/gpt runs/gpt-repaired",
        "ckpt repair runs/mixed runs/gpt --run 3f0e1c52   # objects of two runs are in one folder",
    ],
)
@STORE
@click.argument("target", type=PLACE, metavar="DST")
@click.option("--run", metavar="UUID", help="If the folder contains several runs: the start of the run's uuid.")
def command(store: str, target: str, run: str | None, as_json: bool) -> int:
    """Make a new store from the intact parts of a damaged one.

    STORE is only read; DST must not exist, or be empty. DST gets every checkpoint that is still complete. Each one is
    restored and compared before it counts. A lost log is rebuilt. The command lists every lost checkpoint, and exits
    with 4 if there is one. After an interruption the same command continues.
    """
    import ckptstore

    with progress("repairing") as advance:
        done = ckptstore.repair(store, target, run=run, progress=advance)
    if as_json:
        emit(_json(store, target, done))
    else:
        _print(done)
    # Without the whole log it is unknown to which checkpoint a damaged segment belonged.
    unknown = done.log != "whole" and any(one.key.startswith("seg/") and not one.checkpoints for one in done.damage)
    return LOST if done.lost or done.tags or unknown else 0


def _json(store: str, target: str, done: Repaired) -> dict[str, Any]:
    return {
        "store": store,
        "target": target,
        "run": done.run,
        "log": done.log,
        "kept": list(done.kept),
        "lost": [{"ref": ref, "why": why} for ref, why in done.lost.items()],
        "found": list(done.found),
        "unproven": list(done.unproven),
        "rewritten": list(done.rewritten),
        "lost_tags": [{"tag": name, "ref": ref} for name, ref in done.tags.items()],
        "damage": [{"key": one.key, "what": one.what} for one in done.damage],
        "latest": done.latest,
        "segments": done.segments,
        "bytes": done.nbytes,
    }


def _print(done: Repaired) -> None:
    for one in done.damage[:_MOST]:
        say(f"{click.style('damaged', fg='red', bold=True)}  {one.key}: {one.what}", hanging=9)
    if len(done.damage) > _MOST:
        click.echo(f"... and {len(done.damage) - _MOST:,} more (--json lists all)")
    _print_lost(done)
    for name, ref in done.tags.items():
        say(f"{click.style('lost', fg='red', bold=True)}     tag {name}, which named {ref}", hanging=9)
    kept = checkpoints(done.kept) if done.kept else "no checkpoint"
    say(f"{click.style('kept', fg='green', bold=True)}     {kept}", hanging=9)
    if done.found:
        say(f"found    {checkpoints(done.found)}: not in the log, but in their segments", hanging=9)
    if done.rewritten:
        say(f"rewritten, because their chain is damaged where they do not need it: {ranges(done.rewritten)}")
    say(f"{counted(done.segments, 'segment')}, {size(done.nbytes)} written; latest is {done.latest or 'nothing'}")
    if done.log != "whole":
        note("tags, metadata and retirements in the lost parts of the log are lost with them")
    if done.unproven:
        note(
            f"the tensors of {ranges(done.unproven)} are what was saved; only their own segments vouch for the rest of "
            "their state"
        )


def _print_lost(done: Repaired) -> None:
    """Print every lost checkpoint: that is what the command is for. Those lost for the same reason share a line."""
    together: dict[tuple[str | None, str], list[str]] = {}
    for ref, why in done.lost.items():
        root, seen = ref, {ref}
        while (base := done.lost_bases.get(root)) is not None and base not in seen:
            root = base
            seen.add(root)
        together.setdefault((None, why) if root == ref else (root, ""), []).append(ref)
    for (built_on, why), refs in together.items():
        text = why
        if built_on is not None:
            text = f"they build on {built_on}" if len(refs) > 1 else f"what it builds on is lost: {built_on}"
        say(f"{click.style('lost', fg='red', bold=True)}     {ranges(refs)}: {text}", hanging=9)
