"""Tries mutants: each is run against the tests of its module, on a copy of the tree."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal, Self, TypeVar

from tools.mutants.copies import Copy
from tools.mutants.elsewhere import STARTUP
from tools.mutants.plan import tests_of
from tools.mutants.reach import instrumented
from tools.mutants.sites import Site

__all__ = ["Baseline", "Bench", "Verdict", "baseline", "try_all"]

_T = TypeVar("_T")
_PATIENCE: Final = 60.0
"""Seconds that the tests of a mutant may take beyond four times their duration without one."""
_OWN: Final = 3
"""Test files of a module that run first: the others are collected only for mutants that survive these."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one mutant.

    Attributes:
        outcome: ``killed`` by a failing test, ``timeout``: killed because its tests did not end, or ``survived``.
        by: the first test that failed.
        seconds: how long it took.
    """

    site: Site
    outcome: Literal["killed", "timeout", "survived"]
    by: str
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """For the report."""
        site = asdict(self.site)
        return {"name": self.site.name, "outcome": self.outcome, "by": self.by, "seconds": self.seconds, **site}


@dataclass(frozen=True, slots=True)
class Baseline:
    """The tests without a mutant.

    Attributes:
        seconds: per test.
        failing: tests that fail without a mutant; they do not count.
        reached: name of a site -> the tests that reach it.
    """

    seconds: Mapping[str, float]
    failing: frozenset[str]
    reached: Mapping[str, frozenset[str]]

    def stages(self, site: Site, root: Path) -> list[list[str]]:
        """The tests that reach `site`, quick ones first: those of the module's own files, then all others."""
        files = set(tests_of(site, root)[:_OWN])
        reached = self.reached.get(site.name, frozenset())
        if site.compiled:  # cannot tell; its tests say in their names that it runs
            reached = frozenset(test for test in self.seconds if _file(test) in files and "compiled" in test)
        found = sorted(reached - self.failing, key=lambda test: self.seconds[test])
        own = [test for test in found if _file(test) in files]
        rest = [test for test in found if _file(test) not in files]
        return [stage for stage in (own, rest) if stage]


class Bench:
    """One copy of the tree and a process that runs tests on it. A context manager."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.copy = Copy(source, folder)
        command = [sys.executable, "-m", "tools.mutants.worker"]
        with (folder / "worker.log").open("wb") as log:
            self._worker = subprocess.Popen(
                command,
                cwd=self.copy.root,
                env=self.copy.environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._worker.stdin is not None
        assert self._worker.stdout is not None
        self._worker.stdin.close()
        self._worker.wait()
        self._worker.stdout.close()

    def run(
        self, files: Sequence[str], seconds: float, *, tests: Mapping[str, float] | None = None, first: bool = True
    ) -> Any:
        """Run test files, or only `tests` of them; stop at the `first` failure. Returns the worker's answer."""
        assert self._worker.stdin is not None
        assert self._worker.stdout is not None
        request = {"files": list(files), "tests": tests, "seconds": seconds, "first": first}
        self._worker.stdin.write(json.dumps(request) + "\n")
        self._worker.stdin.flush()
        line = self._worker.stdout.readline()
        if not line:
            raise RuntimeError(f"the test process ended: {self.log()}")
        return json.loads(line)

    def log(self) -> str:
        """The end of the worker's error output."""
        return (self.copy.root / "worker.log").read_text()[-2000:]

    def instrument(self, sites: Sequence[Site]) -> None:
        """Let every site report when it is reached."""
        self.copy.write("sitecustomize.py", STARTUP.encode())
        for path in {site.path for site in sites if not site.compiled}:
            numbered = {number: site for number, site in enumerate(sites) if site.path == path}
            self.copy.write(path, instrumented((self.copy.root / path).read_bytes(), numbered))

    def trial(self, site: Site, known: Baseline) -> Verdict:
        """Run the tests that reach `site` without it."""
        original = (self.copy.root / site.path).read_bytes()
        seconds = 0.0
        self.copy.write(site.path, site.mutate(original))
        try:
            for tests in known.stages(site, self.copy.root):
                limit = _PATIENCE + 4 * sum(known.seconds[test] for test in tests)
                answer = self.run(
                    sorted({_file(test) for test in tests}), limit, tests={test: known.seconds[test] for test in tests}
                )
                seconds += answer["seconds"]
                if answer["outcome"] == "broken":
                    raise RuntimeError(f"pytest could not run {tests[:3]}: {self.log()}")
                if answer["outcome"] == "timeout":
                    return Verdict(site, "timeout", "", seconds)
                if answer["outcome"] == "failed":
                    return Verdict(site, "killed", next(iter(answer["failures"]), "the process died"), seconds)
        finally:
            self.copy.write(site.path, original)
        return Verdict(site, "survived", "", seconds)


def baseline(
    benches: Sequence[Bench], sites: Sequence[Site], files_each: int | None = None, seconds: float = 1800.0
) -> Baseline:
    """Run every test file of one of `sites`, without a mutant, and record which tests reach which sites.

    Args:
        files_each: so many files for each site, the most relevant ones; None: all.
        seconds: that one file may take.
    """
    root = benches[0].copy.root
    originals = {path: (root / path).read_bytes() for path in {site.path for site in sites}}
    for bench in benches:
        bench.instrument(sites)
    files = list(dict.fromkeys(test for site in sites for test in tests_of(site, root)[:files_each]))
    took: dict[str, float] = {}
    failing: set[str] = set()
    reached: dict[str, set[str]] = {}
    noting = threading.Lock()

    def one(bench: Bench, file: str) -> None:
        answer = bench.run([file], seconds, first=False)
        if answer["outcome"] in ("timeout", "broken"):
            raise RuntimeError(f"{file} cannot be run without a mutant either ({answer['outcome']}): {bench.log()}")
        with noting:
            took.update(answer["tests"])
            failing.update(answer["failures"])
            for number, tests in answer["reached"].items():
                # Reached while the file was imported, like a default or a constant: all its tests may notice.
                met = answer["tests"] if "" in tests else tests
                reached.setdefault(sites[int(number)].name, set()).update(met)

    _spread(benches, files, one)
    for bench in benches:
        for path, data in originals.items():
            bench.copy.write(path, data)
    known = {name: frozenset(tests & took.keys()) for name, tests in reached.items()}
    return Baseline(took, frozenset(failing), known)


def _file(test: str) -> str:
    return test.partition("::")[0]


def try_all(
    benches: Sequence[Bench], sites: Sequence[Site], known: Baseline, tell: Callable[[Verdict], None]
) -> list[Verdict]:
    """The verdict of every site, in order; `tell` is called with each as soon as it is known."""
    verdicts: dict[str, Verdict] = {}
    telling = threading.Lock()

    def one(bench: Bench, site: Site) -> None:
        verdict = bench.trial(site, known)
        with telling:
            verdicts[site.name] = verdict
            tell(verdict)

    _spread(benches, sites, one)
    return [verdicts[site.name] for site in sites]


def _spread(benches: Sequence[Bench], work: Sequence[_T], one: Callable[[Bench, _T], None]) -> None:
    """Do all the work, one piece at a time on each bench."""
    free: queue.SimpleQueue[Bench] = queue.SimpleQueue()
    for bench in benches:
        free.put(bench)

    def task(piece: _T) -> None:
        bench = free.get()
        try:
            one(bench, piece)
        finally:
            free.put(bench)

    with ThreadPoolExecutor(len(benches)) as pool:
        for future in [pool.submit(task, piece) for piece in work]:
            future.result()
