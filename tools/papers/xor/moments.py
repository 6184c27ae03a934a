"""The XOR paper, Fig. 7 and 8: distinct prefixes of moments by length, and what coding them by a dictionary saves."""

from __future__ import annotations

import numpy as np

from ckptstore.analysis.analysis import Analysis
from tools.papers.result import Asked, Cell, Claim, Compared, Figure, Result, Table
from tools.papers.xor.similarity import ratio
from tools.papers.xor.states import NAMES, Pair, analyzed, exact, pairs, ratios

__all__ = ["prefixes", "run"]

PARTS = {"first_moment": ("exp_avg", "momentum"), "second_moment": ("exp_avg_sq",)}
"""Class of moments -> what a trajectory may call them."""
BITS = range(7, 13)


def _latest(asked: Asked, name: str) -> Pair:
    return max((pair for pair in pairs(asked, name) if pair.gap == 1), key=lambda pair: pair.step)


def _moments(found: Analysis) -> list[int]:
    return [number for number, group in enumerate(found.groups) if group.kind in PARTS]


def prefixes(asked: Asked) -> Result:
    """Fig. 7: distinct prefixes by their length."""
    rows: list[tuple[Cell, ...]] = [("paper: ConvNeXt_Big, moments", 28, None, 101, None, None, None)]
    series: dict[str, list[float | None]] = {"paper: ConvNeXt_Big": [28, None, 101, None, None, None]}
    equal = states = 0
    for name, label in NAMES.items():
        pair = _latest(asked, name)
        found = analyzed(pair, ("prefix",))
        for number in _moments(found):
            counts = {one.bits: one.distinct for one in found.prefixes if one.group == number and one.index == 1}
            kind = found.groups[number].kind
            text = f"{label}, {kind.replace('_', ' ')}"
            rows.append((text, *(counts[bits] for bits in BITS)))
            series[text] = [float(counts[bits]) for bits in BITS]
            equal += exact(asked, pair, _part(pair, kind))
            states += 1
    most = {text: values for text, values in series.items() if not text.startswith("paper")}
    return Result(
        tables=[Table("Distinct prefixes of moments", ("moments", *(f"{bits} bits" for bits in BITS)), rows)],
        claims=[
            Claim(
                "moments have few distinct prefixes: 28 of 7 bits, 101 of 9",
                "28 -> 101",
                "; ".join(f"{text}: {values[0]:.0f} -> {values[2]:.0f}" for text, values in most.items()),
                all(float(values[2] or 0) <= 256 for values in most.values()),
                "these moments differ more",
                "128 and 512 are possible",
            )
        ],
        figures=[Figure("Distinct prefixes of moments", "lines", list(BITS), series, x="bits", log="y")],
        compared=[Compared("moments restored from a store", states, equal)],
        settings={"states": "the last of each trajectory"},
    )


def _part(pair: Pair, kind: str) -> str:
    """What the trajectory calls its moments."""
    return next(part for part in PARTS[kind] if pair.trajectory.load(pair.step + pair.gap, f"{part}."))


def _by_similarity(pair: Pair, part: str) -> float:
    images = pair.trajectory.load(pair.step + pair.gap, f"{part}.").values()
    return ratio(np.concatenate([one.reshape(-1).view(np.uint32) for one in images]))


def run(asked: Asked) -> Result:
    """Fig. 8: the ratio of prefix coding, by model."""
    rows: list[tuple[Cell, ...]] = [("paper, best model", None, 1.22, None, None, None, None)]
    equal = states = 0
    for name, label in NAMES.items():
        pair = _latest(asked, name)
        found = analyzed(pair, ("gzip", "prefix", "prefix-grouped", "planes"))
        by = ratios(found)
        for number in _moments(found):
            kind = found.groups[number].kind
            rows.append(
                (
                    f"{label}, {kind.replace('_', ' ')}",
                    *(by.get((kind, way)) for way in ("gzip", "prefix", "prefix-grouped")),
                    _by_similarity(pair, _part(pair, kind)),
                    by.get((kind, "planes")),
                    by.get((kind, "xor")),
                )
            )
            equal += exact(asked, pair, _part(pair, kind))
            states += 1
    mine = rows[1:]
    best = max(float(row[3] or 0) for row in mine)
    planes = all(float(row[5] or 0) >= float(row[3] or 0) for row in mine)
    alike = [float(row[4] or 0) / float(row[5] or 1) - 1 for row in mine]
    columns = (
        *("moments", "gzip", "prefixes", "prefixes, grouped", "grouped by similarity (counted)"),
        *("byte planes (ours)", "XOR, 1 step"),
    )
    return Result(
        tables=[Table("Raw bytes over stored bytes", columns, rows, dict.fromkeys(columns[1:], ".3f"))],
        claims=[
            Claim(
                "moments compress by up to 1.22",
                "<= 1.22",
                f"{best:.2f}",
                best >= 1.1,
                "these moments are less alike",
                "an index of 5 to 7 bits takes the place of 9 bits",
            ),
            Claim(
                "byte planes with a Huffman code are at least as small (ours)",
                "-",
                ", ".join(f"{float(row[5] or 0):.2f} / {float(row[3] or 0):.2f}" for row in mine),
                planes,
                "prefixes are smaller on some of these moments",
                "the store's own policy uses planes; `Policy(by_class=...)` chooses prefixes",
            ),
            Claim(
                "groups of similar prefixes are smaller than groups of consecutive numbers",
                "they reduce the moments further",
                ", ".join(f"{float(row[3] or 0):.3f} -> {float(row[4] or 0):.3f}" for row in mine),
                all(float(row[4] or 0) > float(row[3] or 0) for row in mine),
                "these moments do not differ enough from place to place",
                f"Byte planes are still smaller, or as small: such groups save {min(alike):+.1%} to {max(alike):+.1%} "
                "beside them. So no codec of the format groups by similarity",
            ),
        ],
        figures=[
            Figure(
                "Ratio of moments",
                "bars",
                [str(row[0]).replace(", ", "\n") for row in mine],
                {columns[place]: [float(row[place] or 0) for row in mine] for place in (1, 2, 3, 4, 5)},
                limit=1.22,
                y="raw / stored",
            )
        ],
        compared=[Compared("moments restored from a store", states, equal)],
        settings={"states": "the last of each trajectory"},
    )
