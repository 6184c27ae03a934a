"""The command."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from tools.long_run.plotting import plot
from tools.long_run.promised import Rules
from tools.long_run.supervising import supervise
from tools.objects.server import serving


@contextmanager
def _place(url: str | None) -> Iterator[str]:
    """Where the store is made: as given, in a temporary folder, or (``s3``) on a server of our own."""
    with tempfile.TemporaryDirectory(prefix="ckptstore-long-run-") as folder:
        if url != "s3":
            yield url or str(Path(folder) / "store")
            return
        (Path(folder) / "server").mkdir()
        with serving(Path(folder) / "server") as server:
            os.environ.update(server.environment())  # for the processes that are started
            yield server.url()


@click.command()
@click.option("--steps", default=5000, show_default=True, type=click.IntRange(min=1))
@click.option("--seconds", type=float, help="End the training after so many.")
@click.option("--url", help="A new store's folder or URL; `s3`: a server on this machine, which is started for it.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=Path("bench-out/long-run"))
@click.option(
    "--batch", default=10, show_default=True, type=click.IntRange(min=1), help="Steps in a record of the log."
)
@click.option("--pause", default=1.0, show_default=True, help="Seconds between two rounds of prune, compact and gc.")
def main(steps: int, seconds: float | None, url: str | None, out: Path, pause: float, batch: int) -> None:
    """Train and save with retention rules, beside upkeep and two readers, and check the remaining checkpoints.

    Writes report.json, sizes.csv and sizes.png to OUT. Ends with 0 only if exactly the promised set is there, bit for
    bit, and no reader ever restored anything except saved states.

    \b
    python -m tools.long_run --steps 5000
    python -m tools.long_run --steps 5000 --batch 1
    python -m tools.long_run --steps 300 --url s3
    """
    out.mkdir(parents=True, exist_ok=True)
    for name in ("stop", "saved.jsonl", "sizes.jsonl"):
        (out / name).unlink(missing_ok=True)
    with _place(url) as place:
        seen = supervise(place, out, steps=steps, seconds=seconds, rules=Rules(), pause=pause, batch=batch)
    plot(out / "sizes.csv", out / "sizes.png")
    click.echo(json.dumps(seen, indent=1))


if __name__ == "__main__":
    main()
