"""States of very many tensors beside torch.save and torch.load.

    python -m tools.bench.storage.tensors --count 10000

A mixture of experts has tens of thousands of small tensors, so the work for each tensor counts, not the bytes. Every
case runs in a separate process, once per round, the next round in a rotated order: a whole state in memory is saved
(files and folder synced), or a file that was just written is loaded, and verified if the format can. ``open`` is the
time until a store can describe its contents: the log is read and the newest checkpoint described. The loaded state is
compared with the saved one, bit by bit.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import ckptstore
from tools.bench import machine

Numbers = dict[str, float]


def experts(count: int, elements: int) -> dict[str, Tensor]:
    """`count` fp32 tensors as a mixture of experts names them."""
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(count * elements, generator=generator).view(count, elements)
    side = max(1, elements // 64)
    return {
        f"model.layers.{number // 384}.mlp.experts.{number // 3 % 128}.w{number % 3 + 1}.weight": row.clone().view(
            side, -1
        )
        for number, row in enumerate(data)
    }


def _synced(path: Path) -> None:
    for place in (path, path.parent):
        handle = os.open(place, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def _torch_save(state: dict[str, Tensor], folder: Path) -> Numbers:
    began = time.perf_counter()
    torch.save(state, folder / "state.pt")
    _synced(folder / "state.pt")
    return {"seconds": time.perf_counter() - began}


def _torch_load(state: dict[str, Tensor], folder: Path) -> Numbers:
    torch.save(state, folder / "state.pt")
    began = time.perf_counter()
    found = torch.load(folder / "state.pt", weights_only=True)
    return {"seconds": time.perf_counter() - began, "same": _same(found, state)}


def _save(state: dict[str, Tensor], folder: Path) -> Numbers:
    with ckptstore.open(folder / "store", create=True).writer(poll_seconds=None) as writer:
        began = time.perf_counter()
        writer.save(state, 1)
        first = time.perf_counter() - began
        began = time.perf_counter()
        writer.save(state, 2)
        return {"seconds": time.perf_counter() - began, "first": first}


def _stall(state: dict[str, Tensor], folder: Path) -> Numbers:
    with ckptstore.open(folder / "store", create=True).writer(poll_seconds=None) as writer:
        writer.save_async(state, 1).result()
        began = time.perf_counter()
        pending = writer.save_async(state, 2)
        stall = time.perf_counter() - began
        pending.result()
        return {"seconds": stall, "durable": time.perf_counter() - began}


def _load(state: dict[str, Tensor], folder: Path) -> Numbers:
    _save(state, folder)
    store = ckptstore.open(folder / "store")
    began = time.perf_counter()
    found = store.load()
    return {"seconds": time.perf_counter() - began, "same": _same(found, state)}


def _open(state: dict[str, Tensor], folder: Path) -> Numbers:
    _save(state, folder)
    began = time.perf_counter()
    count = len(ckptstore.open(folder / "store").tensors())
    return {"seconds": time.perf_counter() - began, "same": float(count == len(state))}


def _same(found: dict[str, Tensor], state: dict[str, Tensor]) -> float:
    equal = (torch.equal(found[name].view(torch.int32), tensor.view(torch.int32)) for name, tensor in state.items())
    return float(list(found) == list(state) and all(equal))


CASES: dict[str, Callable[[dict[str, Tensor], Path], Numbers]] = {
    "torch.save": _torch_save,
    "ckptstore save": _save,
    "ckptstore save_async: stall": _stall,
    "torch.load": _torch_load,
    "ckptstore load, verified": _load,
    "ckptstore open": _open,
}
_BESIDE = {"ckptstore save": "torch.save", "ckptstore save_async: stall": "torch.save"}
"""The method that a case is compared with, if not torch.load."""


def _one(name: str, count: int, elements: int, folder: Path) -> Numbers:
    """Run one case here -> its numbers, and the rise of memory in bytes."""
    folder.mkdir(parents=True)
    try:
        state = experts(count, elements)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found = CASES[name](state, folder)
        return {**found, "memory": 1024.0 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)}
    finally:
        shutil.rmtree(folder)


def _in_process(name: str, count: int, elements: int, folder: Path) -> Numbers:
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tools.bench.storage.tensors",
        "--one",
        name,
        "--count",
        str(count),
    ]
    command += ["--elements", str(elements), "--dir", str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return {key: float(value) for key, value in json.loads(done.stdout.splitlines()[-1]).items()}


def _show(count: int, nbytes: int, medians: dict[str, Numbers]) -> Table:
    table = Table(title=f"{count:,} tensors, {nbytes / 1e6:,.0f} MB: medians")
    for column in ("case", "seconds", "of torch's", "memory", "other", "bits"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for name, numbers in medians.items():
        beside = medians.get(_BESIDE.get(name, "torch.load"), {}).get("seconds")
        ratio = "-" if beside is None or name.startswith("torch") else f"{numbers['seconds'] / beside:.2f}x"
        other = ", ".join(f"{key} {numbers[key]:.3f}" for key in ("first", "durable") if key in numbers)
        bits = {None: "-", 1.0: "equal"}.get(numbers.get("same"), "DIFFER")
        table.add_row(name, f"{numbers['seconds']:.3f}", ratio, f"{numbers['memory'] / 1e6:,.0f} MB", other, bits)
    return table


@click.command(context_settings={"max_content_width": 110})
@click.option("--count", default=10_000, show_default=True, type=click.IntRange(min=1), help="Tensors of the state.")
@click.option("--elements", default=4096, show_default=True, type=click.IntRange(min=1), help="fp32 in each of them.")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=1), help="Measurements of each case.")
@click.option("--dir", "parent", default=Path("bench-out"), type=click.Path(path_type=Path), help="Where states are.")
@click.option("--only", multiple=True, type=click.Choice(list(CASES)), help="Cases to run; repeatable; default: all.")
@click.option("--one", type=click.Choice(list(CASES)), hidden=True)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON instead of a table.")
def main(
    count: int, elements: int, rounds: int, parent: Path, only: tuple[str, ...], one: str | None, as_json: bool
) -> None:
    """Save and load a state of very many tensors, beside torch.save and torch.load.

    Needs about four times the state on disk while it runs.
    """
    if one is not None:
        click.echo(json.dumps(_one(one, count, elements, parent)))
        return
    parent.mkdir(parents=True, exist_ok=True)
    names = list(only or CASES)
    samples: dict[str, list[Numbers]] = {name: [] for name in names}
    for turn in range(rounds):
        for place in range(len(names)):
            name = names[(place + turn) % len(names)]
            Console(stderr=True).print(f"round {turn + 1}/{rounds}: {name}", highlight=False)
            samples[name].append(_in_process(name, count, elements, parent.resolve() / f"tensors-{os.getpid()}"))
    medians = {
        name: {key: statistics.median(one[key] for one in found) for key in found[0]} for name, found in samples.items()
    }
    if as_json:
        report: dict[str, Any] = {"machine": machine.describe(parent), "count": count, "nbytes": 4 * count * elements}
        click.echo(json.dumps({**report, "medians": medians, "samples": samples}, indent=1, default=str))
        return
    Console().print(_show(count, 4 * count * elements, medians))
    if any(one.get("same", 1.0) != 1.0 for found in samples.values() for one in found):
        raise click.ClickException("a state was not what was saved")


if __name__ == "__main__":
    main()
