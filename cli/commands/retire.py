"""``ckpt retire``: checkpoints that are promised no longer."""

from __future__ import annotations

import click

from ckptstore.cli.arguments import REF, STORE, answer_options, opened
from ckptstore.cli.arguments import command as make_command
from ckptstore.cli.output import emit, note, size
from ckptstore.cli.ranges import checkpoints, counted, ranges
from ckptstore.cli.wrapping import say


@make_command(
    "retire",
    examples=[
        "ckpt retire runs/gpt 1000 2000@1 --dry-run",
        "ckpt retire runs/gpt 1000 2000@1            # a training run is writing: it is asked",
        "ckpt retire runs/gpt 1000 --take-over && ckpt gc runs/gpt",
    ],
)
@STORE
@click.argument("refs", type=REF, nargs=-1, required=True, metavar="REF...")
@click.option("--dry-run", is_flag=True, help="Change nothing: show what would become of them.")
@answer_options
def command(store: str, refs: tuple[str, ...], dry_run: bool, take_over: bool, timeout: float, as_json: bool) -> None:
    """Give up checkpoints, so that gc may delete them.

    They are no longer listed and cannot be loaded. The latest cannot be given up, nor one that has a tag.
    What others build on stays stored; `ckpt gc` deletes the rest. `ckpt rm` is the same command.
    """
    done = opened(store).retire(*refs, dry_run=dry_run, take_over=take_over, timeout=timeout)
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
