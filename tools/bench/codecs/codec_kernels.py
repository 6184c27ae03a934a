"""Compare the hot kernels of the codecs in numpy and compiled, one at a time.

    python -m tools.bench.codecs.codec_kernels

Each kernel processes 1 MiB of words (a block) as in ``sub``; times are medians of processor time, the forms in turn.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
from rich.console import Console
from rich.table import Table

from ckptstore.formats import codecs, kernel_choice
from ckptstore.formats.codecs import kernels, rounding

ROUNDS = 15
REPEATS = 8


def cases() -> dict[str, Callable[[], object]]:
    """Name -> a call of the kernel on a block."""
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
    rest, labels, narrow = np.empty(count, np.uint8), np.empty(count, np.uint8), np.empty(count, "<u2")
    steps, greater = kernels.take_exceptions(plane, 1, rest)
    small = plane & 15
    packed = kernels.pack_small(small, 4)
    sample = plane[: kernels.SAMPLE]
    counts = kernels.classify(old, 23, 116, 123, labels)
    return {
        "difference": lambda: kernels.difference(new, old, delta),
        "rotate_left": lambda: kernels.rotate_left(new, out),
        "split, fp32": lambda: kernels.split(delta, wide),
        "split, bf16": lambda: kernels.split(delta.view("<u2"), halves),
        "combine and add, fp32": lambda: kernels.combine(wide, kernels.ADD, old, out),
        "combine and xor, bf16": lambda: kernels.combine(halves, kernels.XOR, old.view("<u2"), out.view("<u2")),
        "take_exceptions, 10 %": lambda: kernels.take_exceptions(plane, 1, rest),
        "put_exceptions, 10 %": lambda: kernels.put_exceptions(steps, greater, 1, rest),
        "pack_small, nibbles": lambda: kernels.pack_small(small, 4),
        "unpack_small, nibbles": lambda: kernels.unpack_small(packed, 4, rest),
        "survey of a sample": lambda: (kernels.survey(sample), kernels.survey_packed(sample, 4)),
        "classify": lambda: kernels.classify(old, 23, 116, 123, labels),
        "sort": lambda: kernels.sort(delta, labels, counts, out),
        "add_unsorted": lambda: kernels.add_unsorted(delta, labels, counts, old, out),
        "to_bfloat16": lambda: rounding.to_bfloat16(old, narrow),
        "to_float16": lambda: rounding.to_float16(old, narrow),
    }


def seconds(call: Callable[[], object]) -> float:
    """Processor time of a call."""
    began = time.process_time()
    for _ in range(REPEATS):
        call()
    return (time.process_time() - began) / REPEATS


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    table = Table(title="Kernels on 1 MiB", title_justify="left")
    for column in ("kernel", "numpy, us", "compiled, us", "times as fast"):
        table.add_column(column, justify="left" if column == "kernel" else "right")
    began = time.perf_counter()
    kernel_choice.use("compiled")
    found = cases()
    for call in found.values():
        call()
    ready = time.perf_counter() - began
    for name, call in found.items():
        taken: dict[str, list[float]] = {kind: [] for kind in kernel_choice.KINDS}
        for _ in range(ROUNDS):
            for kind in kernel_choice.KINDS:
                kernel_choice.use(kind)
                taken[kind].append(seconds(call))
        slow, fast = (1e6 * statistics.median(taken[kind]) for kind in kernel_choice.KINDS)
        table.add_row(name, f"{slow:.0f}", f"{fast:.0f}", f"{slow / fast:.1f}")
    Console(width=100).print(table)
    print(f"import of numba, compiling (or fetching from its cache) and the first calls: {ready:.2f} s")


if __name__ == "__main__":
    main()
