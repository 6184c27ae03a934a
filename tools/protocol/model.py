"""``python -m tools.protocol.model [--quick] [PART ...]``: explore the protocol, and check that every mutant is caught.

Exits with 1 if the protocol breaks, a mutant survives, or a search that should be exhaustive is not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import NamedTuple

from tools.protocol import log_model, power_model, store_model
from tools.protocol.explore import Model, Result, explore


class Case(NamedTuple):
    """One search and what it has to find."""

    part: str
    name: str
    model: Model
    verdict: str


def cases(quick: bool) -> Iterator[Case]:
    """Every search; in the quick form only small ones, which together take less than half a minute."""
    for name, power in power_model.HOLDS.items():
        yield Case("power", name, power_model.PowerModel(power), "holds")
    for name, power in power_model.MUTANTS.items():
        yield Case("power", f"mutant: {name}", power_model.PowerModel(power), "violated")
    for name, log in (log_model.HOLDS | ({} if quick else log_model.HOLDS_FULL)).items():
        yield Case("log", name, log_model.LogModel(log), "holds")
    for name, log in log_model.MUTANTS.items():
        yield Case("log", f"mutant: {name}", log_model.LogModel(log), "violated")
    for name, store in (store_model.HOLDS | ({} if quick else store_model.HOLDS_FULL)).items():
        yield Case("store", name, store_model.StoreModel(store), "holds")
    for name, store in store_model.MUTANTS.items():
        yield Case("store", f"mutant: {name}", store_model.StoreModel(store), "violated")


def describe(case: Case, result: Result, verbose: bool) -> str:
    """A line per search; of a violation also the shortest way there, if that is news."""
    line = f"[{case.part}] {case.name}: {result.verdict}, {result.states:,} states, {result.seconds:.1f} s"
    if result.message:
        line += f"; {result.message}"
    if result.verdict != case.verdict:
        line += f"   *** expected: {case.verdict}"
    if verbose or result.verdict != case.verdict:
        line += "".join(f"\n    {event}" for event in result.trace)
    return line


def main(arguments: list[str] | None = None) -> int:
    """Run the searches; 0 if everything is as it should be."""
    parser = argparse.ArgumentParser(prog="python -m tools.protocol.model", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help="log, store or power; default: all")
    parser.add_argument("--quick", action="store_true", help="only small searches, for CI")
    parser.add_argument("--traces", action="store_true", help="print how each mutant fails")
    parser.add_argument("--match", default="", help="only searches whose name contains this")
    options = parser.parse_args(arguments)
    wrong = 0
    for case in cases(options.quick):
        if (options.parts and case.part not in options.parts) or options.match not in case.name:
            continue
        result = explore(case.model)
        store_model.forget()
        store_model.forget()
        wrong += result.verdict != case.verdict
        print(describe(case, result, options.traces), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
