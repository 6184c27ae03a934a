"""Races writers for one store in a bucket, to open it and to commit to it. Each race has one winner; the others know
it.

    python -m tools.objects.races --races 1000

Opening: several `Store.writer` at once. All may succeed, one after the other, each with its own term; then all of them
save, and only the newest may. Committing: two terms that each believe to be the newest send the same slot at once.
"""

from __future__ import annotations

import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

import ckptstore
from ckptstore.backends.object_store.objects import ObjectBackend
from tools.objects.faults import state
from tools.objects.server import Server, serving


@dataclass
class Told:
    """The results of the races.

    Attributes:
        opened, committed: races of each kind.
        several: races with more than one winner, or none.
    """

    opened: int = 0
    committed: int = 0
    several: int = 0


def together(pool: ThreadPoolExecutor, calls: list[Callable[[], Any]]) -> list[Any]:
    """The result of each of several calls that start at the same instant, or the project's error that it raised."""
    barrier = threading.Barrier(len(calls))

    def one(call: Callable[[], Any]) -> Any:
        barrier.wait(60)
        try:
            return call()
        except ckptstore.CkptError as error:
            return error

    return [future.result() for future in [pool.submit(one, call) for call in calls]]


def race_to_open(server: Server, pool: ThreadPoolExecutor, racers: int) -> bool:
    """Whether exactly one of several writers that opened a new store at once may continue to write."""
    url = server.url()
    stores = [ckptstore.open(url, storage_options=server.options) for _ in range(racers)]
    writers = together(pool, [lambda s=s: s.writer(poll_seconds=None) for s in stores])
    opened = [one for one in writers if isinstance(one, ckptstore.Writer)]
    saved = together(pool, [lambda w=w, n=n: w.save(state(n), step=n) for n, w in enumerate(opened, 1)])
    for one in opened:
        one.close()
    terms = Counter(one.term for one in stores[0].checkpoints())
    winners = [one for one in saved if isinstance(one, ckptstore.CheckpointInfo)]
    others = [one for one in saved if not isinstance(one, ckptstore.CheckpointInfo)]
    kept = {one.ref for one in stores[0].checkpoints()}
    runs = {store.run for store in stores}
    return (
        len(runs) == 1
        and len({one.term for one in opened}) == len(opened)
        and {one.ref for one in winners} == kept
        and all(isinstance(one, ckptstore.FencedError) for one in others)
        and max(terms, default=0) == max(one.term for one in opened)
        and len(winners) >= 1
    )


def race_to_create(backends: list[ObjectBackend], pool: ThreadPoolExecutor, number: int) -> bool:
    """Whether exactly one of several creates of one slot succeeded, and all others were told so."""
    key = f"log/{number:020d}"
    texts = [f"{number} of {n}".encode() * 20 for n in range(len(backends))]
    calls = [lambda b=b, text=text: b.create(key, text) for b, text in zip(backends, texts, strict=True)]
    results = together(pool, calls)
    won = [n for n, result in enumerate(results) if result is None]
    lost = [result for result in results if isinstance(result, ckptstore.KeyExistsError)]
    return len(won) == 1 and len(lost) == len(backends) - 1 and backends[0].get(key) == texts[won[0]]


def races(server: Server, opening: int, committing: int, racers: int = 4) -> Told:
    """Run `races` races of each kind."""
    told = Told()
    url = server.url()
    backends = [ObjectBackend(url, server.options) for _ in range(racers)]
    with ThreadPoolExecutor(racers) as pool:
        for _ in range(opening):
            told.opened += 1
            told.several += not race_to_open(server, pool, racers)
        for number in range(committing):
            told.committed += 1
            told.several += not race_to_create(backends, pool, number)
    return told


@click.command()
@click.option("--races", "number", default=1000)
@click.option("--racers", default=4)
def main(number: int, racers: int) -> None:
    """Run races: a fifth of them to open, the others to commit."""
    warnings.simplefilter("ignore")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ckptstore-races-") as folder, serving(Path(folder)) as server:
        told = races(server, number // 5, number - number // 5, racers)
    click.echo(
        f"{told.opened} races to open, {told.committed} to commit, {racers} racers: {told.several} without exactly one "
        f"winner, {time.monotonic() - began:.0f} s"
    )
    if told.several:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
