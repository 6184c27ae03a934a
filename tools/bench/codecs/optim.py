"""The cost of one optimizer step: the whole fp32 AdamW state (weight and two moments, 96 bits a parameter), lossless.

    python -m tools.bench.codecs.optim                      # all pairs of consecutive steps of our trajectories
    python -m tools.bench.codecs.optim --json bench-out/optim.json --rounds 5

``predicted`` needs no gradient, ``replayed`` has training's own (fp32, or bf16 with the clip factor), ``sparse``
follows a training step that applied only the largest 1 % of it. Compared in the same rounds: zstd-3 and ZipNN on the
new state, and ZipNN on its exclusive or with the old one. Every decoded state is compared bit by bit; sizes include
payloads, rules and corrections of values that training's own kernels rounded otherwise. Times are processor time,
medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from ckptstore.formats import codecs, jsontext, optim
from tools.bench.codecs.trajectories import Trajectory, ensure

GROUP = optim.AdamW(beta1=0.9, beta2=0.95, weight_decay=0.1)
LIMITS = {"predicted": 27.4, "replayed F32": 27.4, "replayed BF16": 11.3, "sparse F32": 0.36, "sparse BF16": 0.19}
State = list[np.ndarray]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two consecutive steps: the old state, the new state, and the gradient between them, laid end to end."""

    label: str
    promised: bool
    step: optim.Step
    old: State
    new: State
    gradient: np.ndarray
    cuts: tuple[int, ...]
    """Where a chunk begins: every parameter of 64 KiB, runs of smaller ones."""

    @property
    def count(self) -> int:
        return len(self.gradient)


@dataclass(frozen=True, slots=True)
class Row:
    """One method on one pair of steps. Rates are bytes of state (12 a parameter) per second of processor time."""

    pair: str
    method: str
    bits: float
    encode: float
    decode: float
    limit: float | None
    exact: bool


# ------------------------------------------------------------------------------------------------------- the data

PAIRS = (
    ("lm", 40, "early", True),
    ("lm", 350, "mid", True),
    ("lm", 590, "late", True),
    ("lm", 591, "late", True),
    ("bf16", 1, "late, mixed precision", True),
    ("bf16", 2, "late, mixed precision", True),
    ("finetune", 1, "fine-tune, second step of fresh moments", False),
    ("finetune", 2, "fine-tune, third step of fresh moments", False),
)


def load_pair(trajectory: Trajectory, step: int, phase: str, promised: bool) -> Pair:
    """The pair of ``step`` and the next one."""
    before, after, scalars = trajectory.load(step), trajectory.load(step + 1), trajectory.scalars(step + 1)
    names = [name.removeprefix("exp_avg.") for name in before if name.startswith("exp_avg.")]
    weights = "master." if any(name.startswith("master.") for name in before) else "model."
    slots = (weights, "exp_avg.", "exp_avg_sq.")
    count = step + 1 + (trajectory.recipe.start[1] if weights == "master." and trajectory.recipe.start else 0)
    sizes = [before[f"exp_avg.{name}"].size for name in names]
    return Pair(
        f"{trajectory.name} {step} -> {step + 1} ({phase})",
        promised,
        optim.Step(count, float(scalars["lr"]), clip=float.fromhex(str(scalars["clip"]))),
        [np.concatenate([before[slot + name] for name in names]) for slot in slots],
        [np.concatenate([after[slot + name] for name in names]) for slot in slots],
        np.concatenate([after[f"gradient.{name}"] for name in names]),
        tuple(_cuts(sizes)),
    )


def _cuts(sizes: Sequence[int]) -> Iterator[int]:
    at, pooled = 0, False
    for size in sizes:
        tiny = 4 * size < codecs.TINY
        if not (tiny and pooled):
            yield from range(at, at + size, optim.CHUNK_NUMBERS)
        at, pooled = at + size, tiny
    yield at


def sparse_pair(pair: Pair, bf16: bool, share: float = 0.01) -> tuple[Pair, optim.SparseGradient]:
    """The result of torch's AdamW from the old state and the largest ``share`` of the clipped gradient, and that
    gradient.

    Like the paper's, training here compresses the gradient before the optimizer (and rounds it, for ``bf16``).
    """
    import torch

    dense = pair.gradient.view("f4") if pair.gradient.itemsize == 4 else _widened(pair.gradient)
    clipped = dense * np.float32(pair.step.clip)
    kept = np.sort(np.argpartition(np.abs(clipped), -int(share * pair.count))[-int(share * pair.count) :])
    values = clipped[kept]
    if bf16:
        values = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    gradient = optim.SparseGradient(kept, values, pair.count)
    parameter = torch.nn.Parameter(torch.from_numpy(pair.old[0].view("f4").copy()))
    optimizer = torch.optim.AdamW([parameter], lr=pair.step.lr, betas=(0.9, 0.95), weight_decay=0.1)
    moments = [torch.from_numpy(part.view("f4").copy()) for part in pair.old[1:]]
    state = {"step": torch.tensor(float(pair.step.count - 1)), "exp_avg": moments[0], "exp_avg_sq": moments[1]}
    optimizer.state[parameter] = state
    parameter.grad = torch.from_numpy(gradient.dense())
    optimizer.step()
    new = [parameter.detach().numpy().view("u4"), *(moment.numpy().view("u4") for moment in moments)]
    step = optim.Step(pair.step.count, pair.step.lr)
    return Pair(pair.label, pair.promised, step, pair.old, new, gradient.dense(), pair.cuts), gradient


def _widened(halves: np.ndarray) -> np.ndarray:
    return (halves.astype("<u4") << 16).view("<f4")


# ---------------------------------------------------------------------------------------------------- the methods


@dataclass(frozen=True, slots=True)
class Method:
    """A way to store a pair's new state. ``reset`` is called before ``decode``, outside the time."""

    name: str
    pair: Pair
    encode: Callable[[], list[Any]]
    decode: Callable[[list[Any]], State]
    reset: Callable[[], None] = lambda: None
    limit: float | None = None


def ours(name: str, pair: Pair, gradient: optim.Gradient | None) -> Method:
    """An encoding: chunk by chunk, with memory reused as in the engine."""
    variant = optim.choose_variant(GROUP, pair.step, pair.old, pair.new, gradient)
    rule = GROUP.rule(pair.step, variant)
    ranges = list(zip(pair.cuts, pair.cuts[1:], strict=False))
    largest = max(stop - start for start, stop in ranges)
    out = np.empty(optim.replayed.bound(rule, largest), np.uint8)
    described = jsontext.dumps(rule.params)

    def encode() -> list[Any]:
        payloads: list[Any] = [described]
        for start, stop in ranges:
            old, new = ([part[start:stop] for part in state] for state in (pair.old, pair.new))
            if gradient is None:
                payload = optim.predicted.encode(rule, old, new, out=out)
            elif isinstance(gradient, optim.SparseGradient):
                payload = optim.sparse.encode(rule, old, new, gradient.part(start, stop), out=out)
            else:
                payload = optim.replayed.encode(rule, old, new, gradient[start:stop], out=out)
            payloads.append(payload.tobytes())
        return payloads

    state = [np.empty_like(part) for part in pair.old]

    def decode(payloads: list[Any]) -> State:
        read = optim.rule(jsontext.loads(payloads[0], what="rule", max_bytes=1 << 16))
        module = optim.predicted if gradient is None else optim.replayed
        for (start, stop), payload in zip(ranges, payloads[1:], strict=True):
            module.decode(read, payload, [part[start:stop] for part in state])
        return state

    def reset() -> None:
        for part, was in zip(state, pair.old, strict=True):
            np.copyto(part, was)

    return Method(name, pair, encode, decode, reset, LIMITS[name])


def peers(pair: Pair) -> list[Method]:
    """Other compressors on the same bytes, each slot separately."""
    compressor, decompressor = zstandard.ZstdCompressor(3), zstandard.ZstdDecompressor()

    def unzstd(payloads: list[Any]) -> State:
        return [np.frombuffer(decompressor.decompress(payload), "<u4") for payload in payloads]

    found = [Method("zstd-3", pair, lambda: [compressor.compress(part.data) for part in pair.new], unzstd)]
    try:
        from zipnn import ZipNN
    except ImportError:
        print("ZipNN is not installed: left out", file=sys.stderr)
        return found

    def zipnn(parts: State) -> list[Any]:
        return [
            bytes(ZipNN(bytearray_dtype="float32", threads=1).compress(bytearray(part.tobytes()))) for part in parts
        ]

    def unzip(payloads: list[Any]) -> State:
        coder = ZipNN(bytearray_dtype="float32", threads=1)
        return [np.frombuffer(bytes(coder.decompress(payload)), "<u4") for payload in payloads]

    def differences(parts: State) -> State:
        return [np.bitwise_xor(part, was) for part, was in zip(parts, pair.old, strict=True)]

    found.append(Method("ZipNN", pair, lambda: zipnn(pair.new), unzip))
    found.append(Method("ZipNN of XOR", pair, lambda: zipnn(differences(pair.new)), lambda p: differences(unzip(p))))
    return found


def replay(pair: Pair, rounds: int) -> float:
    """Bytes of state per second of ``optim.advance`` alone."""
    rule, seconds = GROUP.rule(pair.step), []
    for _ in range(rounds):
        state = [part.copy() for part in pair.old]
        began = time.process_time()
        optim.advance(rule, state, pair.gradient)
        seconds.append(time.process_time() - began)
    return 12 * pair.count / statistics.median(seconds)


def measure(pair: Pair, rounds: int) -> list[Row]:
    """All methods on one pair, interleaved."""
    kind = "F32" if pair.gradient.itemsize == 4 else "BF16"
    methods = [*peers(pair), ours("predicted", pair, None), ours(f"replayed {kind}", pair, pair.gradient)]
    for bf16, name in ((False, "sparse F32"), (True, "sparse BF16")):
        applied, gradient = sparse_pair(pair, bf16)
        methods.append(ours(name, applied, gradient))
    seconds: list[list[tuple[float, float]]] = [[] for _ in methods]
    sizes, exact = [0] * len(methods), [True] * len(methods)
    for _ in range(rounds):
        for index, method in enumerate(methods):
            began = time.process_time()
            payloads = method.encode()
            encoded = time.process_time() - began
            method.reset()
            began = time.process_time()
            state = method.decode(payloads)
            seconds[index].append((encoded, time.process_time() - began))
            sizes[index] = sum(map(len, payloads))
            exact[index] &= all(np.array_equal(a, b) for a, b in zip(state, method.pair.new, strict=True))
    nbytes = 12 * pair.count
    return [
        Row(
            pair.label,
            method.name,
            8 * sizes[index] / pair.count,
            nbytes / statistics.median(encoded for encoded, _ in seconds[index]),
            nbytes / statistics.median(decoded for _, decoded in seconds[index]),
            method.limit if pair.promised else None,
            exact[index],
        )
        for index, method in enumerate(methods)
    ]


# ------------------------------------------------------------------------------------------------------ the report


def show(rows: Sequence[Row]) -> None:
    """A Markdown table for one pair."""
    print(f"\n### {rows[0].pair}\n\n| method | bits/parameter | ratio | encode GB/s | decode GB/s | limit |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        limit = "" if row.limit is None else f"{row.limit:g}{'' if row.bits <= row.limit else ' MISSED'}"
        rates = f"{row.encode / 1e9:.2f} | {row.decode / 1e9:.2f}"
        print(f"| {row.method} | {row.bits:.3f} | {96 / row.bits:.2f} | {rates} | {limit} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", help="pairs whose label holds this text")
    options = parser.parse_args()
    rows: list[Row] = []
    for name, step, phase, promised in PAIRS:
        if options.only and options.only not in f"{name} {step} ({phase})":
            continue
        pair = load_pair(ensure(name), step, phase, promised)
        found = measure(pair, options.rounds)
        show(found)
        print(f"\nadvance alone: {replay(pair, options.rounds) / 1e9:.2f} GB/s")
        rows += found
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    wrong = [f"{row.pair}: {row.method}" for row in rows if not row.exact]
    missed = [f"{row.pair}: {row.method}" for row in rows if row.limit is not None and row.bits > row.limit]
    if wrong or missed:
        raise SystemExit(f"not equal: {wrong}; above the limit: {missed}")


if __name__ == "__main__":
    main()
