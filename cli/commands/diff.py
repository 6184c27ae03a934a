"""Implements ``ckpt diff``: shows how two checkpoints differ."""

from __future__ import annotations

import math
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckptstore.cli.arguments import PLACE, REF, STORE, opened, select_option
from ckptstore.cli.arguments import command as make_command
from ckptstore.cli.output import emit, number, progress, shape, table
from ckptstore.cli.ref_syntax import like_a_ref

if TYPE_CHECKING:
    from ckptstore import CheckpointInfo
    from ckptstore.reports.comparison import StateDifference, TensorDifference

_SORTS: dict[str, Callable[[TensorDifference], float]] = {
    "bits": lambda tensor: (tensor.bits_changed or 0) / max(tensor.bits, 1),
    "norm": lambda tensor: tensor.norm_diff or 0.0,
    "relative": lambda tensor: tensor.relative or 0.0,
    "max": lambda tensor: tensor.max_abs or 0.0,
}
DIFFERENT = 1
"""Exit code of ``--exit-code`` if the checkpoints differ, as in git."""
_WIDE = 120
"""Minimum columns of a terminal for all numbers."""


@make_command(
    "diff",
    examples=[
        "ckpt diff runs/gpt 1000 2000",
        "ckpt diff runs/gpt 1000@1 1000@2 --select 'model.*' --sort relative",
        "ckpt diff runs/gpt 1000 latest --all --json",
        "ckpt diff runs/gpt 1000@1 1000@2 --exit-code > changes.txt || echo they differ",
        "ckpt diff runs/gpt runs/gpt-again                    # the latest of two runs",
        "ckpt diff runs/gpt 1000 runs/gpt-again 1000          # the same as 1000 1000 --in runs/gpt-again",
    ],
)
@STORE
@click.argument("ref_a", type=REF, metavar="REF")
@click.argument("ref_b", type=REF, metavar="REF", required=False)
@click.argument("rest", nargs=-1, metavar="")
@select_option("Only tensors that match, without the rest of the state; may be repeated.")
@click.option("--in", "other", type=PLACE, metavar="STORE", help="The second REF is in this store.")
@click.option(
    "--sort",
    type=click.Choice(["state", "name", *_SORTS]),
    help="state: the order of the state, which is the default of --json. Default: relative, with counters and random "
    "states last.",
)
@click.option("--all", "everything", is_flag=True, help="Also list tensors that are the same.")
@click.option("--exit-code", is_flag=True, help="Exit with 1 if they differ, else with 0.")
def command(
    store: str,
    ref_a: str,
    ref_b: str | None,
    rest: tuple[str, ...],
    select: tuple[str, ...],
    other: str | None,
    sort: str | None,
    everything: bool,
    exit_code: bool,
    as_json: bool,
) -> int:
    """Compare two checkpoints tensor by tensor.

    Bits are compared: -0.0 and 0.0 differ, and equal NaNs do not. RELATIVE is the norm of the difference divided by the
    norm of the first. MAX is the largest difference of a value.
    """
    if ref_b is None or rest:
        ref_a, ref_b, other = _two_stores(store, [one for one in (ref_a, ref_b, *rest) if one is not None], other)
    if not like_a_ref(store) and not like_a_ref(ref_b) and Path(ref_b, "FORMAT").is_file():
        error = click.UsageError(f"{ref_b!r} is a store, not a REF of {store}")
        error.add_note(f"name its checkpoint: ckpt diff {shlex.quote(store)} {ref_a} {shlex.quote(ref_b)} {ref_a}")
        raise error
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
    elif sort in _SORTS:
        shown.sort(key=_SORTS[sort], reverse=True)
    elif sort is None and not as_json:
        shown.sort(key=_place)
    code = DIFFERENT if exit_code and (bool(state) or counts.keys() - {"same"}) else 0
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
        return code
    names = [infos[0].ref, infos[1].ref] if other is None else [f"{store} {infos[0].ref}", f"{other} {infos[1].ref}"]
    summary = ", ".join(f"{count:,} {status}" for status, count in counts.items()) or "no tensors"
    click.echo(f"{click.style(' -> '.join(names), bold=True)}  tensors: {summary}")
    _print_differences(_metadata(*infos), [_state_line(one) for one in state], shown)
    return code


def _print_differences(metadata: list[str], state: list[str], shown: list[TensorDifference]) -> None:
    """Print metrics and settings first, which may explain a difference, then the tensors."""
    for lines in (metadata, state):
        if lines:
            click.echo("\n" + "\n".join(lines))
    if shown:
        click.echo("\n" + _table(shown))


def _two_stores(store: str, words: list[str], other: str | None) -> tuple[str, str, str]:
    """Parse ``STORE STORE`` (compares the latest of both) and ``STORE REF STORE REF`` -> REF, REF, other store.

    Raises:
        click.UsageError: too few REFs, or too many.
    """
    stores = [number for number, word in enumerate(words) if not like_a_ref(word)]
    if other is None and len(stores) == 1 and (len(words) == 1 or (len(words) == 3 and stores == [1])):
        return ("latest", "latest", words[0]) if len(words) == 1 else (words[0], words[2], words[1])
    error = click.UsageError(
        "Missing argument 'REF'." if len(words) < 2 else f"Got unexpected extra arguments ({' '.join(words[2:])})"
    )
    found = shlex.quote(words[stores[0]]) if len(stores) == 1 else "STORE"
    error.add_note(f"two runs: ckpt diff {shlex.quote(store)} REF {found} REF")
    raise error


def _metadata(a: CheckpointInfo, b: CheckpointInfo) -> list[str]:
    """Return the numbers of the metadata, and of its ``metrics``, that both have and that differ."""
    numbers = [
        {name: value for name, value in {**info.metadata, **_metrics(info)}.items() if type(value) in (int, float)}
        for info in (a, b)
    ]
    return [
        f"{name} {number(value)} -> {number(numbers[1][name])}"
        for name, value in numbers[0].items()
        if name in numbers[1] and numbers[1][name] != value
    ]


def _metrics(info: CheckpointInfo) -> dict[str, Any]:
    found = info.metadata.get("metrics")
    return found if isinstance(found, dict) else {}


def _place(tensor: TensorDifference) -> tuple[int, float]:
    """Sort key: tensors in only one checkpoint, then by relative change; counters and random states, which always
    change, last.
    """
    from ckptstore.formats.tensor_classes import class_by_name

    if tensor.status != "changed":
        return (3 if tensor.status == "same" else 0), 0.0
    relative = tensor.relative if tensor.relative is not None else math.inf
    return (2 if class_by_name(tensor.name, tensor.dtype, tensor.shape) == "other" else 1), -relative


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
    """Draw all numbers; on a narrow terminal the most useful ones."""
    narrow = sys.stdout.isatty() and shutil.get_terminal_size().columns < _WIDE
    rows = []
    for tensor in tensors:
        was = "" if tensor.was is None else f" (was {tensor.was[0]} {shape(tensor.was[1])})"
        largest = number(tensor.max_abs) + (f" (+{tensor.nonfinite:,} not finite)" if tensor.nonfinite else "")
        bits = _share(tensor.bits_changed, tensor.bits)
        if narrow:
            relative = number(tensor.relative) if tensor.status == "changed" else tensor.status
            rows.append([tensor.name, tensor.dtype, shape(tensor.shape) + was, relative, bits, largest])
            continue
        elements, relative = _share(tensor.elements_changed, tensor.elements), number(tensor.relative)
        norms = [number(tensor.norm_b), number(tensor.norm_diff)]
        described = [tensor.name, tensor.status, tensor.dtype, shape(tensor.shape) + was]
        rows.append([*described, bits, elements, *norms, relative, largest])
    if narrow:
        return table(["TENSOR", "DTYPE", "SHAPE", ">RELATIVE", ">BITS", ">MAX"], rows)
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
