"""Measures the most space that a store takes while a run saves: ``python -m tools.bench.storage.space``.

PCcheck's bound (section 3.3 of the paper) is N + 1 states with N saves in flight. Each case saves after every step,
with ``last:1``, N in flight, flat out or with a pause after each save, on a disk, on (simulated) persistent memory and
in a bucket. A thread adds up the store's bytes all the time: allocated blocks of every segment, unfinished and spare
ones too; in a bucket the bytes of the listed segments. The peak is given in states, the bytes of one full.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

import ckptstore
from ckptstore.store import Store
from tools.bench.storage.save_load import parse_size

FORMS = ("writer", "checkpointer", "deltas", "diffs")
MEDIA = ("disk", "pmem", "bucket")


@dataclass(frozen=True, slots=True)
class Case:
    """One run. `space` is the option; None: no bound. `pause` in seconds after each save."""

    form: str
    medium: str
    in_flight: int
    pause: float
    space: str | None


@dataclass(frozen=True, slots=True)
class Peak:
    """The result of a run: its peak in states, the saves, and the seconds of the loop."""

    states: float
    saves: int
    seconds: float


class Meter:
    """Adds up the bytes of a place again and again, in a thread, and keeps the largest sum."""

    def __init__(self, measure: Callable[[], int], every: float) -> None:
        self.most = 0
        self._measure = measure
        self._every = every
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Meter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._every):
            self.most = max(self.most, self._measure())


def allocated(folder: Path) -> int:
    """Allocated bytes of all segments of the store in `folder`, and of its spare files."""
    total = 0
    for place, _, names in chain(os.walk(folder / "store/seg"), os.walk(folder / "store/.spare")):
        for name in names:
            try:
                total += os.lstat(f"{place}/{name}").st_blocks * 512
            except FileNotFoundError:
                continue
    return total


@contextmanager
def opened(medium: str, folder: Path) -> Iterator[tuple[Store, Callable[[], int], float]]:
    """A new store on a medium -> the store, a function that measures it, and the seconds between measurements."""
    if medium == "bucket":
        from tools.objects.server import serving

        own = folder / "server"
        own.mkdir()
        with serving(own) as server:
            store = ckptstore.open(server.url(), storage_options=server.options)
            beside = ckptstore.open(store.url, storage_options=server.options).backend
            yield store, beside.segments_nbytes, 0.1
        return
    place = Path(tempfile.mkdtemp(dir="/dev/shm")) if medium == "pmem" else folder
    try:
        url = f"pmem://{place}/store" if medium == "pmem" else str(place / "store")
        yield ckptstore.open(url), lambda: allocated(place), 0.0005
    finally:
        if medium == "pmem":
            shutil.rmtree(place, ignore_errors=True)


def run(case: Case, folder: Path, nbytes: int, saves: int) -> Peak:
    """Run a case in a new store."""
    with opened(case.medium, folder) as (store, measure, every):
        size = one_state(folder, nbytes)
        with Meter(measure, every) as meter:
            began = time.perf_counter()
            (_checkpointer if case.form == "checkpointer" else _writer)(store, case, nbytes, saves)
            seconds = time.perf_counter() - began
    return Peak(meter.most / size, saves, seconds)


def one_state(folder: Path, nbytes: int) -> int:
    """Bytes of a full of the state: what one slot takes."""
    with ckptstore.open(folder / "one") as store, store.writer() as writer:
        writer.save(_state(nbytes), 1)
        entry = store.view().catalog.segments
        found = sum(-(-one.size // 4096) * 4096 for one in entry.values())
    shutil.rmtree(folder / "one")
    return found


def _state(nbytes: int) -> dict[str, Any]:
    generator = np.random.default_rng(0)
    count = 8
    return {f"w{n}": generator.standard_normal(nbytes // 4 // count, np.float32) for n in range(count)}


def _writer(store: Store, case: Case, nbytes: int, saves: int) -> None:
    state = _state(nbytes)
    options: dict[str, Any] = {} if case.space is None else {"space": case.space}
    if case.form == "deltas":
        options["deltas"] = ckptstore.DeltaOptions(interval=1)
    if case.form == "diffs":
        options["diffs"] = ckptstore.DiffOptions(full_every=10_000, batch=2)
    with store.writer(keep=["last:1"], max_in_flight=case.in_flight, **options) as writer:
        for step in range(1, saves + 1):
            for array in state.values():
                array[:: 64 if case.form in ("deltas", "diffs") else 1] *= 1.0001
            writer.save_async(state, step)
            time.sleep(case.pause)


def _checkpointer(store: Store, case: Case, nbytes: int, saves: int) -> None:
    import torch

    from ckptstore.training import Checkpointer

    model = torch.nn.Linear(nbytes // 4 // 1024, 1024, bias=False)
    options: dict[str, Any] = {} if case.space is None else {"space": case.space}
    with Checkpointer(
        store, model=model, strategy="full", keep_last=1, max_in_flight=case.in_flight, **options
    ) as checkpointer:
        checkpointer.resume()
        for _ in range(saves):
            with torch.no_grad():
                model.weight.mul_(1.0001)
            checkpointer.step()
            time.sleep(case.pause)


@click.command(context_settings={"max_content_width": 110})
@click.option("--size", default="16MB", show_default=True, help="Bytes of the state.")
@click.option("--saves", default=60, show_default=True, type=click.IntRange(min=4), help="Saves of each run.")
@click.option("--form", "forms", multiple=True, default=FORMS[:2], show_default=True, type=click.Choice(FORMS))
@click.option("--medium", "media", multiple=True, default=MEDIA[:2], show_default=True, type=click.Choice(MEDIA))
@click.option("--in-flight", "numbers", multiple=True, default=(1, 2, 3, 4), show_default=True, type=int)
@click.option("--pause", "pauses", multiple=True, default=(0.0, 0.05), show_default=True, type=float)
@click.option("--extra", default=1, show_default=True, help="States of the bound beside those in flight.")
@click.option("--bound/--unbound", default=True, help="With the option space, or without.")
@click.option("--dir", "parent", default=Path("bench-out"), type=click.Path(path_type=Path), help="Where stores are.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def main(
    size: str,
    saves: int,
    forms: tuple[str, ...],
    media: tuple[str, ...],
    numbers: tuple[int, ...],
    pauses: tuple[float, ...],
    extra: int,
    bound: bool,
    parent: Path,
    as_json: bool,
) -> None:
    """Measure peaks of space in states."""
    nbytes = parse_size(size)
    parent.mkdir(parents=True, exist_ok=True)
    found: list[tuple[Case, Peak]] = []
    for medium in media:
        for form in forms:
            for number in numbers:
                for pause in pauses:
                    case = Case(form, medium, number, pause, f"{number + extra} states" if bound else None)
                    with tempfile.TemporaryDirectory(dir=parent) as folder:
                        found.append((case, run(case, Path(folder), nbytes, saves)))
    if as_json:
        click.echo(json.dumps([{**asdict(case), **asdict(peak)} for case, peak in found], indent=1))
        return
    table = Table(title=f"peak in states of {size}, {saves} saves")
    for column in ("medium", "form", "N", "pause s", "space", "peak", "ms a save"):
        table.add_column(column, justify="right")
    for case, peak in found:
        table.add_row(
            case.medium,
            case.form,
            str(case.in_flight),
            f"{case.pause:g}",
            case.space or "",
            f"{peak.states:.2f}",
            f"{1e3 * peak.seconds / peak.saves:.0f}",
        )
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
