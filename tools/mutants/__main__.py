"""The mutation gate: every fsync, checksum, fence, anchor, pin and bounds check is taken out in turn; a test must fail.

python -m tools.mutants [--only 'formats/history/record_text.py*'] [--jobs 2] [--list] [--quick]
python -m tools.mutants --ordinary N [--seed S] [--since REV | MODULE ...]
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from tools.mutants.copies import repository
from tools.mutants.drawing import changed_since, draw, modules_of
from tools.mutants.ordinary import KINDS as ORDINARY_KINDS
from tools.mutants.sites import KINDS, Site, find_sites
from tools.mutants.trial import Bench, Verdict, baseline, try_all

QUICK: Final = (
    "formats/history/folds.py*",
    "formats/segment_files/layout.py*",
    "formats/history/members.py*",
    "formats/history/record_text.py*",
    "ckptstore/backends/local_disk/posix.py*",
    "ckptstore/log/term.py*",
    "ckptstore/log/pins.py*",
    "ckptstore/log/requests.py*",
)
"""Modules whose first test file takes seconds: the sample of ``--quick`` comes from these; survivors run against the
other files. (Syncs are excluded: only a crash shows a missing one.)"""
QUICK_SITES: Final = 4
ROUNDS: Final = (3, None)
QUICK_ROUNDS: Final = (1, None)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 1 if a mutant survives."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", metavar="GLOB", help="sites whose name matches (see --list)")
    parser.add_argument("--jobs", type=int, default=2, help="mutants tried at once; each needs a core")
    parser.add_argument("--list", action="store_true", help="show the sites, run nothing")
    parser.add_argument("--quick", action="store_true", help=f"a sample of {QUICK_SITES} sites, under a minute")
    parser.add_argument("--ordinary", type=int, metavar="N", help="try N ordinary mutants instead")
    parser.add_argument("--since", metavar="REV", default="HEAD~1", help="of the modules changed since (%(default)s)")
    parser.add_argument("modules", nargs="*", metavar="MODULE", help="of these instead, such as 'formats/seg*.py'")
    parser.add_argument("--seed", type=int, default=0, help="of the samples of --quick and --ordinary")
    parser.add_argument("--json", type=Path, help="where the report goes")
    options = parser.parse_args(arguments)
    if options.ordinary is None and options.modules:
        parser.error("modules are for --ordinary; see --only")
    try:
        sites = _sites(options)
    except LookupError as error:
        print(error, file=sys.stderr)
        return 2
    if options.list:
        for site in sites:
            print(f"{site.path}:{site.line}\t{site.name}")
        print(f"{len(sites)} sites: {_counted(Counter(site.kind for site in sites))}")
        return 0
    if not sites:
        print("no site matches", file=sys.stderr)
        return 2
    begin = time.monotonic()
    verdicts = run(sites, max(1, min(options.jobs, len(sites))), QUICK_ROUNDS if options.quick else ROUNDS)
    report(verdicts, time.monotonic() - begin, options.json)
    return int(any(verdict.outcome == "survived" for verdict in verdicts))


def _sites(options: argparse.Namespace) -> list[Site]:
    if options.ordinary is None:
        return chosen(find_sites(repository()), options.only, options.quick, options.seed)
    root = repository()
    modules = modules_of(root, options.modules) if options.modules else changed_since(root, options.since)
    return chosen(draw(root, modules, options.ordinary, options.seed), options.only, quick=False, seed=options.seed)


def chosen(sites: Sequence[Site], only: Sequence[str] | None, quick: bool, seed: int) -> list[Site]:
    """The sites to try."""
    patterns = only or (QUICK if quick else ())
    found = [
        site
        for site in sites
        if not patterns or any(fnmatch.fnmatchcase(site.name, _literal(pattern)) for pattern in patterns)
    ]
    if quick:
        found = [site for site in found if site.kind != "durability"]
        found = random.Random(seed).sample(found, min(QUICK_SITES, len(found)))
    return found


def _literal(pattern: str) -> str:
    return pattern.replace("[", "[[]")  # names are full of subscripts


def run(sites: Sequence[Site], jobs: int, rounds: Sequence[int | None] = ROUNDS) -> list[Verdict]:
    """Try `sites` on `jobs` copies of the tree, and report progress.

    Args:
        rounds: how many test files each mutant runs against, the most relevant first; survivors of a round run against
            more in the next. None: all.
    """
    verdicts: dict[str, Verdict] = {}
    left = list(sites)
    with tempfile.TemporaryDirectory(prefix="ckptstore-mutants-") as folder, ExitStack() as stack:
        benches = [stack.enter_context(Bench(repository(), Path(folder) / f"copy{number}")) for number in range(jobs)]
        print(f"{'seconds':>7}  {'outcome':10}{'kind':12}place: what was taken out  <-  the test that noticed")
        for number, files_each in enumerate(rounds, 1):
            verdicts |= {verdict.site.name: verdict for verdict in _round(benches, left, files_each)}
            left = [site for site in left if verdicts[site.name].outcome == "survived"]
            if not left:
                break
            print(f"{len(left)} of {len(sites)} survive after round {number} of {len(rounds)}", flush=True)
    return [verdicts[site.name] for site in sites]


def _round(benches: Sequence[Bench], sites: Sequence[Site], files_each: int | None) -> list[Verdict]:
    known = baseline(benches, sites, files_each)
    print(f"{len(known.seconds)} tests take {sum(known.seconds.values()):.0f} s without a mutant", flush=True)
    for file, count in sorted(Counter(test.partition("::")[0] for test in known.failing).items()):
        print(f"{count} tests of {file} fail without a mutant and do not count", flush=True)

    def tell(verdict: Verdict) -> None:
        site = verdict.site
        print(
            f"{verdict.seconds:7.1f}  {verdict.outcome:10}{site.kind:12}{site.path}:{site.line} {site.where}: "
            f"{site.source}  <-  {verdict.by or 'nothing'}",
            flush=True,
        )

    return try_all(benches, sites, known, tell)


def report(verdicts: Sequence[Verdict], seconds: float, target: Path | None) -> None:
    """A table by kind, the survivors, and JSON."""
    print(f"{'kind':12}{'sites':>7}{'killed':>8}{'timeout':>9}{'survived':>10}")
    for kind in (*KINDS, *ORDINARY_KINDS, "all"):
        counts = Counter(verdict.outcome for verdict in verdicts if kind in ("all", verdict.site.kind))
        if counts:
            row = (counts.total(), counts["killed"], counts["timeout"], counts["survived"])
            print("{:12}{:>7}{:>8}{:>9}{:>10}".format(kind, *row))
    print(f"{seconds:.0f} s")
    for verdict in verdicts:
        if verdict.outcome == "survived":
            print(f"SURVIVED {verdict.site.path}:{verdict.site.line}: {verdict.site.where}: {verdict.site.source}")
    if target is not None:
        target.write_text(json.dumps([verdict.as_json() for verdict in verdicts], indent=1) + "\n")


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[kind]} {kind}" for kind in (*KINDS, *ORDINARY_KINDS) if counts[kind])


if __name__ == "__main__":
    sys.exit(main())
