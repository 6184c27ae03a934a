"""Make golden files: ``python -m tools.golden``. See `tools.golden`."""

from __future__ import annotations

import click

from tools.golden import everything


@click.command()
@click.option("--again", is_flag=True, help="Make all files again, also frozen ones: only before a format is frozen.")
@click.option("--freeze", is_flag=True, help="Record the present files as frozen; make nothing.")
def main(again: bool, freeze: bool) -> None:
    """Make the golden files that are missing, and list the frozen ones that this version would write differently."""
    if freeze:
        click.echo(f"{everything.freeze()} files are frozen ({everything.FROZEN})")
    elif again:
        everything.make(everything.ROOT)
    else:
        for name in everything.main():
            click.echo(f"{name} is frozen and stays as it is: this version, or its zstd, writes other bytes")


main()
