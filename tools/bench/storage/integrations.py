"""The calls of docs/shims.md: many boxes in one call against one call for each, and what mapping a full takes.

    python -m tools.bench.storage.integrations FOLDER

Everything is in the page cache. Medians of interleaved rounds; `read_tensor` is timed for some of the boxes, and
multiplied. Boxes of a full, of the last delta of a chain of ten, and of shards of two ranks are compared bit by bit.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click
import numpy as np

import ckptstore
from ckptstore.store import Store
from ckptstore.write.ranks.messages.key_value_store import Group, LocalMailbox

__all__ = ["boxes", "main", "mapping"]

_TENSORS: Final = 10
_COLUMNS: Final = 1000
_ONES: Final = 40
"""Boxes that are read by one call each."""

State = dict[str, np.ndarray[Any, Any]]


def _state(megabytes: int) -> State:
    values = np.random.default_rng(0)
    rows = max(40, megabytes * 1_000_000 // (4 * _COLUMNS * _TENSORS))
    return {f"w{number}": values.standard_normal((rows, _COLUMNS), np.float32) for number in range(_TENSORS)}


def _stores(folder: Path, state: State) -> dict[str, Store]:
    stores = {name: ckptstore.open(folder / name) for name in ("full", "delta", "shards")}
    with stores["full"].writer() as writer:
        writer.save(state, 1)
    now = {name: one.copy() for name, one in state.items()}
    with stores["delta"].writer(deltas=1) as writer:
        for step in range(1, 12):
            writer.save(now, step)
            for one in now.values():
                one.view("u4")[::7, ::3] ^= 1
    mailbox = LocalMailbox()

    def work(rank: int) -> None:
        with stores["shards"].writer(group=Group(rank, 2, mailbox)) as writer:
            writer.save({name: _half(one, rank) for name, one in state.items()}, 1)

    ranks = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
    return stores


def _half(whole: np.ndarray[Any, Any], rank: int) -> ckptstore.Shard:
    middle = len(whole) // 2
    rows = slice(middle, None) if rank else slice(0, middle)
    return ckptstore.Shard(whole[rows], whole.shape, (rows.start, 0))


def _seconds(cases: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each case, in interleaved rounds."""
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            begun = time.perf_counter()
            case()
            taken[name].append(time.perf_counter() - begun)
    return {name: statistics.median(one) for name, one in taken.items()}


def boxes(folder: Path, megabytes: int, count: int, rounds: int) -> dict[str, dict[str, float]]:
    """Seconds for `count` boxes of 20 rows and 200 columns, by kind of store and call."""
    stores, chance = _stores(folder, _state(megabytes)), random.Random(1)
    found = {}
    for kind, store in stores.items():
        entries = store.tensors("latest")
        wanted = []
        for _ in range(count):
            name = chance.choice(list(entries))
            row, column = chance.randrange(entries[name].shape[0] - 20), chance.randrange(_COLUMNS - 200)
            wanted.append((name, [(row, row + 20), (column, column + 200)]))
        some = wanted[:_ONES]

        def ones(store: Store = store, some: list[Any] = some) -> list[Any]:
            return [store.read_tensor("latest", name, box=[slice(*one) for one in box]) for name, box in some]

        together = store.read_boxes("latest", some, framework="numpy")
        assert all(one.tobytes() == other.tobytes() for one, other in zip(ones(), together, strict=True))
        cases: dict[str, Callable[[], object]] = {
            "read_boxes": lambda store=store, wanted=wanted: store.read_boxes("latest", wanted, framework="numpy"),  # type: ignore[misc]
            "load": lambda store=store: store.load("latest", framework="numpy"),  # type: ignore[misc]
            "read_tensor": ones,
        }
        found[kind] = _seconds(cases, rounds)
        found[kind]["read_tensor"] *= count / len(some)
    return found


def mapping(folder: Path, megabytes: int, rounds: int) -> dict[str, float]:
    """Seconds to map a full, by call."""
    from safetensors.torch import load_file  # imports torch: the other calls then return torch tensors, too

    store = ckptstore.open(folder / "mapped")
    with store.writer() as writer:
        writer.save(_state(megabytes), 1)
    (file,) = store.file_of(1)
    cases: dict[str, Callable[[], object]] = {
        "safetensors load_file": lambda: load_file(file.path),
        "file_of": lambda: store.file_of(1),
        "map_tensors": lambda: store.map_tensors(1),
        "map_tensors, one tensor": lambda: store.map_tensors(1)["w0"],
        "map_tensors, verify()": lambda: store.map_tensors(1).verify(),
        "load(mmap=True)": lambda: store.load(1, mmap=True),
        "load(mmap=True, verify=False)": lambda: store.load(1, mmap=True, verify=False),
    }
    return _seconds(cases, rounds)


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--megabytes", default=200, show_default=True, help="Size of the state.")
@click.option("--boxes", "count", default=1000, show_default=True, help="Number of boxes.")
@click.option("--rounds", default=5, show_default=True)
def main(folder: Path, megabytes: int, count: int, rounds: int) -> None:
    """See the module."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        for kind, taken in boxes(Path(place), megabytes, count, rounds).items():
            for name, seconds in taken.items():
                print(f"{count} boxes of {kind}: {name} {seconds:.3f} s")
        for name, seconds in mapping(Path(place), megabytes, 3 * rounds).items():
            print(f"{name}: {1e3 * seconds:.1f} ms")


if __name__ == "__main__":
    main()
