"""``ckpt retire``: checkpoints that are promised no longer."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import click

from ckptstore.cli.arguments import REF, STORE, answer_options, opened
from ckptstore.cli.arguments import command as make_command
from ckptstore.cli.output import emit, note, size
from ckptstore.cli.range_text import checkpoints, counted, ranges
from ckptstore.cli.text_wrap import say

if TYPE_CHECKING:
    from ckptstore.store import Store

_LOOKED_AT = 100
"""Checkpoints among which an example is looked for."""


@make_command(
    "retire",
    examples=[
        "ckpt retire runs/gpt 1000 2000@1 --dry-run",
        "ckpt retire runs/gpt 1000 2000@1            # a training run is writing: it is asked",
        "ckpt retire runs/gpt 1000 --take-over && ckpt gc runs/gpt",
    ],
)
@STORE
@click.argument("refs", type=REF, nargs=-1, metavar="REF...")
@click.option("--dry-run", is_flag=True, help="Change nothing: show what would become of them.")
@answer_options
def command(store: str, refs: tuple[str, ...], dry_run: bool, take_over: bool, timeout: float, as_json: bool) -> None:
    """Give up checkpoints, so that gc may delete them.

    They are no longer listed and cannot be loaded. The latest cannot be given up, nor one that has a tag.
    What others build on stays stored; `ckpt gc` deletes the rest. `ckpt rm` is the same command.
    """
    target = opened(store)
    if not refs:
        error = click.UsageError("say which checkpoints to give up: no REF is given, and nothing was changed")
        error.add_note(
            f"`ckpt retire {shlex.quote(target.url)} {_example(target)} --dry-run` shows what giving one up would do"
        )
        raise error
    done = target.retire(*refs, dry_run=dry_run, take_over=take_over, timeout=timeout)
    if as_json:
        emit(
            {
                "store": store,
                "dry_run": dry_run,
                "retired": list(done.retired),
                "kept": list(done.kept),
                "dropped": list(done.dropped),
                "bytes_dropped": done.dropped_nbytes,
            }
        )
        return
    say(f"{'would retire' if dry_run else 'retired'} {checkpoints(done.retired)}")
    if done.kept:
        those = ("it", "its") if len(done.kept) == 1 else ("them", "their")
        say(f"stored still, because others build on {those[0]} or share {those[1]} segment: {ranges(done.kept)}")
    if done.dropped:
        then = "would free" if dry_run else "frees"
        unneeded = counted(len(done.dropped), "segment", "is", "are")
        note(f"{unneeded} needed no more: `ckpt gc` {then} {size(done.dropped_nbytes)}")


def _example(store: Store) -> str:
    """The REF of the newest checkpoint that may be given up; if there is none: of the newest."""
    found = store.lineage(_LOOKED_AT)
    refs = [info.ref for info in found.checkpoints if info.ref != found.latest and not info.tags]
    return next(iter(refs), found.latest or "REF")
