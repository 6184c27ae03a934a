"""The rounds of a benchmark run: every case once per round, each in a separate process."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tools.bench.measure import Ballast
from tools.bench.storage import report
from tools.bench.storage.compared import LOADS, READY, SAVES

SEED = 1
_ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the tables."""

    phase: str
    method: str

    @property
    def name(self) -> str:
        """``phase/method``, what ``--only`` matches."""
        return f"{self.phase}/{self.method}"

    @property
    def saver(self) -> str:
        """The method that writes the files that this case saves or loads."""
        return self.method if self.phase == "save" else LOADS[self.method].saver


CASES = (
    *(Case("save", method) for method in SAVES),
    *(Case(phase, method) for phase in ("cold", "warm") for method in LOADS),
)


class WorkerError(Exception):
    """A worker ended without a result; the message is its last line of output."""


@dataclass(frozen=True, slots=True)
class Bench:
    """The common settings of all workers of a run."""

    size: int
    scratch: Path
    ballast: Ballast

    def worker(self, task: str, method: str, folder: Path, *flags: str) -> dict[str, float]:
        """Run a worker to its end -> its numbers. Raises `WorkerError`."""
        self.ballast.hold()
        command = [sys.executable, "-W", "ignore", "-m", "tools.bench.storage.worker", task, method]
        command += ["--size", str(self.size), "--seed", str(SEED), "--dir", str(folder.resolve()), *flags]
        last = ""
        with (
            tempfile.TemporaryFile("w+", dir=self.scratch) as trouble,
            subprocess.Popen(
                command, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=trouble, text=True
            ) as process,
        ):
            assert process.stdin is not None
            assert process.stdout is not None
            for line in process.stdout:
                last = line.strip()
                if last == READY:
                    self.ballast.release()
                    process.stdin.write("\n")
                    process.stdin.flush()
            status = process.wait()
            trouble.seek(0)
            said = trouble.read().strip().splitlines()
        if status or not last.startswith("{"):
            raise WorkerError(said[-1] if said else f"the worker ended with status {status}")
        return {name: float(value) for name, value in json.loads(last).items()}


@dataclass(slots=True)
class Results:
    """The samples so far of the measured cases, and why cases were given up."""

    samples: dict[Case, list[dict[str, float]]]
    errors: dict[Case, str]

    def take(self, case: Case, measure: Callable[[], dict[str, float]]) -> None:
        """Run one measurement, unless the case, or the save whose files it reads, failed before."""
        source = Case("save", case.saver)
        if source in self.errors:
            self.errors.setdefault(case, f"there is nothing to load: {source.name} failed")
        if case in self.errors:
            return
        try:
            sample = measure()
        except WorkerError as error:
            self.errors[case] = str(error)
            self.samples.get(case, []).clear()
        else:
            self.samples.get(case, []).append(sample)

    def rows(self) -> list[report.Row]:
        """The tables' rows, in the order of `CASES`."""
        return [
            report.Row(
                case.phase,
                case.method,
                (SAVES if case.phase == "save" else LOADS)[case.method].label,
                tuple(self.samples[case]),
                self.errors.get(case),
                is_limit=case.method.startswith("raw") and case.method != "raw-overwrite",
            )
            for case in self.samples
        ]


def _rotated(cases: Sequence[Case], turn: int) -> Iterator[Case]:
    for place in range(len(cases)):
        yield cases[(place + turn) % len(cases)]


def measure_once(results: Results, turn: int, bench: Bench, begun: Callable[[str], None]) -> None:
    """Measure every case once: all saves, then all loads of their files; leaves the scratch folder unchanged."""
    scratch = bench.scratch
    loads = [case for case in results.samples if case.phase != "save"]
    needed = {case.saver for case in loads}
    saves = [case for case in results.samples if case.phase == "save"]
    unmeasured = [Case("save", saver) for saver in sorted(needed - {case.method for case in saves})]
    try:
        for case in [*_rotated(saves, turn), *unmeasured]:
            folder = scratch / case.method
            if case in results.samples:
                begun(case.name)
            results.take(case, partial(bench.worker, "save", case.method, folder))
            if case.method not in needed:
                shutil.rmtree(folder, ignore_errors=True)
        for case in _rotated(loads, turn):
            begun(case.name)
            flags = ["--cold"] if case.phase == "cold" else []
            results.take(case, partial(bench.worker, "load", case.method, scratch / case.saver, *flags))
    finally:
        for saver in SAVES:
            shutil.rmtree(scratch / saver, ignore_errors=True)
