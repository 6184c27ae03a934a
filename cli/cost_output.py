"""Requests and bytes of an object store, as people and scripts read them; money at the prices that they give."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from ckptstore.cli.output import emit, number, size, table

if TYPE_CHECKING:
    from ckptstore import RequestCosts, Spent

__all__ = ["Prices", "parsed", "show_costs"]

Prices = tuple[float, float, float]
"""Of a million reads (GET, HEAD), of a million writes and listings, and of a GB that is received."""
_READS: Final = ("get", "range", "head")
_FREE: Final = ("delete",)


def parsed(text: str) -> Prices:
    """``READ,WRITE,GB``. Raises `click.UsageError`."""
    try:
        read, write, gigabyte = (float(part) for part in text.split(","))
    except ValueError:
        raise click.UsageError(f"--prices: {text!r:.80}; three numbers are needed, as in 0.4,5,0.09") from None
    if not all(0 <= price < 1e9 for price in (read, write, gigabyte)):
        raise click.UsageError(f"--prices: {text!r:.80}; numbers from 0 on are needed")
    return read, write, gigabyte


def show_costs(found: RequestCosts | None, prices: Prices | None, as_json: bool) -> None:
    """Print what a command and a restore take."""
    if found is None:
        if as_json:
            emit({"ref": None, "restore": None, "command": None})
        else:
            click.echo("requests of this medium cost nothing")
        return
    if as_json:
        emit({"ref": found.ref, "restore": _json(found.restore, prices), "command": _json(found.spent, prices)})
        return
    click.echo(click.style(f"checkpoint {found.ref}", bold=True))
    kinds = sorted({*found.restore.requests, *found.spent.requests})
    rows = [[kind, *(number(one.requests.get(kind, 0)) for one in (found.restore, found.spent))] for kind in kinds]
    rows.append(["requests", number(found.restore.total), number(found.spent.total)])
    rows.append(["received", size(found.restore.received), size(found.spent.received)])
    if prices is not None:
        rows.append(["money", *(f"{_money(one, prices):.7f}" for one in (found.restore, found.spent))])
    click.echo(table(["", ">RESTORE", ">THIS COMMAND"], rows))


def _json(spent: Spent, prices: Prices | None) -> dict[str, Any]:
    return {
        "requests": spent.total,
        "kinds": dict(spent.requests),
        "sent_bytes": spent.sent,
        "received_bytes": spent.received,
        "repeated": spent.repeated,
        "money": None if prices is None else _money(spent, prices),
    }


def _money(spent: Spent, prices: Prices) -> float:
    reads = sum(spent.requests.get(kind, 0) for kind in _READS)
    writes = spent.total - reads - sum(spent.requests.get(kind, 0) for kind in _FREE)
    return reads * prices[0] / 1e6 + writes * prices[1] / 1e6 + spent.received * prices[2] / 1e9
