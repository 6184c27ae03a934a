"""Step diffs through the store: every stored byte, and the processor time of a save and of a restore.

    make bench-diffs                                     # all phases, three rounds
    python -m tools.bench.codecs.diffs --only late --rounds 1

Training of the project's language model continues from its cached states for 20 steps; each step is saved with
``Writer.save_async`` and loaded again, so sizes include headers, indices, trees, hashes and digests, and times include
snapshot, compression, hashing and writing of all threads. zstd-3 and ZipNN compress the same states in the same rounds.
A row's state is that of an fp32 AdamW: 96 bits a parameter (with bf16 weights, their copy is saved as well). Every
restored state is compared bit by bit.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard
from torch import Tensor

import ckptstore
from ckptstore.formats import kernel_choice, optim
from ckptstore.formats.codecs import FAST_POLICY, SMALL_POLICY, Policy
from ckptstore.formats.sources import NumpySource
from ckptstore.write.steps.updates import Update
from tools.bench.codecs.trajectories import ensure, run_from
from tools.bench.machine import describe

GROUP = optim.AdamW(beta1=0.9, beta2=0.95, weight_decay=0.1)
STEPS = 20
PHASES = (("lm", 40, "early"), ("lm", 350, "mid"), ("lm", 590, "late"), ("bf16", 1, "late, mixed precision"))
LIMITS = {
    "predicted": 27.4,
    "replayed F32": 27.4,
    "replayed BF16": 11.3,
    "sparse F32": 0.36,
    "sparse BF16": 0.19,
    "predicted, small": 25.5,
    "replayed F32, small": 27.0,
    "replayed BF16, small": 10.9,
}
_KEPT = {"sparse F32": torch.float32, "sparse BF16": torch.bfloat16}

State = dict[str, dict[str, np.ndarray]]


@dataclass(frozen=True, slots=True)
class Series:
    """Consecutive states, the first one a base, and the optimizer's update to each of the others."""

    method: str
    states: list[State]
    updates: list[list[Update]]
    parameters: int

    @property
    def nbytes(self) -> int:
        """Bytes of the fp32 state of all steps but the base."""
        return 12 * self.parameters * (len(self.states) - 1)


@dataclass(frozen=True, slots=True)
class Row:
    """One way to store a phase's steps. Rates: bytes of fp32 state per second of processor time, all threads."""

    phase: str
    method: str
    batch: int
    bits: float
    encode: float
    decode: float
    limit: float | None
    exact: bool


# -------------------------------------------------------------------------------------------------------- the data


def series(name: str, start: int, methods: Sequence[str]) -> Iterator[Series]:
    """One trajectory's steps for each method: dense training once, and once for each kind of sparse values."""
    dense = [method for method in methods if method not in _KEPT]
    if dense:
        states, updates = _train(name, start, None)
        parameters = sum(array.size for array in states[0]["exp_avg"].values())
        for method in dense:
            told = [[_without(one) for one in step] for step in updates] if method == "predicted" else updates
            yield Series(method, states, told, parameters)
    for method in methods:
        if method in _KEPT:
            states, updates = _train(name, start, _KEPT[method])
            parameters = sum(array.size for array in states[0]["exp_avg"].values())
            yield Series(method, states, updates, parameters)


def _without(update: Update) -> Update:
    return Update(update.slots, update.optimizer, update.step)


def _train(name: str, start: int, kept: torch.dtype | None) -> tuple[list[State], list[list[Update]]]:
    run = run_from(ensure(name), start)
    states, updates = [_copied(run.state())], []
    for step in range(start + 1, start + STEPS + 1):
        taken = run.take(step) if kept is None else run.take(step, 0.01, kept)
        states.append(_copied(run.state()))
        weights = "master" if run.master else "model"
        updates.append([])
        for parameter in run.trained:
            count = int(run.optimizer.state[run.trained[parameter]]["step"].item())
            gradient: NumpySource | optim.SparseGradient
            if kept is None:
                numbers = optim.Step(count, taken.lr, taken.clip)
                gradient = NumpySource(_array(taken.gradients[parameter]))
            else:
                numbers = optim.Step(count, taken.lr)
                indices, values = taken.sparse[parameter]
                gradient = optim.SparseGradient(indices.numpy(), _array(values), run.trained[parameter].numel())
            slots = tuple(f"{part}.{parameter}" for part in (weights, "exp_avg", "exp_avg_sq"))
            updates[-1].append(Update(slots, GROUP, numbers, gradient))
    return states, updates


def _array(tensor: Tensor) -> np.ndarray:
    data = tensor.detach().clone().contiguous()
    if data.dtype is torch.bfloat16:
        import ml_dtypes

        return data.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return data.numpy()


def _copied(tensors: dict[str, Tensor]) -> State:
    state: State = {}
    for name, tensor in tensors.items():
        part, _, parameter = name.partition(".")
        state.setdefault(part, {})[parameter] = _array(tensor)
    return state


# ----------------------------------------------------------------------------------------------------- the methods


@dataclass(slots=True)
class Measured:
    """The results of one method's rounds."""

    stored: int
    encode: list[float]
    decode: list[float]
    exact: bool = True


def through_the_store(series: Series, batch: int, folder: Path, policy: Policy = FAST_POLICY) -> Measured:
    """Save a series and load it: bytes of the diffs' segments, and processor seconds."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        store = ckptstore.open(place)
        full_every = len(series.states)
        options = ckptstore.DiffOptions(full_every=full_every, batch=batch, seconds=None, policy=policy)
        with store.writer(parent=None, diffs=options, poll_seconds=None) as writer:
            writer.save(series.states[0] | {"step": 0}, 1)  # type: ignore[operator]  # one more kind of member
            began = time.process_time()
            for number, (state, updates) in enumerate(zip(series.states[1:], series.updates, strict=True), 2):
                writer.save_async(state | {"step": number}, number, updates=updates)  # type: ignore[operator]
            writer.wait()
            encoded = time.process_time() - began
        diffs = {entry.key for entry, doc in store.describe(number) if doc.kind == "gradient"}
        stored = sum((Path(place) / key).stat().st_size for key in diffs)
        store.load(1, framework="numpy")
        store.load(number, framework="numpy")  # compiles at the first call of a process: seconds
        full = _load(store, 1)[1]
        found, seconds = _load(store, number)
        exact = _same(found, series.states[-1])
        middle = number // 2
        exact = exact and _same(_load(store, middle)[0], series.states[middle - 1])
        return Measured(stored, [encoded], [max(seconds - full, 1e-9)], exact)


def _load(store: ckptstore.Store, step: int) -> tuple[Any, float]:
    began = time.process_time()
    state = store.load(step, framework="numpy")
    return state, time.process_time() - began


def _same(found: Any, state: State) -> bool:
    pairs = [(array, found[part][name]) for part, arrays in state.items() for name, array in arrays.items()]
    return all(array.tobytes() == restored.tobytes() for array, restored in pairs)


def peers(states: Sequence[State]) -> Iterator[tuple[str, Callable[[], Measured]]]:
    """Other compressors on the fp32 tensors of some of the states, each tensor on its own."""
    parts = [p for p in ("master", "exp_avg", "exp_avg_sq") if p in states[0]]
    parts = parts if len(parts) == 3 else ["model", "exp_avg", "exp_avg_sq"]
    images = [state[part][name].tobytes() for state in states for part in parts for name in state[part]]
    compressor, decompressor = zstandard.ZstdCompressor(3), zstandard.ZstdDecompressor()
    yield "zstd-3", lambda: _peer(images, compressor.compress, decompressor.decompress)
    try:
        from zipnn import ZipNN
    except ImportError:
        print("ZipNN is not installed: left out", file=sys.stderr)
        return
    coder = ZipNN(bytearray_dtype="float32", threads=1)
    yield (
        "ZipNN",
        lambda: _peer(
            images, lambda data: bytes(coder.compress(bytearray(data))), lambda data: bytes(coder.decompress(data))
        ),
    )


def _peer(images: Sequence[bytes], compress: Callable[[bytes], bytes], restore: Callable[[bytes], bytes]) -> Measured:
    began = time.process_time()
    packed = [compress(image) for image in images]
    encoded = time.process_time() - began
    began = time.process_time()
    found = [restore(data) for data in packed]
    decoded = time.process_time() - began
    return Measured(sum(map(len, packed)), [encoded], [decoded], list(images) == found)


def measure(phase: str, one: Series, rounds: int, folder: Path, with_peers: bool) -> list[Row]:
    """A series at b = 20 and b = 1, and the peers, in interleaved rounds."""
    sample = one.states[1 :: max(1, len(one.states) // 4)]
    small = functools.partial(through_the_store, one, STEPS, folder, SMALL_POLICY)
    ways: list[tuple[str, int, int, Callable[[], Measured]]] = [
        (one.method, batch, one.nbytes, lambda batch=batch: through_the_store(one, batch, folder))  # type: ignore[misc]
        for batch in (STEPS, 1)
    ]
    ways.append((f"{one.method}, small", STEPS, one.nbytes, small))
    if with_peers:
        ways += [(name, 0, 12 * one.parameters * len(sample), run) for name, run in peers(sample)]
    found: list[list[Measured]] = [[] for _ in ways]
    for _ in range(rounds):
        for place, (_, _, _, run) in enumerate(ways):
            found[place].append(run())
    rows = []
    for (method, batch, nbytes, _), runs in zip(ways, found, strict=True):
        rows.append(
            Row(
                phase,
                method,
                batch,
                96 * max(run.stored for run in runs) / nbytes,
                nbytes / statistics.median(run.encode[0] for run in runs),
                nbytes / statistics.median(run.decode[0] for run in runs),
                LIMITS.get(method) if batch == STEPS else None,
                all(run.exact for run in runs),
            )
        )
    return rows


# ------------------------------------------------------------------------------------------------------ the report


def show(rows: Sequence[Row]) -> None:
    print(f"\n### {rows[0].phase}\n\n| method | b | bits/parameter | ratio | save GB/s | restore GB/s | limit |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        limit = "" if row.limit is None else f"{row.limit:g}{'' if row.bits <= row.limit else ' MISSED'}"
        rates = f"{row.encode / 1e9:.2f} | {row.decode / 1e9:.2f}"
        print(f"| {row.method} | {row.batch or ''} | {row.bits:.3f} | {96 / row.bits:.2f} | {rates} | {limit} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=Path("bench-out/diffs.json"))
    parser.add_argument("--only", default="", help="phases whose name holds this text")
    parser.add_argument("--folder", type=Path, default=Path(".cache"), help="where the stores lie meanwhile")
    options = parser.parse_args()
    options.folder.mkdir(exist_ok=True)
    rows: list[Row] = []
    for name, start, phase in PHASES:
        if options.only not in phase:
            continue
        dense = "replayed BF16" if name == "bf16" else "replayed F32"
        methods = ["predicted", dense] if name == "bf16" else ["predicted", dense, *_KEPT]
        found = []
        for number, one in enumerate(series(name, start, methods)):
            if not rows and not found:  # compiled kernels are loaded at their first call
                through_the_store(
                    Series(one.method, one.states[:3], one.updates[:2], one.parameters), 1, options.folder
                )
            found += measure(phase, one, options.rounds, options.folder, number == 0)
        show(found)
        rows += found
    report = {
        "machine": describe(options.folder),
        "kernels": kernel_choice.kind(),
        "rows": [asdict(row) for row in rows],
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1))
    wrong = [f"{row.phase}: {row.method}" for row in rows if not row.exact]
    missed = [f"{row.phase}: {row.method}" for row in rows if row.limit is not None and row.bits > row.limit]
    if wrong or missed:
        raise SystemExit(f"not equal: {wrong}; above the limit: {missed}")


if __name__ == "__main__":
    main()
