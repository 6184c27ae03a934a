"""The tests that are marked for a CUDA device, and benchmarks that kill; each with a limit of time.

A test that skips counts as one that fails: it was not run on the device.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

from rich.console import Console
from rich.table import Table

__all__ = ["KILLS", "Row", "has_device", "marked_tests", "run_benchmark", "run_tests", "show"]

ROOT: Final = Path(__file__).resolve().parents[2]
KILLS: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    ("tools.bench.training.every_step", ("--only", "recover/dense-agent")),
    ("tools.bench.training.every_step", ("--only", "recover/storage")),
    ("tools.bench.training", ("--only", "kill/ckptstore-2/1", "--intervals", "1")),
    ("tools.bench.training", ("--only", "kill/gradient-diffs/1", "--intervals", "1")),
    ("tools.bench.training", ("--only", "kill/layer-host/1", "--intervals", "1")),
)
"""A module, and one case of it: trained on the device, killed, restored in another process, compared bit for bit."""
_VERBOSE: Final = re.compile(r"^(\S+::\S.*?) (PASSED|FAILED|ERROR|SKIPPED)")
_OUTCOMES: Final = {"PASSED": "passed", "FAILED": "failed", "ERROR": "failed", "SKIPPED": "skipped"}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Attributes:
        kind: ``test``, or the benchmark's module.
        name: of the test or case.
        outcome: ``passed``, ``failed``, ``skipped``, ``measured``, ``absent``, ``not run``.
        seconds: of a test, or from the kill to the restored state.
        words: the reason of a failure or skip.
    """

    kind: str
    name: str
    outcome: str
    seconds: float | None = None
    words: str = ""

    @property
    def good(self) -> bool:
        """Whether nothing failed. A case that did not run because the time was up is not a failure, and is reported."""
        return self.outcome in ("passed", "measured", "absent", "not run")


def marked_tests(folder: Path = ROOT / "tests") -> dict[Path, list[str]]:
    """The tests that are marked for a GPU, by file; read, not imported."""
    found: dict[Path, list[str]] = {}
    for path in sorted(folder.rglob("test_*.py")):
        if "pytest.mark.gpu" not in (text := path.read_text()):
            continue  # parsing them all takes seconds
        names = [
            node.name
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.FunctionDef) and any(_is_mark(one) for one in node.decorator_list)
        ]
        if names:
            found[path] = names
    return found


def _is_mark(decorator: ast.expr) -> bool:
    return ast.unparse(decorator) == "pytest.mark.gpu"


def has_device() -> bool:
    """Whether torch sees a CUDA device here."""
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


def run_tests(files: Sequence[Path], folder: Path, seconds: float | None = None) -> Iterator[Row]:
    """Run the marked tests in these files. Tests that had not ended after `seconds` are one row, ``not run``."""
    report, said = folder / "tests.xml", folder / "tests.txt"
    command = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", "-p", "no:xdist", f"--junitxml={report}"]
    if importlib.util.find_spec("pytest_timeout") is None:  # pyproject.toml sets its option, which is an error then
        command += [
            "-o",
            "addopts=--import-mode=importlib --strict-markers",
            "-W",
            "ignore::pytest.PytestConfigWarning",
        ]
    with said.open("w") as out:
        status = _ended([*command, *map(str, files)], out, seconds)
    if status is not None and report.exists():
        yield from _reported(report)
        return
    lines = said.read_text().splitlines()
    if status is not None:
        yield Row("test", "pytest", "failed", words=_last("\n".join(lines)))
        return
    done = [found for line in lines if (found := _VERBOSE.match(line))]
    for one in done:
        yield Row("test", one[1], _OUTCOMES[one[2]])
    yield Row("test", "the others", "not run", words=f"the time was up after {seconds:.0f} s; {len(done)} had ended")


def _reported(report: Path) -> Iterator[Row]:
    for case in ElementTree.parse(report).iter("testcase"):  # ours
        bad = next((one for one in case if one.tag in ("failure", "error", "skipped")), None)
        outcome = "passed" if bad is None else "skipped" if bad.tag == "skipped" else "failed"
        words = "" if bad is None else str(bad.get("message", ""))
        name = f"{case.get('classname')}.{case.get('name')}"
        yield Row("test", name, outcome, float(case.get("time", 0)), words=words.partition("\n")[0])


def _ended(command: Sequence[str], out: Any, seconds: float | None, trouble: Any = subprocess.STDOUT) -> int | None:
    """Run a command to its end -> its status. None: the time was up, and all its processes are killed."""
    with subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=trouble, text=True, start_new_session=True) as process:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def run_benchmark(
    module: str,
    options: Sequence[str],
    folder: Path,
    *,
    quick: bool,
    device: str = "cuda",
    seconds: float | None = None,
    left: float = float("inf"),
) -> Iterator[Row]:
    """Run one case of a benchmark with its model on the device.

    Args:
        seconds: its time limit, after which it has failed, and is ended.
        left: seconds that are left for all: after them it is ended, and counts as not run.
    """
    limit = left if seconds is None else min(seconds, left)
    command = [sys.executable, "-m", module, "--device", device, "--rounds", "1", "--json", "--out", str(folder)]
    command += [*options, *(["--quick"] if quick else [])]
    name = next((one for one in options if "/" in one), "all")
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as trouble:
        status = _ended(command, out, None if limit == float("inf") else limit, trouble)
        for one in (out, trouble):
            one.seek(0)
        lines = [line for line in out.read().splitlines() if line.startswith("{")]
        said = trouble.read()
    if status is None:
        late = limit == left
        words = f"{'the time was up: ' if late else ''}it was ended after {limit:.0f} s"
        yield Row(module, name, "not run" if late else "failed", words=words)
    elif not lines:
        yield Row(module, name, "failed", words=_last(said))
    else:
        for case in json.loads(lines[-1])["results"]:
            yield _row_of(module, case)


def _row_of(module: str, case: dict[str, Any]) -> Row:
    name = case.get("name") or f"{case['kind']}/{case['strategy']}"
    if "error" in case or "absent" in case:
        return Row(module, name, "failed" if "error" in case else "absent", words=case.get("error", case.get("absent")))
    median = case.get("median", {})
    return Row(module, name, "measured", median.get("recover_s", median.get("restore_s")))


def _last(text: str) -> str:
    return (text.strip().splitlines() or ["it said nothing"])[-1]


def show(console: Console, rows: Sequence[Row]) -> None:
    """Print a table: every row except passed tests, and the number of those."""
    passed = [row for row in rows if row.outcome == "passed"]
    table = Table("what", "name", "outcome", title=f"{len(passed)} tests passed", title_justify="left")
    table.add_column("seconds", justify="right")
    table.add_column("")
    for row in rows:
        if row.outcome != "passed":
            table.add_row(
                *(row.kind.removeprefix("tools.bench."), row.name),
                row.outcome if row.good else f"[red]{row.outcome}[/red]",
                "-" if row.seconds is None else f"{row.seconds:.3f}",
                row.words,
            )
    if table.row_count:
        console.print(table)
    else:
        console.print(f"{len(passed)} tests passed")
