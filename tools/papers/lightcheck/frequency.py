"""LightCheck, Table I, Fig. 5 and 6: how often each way saves at a slowdown of 5 %, and how long recovery then takes.

On the CPU the three modes of layer-wise snapshots are: *host* (C): layers are copied to host memory; *device* (G):
copied beside the model first; *direct* (D): into a mapped region that stands for PM. *Disk* is host with its store on
the disk, so here C and disk are the same.
"""

from __future__ import annotations

from typing import Final

from tools.papers.loops import compared, shared, text_of
from tools.papers.lowdiff.overhead import LARGE, SHAPE, TINY
from tools.papers.result import Asked, Claim, Figure, Result, Table

__all__ = ["run"]

BOUND: Final = 0.05
PAPER: Final = {
    "layer-host": ("10 (C), 82 (disk)", "<= 7"),
    "layer-device": ("10 (G)", "<= 7"),
    "layer-direct": ("10 (D)", "<= 7"),
    "checkfreq": ("200", ""),
    "torch.save": ("1,100", ""),
}
"""BERT, Table I and Fig. 6."""


def run(asked: Asked) -> Result:
    """Run the experiment."""
    shape = asked.pick(TINY, SHAPE, LARGE)
    ways = [(name, 1) for name in PAPER]
    found = [one for one in shared(asked, shape, ways, asked.pick(1, 4, 12)) if not one.absent]
    intervals = {one.case.strategy: one.interval(BOUND) for one in found}
    recovery = {
        one.case.strategy: one.result["restore_s"] + intervals[one.case.strategy] / 2 * one.iteration for one in found
    }
    rows = [
        (
            *(one.label, PAPER[one.case.strategy][0], intervals[one.case.strategy], text_of(one), one.loss * 1e3),
            *(one.result["restore_s"], PAPER[one.case.strategy][1], recovery[one.case.strategy]),
        )
        for one in found
    ]
    columns = (
        *("way", "paper: iterations, BERT", "here", "slowdown at every iteration", "a save costs ms", "load s"),
        *("paper: recovery s", "recovery s"),
    )
    formats = {"a save costs ms": ".1f", "load s": ".3f", "recovery s": ".3f"}
    layered = [name for name in intervals if name.startswith("layer")]
    best = min(layered, key=lambda name: intervals[name])
    return Result(
        tables=[Table(f"Iterations between saves at a slowdown of at most {BOUND:.0%}", columns, rows, formats)],
        claims=[
            Claim(
                "layer-wise saving is more than 10 times as frequent as CheckFreq",
                "10 against 200",
                f"{best} {intervals[best]}, CheckFreq {intervals['checkfreq']}, torch.save {intervals['torch.save']}",
                intervals["checkfreq"] >= 10 * intervals[best],
                "CheckFreq-like saving is cheap here: the state is small and the copy overlaps with a forward and "
                "backward pass on the other core"
                if intervals["checkfreq"] < 10 * intervals[best]
                else "",
            ),
            Claim(
                "LightCheck saves every iteration (small models)",
                "1 (ResNet-18)",
                str(intervals[best]),
                intervals[best] == 1,
                "an iteration here is short beside a copy of the state: 1,024 tokens on one core",
            ),
            Claim(
                "recovery takes less than with CheckFreq and torch.save",
                "<= 7 s, lowest",
                ", ".join(f"{name} {recovery[name]:.2f} s" for name in (best, "checkfreq", "torch.save")),
                recovery[best] < min(recovery["checkfreq"], recovery["torch.save"]),
                "half an interval is little to repeat where an iteration takes a tenth of a second",
            ),
        ],
        figures=[
            Figure(
                f"Iterations between saves at {BOUND:.0%} (Table I)",
                "bars",
                [one.label for one in found],
                {"here": [float(intervals[one.case.strategy]) for one in found]},
                log="y",
            ),
            Figure(
                "Slowdown at a save every iteration (Fig. 5)",
                "bars",
                [one.label for one in found],
                {"here": [one.overhead for one in found]},
                limit=BOUND,
            ),
            Figure(
                "Time to recover (Fig. 6)",
                "bars",
                [one.label for one in found],
                {"here": [recovery[one.case.strategy] for one in found]},
                y="s",
            ),
        ],
        compared=compared(found),
        settings={"shape": shape, "bound": BOUND},
        numbers={"ways": [one.numbers() for one in found]},
    )
