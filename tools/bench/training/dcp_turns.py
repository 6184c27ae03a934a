"""``dcp.save`` into a store, beside ``dcp.save`` by torch's own `FileSystemWriter` that syncs its files.

    python -m tools.bench.training.dcp_turns --size 150kB --size 500MB --ranks 2

Ranks are processes of a gloo group on this machine, which meet by TCP as under torchrun. A state is one DTensor in
shards, replicated tensors, and values. Both ways take turns, save by save, so that other load affects both; the order
changes from turn to turn. Seconds: ``save`` until ``dcp.save`` returns, when the checkpoint is durable; ``stall`` until
``dcp.async_save`` returns; ``first`` the first save of the process. The folder of `FileSystemWriter` is synced, too,
because a file whose name is not durable is lost with the power. At the end each rank loads both and compares every
number.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import statistics
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import click
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ckptstore.integrations.dcp import CkptstoreReader, CkptstoreWriter
from tools.bench.storage.save_load import parse_size

__all__ = ["WAYS", "Row", "main", "measure"]

WAYS: Final = ("FileSystemWriter", "ckptstore")


@dataclass(frozen=True, slots=True)
class Row:
    """One way at one size. Medians in seconds; ratios are to FileSystemWriter in the same turn."""

    way: str
    nbytes: int
    first: float
    save: float
    save_ratio: float
    stall: float
    stall_ratio: float


def _state(nbytes: int, seed: int) -> dict[str, Any]:
    """Four fifths of the bytes in a DTensor in shards, the rest in replicated tensors."""
    chance = torch.Generator().manual_seed(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = max(dist.get_world_size(), nbytes // 5 // 64)
    whole = torch.randn(rows, 16 * 4, generator=chance)[:, :64]
    copies = {f"copy{number}": torch.randn(max(1, nbytes // 5 // 16), generator=chance) for number in range(4)}
    return {"model": {"w": distribute_tensor(whole, mesh, [Shard(0)]), **copies}, "step": seed, "note": "x" * 20}


def _place(folder: Path, way: str, number: int) -> tuple[Any, Any]:
    """A writer and a reader of a save."""
    if way == "ckptstore":
        store = folder / "store"
        return CkptstoreWriter(store, number, keep=["last:2"]), CkptstoreReader(store, number)
    path = folder / f"fs-{number}"
    return dcp.FileSystemWriter(path), dcp.FileSystemReader(path)


def _sync(path: Path) -> None:
    for folder in (path, path.parent):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _turn(folder: Path, way: str, number: int, state: dict[str, Any], *, asynchronous: bool) -> float:
    """Save once -> seconds until the call returned (blocking: until it is durable)."""
    writer, _ = _place(folder, way, number)
    dist.barrier()
    began = time.perf_counter()
    pending = dcp.async_save(state, storage_writer=writer) if asynchronous else dcp.save(state, storage_writer=writer)
    if not asynchronous and way != "ckptstore" and dist.get_rank() == 0:
        _sync(folder / f"fs-{number}")
    took = time.perf_counter() - began
    if asynchronous:
        pending.result()
    dist.barrier()
    return took


def _compare(folder: Path, way: str, number: int, state: dict[str, Any]) -> None:
    """Load a save, and compare it with the state."""
    _, reader = _place(folder, way, number)
    found = {
        "model": {name: torch.zeros_like(one) for name, one in state["model"].items()},
        "step": -1,
        "note": "",
    }
    dcp.load(found, storage_reader=reader)
    for name, one in state["model"].items():
        mine, stored = (x.to_local() if hasattr(x, "to_local") else x for x in (one, found["model"][name]))
        assert torch.equal(mine, stored), f"{way}: {name} differs"
    assert (found["step"], found["note"]) == (state["step"], state["note"]), way


def _rank(rank: int, ranks: int, port: int, folder: str, sizes: tuple[int, ...], pairs: int) -> None:
    """The work of one rank. Rank 0 writes the rows."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    rows: list[Row] = []
    first: dict[str, float] = {}
    for nbytes in sizes:
        place = Path(folder) / str(nbytes)
        place.mkdir(exist_ok=True)
        times: dict[tuple[str, bool], list[float]] = {(way, late): [] for way in WAYS for late in (False, True)}
        state: dict[str, Any] = {}
        for turn in range(pairs + 1):
            state = _state(nbytes, turn)
            for way in WAYS if turn % 2 else WAYS[::-1]:
                for late in (False, True):
                    number = 2 * turn + late + 1
                    took = _turn(place, way, number, state, asynchronous=late)
                    if turn:
                        times[way, late].append(took)
                    elif not late:
                        first.setdefault(way, took)
                if rank == 0 and way != "ckptstore" and turn > 1:
                    for number in (2 * turn - 1, 2 * turn):
                        shutil.rmtree(place / f"fs-{number}", ignore_errors=True)
        for way in WAYS:
            _compare(place, way, 2 * pairs + 1, state)
            save, stall = times[way, False], times[way, True]
            ratios = [
                statistics.median(a / b for a, b in zip(times[way, late], times[WAYS[0], late], strict=True))
                for late in (False, True)
            ]
            mine = (statistics.median(save), ratios[0], statistics.median(stall), ratios[1])
            rows.append(Row(way, nbytes, first[way], *mine))
    if rank == 0:
        (Path(folder) / "rows.json").write_text(json.dumps([asdict(one) for one in rows]))
    dist.barrier()
    dist.destroy_process_group()


def measure(folder: Path, sizes: tuple[int, ...], ranks: int, pairs: int) -> list[Row]:
    """Measure both ways at each size.

    Args:
        folder: an empty folder on the disk to measure.
        sizes: bytes of the state of all ranks together.
        pairs: turns that count; one more comes before them.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context: Any = multiprocessing
    context.spawn(_rank, (ranks, port, str(folder), sizes, pairs), nprocs=ranks)
    return [Row(**one) for one in json.loads((folder / "rows.json").read_text())]


@click.command()
@click.option("--size", "sizes", multiple=True, default=("150kB", "500MB"), help="Bytes of the whole state.")
@click.option("--ranks", default=2, show_default=True, help="Processes that save together.")
@click.option("--pairs", default=7, show_default=True, help="Turns of both ways.")
@click.option("--dir", "place", type=click.Path(file_okay=False, path_type=Path), help="Where to write.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(sizes: tuple[str, ...], ranks: int, pairs: int, place: Path | None, *, as_json: bool) -> None:
    """Compare saves through torch.distributed.checkpoint.

    Example: python -m tools.bench.training.dcp_turns --size 150kB --pairs 15
    """
    with tempfile.TemporaryDirectory(dir=place) as folder:
        rows = measure(Path(folder), tuple(parse_size(one) for one in sizes), ranks, pairs)
    if as_json:
        click.echo(json.dumps([asdict(one) for one in rows], indent=1))
        return
    click.echo(f"{'way':18}{'bytes':>12}{'first s':>10}{'save s':>10}{'ratio':>8}{'stall s':>10}{'ratio':>8}")
    for one in rows:
        click.echo(
            f"{one.way:18}{one.nbytes:12,}{one.first:10.3f}{one.save:10.4f}{one.save_ratio:8.2f}"
            f"{one.stall:10.4f}{one.stall_ratio:8.2f}"
        )


if __name__ == "__main__":
    main()
