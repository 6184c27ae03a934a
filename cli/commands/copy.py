"""``ckpt copy``: checkpoints, or a whole store, to another place."""

from __future__ import annotations

from typing import Literal

import click

from ckptstore.cli.arguments import PLACE, REF, STORE, opened
from ckptstore.cli.arguments import command as make_command
from ckptstore.cli.output import emit, note, progress, size
from ckptstore.cli.range_text import checkpoints, counted, ranges
from ckptstore.cli.text_wrap import say


@make_command(
    "copy",
    examples=[
        "ckpt copy runs/gpt /mnt/backup/gpt                # all of it; again: what is new",
        "ckpt copy runs/gpt /tmp/two latest tag:best       # two checkpoints, and what they build on",
        "ckpt copy runs/gpt /tmp/plain 1000 --as full      # as a file that other tools read",
    ],
)
@STORE
@click.argument("target", type=PLACE, metavar="DST")
@click.argument("refs", type=REF, nargs=-1, metavar="[REF...]")
@click.option(
    "--as",
    "form",
    type=click.Choice(["stored", "full"]),
    default="stored",
    help="full: decode each checkpoint and store it uncompressed. Default: stored, byte for byte.",
)
def command(store: str, target: str, refs: tuple[str, ...], form: Literal["stored", "full"], as_json: bool) -> None:
    """Copy checkpoints to another place.

    DST is an empty place, or a copy of the same run that nobody wrote to: it takes what is new. It has the same run,
    terms, tags and metadata. Every byte is compared with its hash on the way. If it was interrupted, the same command
    goes on.
    """
    with progress("copying") as advance:
        done = opened(store).copy(target, refs, form=form, progress=advance)
    if as_json:
        emit(
            {
                "store": store,
                "target": target,
                "run": done.run,
                "checkpoints": list(done.checkpoints),
                "bases": list(done.bases),
                "segments": done.segments,
                "bytes": done.nbytes,
                "present": done.present,
                "went_on": done.went_on,
            }
        )
        return
    say(f"copied {checkpoints(done.checkpoints)}" if done.checkpoints else "the store has no checkpoint")
    say(f"{counted(done.segments, 'segment')}, {size(done.nbytes)} written and verified")
    if done.present:
        say(f"{counted(done.present, 'segment', 'was', 'were')} there already")
    if done.bases:
        note(f"also there, because others build on it, and not promised: {ranges(done.bases)}")
