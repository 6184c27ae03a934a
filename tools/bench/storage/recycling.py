"""Compares new files with overwritten old ones on one disk: ``python -m tools.bench.storage.recycling --dir PLACE``.

The same bytes, durable, in four ways in turn: a raw new file and a raw overwritten one (O_DIRECT, 16 MiB blocks, two
threads), and a segment of the local backend in a new file and in a recycled one, including its locks and syncs. It also
reports the backend's own short measurement, which decides whether it recycles. No hashing, no format: only the disk is
measured.
"""

from __future__ import annotations

import json
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from ckptstore.backends.local_disk.local import LocalBackend
from ckptstore.backends.local_disk.overwriting import PAYS, measure
from ckptstore.backends.local_disk.posix import SYSTEM
from tools.bench import machine
from tools.bench.storage import raw
from tools.bench.storage.report import median, quartiles

MIB = 1 << 20
WAYS = ("raw, new file", "raw, overwritten", "segment, new file", "segment, recycled")


class Places:
    """The files of one run below `folder`: one to overwrite, and two stores, each with one segment at a time."""

    def __init__(self, folder: Path, data: memoryview) -> None:
        self._data = data
        self._new, self._old = folder / "new", folder / "old"
        self._fresh = LocalBackend(folder / "fresh", recycle="never")
        self._recycled = LocalBackend(folder / "recycled", recycle="always")
        self._keys: dict[LocalBackend, str] = {}
        raw.write_direct(self._old, data)
        for backend in (self._fresh, self._recycled):
            self.segment(backend)

    @property
    def recycling(self) -> str:
        """Whether the second store really recycles."""
        return self._recycled.recycling

    def ways(self) -> dict[str, Callable[[], float]]:
        """Each way: a function that returns its seconds. Its files are removed outside of the measurement."""
        return dict(
            zip(
                WAYS,
                (
                    self._raw_new,
                    lambda: _timed(lambda: raw.overwrite_direct(self._old, self._data)),
                    lambda: self.segment(self._fresh),
                    lambda: self.segment(self._recycled),
                ),
                strict=True,
            )
        )

    def _raw_new(self) -> float:
        seconds = _timed(lambda: raw.write_direct(self._new, self._data))
        self._new.unlink()
        return seconds

    def segment(self, backend: LocalBackend) -> float:
        """Release the store's segment and write another; the release, which belongs to gc, is not counted."""
        if (before := self._keys.get(backend)) is not None:
            backend.release(before)
        self._keys[backend] = key = f"seg/0000000001/{secrets.token_hex(16)}.safetensors"
        return _timed(lambda: write_segment(backend, key, self._data))


def write_segment(backend: LocalBackend, key: str, data: memoryview) -> None:
    """Write `data` as the engine does: two threads, the beginning last."""
    sink = backend.open_sink(key, len(data))
    with ThreadPoolExecutor(raw.THREADS) as threads:
        offsets = range(raw.BLOCK, len(data), raw.BLOCK)
        for _ in threads.map(lambda offset: sink.write(offset, data[offset : offset + raw.BLOCK]), offsets):
            pass
    sink.write(0, data[: raw.BLOCK])
    sink.seal(len(data))


def _timed(work: Callable[[], None]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def probe(folder: Path) -> tuple[float | None, float]:
    """The backend's measurement -> speedup, None if it was inconclusive; and its duration in seconds."""
    handle = SYSTEM.open(str(folder), 0)
    try:
        begin = time.perf_counter()
        return measure(SYSTEM, handle), time.perf_counter() - begin
    finally:
        SYSTEM.close(handle)


EXAMPLE = """\b
Example:
  python -m tools.bench.storage.recycling --dir /data --size 1024 --rounds 5
"""


@click.command(epilog=EXAMPLE, context_settings={"max_content_width": 110})
@click.option("--dir", "place", default=Path(), type=click.Path(path_type=Path, exists=True), help="On which disk.")
@click.option("--size", default=1024, show_default=True, type=click.IntRange(min=16), help="MiB of each file.")
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(min=1), help="Of all four ways, in turn.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON instead of a table.")
def main(place: Path, size: int, rounds: int, as_json: bool) -> None:
    """Compare new files with overwritten ones on the disk of --dir; needs five times --size of space there."""
    folder = Path(tempfile.mkdtemp(prefix="ckptstore-recycling-", dir=place))
    try:
        data = memoryview(raw.aligned_buffer(size * MIB))
        for offset in range(0, len(data), MIB):
            data[offset : offset + MIB] = secrets.token_bytes(MIB)
        places = Places(folder, data)
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        probes = []
        for turn in range(rounds):
            probes.append(probe(folder))
            ways = list(places.ways().items())
            for way, work in ways[turn % len(ways) :] + ways[: turn % len(ways)]:
                seconds[way].append(work())
        document = {
            "benchmark": "recycling",
            "machine": machine.describe(folder),
            "settings": {"mib": size, "rounds": rounds},
            "recycling": places.recycling,
            "seconds": seconds,
            "gigabytes_per_second": {way: size * MIB / 1e9 / median(taken) for way, taken in seconds.items()},
            "probe": {
                "ratios": [ratio for ratio, _ in probes],
                "seconds": [taken for _, taken in probes],
                "pays": PAYS,
            },
        }
    finally:
        shutil.rmtree(folder)
    if as_json:
        click.echo(json.dumps(document))
    else:
        _show(Console(), seconds, size, probes, places.recycling)


def _show(
    console: Console, seconds: dict[str, list[float]], size: int, probes: list[tuple[float | None, float]], said: str
) -> None:
    table = Table(title=f"{size} MiB, durable", title_justify="left")
    for column in ("way", "GB/s, median", "quartiles", "to raw, overwritten"):
        table.add_column(column, justify="left" if column == "way" else "right", no_wrap=True)
    yardstick = median(seconds[WAYS[1]])
    for way, taken in seconds.items():
        slow, fast = (size * MIB / 1e9 / value for value in reversed(quartiles(taken)))
        speed = size * MIB / 1e9 / median(taken)
        table.add_row(way, f"{speed:.2f}", f"{slow:.2f}-{fast:.2f}", f"{yardstick / median(taken):.2f}x")
    console.print(table)
    ratios = ", ".join("none" if ratio is None else f"{ratio:.2f}" for ratio, _ in probes)
    console.print(f"the backend's own measurement: {ratios} ({PAYS} pays), {median([s for _, s in probes]):.2f} s each")
    console.print(f"the store that recycles: {said}")


if __name__ == "__main__":
    main()
