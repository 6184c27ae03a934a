"""PCcheck, Fig. 8, 10, 12, 13 and 14: throughput of a loop that saves every f iterations."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final
from unittest import mock

from tools.crash.media import obstacle
from tools.papers.limited_disk import Disk
from tools.papers.pccheck.measuring import (
    ITERATIONS_A_COPY,
    ITERATIONS_A_SAVE,
    ONE_STREAM,
    SHAPE,
    Cost,
    compared,
    disk_like_the_papers,
    measured,
    planned,
)
from tools.papers.result import Asked, Cell, Claim, Figure, Result, Table

__all__ = ["Measured", "chunks", "concurrent", "frequencies", "measured_frequencies", "pmem", "threads"]

LARGE: Final = (320, 6, 1, 8)
"""7.5 million parameters, 90 MB of state: six blocks of 16 MiB, which threads write at the same time."""
LARGE_BYTES: Final = 89_800_000
LIMITED: Final = (
    f"The disk is limited: one stream takes {ITERATIONS_A_SAVE:.0f} iterations for a checkpoint, as the paper's disk "
    f"did for OPT-1.3B, and gets {ONE_STREAM:.0%} of what many streams get, as for VGG16. The link to Gemini's peer "
    f"takes {ITERATIONS_A_COPY} iterations, as 15 Gbit/s did for OPT-1.3B."
)


@dataclass(slots=True)
class Measured:
    """What Fig. 8 and 9 share.

    Attributes:
        limited, free: costs on the limited disk, and on this disk as it is.
        iteration: seconds without saves.
        disk: the limit.
    """

    limited: list[Cost]
    free: list[Cost]
    iteration: float
    disk: Disk


_known: dict[bool, Measured] = {}


def measured_frequencies(asked: Asked) -> Measured:
    """Measure once in this process."""
    if asked.short not in _known:
        intervals = (1, 10, 25) if asked.short else (1, 10, 25, 50, 100)
        names = ("checkfreq", "gpm", "gemini", "ckptstore-4", "topk")
        names = names if asked.short else (*names, "torch.save", "dcp-async", "ckptstore-1", "ckptstore-2")
        rounds = asked.pick(1, 1, 3)
        with planned(asked) as plan:
            plain, iteration = measured(asked, plan, [("checkfreq", 10)], 1)
            disk = disk_like_the_papers(iteration)
            # Step diffs hold every iteration, whatever the interval.
            ways = [(name, f) for f in intervals for name in names if name != "topk" or f == 1]
            limited, iteration = measured(asked, plan, ways, rounds, disk)
            free = [("checkfreq", 1), ("gpm", 1), ("ckptstore-4", 1)]
            free = free if asked.short else [(name, f) for f in (1, 10) for name in names if name != "topk" or f == 1]
            plain, _ = measured(asked, plan, free, rounds)
        _known[asked.short] = Measured(limited, plain, iteration, disk)
    return _known[asked.short]


def frequencies(asked: Asked) -> Result:
    """Fig. 8."""
    found = measured_frequencies(asked)
    at = {(one.strategy, one.interval): one for one in found.limited if one.slowdowns}
    often = at["ckptstore-4", 10].slowdown
    checkfreq = at["checkfreq", 10].slowdown
    return Result(
        tables=[
            _table("Slowdown on the limited disk", found.limited),
            _table("Slowdown on this disk as it is", found.free),
        ],
        claims=[
            Claim(
                "OPT-1.3B every 10 iterations: throughput of PCcheck by CheckFreq's",
                "0.5 by 0.256 a second: 1.95",
                f"{checkfreq / often:.2f}",
                checkfreq / often > 1.5,
                "" if checkfreq / often > 1.5 else _CORES,
            ),
            Claim(
                "several saves in flight slow a loop that saves every 10 iterations by less than 5 %",
                "1.02 (OPT-1.3B, every 50)",
                f"{often:.2f} every 10, {at['ckptstore-4', 25].slowdown:.2f} every 25",
                often < 1.05,
                "" if often < 1.05 else _CORES,
            ),
            Claim(
                "GPM, which stalls, falls behind CheckFreq where saves are rare",
                "1.9 against 1.17 (OPT-1.3B, every 50)",
                f"{at['gpm', 25].slowdown:.2f} against {at['checkfreq', 25].slowdown:.2f}, every 25",
                at["gpm", 25].slowdown > at["checkfreq", 25].slowdown,
                "" if at["gpm", 25].slowdown > at["checkfreq", 25].slowdown else _CORES,
            ),
        ],
        figures=[_lines("Throughput by interval, limited disk (1: no saves)", found.limited, inverse=True)],
        compared=[compared(found.limited + found.free)],
        remarks=[
            LIMITED,
            "Step diffs are LowDiff's way, with gradients compressed to 1 %: every iteration can be restored.",
        ],
        settings={"shape": SHAPE, "iteration_s": found.iteration, "disk": [found.disk.rate, found.disk.stream]},
        numbers={"limited": [one.numbers() for one in found.limited], "free": [one.numbers() for one in found.free]},
    )


_CORES: Final = "One core trains and one saves; the paper's machine had 12 and a GPU."


def _table(title: str, found: Sequence[Cost]) -> Table:
    intervals = sorted({one.interval for one in found})
    names = list(dict.fromkeys(one.strategy for one in found))
    at = {(one.strategy, one.interval): one for one in found}
    rows: list[list[Cell]] = []
    for name in names:
        own = [at.get((name, interval)) for interval in intervals]
        last = next(one for one in reversed(own) if one is not None)
        slow: list[Cell] = [one.slowdown if one is not None and one.slowdowns else None for one in own]
        ms: list[Cell] = [1e3 * last.median(key) if last.samples else None for key in ("durable_s", "restore_s")]
        rows.append([last.label, *slow, *ms])
    heads = ("way", *(f"every {interval}" for interval in intervals), "durable ms", "restore ms")
    return Table(title, heads, rows, dict.fromkeys(heads[1:-2], ".2f") | dict.fromkeys(heads[-2:], ".0f"))


def _lines(title: str, found: Sequence[Cost], *, inverse: bool = False) -> Figure:
    intervals = sorted({one.interval for one in found})
    names = dict.fromkeys(one.strategy for one in found)
    at = {(one.strategy, one.interval): one for one in found if one.slowdowns}
    series = {}
    for name in names:
        values = [at[name, interval].slowdown if (name, interval) in at else None for interval in intervals]
        label = next(one.label for one in found if one.strategy == name)
        series[label] = [None if one is None else (1 / one if inverse else one) for one in values]
    return Figure(
        title, "lines", intervals, series, "iterations between saves", "throughput" if inverse else "slowdown", "x", 1.0
    )


def pmem(asked: Asked) -> Result:
    """Fig. 10."""
    missing = obstacle("pmem")
    intervals = (1, 5) if asked.short else (1, 5, 10, 25, 50)
    names = ("checkfreq", "gpm", "pmem-2") if asked.short else ("checkfreq", "gpm", "pmem-1", "pmem-2", "pmem-4")
    with (
        TemporaryDirectory(dir="/dev/shm", prefix="ckptstore-papers-") as memory,
        mock.patch.dict(os.environ, {"PMEM_IS_PMEM_FORCE": "1"}),  # libpmem treats the memory as persistent
    ):
        there = replace(asked, scratch=Path(memory))
        with planned(there) as plan:
            found, iteration = measured(
                there, plan, [(name, interval) for interval in intervals for name in names], asked.pick(1, 1, 3)
            )
    found = _labelled(found)
    at = {(one.strategy, one.interval): one for one in found if one.slowdowns}
    ours = [at["pmem-2", interval].slowdown for interval in intervals]
    best = [min(at[name, interval].slowdown for name in ("checkfreq", "gpm")) for interval in intervals]
    wins = all(mine <= 1.02 * its for mine, its in zip(ours, best, strict=True))
    return Result(
        tables=[_table("Slowdown on simulated persistent memory", found)],
        claims=[
            Claim(
                "on persistent memory PCcheck is ahead of both at every interval",
                "BERT, every 1 to 100",
                ", ".join(f"{mine:.2f} against {its:.2f}" for mine, its in zip(ours, best, strict=True)),
                wins,
                ""
                if wins
                else "the medium is DRAM: a plain copy takes a fraction of an iteration, there is nothing to overlap, "
                "and the store hashes every byte. " + _CORES,
            )
        ],
        figures=[_lines("Slowdown by interval, simulated persistent memory", found)],
        compared=[compared(found)],
        remarks=[
            "Persistent memory is shared memory that libpmem is told to treat as persistent: the instructions are "
            "real, the medium is DRAM." + (f" Here {missing}: msync instead." if missing else "")
        ],
        settings={"shape": SHAPE, "iteration_s": iteration},
        numbers={"costs": [one.numbers() for one in found]},
    )


def concurrent(asked: Asked) -> Result:
    """Fig. 12."""
    intervals = (5, 10) if asked.short else (2, 5, 10, 25, 50)
    numbers = (1, 2, 4) if asked.short else (1, 2, 3, 4)
    with planned(asked) as plan:
        _, iteration = measured(asked, plan, [("ckptstore-1", 10)], 1)
        ways = [(f"n{number}-p2", interval) for interval in intervals for number in numbers]
        found, iteration = measured(asked, plan, ways, asked.pick(1, 1, 3), disk_like_the_papers(iteration))
    found = _labelled(found)
    at = {(one.strategy, one.interval): one.slowdown for one in found if one.slowdowns}
    gain = [at["n1-p2", interval] / min(at[f"n{number}-p2", interval] for number in numbers) for interval in intervals]
    more = at["n4-p2", 10] / at["n2-p2", 10]
    return Result(
        tables=[_table("Slowdown by the number of saves in flight", found)],
        claims=[
            Claim(
                "more than one save in flight is always better (VGG16)",
                "yes",
                ", ".join(f"{one:.2f} times, every {f}" for one, f in zip(gain, intervals, strict=True)),
                all(one > 1.02 for one in gain),
                ""
                if all(one > 1.02 for one in gain)
                else "where one save ends before the next begins, N does not count",
            ),
            Claim(
                "no more than 4 are needed, as they saturate the disk",
                "2 to 4",
                f"4 against 2, every 10: {more:.2f}",
                True,
            ),
        ],
        figures=[_lines("Slowdown by interval and N, limited disk", found)],
        compared=[compared(found)],
        remarks=[LIMITED],
        settings={"shape": SHAPE, "iteration_s": iteration},
        numbers={"costs": [one.numbers() for one in found]},
    )


def _labelled(found: list[Cost]) -> list[Cost]:
    from tools.bench.training.pccheck_settings import PCCHECK
    from tools.papers.pccheck.measuring import LABELS

    LABELS.update({one.strategy: PCCHECK[one.strategy].label for one in found if one.strategy in PCCHECK})
    return found


def threads(asked: Asked) -> Result:
    """Fig. 13."""
    numbers, each = ((1, 2), (1, 3)) if asked.short else ((1, 2, 3), (1, 2, 3))
    with planned(asked, LARGE) as plan:
        _, iteration = measured(asked, plan, [("ckptstore-1", 10)], 1)
        ways = [(f"n{number}-p{thread}", 10) for number in numbers for thread in each]
        disk = disk_like_the_papers(iteration, LARGE_BYTES)
        found, iteration = measured(asked, plan, ways, asked.pick(1, 1, 3), disk)
    found = _labelled(found)
    at = {one.strategy: one.slowdown for one in found if one.slowdowns}
    gain = [at[f"n{number}-p1"] / at[f"n{number}-p3"] for number in numbers]
    rows: list[list[Cell]] = [
        [f"N = {number}", *(at[f"n{number}-p{thread}"] for thread in each), gain[place], f"{_FIG13[number]:.2f}"]
        for place, number in enumerate(numbers)
    ]
    heads = ("saves in flight", *(f"p = {thread}" for thread in each), "3 against 1", "paper")
    falling = gain[0] > 1.05 and gain[0] >= gain[-1]
    return Result(
        tables=[Table("Slowdown by threads that write one checkpoint, every 10 iterations", heads, rows)],
        claims=[
            Claim(
                "three threads against one pay most with one save in flight, and less with more",
                "1.36, 1.16, 1.13 (N = 1, 2, 3)",
                ", ".join(f"{one:.2f}" for one in gain),
                falling,
                "" if falling else _CORES,
            )
        ],
        figures=[
            Figure(
                "Slowdown by p, every 10 iterations, limited disk",
                "bars",
                [f"N = {number}" for number in numbers],
                {f"p = {thread}": [at[f"n{number}-p{thread}"] for number in numbers] for thread in each},
                y="slowdown",
                limit=1.0,
            )
        ],
        compared=[compared(found)],
        remarks=[LIMITED, "A thread writes blocks of 16 MiB; a state of 90 MB has six."],
        settings={"shape": LARGE, "iteration_s": iteration},
        numbers={"costs": [one.numbers() for one in found]},
    )


_FIG13: Final = {1: 1.36, 2: 1.16, 3: 1.13}


def chunks(asked: Asked) -> Result:
    """Fig. 14."""
    parts = (100, 200) if asked.short else (100, 125, 150, 200)
    interval = 15
    with planned(asked, LARGE) as plan:
        _, iteration = measured(asked, plan, [("ckptstore-1", 15)], 1)
        ways = [(f"memory-{part}", interval) for part in parts] + [("ckptstore-4", interval)]
        disk = disk_like_the_papers(iteration, LARGE_BYTES)
        found, iteration = measured(asked, plan, ways, asked.pick(1, 1, 3), disk)
    found = _labelled(found)
    at = {one.strategy: one.slowdown for one in found if one.slowdowns}
    extra = at["memory-100"] / at["memory-200"] - 1
    whole = at["ckptstore-4"] / at["memory-200"]
    return Result(
        tables=[_table("Slowdown by memory for copies (m: bytes of the state)", found)],
        claims=[
            Claim(
                "m bytes of memory instead of 2 m cost at most 7 %",
                "7 %",
                f"{extra:.1%}",
                extra <= 0.07,
                ""
                if extra <= 0.07
                else f"four saves in flight share m bytes, and the next copy waits for them. {_CORES}",
            ),
            Claim(
                "copying in chunks (pipelined) is slightly faster than whole copies",
                "slightly",
                f"{whole:.2f} times, M = 2 m in chunks against whole copies of up to 4 m",
                whole > 1,
                "" if whole > 1 else "whole copies have more memory: one for each save in flight",
            ),
        ],
        figures=[
            Figure(
                f"Throughput by memory, every {interval} iterations, limited disk (1: no saves)",
                "bars",
                [f"{part / 100:g} m" for part in parts] + ["4 m, whole"],
                {"throughput": [1 / one.slowdown if one.slowdowns else None for one in found]},
                limit=1.0,
            )
        ],
        compared=[compared(found)],
        remarks=[LIMITED, "The chunk is fixed: units of at most 16 MiB, six for this state. N = 4."],
        settings={"shape": LARGE, "iteration_s": iteration},
        numbers={"costs": [one.numbers() for one in found]},
    )
