"""``ckpt diff``: how two checkpoints differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from ckptstore.cli.arguments import REF, STORE, opened, select_option
from ckptstore.cli.arguments import command as make_command
from ckptstore.cli.output import emit, number, progress, shape, table

if TYPE_CHECKING:
    from ckptstore.reports.comparison import StateDifference, TensorDifference

_SORTS: dict[str, Callable[[TensorDifference], float]] = {
    "bits": lambda tensor: (tensor.bits_changed or 0) / max(tensor.bits, 1),
    "norm": lambda tensor: tensor.norm_diff or 0.0,
    "relative": lambda tensor: tensor.relative or 0.0,
    "max": lambda tensor: tensor.max_abs or 0.0,
}


@make_command(
    "diff",
    examples=[
        "ckpt diff runs/gpt 1000 2000",
        "ckpt diff runs/gpt 1000@1 1000@2 --select 'model.*' --sort relative",
        "ckpt diff runs/gpt 1000 latest --all --json",
        "ckpt diff runs/gpt 1000 1000 --in runs/gpt-again     # of another run",
    ],
)
@STORE
@click.argument("ref_a", type=REF, metavar="REF")
@click.argument("ref_b", type=REF, metavar="REF")
@select_option("Only tensors that match, and not the rest of the state; may be repeated.")
@click.option("--in", "other", metavar="STORE", help="The second REF is in this store.")
@click.option("--sort", type=click.Choice(["name", *_SORTS]), help="Default: the order of the state.")
@click.option("--all", "everything", is_flag=True, help="List tensors that are the same, too.")
def command(
    store: str,
    ref_a: str,
    ref_b: str,
    select: tuple[str, ...],
    other: str | None,
    sort: str | None,
    everything: bool,
    as_json: bool,
) -> None:
    """Compare two checkpoints tensor by tensor.

    Bits are compared, so -0.0 and 0.0 differ and equal NaNs do not. Norms and the largest difference are over finite
    values.
    """
    target = opened(store)
    second = target if other is None else opened(other)
    infos = target.checkpoint(ref_a), second.checkpoint(ref_b)
    with progress("comparing") as advance:
        tensors = target.compare(infos[0].ref, infos[1].ref, select or None, other=second, progress=advance)
    state = [] if select else target.compare_state(infos[0].ref, infos[1].ref, other=second)
    counts = Counter(tensor.status for tensor in tensors)
    shown = [tensor for tensor in tensors if everything or tensor.status != "same"]
    if sort == "name":
        shown.sort(key=lambda tensor: tensor.name)
    elif sort is not None:
        shown.sort(key=_SORTS[sort], reverse=True)
    if as_json:
        emit(
            {
                "a": infos[0].ref,
                "b": infos[1].ref,
                "identical": infos[0].state == infos[1].state,
                "counts": {status: counts[status] for status in ("same", "changed", "added", "removed", "replaced")},
                "tensors": [_json(tensor) for tensor in shown],
                "state": [
                    {"path": one.path, "status": one.status, "before": one.before, "after": one.after} for one in state
                ],
            }
        )
        return
    summary = ", ".join(f"{count:,} {status}" for status, count in counts.items()) or "no tensors"
    click.echo(f"{click.style(f'{infos[0].ref} -> {infos[1].ref}', bold=True)}  tensors: {summary}")
    if shown:
        click.echo("")
        click.echo(_table(shown))
    if state:
        click.echo("")
        click.echo("\n".join(_state_line(one) for one in state))


def _json(tensor: TensorDifference) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "status": tensor.status,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "was": None if tensor.was is None else {"dtype": tensor.was[0], "shape": list(tensor.was[1])},
        "bits": tensor.bits,
        "bits_changed": tensor.bits_changed,
        "elements": tensor.elements,
        "elements_changed": tensor.elements_changed,
        "norm_a": tensor.norm_a,
        "norm_b": tensor.norm_b,
        "norm_diff": tensor.norm_diff,
        "relative": tensor.relative,
        "max_abs": tensor.max_abs,
        "nonfinite": tensor.nonfinite,
    }


def _table(tensors: list[TensorDifference]) -> str:
    rows = []
    for tensor in tensors:
        was = "" if tensor.was is None else f" (was {tensor.was[0]} {shape(tensor.was[1])})"
        rows.append(
            [
                tensor.name,
                tensor.status,
                tensor.dtype,
                shape(tensor.shape) + was,
                _share(tensor.bits_changed, tensor.bits),
                _share(tensor.elements_changed, tensor.elements),
                number(tensor.norm_b),
                number(tensor.norm_diff),
                number(tensor.relative),
                number(tensor.max_abs) + (f" (+{tensor.nonfinite:,} not finite)" if tensor.nonfinite else ""),
            ]
        )
    headings = ["TENSOR", "STATUS", "DTYPE", "SHAPE", ">BITS", ">ELEMENTS", ">|B|", ">|B-A|", ">RELATIVE", ">MAX"]
    return table(headings, rows)


def _share(part: int | None, whole: int) -> str:
    if part is None:
        return "-"
    return f"{100 * part / whole:.4g}%" if whole else "0%"


def _state_line(one: StateDifference) -> str:
    from ckptstore.reports.state_tree import text

    if not one.path:
        return "the order of keys or the type of a container differs"
    if one.status == "added":
        return f"+ {one.path}: {text(one.after)}"
    if one.status == "removed":
        return f"- {one.path}: {text(one.before)}"
    return f"~ {one.path}: {text(one.before, 48)} -> {text(one.after, 48)}"
