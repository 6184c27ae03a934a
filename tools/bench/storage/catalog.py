"""Measures the cost of a long history: ``python -m tools.bench.storage.catalog`` (``make bench-catalog``).

Stores of 1,000 to 200,000 checkpoints (plain fulls, and step diffs in batches of 20 with a full every 100) are made as
a fold and, for ``gc``, empty files for their segments. Every number is measured in a separate process: the bytes of the
fold; the seconds of READ, of WRITER OPEN, of ``ckpt log -n 20`` (the whole command) and of ``gc --dry-run``, and their
processor time in case others use the machine, too; the memory of the catalog, by tracemalloc and by the process's
resident size; the duration of the first small save of a term under retention rules, and the longest among saves over
which a fold was written. A second table has the requests that each operation makes of the medium: object reads, size
queries, listings. The last line of each kind says how processor time grows between the two longest histories: as n to
that power.
"""

from __future__ import annotations

import ctypes
import gc
import json
import math
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import tracemalloc
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import click

from ckptstore.backends.local_disk.local import LocalBackend
from ckptstore.formats.checksums import xxh3_128
from ckptstore.formats.history.catalog import CatalogBuilder
from ckptstore.formats.history.folds import encode_fold
from ckptstore.formats.history.record_text import encode_format
from ckptstore.formats.history.records import (
    FORMAT_KEY,
    CheckpointEntry,
    CheckpointId,
    CommitRecord,
    Encoding,
    FormatFile,
    OpenRecord,
    SegmentEntry,
    fold_key,
)
from tools.bench.storage.commands import ckpt
from tools.bench.storage.report import median

COUNTS: Final = (1_000, 10_000, 50_000, 200_000)
BATCH: Final = 20
FULL_EVERY: Final = 100
_EXTRA_SAVES: Final = 40


def _digest(text: str) -> str:
    return xxh3_128(text.encode())


def _segment(name: str, size: int) -> SegmentEntry:
    return SegmentEntry(_digest(f"id {name}"), 1, size, 8192, _digest(f"header {name}"))


def _checkpoint(step: int) -> CheckpointEntry:
    return CheckpointEntry(1, step, _digest(f"state {step}"), 1.7e9 + step * 1.234567, 148, 497_759_232)


def _fulls(count: int) -> CatalogBuilder:
    """One commit for each checkpoint."""
    builder = CatalogBuilder()
    builder.apply(OpenRecord(1, None, _digest("open"), 1.7e9), 0)
    for step in range(1, count + 1):
        segment = _segment(str(step), 497_800_000 + step % 977)
        edge = Encoding((1, step), "full", None, (segment.id,), False, segment.size)
        builder.apply(CommitRecord(1, _digest("nonce"), (segment,), (_checkpoint(step),), (edge,)), step)
    return builder


def _diffs(count: int) -> CatalogBuilder:
    """One commit, and one segment, for each batch of steps."""
    builder = CatalogBuilder()
    builder.apply(OpenRecord(1, None, _digest("open"), 1.7e9), 0)
    for seq, first in enumerate(range(1, count + 1, BATCH), 1):
        steps = range(first, min(first + BATCH, count + 1))
        segment = _segment(str(first), 90_000_000 + first % 977)
        edges = []
        for step in steps:
            full = step % FULL_EVERY == 1
            base = None if full else CheckpointId(1, step - 1, _digest(f"state {step - 1}"))
            edges.append(Encoding((1, step), "full" if full else "gradient", base, (segment.id,), False, 4_500_000))
        entries = tuple(_checkpoint(step) for step in steps)
        builder.apply(CommitRecord(1, _digest("nonce"), (segment,), entries, tuple(edges)), seq)
    return builder


_KINDS: Final[dict[str, Callable[[int], CatalogBuilder]]] = {"fulls": _fulls, "diffs": _diffs}


RULES: Final = ("last:100", "every:1000", "best:loss:5")


def make(folder: Path, kind: str, count: int) -> int:
    """A store of one fold with `count` checkpoints -> bytes of the fold."""
    run = uuid.uuid4().hex
    catalog = _KINDS[kind](count).catalog
    data, digest = encode_fold(catalog, run=run)
    backend = LocalBackend(folder)
    backend.create(FORMAT_KEY, encode_format(FormatFile(run=run)))
    backend.create(fold_key(catalog.next_seq - 1, digest), data)
    return len(data)


# ------------------------------------------------------------------------------------------------ in a process each


def resident() -> int:
    """Resident bytes of this process, once freed memory has been returned to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def _read(folder: str) -> dict[str, float]:
    import ckptstore

    store = ckptstore.open(folder)
    store.format  # noqa: B018
    import zstandard  # noqa: F401

    before = resident()
    begun, used = time.perf_counter(), time.process_time()
    view = store.view()
    seconds, cpu = time.perf_counter() - begun, time.process_time() - used
    held = resident() - before
    return {"read_s": seconds, "read_cpu_s": cpu, "resident": held / len(view.catalog.checkpoints)}


def _traced(folder: str) -> dict[str, float]:
    import ckptstore

    store = ckptstore.open(folder)
    store.format  # noqa: B018
    import zstandard  # noqa: F401

    tracemalloc.start()
    view = store.view()
    gc.collect()
    return {"traced": tracemalloc.get_traced_memory()[0] / len(view.catalog.checkpoints)}


def _open(folder: str) -> dict[str, float]:
    import zstandard  # noqa: F401

    import ckptstore
    from ckptstore.log.term import open_term

    store = ckptstore.open(folder)
    store.format  # noqa: B018
    begun, used = time.perf_counter(), time.process_time()
    term = open_term(store.journal, lambda catalog: getattr(catalog.latest(), "id", None))
    assert term.parent is not None
    return {"open_s": time.perf_counter() - begun, "open_cpu_s": time.process_time() - used}


def _stall(folder: str) -> dict[str, float]:
    """Small saves until some after a fold was written -> milliseconds."""
    import ckptstore

    store = ckptstore.open(folder)
    before = set(store.backend.list("fold/"))
    seconds: list[float] = []
    after = 0
    with store.writer(poll_seconds=None) as writer:
        assert writer.parent is not None
        first = writer.parent.step + 1
        for step in range(first, first + 3000):
            begun = time.perf_counter()
            writer.save({"step": step}, step=step)
            seconds.append(time.perf_counter() - begun)
            if after or (step % 8 == 0 and set(store.backend.list("fold/")) - before):
                after += 1
            if after > _EXTRA_SAVES:
                break
    assert set(store.backend.list("fold/")) - before
    return {"save_ms": median(seconds[1:]) * 1e3, "longest_ms": max(seconds[1:]) * 1e3, "first_ms": seconds[0] * 1e3}


def _first(folder: str) -> dict[str, float]:
    """The first two saves of a term with retention rules: by the second save all of the history was examined."""
    import ckptstore

    store = ckptstore.open(folder)
    with store.writer(poll_seconds=None, keep=RULES) as writer:
        assert writer.parent is not None
        first = writer.parent.step + 1
        used = time.process_time()
        milliseconds = []
        for step in (first, first + 1):
            begun = time.perf_counter()
            writer.save({"step": step}, step=step, metadata={"loss": 1.0})
            milliseconds.append((time.perf_counter() - begun) * 1e3)
    return {
        "ruled_first_ms": milliseconds[0],
        "ruled_second_ms": milliseconds[1],
        "ruled_cpu_s": time.process_time() - used,
    }


def _gc(folder: str) -> dict[str, float]:
    import ckptstore

    store = ckptstore.open(folder)
    begun, used = time.perf_counter(), time.process_time()
    assert store.gc(dry_run=True).segments == ()
    return {"gc_s": time.perf_counter() - begun, "gc_cpu_s": time.process_time() - used}


def requests(folder: str) -> dict[str, int]:
    """The requests of each command to the medium: ``NAME.get``, ``NAME.size``, ``NAME.list``."""
    from click.testing import CliRunner

    import ckptstore
    from ckptstore.cli.main import cli

    counted: Counter[str] = Counter()

    def counting(name: str) -> None:
        real = getattr(LocalBackend, name)

        def call(self: LocalBackend, *arguments: Any, **named: Any) -> Any:
            counted[name] += 1
            return real(self, *arguments, **named)

        setattr(LocalBackend, name, call)

    for name in ("get", "size", "list"):
        counting(name)
    found: dict[str, int] = {}

    def note(what: str) -> None:
        found.update({f"{what}.{name}": counted[name] for name in ("get", "size", "list")})
        counted.clear()

    assert CliRunner().invoke(cli, ["log", folder, "-n", "20"], prog_name="ckpt").exit_code == 0
    note("log")
    ckptstore.open(folder).gc(dry_run=True)
    note("gc")
    with ckptstore.open(folder).writer(poll_seconds=None) as writer:
        note("open")
        assert writer.parent is not None
        writer.save({"n": 1}, writer.parent.step + 1)
        note("save")
    return found


def place_segments(folder: Path) -> None:
    """Make an empty file for each segment, for commands that list them."""
    import ckptstore

    for number, entry in enumerate(ckptstore.open(folder).view().catalog.segments.values()):
        path = folder / entry.key
        if not number:
            path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


_PARTS: Final[dict[str, Callable[[str], dict[str, float]]]] = {
    "read": _read,
    "traced": _traced,
    "open": _open,
    "stall": _stall,
    "first": _first,
    "gc": _gc,
    "requests": lambda folder: dict(requests(folder)),
}


def measured(part: str, folder: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "tools.bench.storage.catalog", "--part", part, "--store", str(folder)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _log_seconds(folder: Path) -> tuple[float, float]:
    """Wall seconds and processor seconds."""
    begun, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([*ckpt(), "log", str(folder), "-n", "20"], check=True, stdout=subprocess.DEVNULL)
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter() - begun, now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime


def measure(place: Path, kind: str, count: int, rounds: int) -> dict[str, Any]:
    """Measure one line of the table. Times are medians of `rounds` processes; saves come last, because they change the
    store."""
    folder = place / f"{kind}-{count}"
    nbytes = make(folder, kind, count)
    reads = [measured("read", folder) for _ in range(rounds)]
    row: dict[str, Any] = {"kind": kind, "checkpoints": count, "fold_bytes": nbytes}
    row |= {name: median([one[name] for one in reads]) for name in reads[0]}
    logs = [_log_seconds(folder) for _ in range(rounds)]
    row |= {"log_s": median([wall for wall, _ in logs]), "log_cpu_s": median([cpu for _, cpu in logs])}
    row |= measured("traced", folder)
    opens = [measured("open", folder) for _ in range(rounds)]
    row |= {name: median([one[name] for one in opens]) for name in opens[0]}
    place_segments(folder)
    row |= measured("gc", folder)
    ruled = place / f"{kind}-{count}-ruled"
    make(ruled, kind, count)
    row |= measured("requests", ruled) | measured("first", ruled)
    row |= measured("stall", folder)
    shutil.rmtree(folder)
    shutil.rmtree(ruled)
    return row


_HEADINGS: Final = (
    "kind   checkpoints   fold bytes   READ s (CPU)    OPEN s (CPU)    log s (CPU)     gc s (CPU)      traced B   RSS B"
    "   save ms   longest ms   with rules: 1st ms   2nd ms"
)
_REQUESTS: Final = ("log", "open", "save", "gc")


def _line(row: dict[str, Any]) -> str:
    times = "".join(f" {row[f'{name}_s']:>8.3f} ({row[f'{name}_cpu_s']:.3f})" for name in ("read", "open", "log", "gc"))
    memory = f"{row['traced']:>10.0f} {row['resident']:>7.0f}"
    saves = f"{row['save_ms']:>9.2f} {row['longest_ms']:>12.1f}"
    saves += f"{row['ruled_first_ms']:>21.1f}{row['ruled_second_ms']:>9.1f}"
    return f"{row['kind']:<6} {row['checkpoints']:>11,} {row['fold_bytes']:>12,}{times} {memory} {saves}"


def _requests_line(row: dict[str, Any]) -> str:
    numbers = "".join(
        "  {:>4} {:>4} {:>4}".format(*(row[f"{what}.{name}"] for name in ("get", "size", "list"))) for what in _REQUESTS
    )
    return f"{row['kind']:<6} {row['checkpoints']:>11,}{numbers}"


def _growth(rows: Sequence[dict[str, Any]]) -> str:
    """The exponent n with which processor time grows between the two longest histories."""
    shorter, longer = sorted(rows, key=lambda row: int(row["checkpoints"]))[-2:]
    ratio = math.log(longer["checkpoints"] / shorter["checkpoints"])
    powers = {
        name: math.log(max(longer[f"{name}_cpu_s"], 1e-4) / max(shorter[f"{name}_cpu_s"], 1e-4)) / ratio
        for name in ("read", "open", "log", "gc", "ruled")
    }
    said = ", ".join(f"{name} {power:.2f}" for name, power in powers.items())
    counts = f"{shorter['checkpoints']:,} to {longer['checkpoints']:,}"
    return f"{longer['kind']}: from {counts} as n to the power of: {said}"


@click.command()
@click.option("--counts", default=",".join(map(str, COUNTS)), help="Numbers of checkpoints.")
@click.option("--kinds", default=",".join(_KINDS), help="fulls, diffs")
@click.option("--rounds", default=3, type=click.IntRange(min=1), help="Processes for each time.")
@click.option("--dir", "folder", type=click.Path(path_type=Path, file_okay=False), help="Where the stores are made.")
@click.option("--part", type=click.Choice(list(_PARTS)), hidden=True)
@click.option("--store", hidden=True)
def main(counts: str, kinds: str, rounds: int, folder: Path | None, part: str | None, store: str | None) -> None:
    """Measure stores with many checkpoints; the report goes to ``bench-out/catalog.json``, too."""
    if part is not None and store is not None:
        click.echo(json.dumps(_PARTS[part](store)))
        return
    rows = []
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    click.echo(_HEADINGS)
    with tempfile.TemporaryDirectory(prefix="ckptstore-catalog-", dir=folder) as place:
        for kind in kinds.split(","):
            for count in map(int, counts.split(",")):
                rows.append(measure(Path(place), kind, count, rounds))
                click.echo(_line(rows[-1]))
    click.echo(f"\n{'get, size, list of':<18}" + "".join(f"  {what:>14}" for what in _REQUESTS))
    for row in rows:
        click.echo(_requests_line(row))
    click.echo("")
    for kind in kinds.split(","):
        if len(same := [row for row in rows if row["kind"] == kind]) > 1:
            click.echo(_growth(same))
    out = Path("bench-out/catalog.json")
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
