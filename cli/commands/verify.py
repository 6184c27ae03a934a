"""``ckpt verify``: is every byte what was written?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ckptstore.cli.arguments import STORE
from ckptstore.cli.arguments import command as make_command
from ckptstore.cli.output import emit, progress, size, some

if TYPE_CHECKING:
    from ckptstore.verification import VerificationReport

DAMAGED = 1
"""Exit code when damage was found (an unreadable store exits with its error's own code)."""


@make_command("verify", examples=["ckpt verify runs/gpt", "ckpt verify runs/gpt --json && echo intact"])
@STORE
def command(store: str, as_json: bool) -> int:
    """Check every byte and hash of a store.

    Reads everything. Names what is damaged, which checkpoints that costs, and which can still be restored. Exits 1 if
    there is damage.
    """
    from ckptstore.backends import open_backend
    from ckptstore.store import Store
    from ckptstore.verification import verify

    # Not `opened`: a damaged FORMAT file is a finding here, no reason to stop.
    target = Store(open_backend(store, create=False))
    with progress("verifying") as advance:
        report = verify(target, progress=advance)
    if as_json:
        emit(_json(report))
    else:
        _print(report)
    return 0 if report.ok else DAMAGED


def _json(report: VerificationReport) -> dict[str, Any]:
    return {
        "ok": report.ok,
        "objects": report.objects,
        "bytes": report.nbytes,
        "damage": [
            {"key": damage.key, "what": damage.what, "checkpoints": list(damage.checkpoints)}
            for damage in report.damage
        ],
        "restorable": list(report.restorable),
        "lost": list(report.lost),
        "latest": None if report.latest is None else report.latest.ref,
        "orphans": list(report.orphans),
        "strangers": list(report.strangers),
    }


def _print(report: VerificationReport) -> None:
    total = len(report.restorable) + len(report.lost)
    click.echo(f"checked {size(report.nbytes)} in {report.objects:,} objects, {total:,} checkpoints")
    for damage in report.damage:
        needed = f"  (needed by {some(damage.checkpoints)})" if damage.checkpoints else ""
        click.echo(f"{click.style('damaged', fg='red', bold=True)}  {damage.key}: {damage.what}{needed}")
    if report.lost:
        click.echo(f"{click.style('lost', fg='red', bold=True)}     {some(report.lost)}")
    if report.damage:
        click.echo(f"intact   {some(report.restorable) if report.restorable else 'no checkpoint'}")
        if report.latest is not None:
            click.echo(f"newest checkpoint that can be restored: {report.latest.ref}")
    if report.orphans:
        hidden = any(damage.key.startswith("log/") for damage in report.damage)
        why = "or to one that a damaged log slot hides: keep them" if hidden else "left by interrupted saves; harmless"
        click.echo(f"{len(report.orphans):,} segments belong to no checkpoint ({why})")
    if report.strangers:
        click.echo(f"{len(report.strangers):,} files are not part of the store: {some(report.strangers)}")
    if report.ok:
        click.echo(click.style("intact", fg="green", bold=True))
