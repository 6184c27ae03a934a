"""Implements ``ckpt tag``: names checkpoints."""

from __future__ import annotations

from typing import Any

import click

from ckptstore.cli.arguments import REF, STORE, TAG, answer_options, opened
from ckptstore.cli.arguments import command as make_command
from ckptstore.cli.output import emit, moment, note, table


@make_command(
    "tag",
    examples=[
        "ckpt tag runs/gpt                        # the tags",
        "ckpt tag runs/gpt best 1000@2            # a training run is writing: it is asked (1000@2 best works, too)",
        "ckpt tag runs/gpt released --take-over   # names the latest; no run is writing",
        "ckpt tag runs/gpt best --delete",
        "ckpt tag - best 1000                     # in the store that CKPT_STORE names",
    ],
)
@STORE
@click.argument("name", type=TAG, required=False, metavar="[NAME]")
@click.argument("ref", type=REF, required=False, metavar="[REF]")
@click.option("--delete", is_flag=True, help="Remove the tag; the checkpoint stays.")
@answer_options
def command(
    store: str, name: str | None, ref: str | None, delete: bool, take_over: bool, timeout: float, as_json: bool
) -> None:
    """Name a checkpoint, or list the tags.

    The default REF is latest. An existing tag is moved. tag:NAME can then be used as a REF, and a checkpoint with a tag
    is never retired.
    """
    target = opened(store)
    if name is None:
        if delete:
            raise click.UsageError("--delete: pass the name of the tag")
        found = target.tags()
        if as_json:
            emit({"store": store, "tags": [_json(tag, info.ref) for tag, info in found.items()]})
        elif found:
            rows = [[tag, info.ref, moment(info.time)] for tag, info in found.items()]
            click.echo(table(["TAG", "CHECKPOINT", "TIME"], rows))
        else:
            note("no tag yet")
        return
    if delete:
        if ref is not None:
            raise click.UsageError("--delete removes a tag from any checkpoint; omit REF")
        target.untag(name, take_over=take_over, timeout=timeout)
    else:
        if ref is not None and _names(ref) and not _names(name):
            name, ref = ref, name  # no tag can be named like a REF, so either order is unambiguous
        ref = target.tag(name, ref or "latest", take_over=take_over, timeout=timeout).ref
    if as_json:
        emit({"store": store, "tags": [_json(name, ref)]})
    else:
        click.echo(f"tag:{name} is removed" if ref is None else f"tag:{name} is {ref}")


def _names(text: str) -> bool:
    """Tell whether a new tag may have this name."""
    from ckptstore.errors import UsageError
    from ckptstore.log.refs import check_new_tag

    try:
        check_new_tag(text)
    except UsageError:
        return False
    return True


def _json(name: str, ref: str | None) -> dict[str, Any]:
    return {"name": name, "ref": ref}
