"""Writes one segment to persistent memory in each way, and compares the times with a copy in memory.

    python -m tools.bench.storage.pmem --size 256MiB --rounds 7

Persistent memory is simulated by shared memory that libpmem is told to treat as persistent: the instructions are the
real ones, the medium is DRAM. The first case is the limit: a copy into shared memory that is already mapped and
touched. The others make a segment as a writer does, a new file each time, in blocks of 16 MiB, sealed; each is read
back and compared. ``warm`` cases store into existing memory and show the cost of the instructions.

Cases are interleaved, each round in a rotated order; medians. Memory is touched before each measurement, so that a host
that takes free memory back does not distort the order. Processor seconds are reported as well: on a busy machine they
are more reliable than wall time.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import click

from ckptstore.backends.base import Backend
from ckptstore.backends.local_disk.local import LocalBackend
from ckptstore.backends.local_disk.posix import address_of
from tools.bench import machine
from tools.bench.measure import Ballast
from tools.bench.storage.save_load import parse_size
from tools.crash.media import assuming, backend_on, obstacle

__all__ = ["Row", "main", "measure"]

LIMIT: Final = "warm: memcpy into shared memory (the limit)"
BLOCK: Final = 16 << 20
_Took: TypeAlias = tuple[float, float]
"""Wall seconds and processor seconds."""
KEY: Final = "seg/0000000001/bench.safetensors"


@dataclass(frozen=True, slots=True)
class Row:
    """One way.

    Attributes:
        name: of the way.
        samples: wall and processor seconds of each round.
        seconds, cpu: their medians.
        rate: bytes per second.
        ratio: of the limit's seconds to these.
    """

    name: str
    samples: tuple[tuple[float, float], ...]
    seconds: float
    cpu: float
    rate: float
    ratio: float


class _Bench:
    """The data, and the ways to write it. Each way returns its times, and raises if the bytes differ."""

    def __init__(self, size: int, shared: Path, disk: Path, threads: int) -> None:
        self.data = memoryview(mmap.mmap(-1, size))
        for begin in range(0, size, 1 << 20):
            self.data[begin : begin + (1 << 20)] = os.urandom(min(1 << 20, size - begin))
        self.shared = shared
        self.disk = disk
        self.threads = ThreadPoolExecutor(threads)
        with (shared / "warm").open("w+b") as file:
            os.posix_fallocate(file.fileno(), 0, size)
            self.warm = memoryview(mmap.mmap(file.fileno(), size))

    def ways(self) -> dict[str, Callable[[], _Took]]:
        """Name -> the way."""
        found: dict[str, Callable[[], _Took]] = {LIMIT: lambda: self._into_warm(_memcpy)}
        if (library := None if obstacle("pmem") else assuming()) is not None:
            copy, drain, flush = library.copy, library.drain, library.flush

            def cached(target: memoryview, data: memoryview) -> None:
                _memcpy(target, data)
                flush(target)

            found["warm: libpmem, non-temporal, one fence"] = lambda: self._into_warm(copy, drain)
            found["warm: memcpy, then flush and fence"] = lambda: self._into_warm(cached, drain)
            found["pmem:// libpmem, on shared memory"] = lambda: self._segment(backend_on("pmem", self.shared / "n"))
        found["pmem:// msync, on shared memory"] = lambda: self._segment(backend_on("pmem-msync", self.shared / "m"))
        found["file:// on shared memory"] = lambda: self._segment(LocalBackend(self.shared / "f", direct=False))
        kind = machine.filesystem_type(self.disk)
        found[f"pmem:// msync, on {kind}"] = lambda: self._segment(backend_on("pmem-msync", self.disk / "m"))
        found[f"file:// O_DIRECT, on {kind}"] = lambda: self._segment(LocalBackend(self.disk / "f"))
        return found

    def _blocks(self, work: Callable[[int, memoryview], None]) -> None:
        offsets = range(0, len(self.data), BLOCK)
        for _ in self.threads.map(lambda at: work(at, self.data[at : at + BLOCK]), offsets):
            pass

    def _into_warm(
        self, copy: Callable[[memoryview, memoryview], None], finish: Callable[[], None] = lambda: None
    ) -> _Took:
        for begin in range(0, len(self.warm), 1 << 20):
            self.warm[begin : begin + (1 << 20)] = bytes(min(1 << 20, len(self.warm) - begin))

        def work(at: int, data: memoryview) -> None:
            copy(self.warm[at : at + len(data)], data)
            finish()  # a fence waits only for the stores of its own thread

        begin_at = _clocks()
        self._blocks(work)
        took = _since(begin_at)
        self._compare(self.warm)
        return took

    def _segment(self, backend: Backend) -> _Took:
        backend.create("FORMAT", b"x")  # folders are made, and synced, outside of the measurement
        backend.create("seg/0000000001/first", b"x")
        begin_at = _clocks()
        sink = backend.open_sink(KEY, len(self.data))
        self._blocks(sink.write)
        sink.seal(len(self.data))
        took = _since(begin_at)
        with backend.open_source(KEY) as source:
            found = source.map()
            assert found is not None
            self._compare(found)
        backend.close()
        shutil.rmtree(backend.url)
        return took

    def _compare(self, found: memoryview) -> None:
        if found != self.data:
            raise click.ClickException("what was read back differs from what was written")


def _clocks() -> _Took:
    return time.perf_counter(), time.process_time()


def _since(begin: _Took) -> _Took:
    now = _clocks()
    return now[0] - begin[0], now[1] - begin[1]


def _memcpy(target: memoryview, data: memoryview) -> None:
    ctypes.memmove(address_of(target), address_of(data), len(data))


def measure(size: int, rounds: int, shared: Path, disk: Path, threads: int, *, settle: bool = True) -> list[Row]:
    """Measure every way `rounds` times, after one uncounted round."""
    bench = _Bench(size, shared, disk, threads)
    ways = bench.ways()
    samples: dict[str, list[_Took]] = {name: [] for name in ways}
    ballast = Ballast(3 * size if settle else 0)
    for turn in range(rounds + 1):
        names = list(ways)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            ballast.hold()
            ballast.release()
            took = ways[name]()
            if turn:
                samples[name].append(took)
    bench.threads.shutdown()
    limit = _median(samples[LIMIT])[0]
    return [
        Row(name, tuple(found), *(medians := _median(found)), size / medians[0], limit / medians[0])
        for name, found in samples.items()
    ]


def _median(found: Sequence[_Took]) -> _Took:
    return statistics.median(took[0] for took in found), statistics.median(took[1] for took in found)


@click.command()
@click.option("--size", default="256MiB", show_default=True, help="Of the segment.")
@click.option("--rounds", default=7, show_default=True, type=click.IntRange(min=1))
@click.option("--threads", default=1, show_default=True, type=click.IntRange(min=1), help="That write blocks.")
@click.option("--shared", default=Path("/dev/shm"), type=click.Path(path_type=Path), help="A tmpfs.")
@click.option(
    "--disk", default=Path(tempfile.gettempdir()), type=click.Path(path_type=Path), help="A folder on a disk."
)
@click.option("--settle/--no-settle", default=True, show_default=True, help="Touch memory before each measurement.")
@click.option("--json", "as_json", is_flag=True)
def main(size: str, rounds: int, threads: int, shared: Path, disk: Path, settle: bool, as_json: bool) -> None:
    """Write one segment in every way, and compare with a copy in memory."""
    nbytes = parse_size(size)
    with tempfile.TemporaryDirectory(dir=shared) as memory, tempfile.TemporaryDirectory(dir=disk) as folder:
        described = machine.describe(Path(folder))
        rows = measure(nbytes, rounds, Path(memory), Path(folder), threads, settle=settle)
    if as_json:
        results = [{field: getattr(row, field) for field in Row.__slots__} for row in rows]
        settings = {"size": nbytes, "rounds": rounds, "threads": threads}
        click.echo(json.dumps({"benchmark": "pmem", "machine": described, "settings": settings, "results": results}))
        return
    click.echo(f"{size}, {threads} thread{'s' if threads > 1 else ''}, medians of {rounds}; {described['cpu']}")
    for row in rows:
        spread = f"{min(row.samples)[0]:.3f} to {max(row.samples)[0]:.3f} s; processor {row.cpu:.3f} s"
        click.echo(f"{row.name:45} {row.seconds:.3f} s  {row.rate / 1e9:5.2f} GB/s  {row.ratio:.2f}  ({spread})")
    if why := obstacle("pmem"):
        click.echo(f"left out: {why}")


if __name__ == "__main__":
    main()
