"""Implements ``ckpt verify``: checks that every byte is what was written."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import click

from ckptstore.cli.arguments import REF, STORE
from ckptstore.cli.arguments import command as make_command
from ckptstore.cli.output import emit, note, printable, progress, size, some
from ckptstore.cli.range_text import checkpoints, counted, ranges
from ckptstore.cli.text_wrap import say
from ckptstore.errors import CorruptionError, StorageError
from ckptstore.formats.history.records import in_format

if TYPE_CHECKING:
    from ckptstore.maintenance.verify.verification import VerificationReport

DAMAGED = CorruptionError.exit_code
UNREAD = StorageError.exit_code
"""Exit code if nothing is damaged, but something could not be read."""


@make_command(
    "verify",
    examples=[
        "ckpt verify runs/gpt",
        "ckpt verify runs/gpt --deep",
        "ckpt verify runs/gpt latest --deep           # before resuming: decodes that checkpoint, and no other",
        "ckpt verify runs/gpt --json && echo intact",
    ],
)
@STORE
@click.argument("ref", type=REF, required=False, metavar="[REF]")
@click.option("--deep", is_flag=True, help="Also decode and replay, and compare the resulting states.")
def command(store: str, ref: str | None, deep: bool, as_json: bool) -> int:
    """Check every byte and hash of a store, or of one checkpoint.

    Reads everything, and compares it with what the log promised. Names what is damaged, the checkpoints that it makes
    unrestorable, and those that can still be restored. With a REF it reads only the segments that can restore it.
    Exits with 4 if there is damage, with 8 if there is none but something could not be read.
    """
    from ckptstore.backends import open_backend
    from ckptstore.store import Store

    # Not `opened`: a damaged FORMAT file is a finding of this command, not an error.
    target = Store(open_backend(store, create=False))
    with progress("verifying") as advance:
        report = target.verify(ref, deep=deep, progress=advance)
    if as_json:
        emit(_json(report))
    else:
        _print(report, store)
    return DAMAGED if report.damage else UNREAD if report.unread else 0


def _json(report: VerificationReport) -> dict[str, Any]:
    return {
        "ok": report.ok,
        "deep": report.deep,
        "ref": report.ref,
        "objects": report.objects,
        "bytes": report.nbytes,
        "damage": [
            {"key": damage.key, "what": damage.what, "checkpoints": list(damage.checkpoints)}
            for damage in report.damage
        ],
        "unread": [
            {"key": unread.key, "what": unread.what, "checkpoints": list(unread.checkpoints)}
            for unread in report.unread
        ],
        "restorable": list(report.restorable),
        "lost": list(report.lost),
        "unknown": list(report.unknown),
        "latest": None if report.latest is None else report.latest.ref,
        "orphans": list(report.orphans),
        "strangers": list(report.strangers),
    }


def _print(report: VerificationReport, store: str) -> None:
    total = len(report.restorable) + len(report.lost) + len(report.unknown)
    decoded = ", each of them decoded" if report.deep else ""
    what = f"{counted(total, 'checkpoint')}{decoded}" if report.ref is None else f"checkpoint {report.ref}"
    if report.ref is not None and report.deep:
        what += ", decoded"
    say(f"checked {size(report.nbytes)} in {counted(report.objects, 'object')}, {what}")
    for damage in report.damage:
        needed = f"  (needed by {ranges(damage.checkpoints)})" if damage.checkpoints else ""
        say(f"{click.style('damaged', fg='red', bold=True)}  {printable(damage.key)}: {damage.what}{needed}", hanging=9)
    for unread in report.unread:
        say(f"{click.style('unread', fg='yellow', bold=True)}   {unread.key}: {unread.what}", hanging=9)
    if report.lost:
        say(f"{click.style('lost', fg='red', bold=True)}     {checkpoints(report.lost)}", hanging=9)
    if report.unknown:
        say(f"{click.style('unknown', fg='yellow', bold=True)}  {checkpoints(report.unknown)}", hanging=9)
    if not report.ok:
        say(f"intact   {checkpoints(report.restorable) if report.restorable else 'no checkpoint'}", hanging=9)
        passing = not report.unread and all(damage.passing for damage in report.damage)
        if passing:
            note("no checkpoint is affected, and nothing needs repair")
        elif report.latest is not None:
            say(f"newest checkpoint that can be restored: {report.latest.ref}")
            if report.ref is None:
                place = shlex.quote(store)
                command = f"ckpt restore {place} {report.latest.ref} --out FILE"
                note(f"`{command}` writes it to a file; `ckpt repair {place} DST` makes a store of what is intact")
    if report.orphans:
        # A segment counts as damage if the log lacks the term that it belongs to.
        hidden = any(damage.key.startswith("log/") or damage.key in report.orphans for damage in report.damage)
        why = (
            "or to one that damage of the log hides: keep them, `ckpt repair` can recover what is in them"
            if hidden
            else "of retired checkpoints or interrupted saves; harmless, ckpt gc deletes them"
        )
        say(f"{counted(len(report.orphans), 'segment', 'belongs', 'belong')} to no checkpoint ({why})")
    if report.strangers:
        names = some([printable(key) for key in report.strangers])
        say(f"{counted(len(report.strangers), 'file', 'is', 'are')} not part of the store: {names}")
        if not all(map(in_format, report.strangers)):
            note(
                "the store is complete without them: no store writes such names, but an editor, a file manager or a "
                "sync client does. ckpt neither reads nor deletes them: delete them, or move them out"
            )
    if report.ok:
        click.echo(click.style("intact", fg="green", bold=True))
