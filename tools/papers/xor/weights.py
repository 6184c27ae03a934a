"""The XOR paper, Fig. 3 and 6: how far the exclusive or of adjacent checkpoints' weights compresses, and how this
changes during training.

A ratio is raw bytes over stored bytes. *XOR, gzip*: the exclusive or under gzip. *XOR*: the store's codec, which codes
the exclusive or's byte planes. *difference*: the store's other delta, the integer difference of the bits.
"""

from __future__ import annotations

import statistics

from tools.papers.result import Asked, Cell, Claim, Compared, Figure, Result, Table
from tools.papers.xor.states import NAMES, analyzed, exact, pairs, ratios, xor_gzip

__all__ = ["over_training", "run"]

KIND = "weight"
METHODS = ("gzip", "zstd", "xor", "sub")
COLUMNS = ("gzip", "zstd", "xor", "sub")


def run(asked: Asked) -> Result:
    """Fig. 3: ratios of weights, by model."""
    rows: list[tuple[Cell, ...]] = [("paper, four models", None, "<= 1.1", None, None, "1.3-3.23", None)]
    best, general, equal, states = [], [], 0, 0
    for name, label in NAMES.items():
        found = list(pairs(asked, name))
        for gap in (1, 10):
            those = [pair for pair in found if pair.gap == gap]
            measured = [ratios(analyzed(pair, METHODS)) for pair in those]
            mean = {way: statistics.fmean(one[KIND, way] for one in measured) for way in COLUMNS}
            packed = statistics.fmean(xor_gzip(pair, "model") for pair in those)
            equal += sum(exact(asked, pair, "model") for pair in those)
            states += len(those)
            rows.append((label, gap, mean["gzip"], mean["zstd"], packed, mean["xor"], mean["sub"]))
            best += [mean["xor"]] if gap == 1 else []
            if name != "bf16":
                general.append(mean["gzip"])
    columns = ("model", "steps between", "gzip", "zstd-3", "XOR, gzip", "XOR", "difference")
    adjacent = [row for row in rows if row[1] == 1]
    return Result(
        tables=[Table("Raw bytes over stored bytes, weights", columns, rows, dict.fromkeys(columns[2:], ".2f"))],
        claims=[
            Claim(
                "the delta of weights compresses by 1.3 to 3.23",
                "1.3-3.23",
                f"{min(best):.2f}-{max(best):.2f}",
                min(best) >= 1.3,
                "early in training, and between states further apart, weights change in more bits"
                if min(best) < 1.3
                else "",
            ),
            Claim(
                "gzip reaches 1.1 at most (fp32)", "<= 1.1", f"{max(general):.2f}", max(general) <= 1.12, "fp32 weights"
            ),
            Claim(
                "the integer difference is smaller than the exclusive or (ours)",
                "-",
                ", ".join(f"{row[6]:.2f} / {row[5]:.2f}" for row in adjacent),
                all(float(row[6] or 0) > float(row[5] or 0) for row in adjacent),
                "where weights hardly change, an exclusive or has more zeros",
                "the store chooses between the two per tensor, by sampling",
            ),
        ],
        figures=[
            Figure(
                "Ratio of weights between adjacent steps",
                "bars",
                [str(row[0]) for row in adjacent],
                {
                    column: [float(row[place] or 0) for row in adjacent]
                    for place, column in ((2, "gzip"), (4, "XOR, gzip"), (5, "XOR"), (6, "difference"))
                },
                y="raw / stored",
                limit=1.3,
            )
        ],
        compared=[Compared("states restored from a store of exclusive ors", states, equal)],
        remarks=["Means over the phases of training. bf16: the weights that the model computes with."],
        settings={"trajectories": [asked.pick("small-", "small-", "") + name for name in NAMES]},
    )


def over_training(asked: Asked) -> Result:
    """Fig. 6: the ratio as training goes on."""
    series: dict[str, dict[int, float]] = {}
    equal, states = 0, 0
    for name in ("lm", "cnn"):
        for pair in pairs(asked, name):
            label = f"{NAMES[name]}, {pair.gap} {'step' if pair.gap == 1 else 'steps'}"
            series.setdefault(label, {})[pair.step] = ratios(analyzed(pair, ("xor",)))[KIND, "xor"]
            equal += exact(asked, pair, "model")
            states += 1
    steps = sorted({step for values in series.values() for step in values})
    rows = [(step, *(values.get(step) for values in series.values())) for step in steps]
    columns = ("after step", *series)
    rising = {label: list(values.values()) for label, values in series.items()}
    return Result(
        tables=[Table("XOR ratio of weights during training", columns, rows, dict.fromkeys(columns[1:], ".2f"))],
        claims=[
            Claim(
                "the ratio becomes steady and stays high as training goes on",
                "steady, high",
                "; ".join(f"{label}: {values[0]:.2f} to {values[-1]:.2f}" for label, values in rising.items()),
                all(values[-1] >= 0.95 * values[0] for values in rising.values()),
                "the learning rate falls, so weights change less; these short runs do not reach a plateau",
            )
        ],
        figures=[
            Figure(
                "XOR ratio of weights during training",
                "lines",
                steps,
                {label: [values.get(step) for step in steps] for label, values in series.items()},
                x="step",
                y="raw / stored",
            )
        ],
        compared=[Compared("states restored from a store of exclusive ors", states, equal)],
        settings={"trajectories": [asked.pick("small-", "small-", "") + name for name in ("lm", "cnn")]},
    )
