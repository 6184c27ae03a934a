"""``ckpt bisect``: at which checkpoint something began."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ckptstore.cli.arguments import REF, STORE, opened, select_option
from ckptstore.cli.arguments import command as make_command
from ckptstore.cli.output import emit, note
from ckptstore.cli.range_text import ranges
from ckptstore.cli.text_wrap import say

if TYPE_CHECKING:
    from ckptstore import Bisected, Probe

_COLORS = {"good": "green", "bad": "red", "skipped": "yellow"}


@make_command(
    "bisect",
    examples=[
        "ckpt bisect runs/gpt --nan                              # the first checkpoint with a NaN or an infinity",
        "ckpt bisect runs/gpt 'python eval.py \"$1\"'              # exits with 0: good, 125: skip, 1 to 127: bad",
        "ckpt bisect runs/gpt --expr \"abs(tensors['model.w']).max() > 100\" --select model.w --good 1000",
    ],
)
@STORE
@click.argument("cmd", metavar="[CMD]", required=False)
@click.option("--nan", is_flag=True, help="Instead of CMD: is a tensor not finite?")
@click.option("--expr", metavar="PYTHON", help="Instead of CMD: true if bad. Knows tensors (by name), state and np.")
@select_option("Restore only tensors that match; may be repeated.")
@click.option("--ref", type=REF, help="Search the history of this one. Default: latest.")
@click.option("--good", type=REF, help="This one is known to be good: search behind it.")
@click.option("--bad", type=REF, help="This one is known to be bad: search before it.")
@click.option("--check", type=click.IntRange(0), default=0, metavar="N", help="Look at N more on either side.")
def command(
    store: str,
    cmd: str | None,
    nan: bool,
    expr: str | None,
    select: tuple[str, ...],
    ref: str | None,
    good: str | None,
    bad: str | None,
    check: int,
    as_json: bool,
) -> None:
    """Find the checkpoint at which something began.

    Restores about log2(n) checkpoints of n, 14 of 10,000, and asks of each whether it is good. CMD is a shell command
    that gets a safetensors file as $1 (and as $CKPT_FILE, beside $CKPT_REF and $CKPT_STEP).
    """
    if bool(cmd) + nan + (expr is not None) != 1:
        raise click.UsageError("give one of CMD, --nan and --expr")
    if ref is not None and bad is not None:
        raise click.UsageError("--bad is the end of the search: it cannot be combined with --ref")
    target = opened(store)

    from ckptstore.reports.predicates import expression, not_finite

    predicate = cmd if cmd else expression(expr) if expr is not None else not_finite

    def tell(probe: Probe) -> None:
        if not as_json:
            answer = click.style(f"{probe.answer:8}", fg=_COLORS[probe.answer])
            say(f"{answer} {probe.ref}" + (f"  {probe.why}" if probe.why else f"  ({probe.left:,} left)"))

    found = target.bisect(
        predicate, ref=ref or "latest", select=select or None, good=good, bad=bad, checks=check, on_probe=tell
    )
    if as_json:
        emit(
            {
                "store": store,
                "last_good": found.last_good,
                "first_bad": found.first_bad,
                "between": list(found.between),
                "contradictions": list(found.contradictions),
                "checkpoints": found.checkpoints,
                "probes": [{"ref": one.ref, "answer": one.answer, "why": one.why} for one in found.probes],
            }
        )
    else:
        _print(found)


def _print(found: Bisected) -> None:
    if found.first_bad is None:
        say(f"nothing bad was found; the newest that is good: {found.last_good or 'none'}")
    elif found.between:
        say(f"it began at {found.first_bad}, or at one before it that was skipped: {ranges(found.between)}")
    else:
        say(f"{click.style('first bad:', bold=True)} {found.first_bad}")
    if found.first_bad is not None:
        say(f"last good: {found.last_good or 'none'}")
    for text in found.contradictions:
        note(f"{text}: it did not begin once and go on, so there is no one place where it began")
