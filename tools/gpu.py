"""Everything that needs a GPU, on a machine that has one: ``python -m tools.gpu``.

Runs all tests that are marked for a CUDA device (a test that skips there counts as one that fails), then the training
benchmark and that of saves after every step with the model on the device, and prints one table. Without a device it
says which tests there are, and ends with exit code 3; with a failure it ends with 1.

The tests ran on an H200 (torch 2.11, CUDA 13): all passed. The benchmarks ran there in their quick form.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

import click
from rich.console import Console
from rich.table import Table

__all__ = ["Row", "main", "marked_tests"]

ROOT: Final = Path(__file__).resolve().parents[1]
NO_DEVICE: Final = 3
_BENCHMARKS: Final[dict[str, tuple[str, ...]]] = {
    "tools.bench.training": ("--only", "loop/*", "--intervals", "1,10", "--rounds", "1"),
    "tools.bench.training.every_step": ("--rounds", "1",),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Attributes:
        kind: ``test``, or the benchmark's module.
        name: of the test or case.
        outcome: ``passed``, ``failed``, ``skipped``, ``measured``, ``absent``.
        seconds: of a test, or an iteration of the loop.
        overhead: of a loop, over the one without saves; None: it has none.
        words: why not.
    """

    kind: str
    name: str
    outcome: str
    seconds: float | None = None
    overhead: float | None = None
    words: str = ""

    @property
    def good(self) -> bool:
        """Whether it is as it should be."""
        return self.outcome in ("passed", "measured", "absent")


def marked_tests(folder: Path = ROOT / "tests") -> dict[Path, list[str]]:
    """The tests that are marked for a GPU, by file; read, not imported."""
    found: dict[Path, list[str]] = {}
    for path in sorted(folder.rglob("test_*.py")):
        if "pytest.mark.gpu" not in (text := path.read_text()):
            continue  # to parse them all takes seconds
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


def run_tests(files: Sequence[Path], folder: Path) -> Iterator[Row]:
    """Run what is marked in these files."""
    report = folder / "tests.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={report}", *map(str, files)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if not report.exists():
        yield Row("test", "pytest", "failed", words=_last(done.stderr or done.stdout))
        return
    for case in ElementTree.parse(report).iter("testcase"):  # ours
        bad = next((one for one in case if one.tag in ("failure", "error", "skipped")), None)
        outcome = "passed" if bad is None else "skipped" if bad.tag == "skipped" else "failed"
        words = "" if bad is None else str(bad.get("message", ""))
        name = f"{case.get('classname')}.{case.get('name')}"
        yield Row("test", name, outcome, float(case.get("time", 0)), words=words.partition("\n")[0])


def run_benchmark(module: str, options: Sequence[str], folder: Path, *, quick: bool) -> Iterator[Row]:
    """Run a benchmark with its model on the device."""
    command = [sys.executable, "-m", module, "--device", "cuda", "--json", "--out", str(folder), *options]
    done = subprocess.run(
        [*command, *(["--quick"] if quick else [])], cwd=ROOT, capture_output=True, text=True, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        yield Row(module, "all", "failed", words=_last(done.stderr))
        return
    for case in json.loads(lines[-1])["results"]:
        yield _row_of(module, case)


def _row_of(module: str, case: dict[str, Any]) -> Row:
    name = case.get("name") or f"{case['kind']}/{case['strategy']}"
    if "error" in case or "absent" in case:
        return Row(module, name, "failed" if "error" in case else "absent", words=case.get("error", case.get("absent")))
    median = case.get("median", {})
    overhead = case.get("overhead", case["slowdown"] - 1 if "slowdown" in case else None)
    return Row(module, name, "measured", median.get("iteration_s", median.get("recover_s")), overhead)


def _last(text: str) -> str:
    return (text.strip().splitlines() or ["it said nothing"])[-1]


def show(console: Console, rows: Sequence[Row]) -> None:
    """Print the table."""
    table = Table("what", "name", "outcome", title="On the GPU", title_justify="left")
    table.add_column("seconds", justify="right")
    table.add_column("overhead", justify="right")
    table.add_column("")
    for row in rows:
        table.add_row(
            *(row.kind.removeprefix("tools.bench."), row.name),
            row.outcome if row.good else f"[red]{row.outcome}[/red]",
            "-" if row.seconds is None else f"{row.seconds:.3f}",
            "-" if row.overhead is None else f"{row.overhead:.1%}",
            row.words,
        )
    console.print(table)


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="Benchmarks with a tiny model.")
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON.")
def main(*, quick: bool, as_json: bool) -> None:
    """See the module."""
    found = marked_tests()
    count = sum(map(len, found.values()))
    if not has_device():
        names = [f"{path.relative_to(ROOT)}::{name}" for path, tests in found.items() for name in tests]
        if as_json:
            click.echo(json.dumps({"device": None, "tests": names}))
        else:
            click.echo(f"no CUDA device here; {count} tests wait for one, and were not run:")
            click.echo("\n".join(f"  {name}" for name in names))
        sys.exit(NO_DEVICE)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as place:
        os.environ.setdefault("CKPTSTORE_RUNTIME_DIR", f"{place}/runtime")
        rows += run_tests(list(found), Path(place))
        for module, options in _BENCHMARKS.items():
            rows += run_benchmark(module, options, Path(place), quick=quick)
    if as_json:
        click.echo(json.dumps({"device": "cuda", "rows": [asdict(row) for row in rows]}))
    else:
        show(Console(width=None if sys.stdout.isatty() else 160), rows)
    sys.exit(0 if all(row.good for row in rows) else 1)


if __name__ == "__main__":
    main()
