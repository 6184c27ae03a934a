"""Implements ``ckpt inspect``: shows what a checkpoint consists of."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from ckptstore.cli.arguments import REF, STORE, TENSOR, opened, select_option
from ckptstore.cli.arguments import command as make_command
from ckptstore.cli.cost_output import parsed, show_costs
from ckptstore.cli.output import breadth, emit, moment, number, progress, ratio, shape, size, table, writing
from ckptstore.cli.plan_output import plan_line, plan_step, plan_table
from ckptstore.cli.range_text import counted, ranges
from ckptstore.cli.spinner import patience
from ckptstore.cli.text_wrap import columns, say_all
from ckptstore.errors import CkptError

if TYPE_CHECKING:
    from ckptstore import Store
    from ckptstore.reports.inspection import CheckpointDescription, TensorDescription, TensorStatistics
    from ckptstore.reports.restore_explanation import Explanation

_BARS = " ▁▂▃▄▅▆▇█"


@make_command(
    "inspect",
    examples=[
        "ckpt inspect runs/gpt",
        "ckpt inspect runs/gpt 1000@2 --tensors --chain",
        "ckpt inspect runs/gpt 1000@2 --select 'optimizer.*.exp_avg'",
        "ckpt inspect runs/gpt --tensor model.wte.weight",
        "ckpt inspect runs/gpt latest --state",
        "ckpt inspect s3://bucket/gpt latest --cost --prices 0.4,5,0.09",
    ],
)
@STORE
@click.argument("ref", type=REF, default="latest", metavar="[REF]")
@click.option("--tensors", "listed", is_flag=True, help="List the tensors.")
@select_option("List only tensors that match; may be repeated.")
@click.option("--chain", is_flag=True, help="List what a restore reads, segment by segment.")
@click.option("--tensor", type=TENSOR, help="Read this tensor and show statistics of its values.")
@click.option("--cost", is_flag=True, help="Show the requests and bytes that a restore takes from an object store.")
@click.option(
    "--prices",
    metavar="READ,WRITE,GB",
    help="With --cost: the price of a million reads, a million writes and listings, and a GB received.",
)
@click.option("--state", is_flag=True, help="Show the rest of the state: everything that is not a tensor.")
def command(
    store: str,
    ref: str,
    select: tuple[str, ...],
    listed: bool,
    chain: bool,
    tensor: str | None,
    cost: bool,
    prices: str | None,
    state: bool,
    as_json: bool,
) -> None:
    """Show the tensors, the chain and the state of a checkpoint.

    Shows how large the checkpoint is, what it is restored from, and a summary of its tensors. --tensors lists the
    tensors, --chain lists the steps of the chain.
    """
    if cost or prices is not None:
        if tensor is not None or state or listed or chain or not cost:
            raise click.UsageError("--cost can be combined only with --select and --prices")
        show_costs(
            opened(store).request_costs(ref, select or None), None if prices is None else parsed(prices), as_json
        )
        return
    if tensor is not None:
        if select or state or listed or chain:
            raise click.UsageError(
                "--tensor shows one tensor; it cannot be combined with --tensors, --select, --chain or --state"
            )
        with progress("reading") as advance:
            numbers = opened(store).statistics(ref, tensor, progress=advance)
        if as_json:
            emit(_statistics_json(numbers))
        else:
            click.echo("\n".join(_statistics_text(numbers)))
        return
    target = opened(store)
    with patience("inspecting"):  # reading the headers of many tensors takes time
        found = target.inspect(ref, select, explain=as_json or not state)
        plan = found.plan
        remote = None if plan is None or found.remote is None else _remote(target)
    if plan is None:
        click.echo("\n".join(["state", *_tree(found.tree)]))
        return
    if as_json:
        last = found.writer
        emit(
            _json(found, plan, state)
            | {"remote": remote, "latest": found.latest, "writer": last.state, "host": last.host, "pid": last.pid}
        )
    else:
        say_all(_text(found, plan, remote, chain=chain, tensors=listed or bool(select)))


def _remote(store: Store) -> dict[str, Any] | None:
    """Return the second tier and how far it is behind; None if there is none."""
    url = None
    try:
        there = store.remote
        if there is None:
            return None
        url, lag = there.url, store.lag()
    except CkptError as error:  # the checkpoint can be shown without the second tier
        return {"url": url, "error": str(error)}
    assert lag is not None
    return {
        "url": url,
        "checkpoints": lag.checkpoints,
        "steps": lag.steps,
        "bytes": lag.nbytes,
        "branch": list(lag.branch),
        "error": lag.error,
    }


def _behind(remote: dict[str, Any]) -> str:
    if remote["error"] is not None:
        url = remote["url"] or "unknown"
        return f"remote: {remote['error']}" if url in remote["error"] else f"remote: {url}: {remote['error']}"
    far = f"{remote['checkpoints']:,} checkpoints behind ({remote['steps']:,} steps, {size(remote['bytes'])})"
    kept = f"; not in the remote: {ranges(remote['branch'])}" if remote["branch"] else ""
    return f"remote: {remote['url']}: {far if remote['checkpoints'] else 'up to date'}{kept}"


def _json(found: CheckpointDescription, plan: Explanation, state: bool) -> dict[str, Any]:
    info = found.info
    document: dict[str, Any] = {
        "ref": info.ref,
        "step": info.step,
        "term": info.term,
        "state": info.state,
        "kind": info.kind,
        "lossy": info.lossy,
        "time": info.time,
        "bytes": info.nbytes,
        "stored_bytes": info.stored,
        "tags": list(info.tags),
        "metadata": dict(info.metadata),
        "medium": found.medium,
        "chain": [
            {
                "ref": link.ref,
                "kind": link.kind,
                "base": link.base,
                "lossy": link.lossy,
                "stored_bytes": link.stored,
                "segments": list(link.segments),
            }
            for link in found.chain
        ],
        "plan": {
            "bytes_read": plan.bytes_read,
            "seconds": round(plan.seconds, 3),
            "steps": [plan_step(step) for step in plan.steps],
        },
        "tensors": [
            {
                "name": tensor.name,
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "bytes": tensor.nbytes,
                "stored_bytes": tensor.stored,
                "codec": tensor.codec,
                "kind": tensor.kind,
                "hash": tensor.hash,
                "segment": tensor.segment,
                "shards": tensor.shards,
                "stored_with": tensor.stored_with,
            }
            for tensor in found.tensors
        ],
    }
    return document | ({"tree": found.tree} if state else {})


def _text(
    found: CheckpointDescription, plan: Explanation, remote: dict[str, Any] | None, *, chain: bool, tensors: bool
) -> Iterator[str]:
    info = found.info
    tags = "".join("  " + click.style(f"tag:{tag}", fg="yellow") for tag in info.tags)
    yield click.style(f"checkpoint {info.ref}", bold=True) + tags + ("  LOSSY" if info.lossy else "")
    larger = info.stored > info.nbytes > 0
    smaller = f"{info.stored / info.nbytes:.1f}x larger" if larger else ratio(info.nbytes, info.stored)
    yield f"{counted(info.tensors, 'tensor')}, {size(info.nbytes)}; stored in {size(info.stored)} ({smaller})"
    yield plan_line(plan)
    yield f"saved {moment(info.time)}   state {info.state}"
    yield f"medium: {found.medium}"
    if found.latest and sys.stdout.isatty():
        yield writing(found.writer)
    if remote is not None:
        yield _behind(remote)
    for name, value in info.metadata.items():
        yield _metadata_line(name, value)
    if chain:
        yield ""
        yield plan_table(plan)
    if tensors:
        yield ""
        yield from _tensor_table(found.tensors)
    yield ""
    yield table(["DTYPE", "CODEC", ">TENSORS", ">SIZE", ">STORED"], _summary(found))
    more = [] if tensors else ["--tensors"]
    more += [] if chain or len(plan.steps) < 2 else [f"--chain ({counted(len(plan.steps), 'step')})"]
    if more and sys.stdout.isatty():
        yield click.style(f"more: {', '.join(more)}", dim=True)


def _tensor_table(tensors: Sequence[TensorDescription]) -> Iterator[str]:
    """Yield the table of tensors.

    A tensor that is stored with another one shows that tensor's name under STORED. On a terminal too narrow for this it
    shows a mark, and a line below the table explains the mark.
    """
    headings = ["TENSOR", "DTYPE", "SHAPE", ">SIZE", ">STORED", "CODEC"]
    rows = [[t.name, t.dtype, _shape(t), size(t.nbytes), _stored(t), t.codec] for t in tensors]
    room = columns()
    if room is None or breadth(headings, rows) <= room:
        yield table(headings, rows)
        return
    leaders = list(dict.fromkeys(t.stored_with for t in tensors if t.stored_with is not None))
    marks = {leader: "shared" if len(leaders) == 1 else f"shared {number}" for number, leader in enumerate(leaders, 1)}
    for row, tensor in zip(rows, tensors, strict=True):
        if tensor.stored_with is not None:
            row[4] = marks[tensor.stored_with]
    yield table(headings, rows)
    for leader, mark in marks.items():
        yield f"{mark}: stored with {leader}"


def _metadata_line(name: str, value: Any) -> str:
    """Format a member of the metadata; numbers as in ``ckpt log``."""
    if name == "metrics" and isinstance(value, dict) and value:
        return ", ".join(f"{key} {number(one) if isinstance(one, float) else one}" for key, one in value.items())
    if isinstance(value, float):
        return f"{name}: {number(value)}"
    return f"{name}: {value if isinstance(value, str) else repr(value)}"


def _stored(tensor: TensorDescription) -> str:
    return size(tensor.stored) if tensor.stored_with is None else f"with {tensor.stored_with}"


def _shape(tensor: TensorDescription) -> str:
    whole = shape(tensor.shape)
    return whole if tensor.shards is None else f"{whole} in {tensor.shards} shard{'s' if tensor.shards > 1 else ''}"


def _summary(found: CheckpointDescription) -> list[list[str]]:
    groups: dict[tuple[str, str], list[int]] = {}
    for tensor in found.tensors:
        sums = groups.setdefault((tensor.dtype, tensor.codec), [0, 0, 0])
        for index, amount in enumerate((1, tensor.nbytes, tensor.stored)):
            sums[index] += amount
    largest = sorted(groups.items(), key=lambda item: -item[1][1])
    return [[*kind, number(count), size(nbytes), size(stored)] for kind, (count, nbytes, stored) in largest]


def _tree(node: Any, indent: str = "") -> Iterator[str]:
    """Yield the lines of the state's tree; tensors are counted, not listed."""
    from ckptstore.reports.state_tree import children, is_tensor

    members = children(node) or []
    tensors = sum(is_tensor(child) for _, child in members)
    rest = [(key, child) for key, child in members if not is_tensor(child)]
    if tensors:
        rest.append((_tensors(tensors), None))
    for index, (key, child) in enumerate(rest):
        last = index == len(rest) - 1
        value = "" if tensors and last else _value(child)
        yield f"{indent}{'└── ' if last else '├── '}{key}{value}"
        if not value and child is not None:
            yield from _tree(child, indent + ("    " if last else "│   "))


def _value(node: Any) -> str:
    """Return the text after the key of a node that fits its line, else an empty string."""
    from ckptstore.reports.state_tree import children, is_tensor, text

    members = [child for _, child in children(node) or []]
    if members and all(is_tensor(child) for child in members):
        return f": {_tensors(len(members))}"
    sequence = isinstance(node, list) or (isinstance(node, dict) and "$tuple" in node)
    flat = all(children(child) is None and not is_tensor(child) and not _is_long(child) for child in members)
    return f": {text(node)}" if not members or (sequence and flat) else ""


def _is_long(node: Any) -> bool:
    return isinstance(node, dict) and "$ints" in node


def _tensors(count: int) -> str:
    return click.style(f"({count} tensor{'s' if count > 1 else ''})", dim=True)


def _statistics_json(found: TensorStatistics) -> dict[str, Any]:
    return {
        "name": found.name,
        "dtype": found.dtype,
        "shape": list(found.shape),
        "bytes": found.nbytes,
        "values": found.values,
        "nans": found.nans,
        "infinities": found.infinities,
        "zeros": found.zeros,
        "min": found.minimum,
        "max": found.maximum,
        "mean": found.mean,
        "std": found.std,
        "norm": found.norm,
        "exponents": {str(exponent): count for exponent, count in found.exponents.items()},
    }


def _statistics_text(found: TensorStatistics) -> Iterator[str]:
    yield click.style(found.name, bold=True)
    yield f"{found.dtype} {shape(found.shape)}, {size(found.nbytes)}"
    yield ""
    rows = [
        ("values", found.values),
        ("zeros", found.zeros),
        ("NaN", found.nans),
        ("infinite", found.infinities),
        ("min", found.minimum),
        ("max", found.maximum),
        ("mean", found.mean),
        ("std", found.std),
        ("norm", found.norm),
    ]
    yield table(["", ">"], [[name, number(value)] for name, value in rows])
    if found.exponents:
        low, high = min(found.exponents), max(found.exponents)
        top = max(found.exponents.values())
        counts = [found.exponents.get(exponent, 0) for exponent in range(low, high + 1)]
        yield ""
        yield "magnitudes, one bar per power of two:"
        yield f"2^{low} {''.join(_BARS[-(-8 * count // top)] for count in counts)} 2^{high + 1}"
