"""Compares saves to and restores from a bucket with its client alone, s3fs, boto3 and DCP.

    python -m tools.bench.storage.objects --size 1GB --rounds 5

A server in memory on loopback (`tools.objects.fast_server`), a process for each client in each round, rounds
interleaved and rotated; the restored bytes are compared with the saved ones. ``ratio`` is the speed relative to obstore
in the same round with the same checksum, because the store is built on obstore: medians of the rounds. ``server`` is
the server's time: where it is near the elapsed seconds, the server was the limit.

Then it measures how much of its speed a trainer's Python loop keeps during an upload
(`tools.bench.storage.objects_loop`): by a writer in its process, by the agent, and, for the cost of the machine itself,
by an unrelated process. With ``--pin`` the loop has its own core, as in training.

Loopback is not a network: client and server run as fast as they can, which takes all cores. ``--link 10Gbit/s --link
1Gbit/s`` also measures the loop beside uploads over such links, each with its own server that is limited to that speed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console
from rich.table import Table

from ckptstore.cli.quantities import AMOUNT, RATE, Typed
from tools.bench import machine
from tools.bench.storage.object_clients import CLIENTS, missing
from tools.bench.storage.objects_loop import others, pinned
from tools.bench.storage.report import median
from tools.objects.fast_server import serving_fast

__all__ = ["Comparison", "main"]

PHASES: Final = ("save", "restore")
MODES: Final = ("thread", "agent", "apart")
LOOPBACK: Final = "loopback"
RAW: Final = {"ckptstore": "obstore", "obstore": "obstore"}
"""The client that each is divided by; all others by ``obstore-plain``, as they send no checksum either."""


class Comparison:
    """Samples of all clients.

    Attributes:
        samples: client -> phase -> one entry a round.
        loops: link -> mode -> one entry a round.
        left_out: client -> the package that it lacks.
    """

    def __init__(self, clients: Sequence[str], size: int) -> None:
        self.size = size
        self.left_out = {name: package for name in clients if (package := missing(name))}
        self.clients = [name for name in clients if name not in self.left_out]
        self.samples: dict[str, dict[str, list[dict[str, float]]]] = {
            name: {phase: [] for phase in PHASES} for name in self.clients
        }
        self.loops: dict[str, dict[str, list[dict[str, float]]]] = {}

    def round(self, number: int, port: int) -> None:
        """Every client once, beginning with another one each time. Raises `click.ClickException`."""
        turn = number % len(self.clients)
        for name in [*self.clients[turn:], *self.clients[:turn]]:
            found = _run("tools.bench.storage.objects_worker", name, port, self.size)
            for phase in PHASES:
                self.samples[name][phase].append(found[phase])
            _emptied(port)

    def loop(self, link: str, port: int, *more: str) -> None:
        """Measure each mode once."""
        samples = self.loops.setdefault(link, {mode: [] for mode in MODES})
        for mode in MODES:
            samples[mode].append(_run("tools.bench.storage.objects_loop", mode, port, self.size, *more))
            _emptied(port)

    def loop_rows(self) -> list[dict[str, Any]]:
        """One row for each link and mode: medians."""
        return [
            {
                "link": link,
                "mode": mode,
                **{word: median([one[word] for one in samples]) for word in ("kept", "ran", "stall", "upload")},
                "spread": [function(one["kept"] for one in samples) for function in (min, max)],
            }
            for link, modes in self.loops.items()
            for mode, samples in modes.items()
        ]

    def rows(self) -> list[dict[str, Any]]:
        """One row for each client and phase: medians."""
        return [self._row(name, phase) for phase in PHASES for name in self.clients]

    def _row(self, name: str, phase: str) -> dict[str, Any]:
        samples = self.samples[name][phase]
        rates = sorted(self.size / 1e9 / one["seconds"] for one in samples)
        raw = self.samples.get(RAW.get(name, "obstore-plain"), {}).get(phase)
        ratios = [base["seconds"] / one["seconds"] for one, base in zip(samples, raw or (), strict=bool(raw))]
        row: dict[str, Any] = {"phase": phase, "client": name, "rate": median(rates), "spread": [rates[0], rates[-1]]}
        row["ratio"] = median(ratios) if ratios else None
        for word in ("cpu", "server"):
            row[word] = median([one[word] / self.size * 1e9 for one in samples])
        row["memory"] = median([one["memory"] / self.size for one in samples])
        return row


def _run(module: str, name: str, port: int, size: int, *more: str) -> Any:
    command = [sys.executable, "-m", module, name, "--port", str(port), "--size", str(size), *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise click.ClickException(f"{name}: {done.stderr[-2000:]}")
    return json.loads(done.stdout)


def _emptied(port: int) -> None:
    """Begin with an empty bucket, so that memory does not grow with the rounds."""
    for method in ("DELETE", "PUT"):
        link = HTTPConnection("127.0.0.1", port, timeout=20)
        link.request(method, "/tests")
        link.getresponse().read()
        link.close()


def _shown(console: Console, found: Comparison, rows: Sequence[dict[str, Any]]) -> None:
    for phase in PHASES:
        table = Table(title=f"{phase}, {found.size / 1e9:g} GB", title_justify="left")
        for column in ("client", "GB/s", "least-most", "ratio", "CPU s/GB", "server s/GB", "memory/state"):
            table.add_column(column, justify="left" if column == "client" else "right", no_wrap=True)
        for row in rows:
            if row["phase"] == phase:
                ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
                low, high = row["spread"]
                numbers = [f"{row[word]:.2f}" for word in ("cpu", "server", "memory")]
                table.add_row(row["client"], f"{row['rate']:.2f}", f"{low:.2f}-{high:.2f}", ratio, *numbers)
        console.print(table)
    if found.loops:
        _show_loops(console, found)
    for name, package in found.left_out.items():
        console.print(f"{name}: left out, {package} is not installed", highlight=False)


def _show_loops(console: Console, found: Comparison) -> None:
    title = f"a Python loop beside an upload of {found.size / 1e9:g} GB (stall: in save_async)"
    table = Table(title=title, title_justify="left")
    words = {"thread": "threads", "agent": "agent", "apart": "other process"}
    for column in ("link", "upload by", "kept", "least-most", "GIL took", "stall s", "upload s"):
        table.add_column(column, justify="left" if column in ("link", "upload by") else "right", no_wrap=True)
    for row in found.loop_rows():
        least, most = row["spread"]
        shares = (f"{row['kept']:.0%}", f"{least:.0%}-{most:.0%}", f"{1 - row['ran']:.1%}")
        stall = "" if row["mode"] == "apart" else f"{row['stall']:.2f}"
        table.add_row(row["link"], words[row["mode"]], *shares, stall, f"{row['upload']:.2f}")
    console.print(table)


@click.command(
    epilog="\b\nExample:\n  python -m tools.bench.storage.objects --size 1GB --rounds 5 --link 10Gbit/s --link 1Gbit/s"
)
@click.option("--size", type=AMOUNT, default="1GB", show_default=True, help="Of the state.")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--client", "clients", type=click.Choice(list(CLIENTS)), multiple=True, help="Default: all.")
@click.option("--loop/--no-loop", default=True, help="Whether to measure the trainer's loop, too.")
@click.option("--pin", is_flag=True, help="With the loop: pin it to one core, upload and server to the others.")
@click.option(
    "--link", "links", type=RATE, multiple=True, help="With the loop: also over a network of this speed, as 1Gbit/s."
)
@click.option("--bandwidth", metavar="RATE", help="With the loop: bandwidth limit of the upload, as 250MB/s.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("bench-out"), show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON instead of tables.")
def main(
    size: float,
    rounds: int,
    clients: tuple[str, ...],
    loop: bool,
    pin: bool,
    links: tuple[Typed, ...],
    bandwidth: str | None,
    out: Path,
    as_json: bool,
) -> None:
    """Compare ways to save to and restore from a bucket on loopback.

    Writes objects.json into --out.
    """
    out.mkdir(parents=True, exist_ok=True)
    found = Comparison(clients or list(CLIENTS), int(size) // 4 * 4)
    more = [*(["--pin"] if pin else []), *(["--bandwidth", bandwidth] if bandwidth else [])]
    with serving_fast() as server:
        for number in range(rounds if found.clients else 0):
            found.round(number, server.port)
    for link in (None, *(one.text for one in links)) if loop else ():
        with pinned(others()) if pin else nullcontext(), serving_fast(link) as server:
            for _ in range(rounds):
                found.loop(link or LOOPBACK, server.port, *more)
    rows = found.rows()
    document = {
        "benchmark": "objects",
        "machine": machine.describe(out),
        "settings": {
            "size": found.size,
            "rounds": rounds,
            "pin": pin,
            "links": [one.text for one in links],
            "bandwidth": bandwidth,
        },
        "clients": rows,
        "samples": found.samples,
        "loops": found.loops,
        "loop_rows": found.loop_rows(),
        "left_out": found.left_out,
    }
    (out / "objects.json").write_text(json.dumps(document, indent=1) + "\n")
    if as_json:
        click.echo(json.dumps(document))
    else:
        console = Console()
        _shown(console, found, rows)
        console.print(f"wrote {out}/objects.json", highlight=False)


if __name__ == "__main__":
    main()
