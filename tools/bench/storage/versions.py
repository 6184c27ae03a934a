"""Compares cold and warm loads by two installed versions of ckptstore, in processes that live side by side.

    python -m tools.bench.storage.versions --other OTHER/.venv/bin/python FOLDER

Each version writes `--files` stores of one state and opens them in its own process; then come rounds in which every
process loads once, in a random order. A file's place on the disk and the memory that the machine provides change a cold
read by a quarter either way from one file and one process to the next: several files, and turns within seconds, make a
difference of 3 % visible. Medians over all loads of a version, seconds, and the medians of its files.
"""

from __future__ import annotations

import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import click
import numpy as np

from tools.bench.storage.pagecache import drop, warm

__all__ = ["compare", "main"]

_WORKER: Final = """
import sys, time
import numpy as np, ckptstore
mode, path, tensors, megabytes, mapped = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
store = ckptstore.open(path)
if mode == "save":
    values = np.random.default_rng(1)
    state = {f"t{i}": values.random(megabytes << 17) for i in range(tensors)}
    with store.writer() as writer:
        writer.save(state, step=1)
else:
    store.load("latest", mmap=mapped == "mapped")
    for line in sys.stdin:
        begun = time.perf_counter()
        state = store.load("latest", mmap=mapped == "mapped")
        print(time.perf_counter() - begun, flush=True)
        del state
"""


def compare(pythons: dict[str, str], folder: Path, files: int, rounds: int, size: int, **how: bool) -> dict[str, Any]:
    """Seconds of a load by each of the `pythons` (name -> interpreter); `how`: `mapped`, `cold`."""
    kind = "mapped" if how["mapped"] else "read"
    tensors = max(1, size // 16)
    stores = {(name, at): folder / f"{name}-{at}" for at in range(files) for name in pythons}
    for (name, _), path in stores.items():
        subprocess.run(_command(pythons[name], "save", path, tensors, kind), check=True, cwd=folder)
    workers = {
        key: subprocess.Popen(
            _command(pythons[key[0]], "load", path, tensors, kind),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
        )
        for key, path in stores.items()
    }
    times: dict[tuple[str, int], list[float]] = {key: [] for key in stores}
    try:
        shuffled = list(workers)
        for number in range(rounds):
            random.Random(number).shuffle(shuffled)
            for key in shuffled:
                (drop if how["cold"] else warm)(stores[key])
                times[key].append(_ask(workers[key]))
    finally:
        for worker in workers.values():
            worker.communicate()  # the end of its input ends it
    return {
        name: {
            "median": statistics.median(second for key in stores if key[0] == name for second in times[key]),
            "files": [statistics.median(times[key]) for key in stores if key[0] == name],
        }
        for name in pythons
    }


def _command(python: str, mode: str, path: Path, tensors: int, kind: str) -> list[str]:
    return [python, "-c", _WORKER, mode, str(path), str(tensors), "16", kind]


def _ask(worker: subprocess.Popen[str]) -> float:
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write("\n")
    worker.stdin.flush()
    answer = worker.stdout.readline()
    if not answer:
        raise RuntimeError(f"a worker ended with {worker.wait()}")
    return float(answer)


@click.command(context_settings={"show_default": True})
@click.argument("folder", required=False, type=click.Path(path_type=Path, file_okay=False))
@click.option("--other", required=True, help="The interpreter that has the other version installed.")
@click.option("--files", type=click.IntRange(1), default=6, help="Stores of each version.")
@click.option("--rounds", type=click.IntRange(1), default=15)
@click.option("--size", type=click.IntRange(16), default=512, help="MiB of a state, in tensors of 16 MiB.")
@click.option("--mapped/--read", default=True, help="load(mmap=True), or load().")
@click.option("--cold/--warm", default=True)
@click.option("--json", "as_json", is_flag=True)
def main(
    folder: Path | None, other: str, files: int, rounds: int, size: int, mapped: bool, cold: bool, as_json: bool
) -> None:
    """Compare loads by this version with those by another, side by side."""
    where = Path(tempfile.mkdtemp(prefix="versions-", dir=folder))
    began = time.perf_counter()
    try:
        found = compare({"other": other, "this": sys.executable}, where, files, rounds, size, mapped=mapped, cold=cold)
    finally:
        shutil.rmtree(where)
    if as_json:
        click.echo(json.dumps(found))
        return
    for name, row in found.items():
        click.echo(f"{name:6} {row['median']:.4f} s   files: {' '.join(f'{value:.3f}' for value in row['files'])}")
    ratio = found["this"]["median"] / found["other"]["median"]
    spread = np.ptp([value for row in found.values() for value in row["files"]])
    click.echo(f"this / other {ratio:.3f}; files differ by up to {spread:.3f} s; {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
