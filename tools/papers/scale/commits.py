"""Commits of thousands of ranks: the product's own writers over a mailbox and a bucket that count, in virtual time."""

from __future__ import annotations

import math
from typing import Final

from tools.goodput.ranks import Phase, Run, simulated
from tools.papers.result import Asked, Cell, Claim, Compared, Figure, Result, Table

__all__ = ["commit_seconds", "run"]

SIZES: Final = {True: (2, 8, 32, 128), False: (2, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096)}
"""Ranks in the quick and in the long form."""
LINEAR: Final = 1.15
"""Highest exponent of a growth that counts as linear."""


def run(asked: Asked) -> Result:
    """Run the experiment."""
    sizes = SIZES[asked.short]
    runs: list[Run] = []
    for size in sizes:
        runs.append(simulated(size))
        asked.told(f"{size} ranks: a commit takes {runs[-1].phases['next'].seconds:.2f} s")
    rows = [_row(one, name) for name in ("open", "first", "next") for one in runs]
    heads = (
        *("phase", "ranks", "seconds", "calls", "found nothing", "letters' calls a rank", "host kB"),
        *("rank 0 kB", "requests", "of rank 0", "rank 0 computes ms"),
    )
    last, before = runs[-1], runs[-2]
    growth = {
        what: {name: _exponent(before, last, name, what) for name in ("open", "first", "next")}
        for what in ("sent", "bytes_0", "bytes_host", "requests", "seconds", "calls")
    }
    flat = {what: max(found.values()) for what, found in growth.items()}
    steady = growth["calls"]["next"] <= LINEAR and growth["seconds"]["next"] <= LINEAR
    return Result(
        tables=[
            Table(
                "One open, the first save (the ranks agree who writes what), and each further save",
                heads,
                rows,
                dict.fromkeys(heads[3:], ".0f") | {"seconds": ".2f", "letters' calls a rank": ".1f"},
            )
        ],
        claims=[
            _claim("letters grow no faster than the ranks", flat["sent"]),
            _claim("bytes at rank 0 grow no faster than the ranks", flat["bytes_0"]),
            _claim("requests to the bucket grow no faster than the ranks", flat["requests"]),
            Claim(
                "a further save: time and calls grow no faster than the ranks",
                "-",
                f"seconds {growth['seconds']['next']:.2f}, calls {growth['calls']['next']:.2f} "
                f"(exponents, {before.size} to {last.size} ranks)",
                steady,
                "" if steady else "see the table",
            ),
            Claim(
                "all calls of the mailbox grow no faster than the ranks, in every phase",
                "-",
                f"exponent {flat['calls']:.2f}, in the first save {growth['calls']['first']:.2f}",
                flat["calls"] <= LINEAR,
                "see the table",
                "In the first save rank 0 lists the ranks' segments together, and ranks that have waited for long look "
                "1,000 times a second together. With a request for each segment and 20 looks a second by each rank the "
                "exponent was 1.8",
            ),
            _claim(
                "bytes through the mailbox's host grow no faster than the ranks",
                flat["bytes_host"],
                "A rank is told the checkpoint, not the segments of the other ranks. With the names of all, 19 bytes "
                "each, the exponent was 1.2, a save of 1,024 ranks sent 20 MB, and one of 4,096 ranks 0.3 GB",
            ),
            Claim(
                "no barrier on training's process group",
                "PCcheck: rank 0 hears all, and tells all",
                "there is no process group: ranks have a mailbox alone",
                True,
            ),
        ],
        figures=[
            Figure(
                "Seconds by ranks, virtual",
                "lines",
                sizes,
                {name: [one.phases[name].seconds for one in runs] for name in ("open", "first", "next")},
                "ranks",
                "seconds",
                "xy",
            ),
            Figure(
                "Calls of the mailbox by ranks",
                "lines",
                sizes,
                {
                    "first save": [one.phases["first"].calls for one in runs],
                    "further save": [one.phases["next"].calls for one in runs],
                    "further save, found something": [_sent(one.phases["next"]) for one in runs],
                    "proportional": [one * runs[0].phases["next"].calls / runs[0].size for one in sizes],
                },
                "ranks",
                "calls",
                "xy",
            ),
        ],
        compared=[
            Compared(
                "the last checkpoint of each job, loaded as its first, second, middle and last rank",
                len(runs),
                sum(one.equal for one in runs),
            )
        ],
        remarks=[
            "The ranks are the product's writers, with all their code. Replaced are the clock, the writer's threads "
            "(work runs in the caller's), the mailbox (a dict with the times of torch's TCPStore: 10 us of its host a "
            "call, one after the other, 1.1 us for each further key, 100 us of network) and the bucket (memory, 20 ms "
            "a request). What rank 0 computes takes the time that it really takes.",
            "States are small: what is measured is the protocol. Training waits for none of this in `save_async`, "
            "unless all its places are taken.",
        ],
        settings={"sizes": list(sizes)},
        numbers={"kinds": {str(one.size): dict(one.kinds) for one in runs}},
    )


def _sent(phase: Phase) -> float:
    return phase.calls - phase.polls


def _row(one: Run, name: str) -> list[Cell]:
    phase = one.phases[name]
    said = {"open": "open", "first": "first save", "next": "further save"}[name]
    return [
        *(said, one.size, phase.seconds, float(phase.calls), float(phase.polls), _sent(phase) / one.size),
        *(phase.bytes_host / 1e3, phase.bytes_0 / 1e3, float(phase.requests), float(phase.requests_0)),
        1e3 * phase.processor_0,
    ]


def _exponent(before: Run, last: Run, name: str, what: str) -> float:
    """e of a growth as ranks**e."""

    def value(one: Run) -> float:
        phase = one.phases[name]
        return float(_sent(phase) if what == "sent" else getattr(phase, what))

    return math.log(value(last) / value(before)) / math.log(last.size / before.size)


def _claim(text: str, exponent: float, remark: str = "") -> Claim:
    holds = exponent <= LINEAR
    return Claim(text, "-", f"exponent {exponent:.2f}", holds, "" if holds else "see the table", remark)


def commit_seconds(size: int) -> float:
    """Seconds of a further save of so many ranks, by a line through 32 and 128 ranks."""
    few, many = (_known(number) for number in (32, 128))
    return max(few, few + (many - few) * (size - 32) / 96) if size > 1 else 0.0


_seconds: dict[int, float] = {}


def _known(size: int) -> float:
    if size not in _seconds:
        _seconds[size] = simulated(size).phases["next"].seconds
    return _seconds[size]
