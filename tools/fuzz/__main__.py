"""Fuzz everything that reads unchecked bytes: a typed error or the right data, in time and within bounded memory.

python -m tools.fuzz --seconds 60 [--target NAME] [--engine plain|atheris]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.fuzz.campaign import Result, campaign
from tools.fuzz.targets import TARGETS

REGRESSIONS = Path(__file__).resolve().parents[2] / "tests" / "regressions"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 1 if anything was found."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="wall time in all")
    parser.add_argument("--cpu", action="store_true", help="seconds of CPU time instead")
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="default: every one")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=("plain", "atheris"), help="default: atheris where there is time for it")
    parser.add_argument("--keep", type=Path, default=REGRESSIONS, help="where inputs go that violate something")
    options = parser.parse_args(arguments)
    print(f"{'target':12}{'engine':>9}{'runs':>10}{'accepted':>10}{'kinds':>7}{'CPU s':>8}{'found':>7}", flush=True)
    results = campaign(
        options.target or list(TARGETS),
        options.seconds,
        jobs=options.jobs,
        seed=options.seed,
        engine=options.engine,
        cpu=options.cpu,
        keep=options.keep,
        tell=show,
    )
    runs, cpu, found = sum(r.runs for r in results), sum(r.cpu for r in results), sum(len(r.found) for r in results)
    print(f"{'all':12}{'':>9}{runs:>10}{sum(r.accepted for r in results):>10}{'':>7}{cpu:>8.0f}{found:>7}")
    return int(found > 0)


def show(result: Result) -> None:
    """Print one line of the table, and the findings."""
    print(
        f"{result.target:12}{result.engine:>9}{result.runs:>10}{result.accepted:>10}{result.kinds:>7}"
        f"{result.cpu:>8.0f}{len(result.found):>7}",
        flush=True,
    )
    for path, message in zip(result.found, result.messages, strict=True):
        print(f"  {path}: {message}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
