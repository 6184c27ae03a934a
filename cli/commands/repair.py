"""``ckpt repair``: what is intact of a damaged store, as a new one."""

from __future__ import annotations

import re
from collections.abc import Mapping
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
"""When a checkpoint, or a tag, is lost."""
_MOST = 20
_BUILDS = "what it builds on is lost: "
_BASE = re.compile(rf"^{_BUILDS}([0-9]+@[0-9]+)\Z")


@make_command(
    "repair",
    examples=[
        "ckpt repair runs/gpt runs/gpt-repaired",
        "ckpt repair runs/mixed runs/gpt --run 3f0e1c52   # objects of two runs are in one folder",
    ],
)
@STORE
@click.argument("target", type=PLACE, metavar="DST")
@click.option("--run", metavar="UUID", help="Of several runs in one folder take this one: the beginning of its uuid.")
def command(store: str, target: str, run: str | None, as_json: bool) -> int:
    """Make a store of what is intact of a damaged one.

    STORE is only read; DST must not exist, or be empty. DST gets every checkpoint that is still complete, each restored
    and compared before it counts; where the log is gone it is made again. It says what is lost, checkpoint by
    checkpoint, and exits with 4 if anything is. If it was interrupted, the same command goes on.
    """
    import ckptstore

    with progress("repairing") as advance:
        done = ckptstore.repair(store, target, run=run, progress=advance)
    if as_json:
        emit(_json(store, target, done))
    else:
        _print(done)
    # Without the whole log nobody knows which checkpoint a damaged segment was of.
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
    _print_lost("lost", done.lost)
    for name, ref in done.tags.items():
        say(f"{click.style('lost', fg='red', bold=True)}     tag {name}, which named {ref}", hanging=9)
    kept = checkpoints(done.kept) if done.kept else "no checkpoint"
    say(f"{click.style('kept', fg='green', bold=True)}     {kept}", hanging=9)
    if done.found:
        say(f"found    {checkpoints(done.found)}: the log says nothing of them, their segments do", hanging=9)
    if done.rewritten:
        say(f"rewritten, because what leads to them is damaged where they do not need it: {ranges(done.rewritten)}")
    say(f"{counted(done.segments, 'segment')}, {size(done.nbytes)} written; latest is {done.latest or 'nothing'}")
    if done.log != "whole":
        note("tags, metadata and retirements that stood in lost parts of the log are lost with them")
    if done.unproven:
        note(
            f"tensors of {ranges(done.unproven)} are what was saved; of the rest of their state nothing but their own "
            "segments tells"
        )


def _print_lost(label: str, lost: Mapping[str, str]) -> None:
    """Every one of them: that is what the command is for. Those that are lost for the same reason share a line."""
    together: dict[str, list[str]] = {}
    for ref, why in lost.items():
        root, seen = ref, {ref}
        while (found := _BASE.search(lost.get(root, ""))) is not None and found[1] not in seen:
            root = found[1]
            seen.add(root)
        far = root != ref and (root in lost or len(seen) > 2)
        together.setdefault(f"{_BUILDS}{root}" if far else why, []).append(ref)
    for why, refs in together.items():
        text = f"they build on {why.removeprefix(_BUILDS)}" if why.startswith(_BUILDS) and len(refs) > 1 else why
        say(f"{click.style(label, fg='red', bold=True)}     {ranges(refs)}: {text}", hanging=9)
