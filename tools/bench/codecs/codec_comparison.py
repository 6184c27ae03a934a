"""Compare the codecs with those of other libraries, on tensors of real training.

    python -m tools.bench.codecs                     all cases: a quarter of an hour on an idle machine
    python -m tools.bench.codecs --only 'delta/*bf16*' --rounds 3
    CKPTSTORE_KERNELS=numpy python -m tools.bench.codecs --methods '[dxpZ]*'    the same without compiled kernels

Prints a table for each case, then the project's promises for its codecs and whether they held, and writes everything to
``bench-out/codecs.json`` and ``codecs.png``. The trajectories are trained on first use (five minutes) and kept in
``.cache``. ``python -m tools.bench.codecs.codec_report bench-out/codecs.json`` prints the tables of the docs.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import statistics
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ckptstore.formats import codecs, kernel_choice
from tools.bench import machine
from tools.bench.codecs import codec_report
from tools.bench.codecs.codec_cases import CASES, Case, Part, load
from tools.bench.codecs.codec_methods import Method, Ours, others, ours

PREFIX_BITS = range(7, 13)


def measure(methods: Sequence[Method], parts: Sequence[Part], rounds: int) -> list[dict[str, Any]]:
    """Sizes, and medians of one core's processor time; every decoded byte is compared.

    The methods take turns, so that a busy or throttled machine slows all of them alike; slow ones run once.
    """
    logical = sum(len(part.data) for part in parts)
    payloads = {method.label: checked(method, parts) for method in methods}
    scratch: dict[str, dict[str, np.ndarray]] = {method.label: {} for method in methods}

    def encode(method: Method) -> None:
        for part in parts:
            method.encode(part, scratch[method.label])

    def decode(method: Method) -> None:
        for payload, part in zip(payloads[method.label], parts, strict=True):
            method.decode(payload, part, scratch[method.label])

    seconds: dict[tuple[str, str], list[float]] = {}
    for turn in range(rounds):
        for method in methods:
            if not (turn and method.slow):
                for name, work in (("encode", encode), ("decode", decode)):
                    seconds.setdefault((method.label, name), []).append(_processor_time(lambda w=work, m=method: w(m)))
    rows = []
    for method in methods:
        stored = sum(map(len, payloads[method.label]))
        rates = {name: logical / statistics.median(seconds[method.label, name]) for name in ("encode", "decode")}
        ratio = logical / stored if stored else None
        rows.append({"method": method.label, "ratio": ratio, "stored": stored, **rates})
    return rows


def checked(method: Method, parts: Sequence[Part]) -> list[bytes]:
    """The parts' payloads, after decoding them and comparing every byte."""
    scratch: dict[str, np.ndarray] = {}
    payloads = [bytes(method.encode(part, scratch)) for part in parts]
    for payload, part in zip(payloads, parts, strict=True):
        before = zlib.crc32(part.data)
        if method.decode(payload, part, scratch).tobytes() != part.data.tobytes():
            raise AssertionError(f"{method.label} does not return its input")
        assert zlib.crc32(part.data) == before, f"{method.label} changed its input"
    return payloads


def measure_cores(method: Method, parts: Sequence[Part], rounds: int, cores: int) -> dict[str, float]:
    """Wall-clock rates with the chunks spread over all cores: the best of several rounds."""
    jobs = [part for part in parts for _ in range(max(1, 2 * cores * (4 << 20) // sum(len(p.data) for p in parts)))]
    logical = sum(len(part.data) for part in jobs)
    local: dict[int, dict[str, np.ndarray]] = {}

    def scratch() -> dict[str, np.ndarray]:
        return local.setdefault(threading.get_ident(), {})

    payloads = {id(part): bytes(method.encode(part, {})) for part in parts}
    rates: dict[str, float] = {}
    with ThreadPoolExecutor(cores) as pool:
        for name, job in (
            ("encode_all", lambda part: method.encode(part, scratch())),
            ("decode_all", lambda part: method.decode(payloads[id(part)], part, scratch())),
        ):
            seconds = []
            for _ in range(rounds + 1):
                began = time.perf_counter()
                list(pool.map(job, jobs))
                seconds.append(time.perf_counter() - began)
            rates[name] = logical / min(seconds)
    return rates


def _processor_time(work: Callable[[], object]) -> float:
    """Processor time of all threads (a library may start several even when set to use one)."""
    began = time.process_time()
    work()
    return time.process_time() - began


def bounds(case: Case, parts: Sequence[Part], context: codecs.Context | None) -> dict[str, float]:
    """Order-0 entropy of the byte planes, bits per word: unchanged, XORed, as integer differences, and as differences
    with a histogram for every class of the base. Histograms are of 64 Ki words; the last one's of a block, as encoded.
    """
    word = codecs.word_size(case.dtype)
    total = sum(len(part.data) // word for part in parts)
    found = {"raw": 0.0} | ({"xor": 0.0, "sub": 0.0} if case.gap else {}) | ({"context": 0.0} if context else {})
    for part in parts:
        new = part.data.view(f"<u{word}")
        share = len(new) / total
        found["raw"] += share * codecs.plane_entropy(new)
        if part.base is not None:
            base = part.base.view(new.dtype)
            found["xor"] += share * codecs.plane_entropy(new ^ base)
            found["sub"] += share * codecs.difference_entropy(new, base)
            if context:
                found["context"] += share * codecs.context_entropy(new, base, context, codecs.BLOCK // word)
    return found


def prefixes(parts: Sequence[Part]) -> dict[str, Any]:
    """Figures 7 and 8 of the paper: distinct prefixes by length, and the savings of dictionaries of them."""
    words = np.concatenate([part.data.view("<u4") for part in parts])
    logical = words.nbytes

    def ratio(codec: codecs.Codec) -> float:
        return logical / sum(len(codecs.encode(codec, part.data)) for part in parts)

    return {
        "distinct": {bits: codecs.distinct_prefixes(words, bits) for bits in PREFIX_BITS},
        "ratio": {
            group: {bits: ratio(codecs.Prefix(4, bits, group)) for bits in PREFIX_BITS}
            for group in (0, 256, 1024, 4096)
        },
        "planes": ratio(codecs.Planes(4, "rotate")),
    }


def run(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Run everything about one case."""
    parts = load(case, options.limit)
    found, missing = others(case)
    methods = [m for m in [*ours(case, parts), *found] if fnmatch.fnmatch(m.label, options.methods)]
    rows = measure(methods, parts, options.rounds)
    for method, row in zip(methods, rows, strict=True):
        if not method.slow and not options.one_core:
            row.update(measure_cores(method, parts, options.rounds, os.cpu_count() or 1))
    result = {
        "case": name_of(case),
        "label": case.label,
        "dtype": case.dtype,
        "gap": case.gap,
        "nbytes": sum(len(part.data) for part in parts),
        "chunks": len(parts),
        "bound": bounds(case, parts, context_of(methods)),
        "rows": rows,
        "missing": missing,
    }
    if case.prefix.startswith("exp_avg") and not case.gap:
        result["prefixes"] = prefixes(parts)
    return result


def context_of(methods: Sequence[Method]) -> codecs.Context | None:
    """The context that the case's ``sub`` was given, if any."""
    tried = [method.codec for method in methods if isinstance(method, Ours)]
    return next((codec.context for codec in tried if isinstance(codec, codecs.Sub) and codec.context), None)


def name_of(case: Case) -> str:
    """The name that ``--only`` matches."""
    return f"{case.group}/{case.label}" + (f"/{case.gap}" if case.gap else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="glob over case names")
    parser.add_argument("--methods", default="*", help="glob over methods")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--limit", type=lambda text: int(float(text) * 1e6), default=None, metavar="MB", help="per case"
    )
    parser.add_argument("--one-core", action="store_true", help="skip the rates on all cores")
    parser.add_argument("--out", type=Path, default=Path("bench-out"))
    options = parser.parse_args()
    results = []
    options.out.mkdir(parents=True, exist_ok=True)
    for case in CASES:
        if fnmatch.fnmatch(name_of(case), options.only):
            results.append(run(case, options))
            codec_report.show(results[-1])
    report = {
        "machine": machine.describe(options.out),
        "versions": {package: machine._version(package) for package in ("zipnn", "blosc2", "lz4", "pcodec")},
        "rounds": options.rounds,
        "kernels": kernel_choice.kind(),
        "cases": results,
        "promises": codec_report.promises(results),
    }
    codec_report.show_promises(report["promises"])
    (options.out / "codecs.json").write_text(json.dumps(report, indent=1))
    codec_report.draw(results, options.out / "codecs.png")


if __name__ == "__main__":
    main()
