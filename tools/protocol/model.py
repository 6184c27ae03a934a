"""``python -m tools.protocol.model [--quick] [PART ...]``: explore the protocol, and check that every mutant is caught.

Exits with 1 if the protocol breaks, a mutant survives, or a search of the quick form is not exhaustive. The full form
takes an hour and several gigabytes; searches that exceed ``--states`` are reported as bounded.
"""

from __future__ import annotations

import argparse
import sys

from tools.protocol import store_catalog
from tools.protocol.cases import Case, cases
from tools.protocol.explore import Result, explore


def describe(case: Case, result: Result, surprising: bool, verbose: bool) -> str:
    """A line per search; for an unexpected violation also the shortest way there."""
    line = f"[{case.part}] {case.name}: {result.verdict}, {result.states:,} states, {result.seconds:.1f} s"
    if result.message:
        line += f"; {result.message}"
    if surprising:
        line += f"   *** expected: {case.verdict}"
    if verbose or surprising:
        line += "".join(f"\n    {event}" for event in result.trace)
    return line


def main(arguments: list[str] | None = None) -> int:
    """Run the searches; 0 if all results are as expected."""
    parser = argparse.ArgumentParser(prog="python -m tools.protocol.model", description=(__doc__ or "").split("\n")[0])
    parts = "log, loss, arriving, store, prune, compact, power, recycle, tiers or remote"
    parser.add_argument("parts", nargs="*", metavar="PART", help=parts)
    parser.add_argument("--quick", action="store_true", help="only small searches, for CI")
    parser.add_argument("--traces", action="store_true", help="print how each mutant fails")
    parser.add_argument("--states", type=int, default=5_000_000, metavar="N", help="give a search up beyond N states")
    parser.add_argument("--match", default="", help="only searches whose name contains this")
    options = parser.parse_args(arguments)
    wrong = 0
    for case in cases(options.quick):
        if (options.parts and case.part not in options.parts) or options.match not in case.name:
            continue
        result = explore(case.model, options.states)
        store_catalog.forget()
        surprising = result.verdict != case.verdict and (options.quick or result.verdict != "bounded")
        wrong += surprising
        print(describe(case, result, surprising, options.traces), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
