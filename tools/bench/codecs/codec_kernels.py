"""Compare the hot kernels in numpy and compiled, for every instruction set of this processor, one at a time.

    python -m tools.bench.codecs.codec_kernels [--rounds N] [PATTERN]

Each kernel processes 1 MiB of words (a block) as in ``sub``, or a tile of optimizer state. Rates are GB of its largest
argument per second of processor time: medians, the forms in turn.
"""

from __future__ import annotations

import argparse
import fnmatch
import statistics
import time
from collections.abc import Callable

import numpy as np
from rich.console import Console
from rich.table import Table

from ckptstore.formats import codecs, core, digest, kernel_choice, optim, uncached_copy
from ckptstore.formats.codecs import kernels, rounding
from ckptstore.formats.optim import adam, arithmetic, residuals, sgd

SECONDS = 0.01
MIB = 1 << 20
Case = tuple[Callable[[], object], int]


def words() -> dict[str, Case]:
    """Name -> a call of a codec's kernel on a block, and the bytes that count."""
    rng = np.random.default_rng(1)
    count = codecs.BLOCK // 4
    base = rng.normal(0, 0.02, count).astype("<f4")
    new = (base + rng.normal(0, 1e-6, count).astype("<f4")).view("<u4")
    old, delta, out = base.view("<u4"), np.empty(count, "<u4"), np.empty(count, "<u4")
    kernels.difference(new, old, delta)
    wide: list[kernels.Words] = [np.empty(count, "<u2"), np.empty(count, np.uint8), np.empty(count, np.uint8)]
    kernels.split(delta, wide)
    halves: list[kernels.Words] = [np.empty(2 * count, np.uint8), np.empty(2 * count, np.uint8)]
    plane = np.minimum(rng.geometric(0.9, count) - 1, 200).astype(np.uint8)
    few = np.where(rng.random(count) < 0.003, delta, 0).astype("<u4")
    rest, labels, narrow = np.empty(count, np.uint8), np.empty(count, np.uint8), np.empty(count, "<u2")
    steps, greater = kernels.take_exceptions(plane, 1, rest)
    small = plane & 15
    packed = kernels.pack_small(small, 4)
    sample = plane[: kernels.SAMPLE]
    counts = kernels.classify(old, 23, 116, 123, labels)
    return {
        "difference": (lambda: kernels.difference(new, old, delta), MIB),
        "zigzag": (lambda: kernels.zigzag(new, out), MIB),
        "rotate_left": (lambda: kernels.rotate_left(new, out), MIB),
        "split, fp32": (lambda: kernels.split(delta, wide), MIB),
        "split, bf16": (lambda: kernels.split(delta.view("<u2"), halves), MIB),
        "combine and add, fp32": (lambda: kernels.combine(wide, kernels.ADD, old, out), MIB),
        "combine and xor, bf16": (
            lambda: kernels.combine(halves, kernels.XOR, old.view("<u2"), out.view("<u2")),
            MIB,
        ),
        "take_exceptions, 10 %": (lambda: kernels.take_exceptions(plane, 1, rest), count),
        "take_exceptions, 0.3 %": (lambda: kernels.take_exceptions(few, 1, rest[:0]), MIB),
        "put_exceptions, 10 %": (lambda: kernels.put_exceptions(steps, greater, 1, rest), count),
        "pack_small, nibbles": (lambda: kernels.pack_small(small, 4), count),
        "unpack_small, nibbles": (lambda: kernels.unpack_small(packed, 4, rest), count),
        "survey": (lambda: kernels.survey(sample), kernels.SAMPLE),
        "survey_packed": (lambda: kernels.survey_packed(sample, 4), kernels.SAMPLE),
        "classify": (lambda: kernels.classify(old, 23, 116, 123, labels), MIB),
        "sort": (lambda: kernels.sort(delta, labels, counts, out), MIB),
        "add_unsorted": (lambda: kernels.add_unsorted(delta, labels, counts, old, out), MIB),
        "to_bfloat16": (lambda: rounding.to_bfloat16(old, narrow), MIB),
        "to_float16": (lambda: rounding.to_float16(old, narrow), MIB),
    }


def steps() -> dict[str, Case]:
    """The same for the optimizers' kernels, the digest and copies."""
    rng = np.random.default_rng(2)
    w, m, g, out = (rng.normal(0, 0.02, arithmetic.TILE).astype("<f4") for _ in range(4))
    v, nbytes = np.square(g), 4 * arithmetic.TILE
    fixed = v.copy()
    step = optim.Step(3, 1e-3, 1.0)
    rule, momentum = optim.AdamW(beta2=0.95).rule(step), optim.SGD(momentum=0.9).rule(step)
    assert isinstance(rule, adam.AdamRule)
    assert isinstance(momentum, sgd.SGDRule)
    large, target = (rng.integers(0, 256, 16 * MIB, np.uint8) for _ in range(2))
    pieces = np.arange(10_000, dtype=np.int64) * 400
    to, at, lengths = target.ctypes.data + pieces, large.ctypes.data + pieces, np.full(10_000, 400, np.int64)
    return {
        "fma, scalar": (lambda: arithmetic.fma(w, 0.375, m, out), nbytes),
        "fma, array": (lambda: arithmetic.fma(w, g, m, out), nbytes),
        "moments": (lambda: adam.moments(rule, m, v, g), nbytes),
        "second_moment": (lambda: adam.second_moment(rule, m, w, fixed, out), nbytes),
        "move": (lambda: adam.move(rule, w, m, fixed), nbytes),
        "buffered": (lambda: sgd.buffered(momentum, w, m, g), nbytes),
        "missed": (lambda: residuals.missed(w.view("<u4"), w.copy().view("<u4")), nbytes),
        "digest, 16 MiB": (lambda: digest.partial(large, 0), large.size),
        "digests of 400 bytes": (lambda: digest.partials(large[:4_000_000], [400] * 10_000), 4_000_000),
        "stream, 16 MiB": (lambda: uncached_copy.stream(large, target), large.size),
        "moves of 400 bytes": (lambda: uncached_copy.moves(to, at, lengths, 1 << 62), 4_000_000),
    }


def seconds(call: Callable[[], object]) -> float:
    """Processor time of a call."""
    began = time.process_time()
    call()
    once = max(time.process_time() - began, 1e-6)
    repeats = max(1, int(SECONDS / once))
    began = time.process_time()
    for _ in range(repeats):
        call()
    return (time.process_time() - began) / repeats


def select(form: str) -> None:
    """Use numpy, or an instruction set."""
    kernel_choice.use("numpy" if form == "numpy" else "compiled")
    if form != "numpy":
        core.select(form)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("pattern", nargs="?", default="*")
    given = parser.parse_args()
    forms = ["numpy", *core.sets()]
    table = Table(title="GB/s of one core", title_justify="left")
    for column in ("kernel", *forms):
        table.add_column(column, justify="left" if column == "kernel" else "right")
    for name, (call, nbytes) in (words() | steps()).items():
        if not fnmatch.fnmatch(name, given.pattern):
            continue
        taken: dict[str, list[float]] = {form: [] for form in forms}
        for _ in range(given.rounds):
            for form in forms:
                select(form)
                taken[form].append(seconds(call))
        table.add_row(name, *(f"{nbytes / statistics.median(taken[form]) / 1e9:.3g}" for form in forms))
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
