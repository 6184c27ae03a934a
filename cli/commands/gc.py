"""Implements ``ckpt gc``: deletes the segments that nothing needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ckptstore.cli.arguments import STORE, opened
from ckptstore.cli.arguments import command as make_command
from ckptstore.cli.hints import note_damage
from ckptstore.cli.output import emit, note, printable, progress, size, some
from ckptstore.cli.range_text import counted
from ckptstore.cli.text_wrap import say
from ckptstore.errors import CorruptionError

if TYPE_CHECKING:
    from ckptstore.maintenance.garbage_collection import Collected, Holder

UNREADABLE = CorruptionError.exit_code
"""Exit code if a damaged pin blocked all deletion. `note_damage` returns it if log damage blocked some of it."""


@make_command(
    "gc",
    examples=[
        "ckpt gc runs/gpt --dry-run",
        "ckpt gc runs/gpt",
        "ckpt gc runs/gpt --wait 700          # long enough to detect dead readers of other hosts",
    ],
)
@STORE
@click.option("--dry-run", is_flag=True, help="Delete nothing: show what would be deleted.")
@click.option(
    "--wait",
    type=click.FloatRange(min=0),
    default=0.0,
    metavar="SECONDS",
    help="While readers pin segments, look again for this long. Default: 0.",
)
@click.option(
    "--pin-ttl",
    type=float,
    default=None,
    metavar="SECONDS",
    help="Treat a reader as dead, and delete its pin, if the pin has not changed for this long (60 s at least). "
    "Needs a longer --wait. Default: 600.",
)
def command(store: str, dry_run: bool, wait: float, pin_ttl: float | None, as_json: bool) -> int:
    """Delete the segments that nothing needs.

    These are segments that were dropped (by a merge, for example), and segments of earlier terms that were never
    committed. Segments that a reader has pinned stay, and so do files that are not the store's. The pin of a process
    that has ended on this host is ignored. The command may run while others write and read. It exits with
    4 if the log is damaged: a segment that the log does not name may belong to a lost record, and stays.
    """
    with progress("deleting") as advance:
        target = opened(store)
        done = target.gc(wait=wait, pin_ttl=pin_ttl, dry_run=dry_run, progress=advance)
    if as_json:
        emit(_json(store, done, dry_run))
    else:
        _print(done, dry_run)
    damaged = note_damage(target.url, done.damage)
    return UNREADABLE if done.unreadable_pins else damaged


def _json(store: str, done: Collected, dry_run: bool) -> dict[str, Any]:
    return {
        "store": store,
        "dry_run": dry_run,
        "segments": list(done.segments),
        "bytes": done.nbytes,
        "spare_bytes": done.spare_nbytes,
        "pinned": list(done.pinned),
        "pinned_bytes": done.pinned_nbytes,
        "pins": [
            {"key": holder.key, "reader": dict(holder.reader), "segments": list(holder.segments)}
            for holder in done.holders
        ],
        "dead_pins": list(done.dead_pins),
        "unreadable_pins": list(done.unreadable_pins),
        "strangers": list(done.strangers),
        "damage": list(done.damage),
    }


def _print(done: Collected, dry_run: bool) -> None:
    what = "would delete" if dry_run else "deleted"
    say(f"{what} {counted(len(done.segments), 'segment')}: {size(done.nbytes)}")
    if done.spare_nbytes:
        say(f"kept as spare files, which new checkpoints overwrite: {size(done.spare_nbytes)}")
    if done.dead_pins:
        say(f"{what} the pins of {counted(len(done.dead_pins), 'dead reader')}: {some(done.dead_pins)}")
    if done.pinned and not done.unreadable_pins:
        say(f"pinned by readers, kept: {counted(len(done.pinned), 'segment')}, {size(done.pinned_nbytes)}")
        for holder in done.holders:
            say(f"  {holder.key}: {_who(holder)}, {counted(len(holder.segments), 'segment')}")
        note(
            "if a reader on another host or in another container is dead: a --wait longer than --pin-ttl (600 s) "
            "detects that and deletes its pin"
        )
    if done.strangers:
        say(f"not the store's, kept: {some([printable(key) for key in done.strangers])}")
        note("gc deletes only files that a store writes; remove the others yourself, or move them out of the store")
    if done.unreadable_pins:
        damaged = click.style("damaged", fg="red", bold=True)
        say(f"{damaged}  {some(done.unreadable_pins)}")
        say(f"a damaged pin does not say which segments it protects: {size(done.pinned_nbytes)} kept")
        note(
            "its reader rewrites it within 30 s; if it stays damaged, delete the file (a --wait longer than --pin-ttl "
            "deletes it, too). No checkpoint needs it"
        )


def _who(holder: Holder) -> str:
    known = [f"{name} {holder.reader[name]}" for name in ("host", "pid") if name in holder.reader]
    return ", ".join(known) or "unknown reader"
