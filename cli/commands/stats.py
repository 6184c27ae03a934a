"""``ckpt stats``: where a store's bytes are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckptstore.cli.arguments import STORE, opened
from ckptstore.cli.arguments import command as make_command
from ckptstore.cli.hints import note_damage
from ckptstore.cli.output import emit, note, size, table
from ckptstore.cli.range_text import counted, kind_name
from ckptstore.cli.spinner import patience
from ckptstore.cli.text_wrap import say

if TYPE_CHECKING:
    from ckptstore import StoreStats


@make_command(
    "stats",
    examples=["ckpt stats runs/gpt", "ckpt stats runs/gpt --plot gpt.svg", "ckpt stats runs/gpt --json"],
)
@STORE
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Draw bytes over steps, and the metric: .svg, .png or .pdf.",
)
@click.option("--metric", default="loss", metavar="NAME", help="Number of the metadata to draw. Default: loss.")
def command(store: str, plot: Path | None, metric: str, as_json: bool) -> int:
    """Show where a store's bytes are, and how it grows.

    By kind, by term and by class of tensor. It also says what pruning by the store's rules, and gc, would free. Exits
    with 4 if the log is damaged: the rest is then of what is left of it.
    """
    if plot is not None:  # before anything is read, not after
        from ckptstore.exchange.atomic_files import refuse_missing_folder, refuse_store

        refuse_store(plot.resolve())
        refuse_missing_folder(plot)
    target = opened(store)
    with patience("adding up"):
        found = target.stats()
    if plot is not None:
        from ckptstore.analysis.growth_plot import draw_growth

        draw_growth(found, plot, metric)
    if as_json:
        emit(_json(store, found))
    else:
        _print(found)
        if plot is not None:
            note(f"drawn: {plot}")
    return note_damage(target.url, found.damage)


def _json(store: str, found: StoreStats) -> dict[str, Any]:
    return {
        "store": store,
        "checkpoints": len(found.checkpoints),
        "latest": found.latest,
        "bytes": found.nbytes,
        "kinds": [
            {"kind": kind, "checkpoints": share.checkpoints, "bytes": share.nbytes}
            for kind, share in found.kinds.items()
        ],
        "terms": [
            {"term": term, "checkpoints": share.checkpoints, "bytes": share.nbytes}
            for term, share in found.terms.items()
        ],
        "classes": [
            {
                "class": kind,
                "tensors": one.tensors,
                "bytes": one.nbytes,
                "stored_bytes": one.stored,
                "chain_bytes": one.chain,
            }
            for kind, one in found.classes.items()
        ],
        "bytes_per_1000_steps": found.growth,
        "rules": list(found.rules),
        "prune_frees": found.prunable_nbytes,
        "gc_frees": found.garbage_nbytes,
        "damage": list(found.damage),
    }


_CLASSES = {
    "weight": "weights",
    "first_moment": "first moments",
    "second_moment": "second moments",
    "gradient": "gradients",
    "other": "others",
}


def _print(found: StoreStats) -> None:
    latest = f", the newest {found.latest}" if found.latest else ""
    say(f"{counted(len(found.checkpoints), 'checkpoint')}{latest}: {size(found.nbytes)}")
    if found.growth is not None:
        say(f"grows by {size(round(found.growth))} in 1,000 steps")
    shares = [[kind_name(kind), f"{share.checkpoints:,}", size(share.nbytes)] for kind, share in found.kinds.items()]
    click.echo("\n" + table(["KIND", ">CHECKPOINTS", ">STORED"], shares))
    if "held" in found.kinds:
        say("held: retired, and stored because others build on them")
    terms = {term: share for term, share in found.terms.items() if share.nbytes or share.checkpoints}
    if len(terms) > 1:
        shares = [[str(term), f"{share.checkpoints:,}", size(share.nbytes)] for term, share in terms.items()]
        click.echo("\n" + table([">TERM", ">CHECKPOINTS", ">STORED"], shares))
    if found.classes:
        rows = [
            [_CLASSES.get(kind, kind), f"{one.tensors:,}", size(one.nbytes), size(one.stored), size(one.chain)]
            for kind, one in found.classes.items()
        ]
        click.echo(f"\ntensors of {found.latest}, stored by itself, and with all that it is restored from:")
        click.echo(table(["CLASS", ">TENSORS", ">SIZE", ">STORED", ">WITH ITS CHAIN"], rows))
    rules = f"rules: {', '.join(found.rules)}" if found.rules else "no rules: every checkpoint is kept"
    if found.prunable_nbytes is not None:
        rules += f"; `ckpt prune` would leave {size(found.prunable_nbytes)} to gc"
    click.echo("")
    say(rules)
    say(f"`ckpt gc` would free {size(found.garbage_nbytes)}")
