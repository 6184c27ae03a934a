"""LightCheck, Table II and Fig. 9: total training time with failures, and by their frequency."""

from __future__ import annotations

from typing import Final

from tools.bench.training.training_cases import environment
from tools.papers.lives import Life, Way, lived, moments
from tools.papers.result import Asked, Claim, Compared, Figure, Result, Table
from tools.warm import MODULES, Warm

__all__ = ["run"]

WAYS: Final = (
    Way("layer-host", 2, "layer-wise, every 2"),
    Way("checkfreq", 10, "CheckFreq-like, every 10"),
    Way("torch.save", 30, "torch.save, every 30"),
)
"""Intervals in the order of the paper's Table I, scaled."""
PAPER: Final = {"layer-wise, every 2": 514.8, "CheckFreq-like, every 10": 537.5, "torch.save, every 30": 598.6}
PAPER_IDEAL: Final = 501.3
"""Hours for BERT, an MTBF of one hour."""
SHAPE: Final = (128, 6, 8, 64)


def run(asked: Asked) -> Result:
    """Run the experiment."""
    steps = asked.pick(8, 60, 300)
    mtbfs = asked.pick((8,), (60, 20), (160, 80, 40, 20))
    shape = asked.pick((32, 2, 1, 16), SHAPE, SHAPE)
    lives: dict[tuple[str, int], Life] = {}
    with Warm(MODULES, env=environment()) as warm:
        ideal = lived(warm, Way("none", 1, "none"), shape, steps, (), asked.scratch / "none")
        for mtbf in mtbfs:
            kills = moments(mtbf, asked.seed * 1000 + mtbf, 20 * steps)
            for way in WAYS:
                life = lived(warm, way, shape, steps, kills, asked.scratch / f"{mtbf}-{way.strategy}")
                lives[way.label, mtbf] = life
                asked.told(f"MTBF {mtbf}, {way.label}: {life.seconds:.1f} s, {life.failures} failures")
    rows = [
        (
            *(f"MTBF {mtbf}", label, PAPER[label] / PAPER_IDEAL, life.seconds / ideal.seconds, life.seconds),
            *(life.failures, life.lost),
        )
        for (label, mtbf), life in lives.items()
    ]
    columns = (
        *("iterations between failures", "way", "paper: BERT, MTBF 1 h, of ideal", "of ideal", "s"),
        *("failures", "iterations lost"),
    )
    formats = {columns[2]: ".3f", "of ideal": ".3f", "s": ".2f"}
    labels, last = [way.label for way in WAYS], mtbfs[-1]
    total = {key: life.seconds / ideal.seconds for key, life in lives.items()}
    best = min(labels, key=lambda label: total[label, last])
    return Result(
        tables=[Table(f"Total time of {steps} iterations", columns, rows, formats)],
        claims=[
            Claim(
                "with failures LightCheck trains faster than CheckFreq, and CheckFreq than torch.save",
                "1.03, 1.07, 1.19 of ideal",
                ", ".join(f"{label} {total[label, last]:.2f}" for label in labels),
                best == labels[0],
                "a layer-wise save every second iteration costs more than the few repeated iterations that it saves, "
                "where an iteration takes a twentieth of a second"
                if best != labels[0]
                else "",
            ),
            Claim(
                "LightCheck loses the fewest iterations",
                "fewest",
                ", ".join(f"{label} {lives[label, last].lost}" for label in labels),
                lives[labels[0], last].lost == min(lives[label, last].lost for label in labels),
                "a failure can hit before the newest save is durable",
            ),
        ],
        figures=[
            Figure(
                "Total time by the time between failures (Fig. 9)",
                "lines",
                list(mtbfs),
                {label: [total[label, mtbf] for mtbf in mtbfs] for label in labels},
                x="iterations between failures",
                y="of training without failures",
                limit=1.0,
            )
        ],
        compared=[
            Compared(
                "states restored after a failure",
                sum(life.restored for life in lives.values()),
                sum(life.equal for life in lives.values()),
            ),
            Compared(
                "the last state of each run under failures, with that of a run without",
                len(lives),
                sum(life.digest == ideal.digest for life in lives.values()),
            ),
        ],
        remarks=["The start of a process is left out: it is the same for all ways."],
        settings={"steps": steps, "mtbf_iterations": list(mtbfs), "shape": shape, "ways": [repr(way) for way in WAYS]},
        numbers={"ideal_s": ideal.seconds, "lives": [life.numbers() | {"mtbf": key[1]} for key, life in lives.items()]},
    )
