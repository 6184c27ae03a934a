"""Implements ``ckpt keep``: sets and shows a store's retention rules."""

from __future__ import annotations

import click

from ckptstore.cli.arguments import RULE, STORE, answer_options, opened
from ckptstore.cli.arguments import command as make_command
from ckptstore.cli.output import emit, note


@make_command(
    "keep",
    examples=[
        "ckpt keep runs/gpt                                       # the rules",
        "ckpt keep runs/gpt last:100 every:1000 best:loss:5       # a training run is writing: it is asked",
        "ckpt keep runs/gpt last:100 newer-than:7d --take-over    # no run is writing",
        "ckpt keep runs/gpt --everything",
    ],
)
@STORE
@click.argument("rules", type=RULE, nargs=-1, metavar="[RULE...]")
@click.option("--everything", is_flag=True, help="Remove the rules: every checkpoint is kept.")
@answer_options
def command(
    store: str, rules: tuple[str, ...], everything: bool, take_over: bool, timeout: float, as_json: bool
) -> None:
    """Set which checkpoints a store keeps, or show it.

    RULE is last:N, every:N, best:METRIC:N[:max], newer-than:7d, branches or tagged. A checkpoint is kept if any rule
    keeps it; every writer retires the others as it saves. The newest checkpoint is always kept, and so is one with a
    tag. The rule space:4GB or space:3states keeps nothing: it limits the space of all checkpoints.
    """
    target = opened(store)
    if everything and rules:
        raise click.UsageError("--everything removes all rules; omit RULE")
    found = (
        target.keep(*rules, everything=everything, take_over=take_over, timeout=timeout)
        if everything or rules
        else target.rules()
    )
    if as_json:
        emit({"store": store, "rules": list(found)})
        return
    click.echo("\n".join(found) or "no rules: every checkpoint is kept")
    if rules:
        note("checkpoints that no rule keeps are retired with the next save, or by `ckpt prune`")
