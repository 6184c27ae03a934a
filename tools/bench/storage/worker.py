"""One measurement in its own process: does what the arguments say and prints one line of JSON.

``python -m tools.bench.storage.worker save|load|expect METHOD --size BYTES --seed N --dir DIR``. Started by
`save_load`, which never imports torch; a worker has finished its imports before it measures. By hand: press Enter when
it says ready.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from tools.bench.measure import Measurement
from tools.bench.storage import compared, loaders, pagecache, savers, state

EXPECTED = "expected.json"
"""In the scratch folder: flat name -> XXH3-128 that every loaded tensor must have."""
_TINY = 12_000
"""Bytes of the warm-up state."""


def compare(tensors: dict[str, str], small: dict[str, Any] | None, expected: dict[str, str], seed: int) -> None:
    """Compare the loaded state with the state that `seed` determines.

    Args:
        tensors: flat name -> digest of the loaded bytes (`loaders.touch`).
        small: the loaded state beside the tensors, or None if the format has none.
        expected: flat name -> digest that the tensor must have (`state.expected_hashes`).
        seed: of the saved state.

    Raises:
        RuntimeError: something differs; names the first tensor.
    """
    wrong = sorted(name for name in expected.keys() | tensors.keys() if expected.get(name) != tensors.get(name))
    if wrong:
        raise RuntimeError(f"{len(wrong)} tensors differ from what was saved, the first is {wrong[0]}")
    if small is not None and small != state.small_state(seed):
        raise RuntimeError("the state beside the tensors differs from what was saved")


def _expected(folder: Path) -> dict[str, str]:
    return dict(json.loads((folder.parent / EXPECTED).read_text()))


def _wait_for_driver() -> None:
    """Report that everything is prepared, and continue once the driver has released its memory (`measure.Ballast`)."""
    sys.stdout.write(compared.READY + "\n")
    sys.stdout.flush()
    sys.stdin.readline()


def _warm_up_save(name: str, folder: Path, seed: int) -> loaders.Origin:
    """Save a tiny state once: lazy imports and first calls are over, and there is something to load."""
    folder.mkdir()
    savers.RUN[name](state.build(_TINY, seed), folder, Measurement())
    return loaders.Origin(folder, _TINY, seed)


def save(name: str, size: int, seed: int, folder: Path) -> dict[str, float]:
    """Save into the new folder `folder`, then load again and compare."""
    folder.mkdir()
    _warm_up_save(name, folder / "warm-up", seed)
    shutil.rmtree(folder / "warm-up")
    saved = state.build(size, seed)
    os.sync()  # pending writes of earlier measurements do not count in this one
    measurement = Measurement(_wait_for_driver)
    further = savers.RUN[name](saved, folder, measurement)
    del saved
    method = compared.SAVES[name]
    back = loaders.RUN[method.reader](loaders.Origin(folder, size, seed))
    compare(loaders.touch(back.tensors, 1), back.small, _expected(folder), seed)
    return {**measurement.as_dict(), **further, "state_bytes": size}


def load(name: str, size: int, seed: int, folder: Path, *, cold: bool, threads: int) -> dict[str, float]:
    """Load the files of a `save` in `folder`, touch every byte, compare."""
    saver = compared.LOADS[name].saver
    tiny = _warm_up_save(saver, folder / "warm-up", seed)
    loaders.touch(loaders.RUN[name](tiny).tensors, threads)
    shutil.rmtree(folder / "warm-up")
    kept = folder / compared.SAVES[saver].keeps
    if cold:
        pagecache.drop(kept)
    else:
        pagecache.warm(kept)
    expected = _expected(folder)
    with Measurement(_wait_for_driver) as measurement:
        loaded = loaders.RUN[name](loaders.Origin(folder, size, seed))
        measurement.mark("load")
        hashes = loaders.touch(loaded.tensors, threads)
    compare(hashes, loaded.small, expected, seed)
    return {**measurement.as_dict(), "state_bytes": size, "file_bytes": pagecache.total_bytes(kept)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=["save", "load", "expect"])
    parser.add_argument("method")
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--touch-threads", type=int, default=1)
    options = parser.parse_args()
    result: dict[str, Any]
    if options.task == "expect":
        hashes = state.expected_hashes(options.size, options.seed)
        (options.dir / EXPECTED).write_text(json.dumps(hashes))
        shapes = state.parameter_shapes(options.size)
        result = {"tensors": len(hashes), "parameters": sum(math.prod(shape) for shape in shapes.values())}
    elif options.task == "save":
        result = save(options.method, options.size, options.seed, options.dir)
    else:
        result = load(
            options.method,
            options.size,
            options.seed,
            options.dir,
            cold=options.cold,
            threads=options.touch_threads,
        )
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
