"""The command; see `tools.frozen`."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import click

from tools.frozen.installing import FrozenVersionError, frozen, present
from tools.frozen.interleaving import InterleavingError, interleave


@click.command()
@click.option("--operations", default=40, show_default=True, help="Turns of the two versions on each store.")
@click.option("--stores", default=1, show_default=True, help="Stores, each with the next seed.")
@click.option("--seed", default=0, show_default=True, help="Chooses the operations.")
@click.option("--build", is_flag=True, help="Only build the frozen version, and print where it is.")
@click.option("--json", "as_json", is_flag=True, help="Print what was done as JSON.")
def main(operations: int, stores: int, seed: int, build: bool, as_json: bool) -> None:
    """Work on stores with the frozen version and the working tree in turns.

    \b
    python -m tools.frozen --operations 60 --stores 5
    """
    try:
        packages = (frozen(), present())
    except FrozenVersionError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    if build:
        click.echo(packages[0])
        return
    for number in range(seed, seed + stores):
        with tempfile.TemporaryDirectory(prefix="frozen-") as place:
            try:
                outcome = interleave(
                    packages,
                    Path(place),
                    operations=operations,
                    seed=number,
                    told=None if as_json else click.echo,
                )
            except InterleavingError as error:
                click.echo(f"error: {error}", err=True)
                sys.exit(1)
        done = {"seed": number, "saved": outcome.saved, "compared": outcome.compared, "counts": outcome.counts}
        click.echo(json.dumps(done | asdict(outcome)) if as_json else f"{done}")


main()
