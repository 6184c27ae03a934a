"""What `ckptstore.save` and `ckptstore.load` cost beside ``torch.save`` and ``torch.load``, from the first call on.

    python -m tools.bench.training.drop_in

Every way runs in processes of its own, in turns. The clock starts when torch is imported: ``first`` is the import of
ckptstore and the first save, of a linear layer of 64 x 64 with AdamW (59 kB); ``save`` a later one, ``load`` a load of
it; ``large save`` and ``large load`` are those of a state of `--size` MiB. Medians of the processes, in milliseconds:
of the call, and after the slash of the processor time of all threads, which other load changes less. (That time lacks
the pauses of Python's garbage collector, which visits all of torch.) ``torch.save`` is made as safe as the others: a
temporary file, fsync, rename, fsync of the folder.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import click

__all__ = ["WAYS", "main", "measure"]

WAYS: Final = ("torch.save", "a store", "a .pt file", "a .safetensors file")
COLUMNS: Final = ("first", "save", "load", "large save", "large load")

_WORKER: Final = """
import gc, json, os, statistics, sys, time
import torch
way, folder, megabytes, times = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
paused = began = 0.0
def collecting(phase, info):
    global paused, began
    if phase == "start":
        began = time.process_time()
    else:
        paused += time.process_time() - began
gc.callbacks.append(collecting)
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.randn(4, 64)).sum().backward()
optimizer.step()
small = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
ending = {"a .pt file": ".pt", "a .safetensors file": ".safetensors"}.get(way, "")

def durable(state, path):
    with open(path + ".new", "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".new", path)
    parent = os.open(folder, os.O_RDONLY)
    os.fsync(parent)
    os.close(parent)

def save(state, name):
    path = os.path.join(folder, name + ending)
    if way == "torch.save":
        durable(state, path)
    else:
        import ckptstore
        ckptstore.save(state, path)

def load(name):
    path = os.path.join(folder, name + ending)
    if way == "torch.save":
        return torch.load(path, weights_only=True)
    import ckptstore
    return ckptstore.load(path)

def timed(count, call, *arguments):
    walls, processor = [], []
    for _ in range(count):
        start, used, before = time.perf_counter(), time.process_time(), paused
        call(*arguments)
        walls.append((time.perf_counter() - start) * 1e3)
        processor.append((time.process_time() - used - (paused - before)) * 1e3)
    found.append((statistics.median(walls), statistics.median(processor)))

found = []
timed(1, save, small, "small")
timed(20, save, small, "small")
timed(20, load, "small")
large = {str(n): torch.randn(4 << 20) for n in range(megabytes // 16)}
timed(times, save, large, "large")
timed(times, load, "large")
assert all(torch.equal(load("large")[name], one) for name, one in large.items())
print(json.dumps(found))
"""


def measure(folder: Path, processes: int, megabytes: int, times: int) -> dict[str, list[tuple[float, float]]]:
    """Run every way in turns -> the medians of `COLUMNS`, of the call and of its processor time, by way."""
    found: dict[str, list[list[tuple[float, float]]]] = {way: [] for way in WAYS}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    for _ in range(processes):
        for way in WAYS:
            place = Path(tempfile.mkdtemp(dir=folder))
            done = subprocess.run(
                [sys.executable, "-c", _WORKER, way, str(place), str(megabytes), str(times)],
                stdout=subprocess.PIPE,
                text=True,
                check=True,
                env=environment,
            )
            shutil.rmtree(place)
            found[way].append(json.loads(done.stdout))
    return {
        way: [
            (statistics.median(wall for wall, _ in column), statistics.median(cpu for _, cpu in column))
            for column in zip(*rows, strict=True)
        ]
        for way, rows in found.items()
    }


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path), required=False)
@click.option("--processes", type=click.IntRange(1), default=9)
@click.option("--size", type=click.IntRange(16), default=256, help="MiB of the large state.")
@click.option("--times", type=click.IntRange(1), default=3, help="Saves and loads of the large state in each process.")
@click.option("--json", "as_json", is_flag=True)
def main(folder: Path | None, processes: int, size: int, times: int, as_json: bool) -> None:
    """Run the command: see the module."""
    place = Path(tempfile.mkdtemp(prefix="bench-drop-in-", dir=folder))
    try:
        found = measure(place, processes, size, times)
    finally:
        shutil.rmtree(place)
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    click.echo(f"{'way':20}" + "".join(f"{name:>16}" for name in COLUMNS))
    for way, row in found.items():
        click.echo(f"{way:20}" + "".join(f"{wall:8.1f} /{cpu:6.1f}" for wall, cpu in row))


if __name__ == "__main__":
    main()
