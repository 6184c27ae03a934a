"""The XOR paper, section 3.4: checkpoint K is the delta against K - T: bytes against what a restore reads.

The states are those of the demo's language model, one checkpoint an iteration (`tools.bench.codecs.chains`), with no
limit on chains, so that the interval alone decides.
"""

from __future__ import annotations

from tools.bench.codecs.chains import table
from tools.papers.result import Asked, Claim, Compared, Figure, Result, Table

__all__ = ["run"]


def run(asked: Asked) -> Result:
    """Run the experiment."""
    steps, width = asked.pick((8, 32), (40, 64), (200, 96))
    found = table(steps, 1000.0, width, asked.scratch, threads=1)
    rows = [
        (
            *(row.strategy, row.stored / 1e6, row.bits_per_parameter, row.longest_chain),
            *(row.worst_bytes / 1e6, row.worst_seconds, row.fulls),
        )
        for row in found
    ]
    columns = ("strategy", "stored MB", "bits/parameter", "longest chain", "restore MB", "restore s", "fulls")
    by = {row.strategy: row for row in found}
    dense, wide = by["T = 1"], by["T = 10"]
    fixed = [row for row in found if row.strategy.startswith("T = ") and "paper" not in row.strategy]
    names = [int(row.strategy.removeprefix("T = ")) for row in fixed]
    return Result(
        tables=[
            Table(f"{steps} checkpoints", columns, rows, dict.fromkeys(columns[1:], ".1f") | {"restore s": ".3f"}),
        ],
        claims=[
            Claim(
                "a longer interval T lets a restore read fewer deltas",
                "1/T of them",
                f"T = 1: {dense.longest_chain} deltas, T = 10: {wide.longest_chain}",
                wide.longest_chain < dense.longest_chain,
                "a chain is cut, too, where a full is smaller than a delta",
            ),
            Claim(
                "at the cost of a lower ratio",
                "lower",
                f"{dense.bits_per_parameter:.1f} -> {wide.bits_per_parameter:.1f} bits per parameter",
                wide.stored > dense.stored,
                "early in training the weights change so much from step to step that the gap hardly counts",
            ),
            Claim(
                "an interval that follows the measured ratio is as good as the best fixed one (ours)",
                "-",
                f"auto {by['auto'].stored / 1e6:.1f} MB, best fixed {min(row.stored for row in fixed) / 1e6:.1f} MB",
                by["auto"].stored <= 1.1 * min(row.stored for row in fixed),
                "auto also keeps restores short",
            ),
        ],
        figures=[
            Figure(
                "Interval T",
                "lines",
                names,
                {
                    "stored MB": [row.stored / 1e6 for row in fixed],
                    "MB that the most expensive restore reads": [row.worst_bytes / 1e6 for row in fixed],
                },
                x="T",
                log="x",
            )
        ],
        compared=[Compared("the checkpoint with the most expensive restore, by strategy", len(found), len(found))],
        remarks=[
            "A restored checkpoint that differs from the one stored as a full ends this experiment with an error."
        ],
        settings={"steps": steps, "width": width},
    )
