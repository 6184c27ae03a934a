"""Tables and pictures of the training benchmark: the cost of each strategy by interval, the loss of a kill, and the
wasted time by (1/f, b): the shapes of PCcheck's Fig. 8 and LowDiff's Table I.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from tools.bench.storage.report import MEGABYTE, median, quartiles
from tools.bench.training.training_cases import Case, Results

_COLOURS: Final = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#000000", "#999999")
_MARKS: Final = "osv^D<>PX*hd"


@dataclass(frozen=True, slots=True)
class Tables:
    """The results, ready to be printed.

    Attributes:
        results: everything.
        mtbf: M in seconds, for wasted time.
    """

    results: Results
    mtbf: float

    def of(self, kind: str) -> list[Case]:
        """The cases of a kind, in their order."""
        return [case for case in self.results.samples if case.kind == kind]

    def median(self, case: Case, name: str) -> float | None:
        """Median of a field over the rounds; None if there is none."""
        values = [sample[name] for sample in self.results.samples.get(case, []) if name in sample]
        return median(values) if values else None

    def slowdowns(self, case: Case) -> list[float]:
        """Seconds of an iteration over those of ``none`` in the same round and with the same interval; not of kills."""
        if case.kind == "kill":
            return []
        plain = Case(case.kind, "none", 1 if case.kind == "table" else case.interval)
        pairs = zip(self.results.samples.get(case, []), self.results.samples.get(plain, []), strict=False)
        return [mine["iteration_s"] / theirs["iteration_s"] for mine, theirs in pairs]

    def wasted(self, case: Case) -> float | None:
        """Of a ``table``'s case: wasted time as a share of the training time, as in LowDiff's Eq. (8), but measured.

        It is the loop's cost of saving, and for every failure half a batch of iterations and a restore.
        """
        slowed, plain = self.slowdowns(case), self.median(Case("table", "none", 1), "iteration_s")
        restore = self.median(case, "restore_s")
        if not slowed or plain is None or restore is None:
            return None
        return max(0.0, median(slowed) - 1) + (case.batch / 2 * plain + restore) / self.mtbf

    def document(self) -> list[dict[str, Any]]:
        """Every sample, with medians beside them."""
        found = []
        for case, samples in self.results.samples.items():
            entry: dict[str, Any] = {"name": case.name, "kind": case.kind, "strategy": case.strategy}
            entry |= {"interval": case.interval} | ({"batch": case.batch} if case.batch else {})
            for name, why in (("error", self.results.errors), ("absent", self.results.absent)):
                if case in why:
                    entry[name] = why[case]
            if samples:
                names = [name for name, value in samples[0].items() if isinstance(value, int | float)]
                entry["median"] = {name: self.median(case, name) for name in names}
                if slowed := self.slowdowns(case):
                    entry["slowdown"] = median(slowed)
                if (share := self.wasted(case)) is not None and case.batch:
                    entry["wasted"] = share
                entry["samples"] = samples
            found.append(entry)
        return found


def _number(value: float | None, text: str, scale: float = 1.0) -> str:
    return "-" if value is None else format(value / scale, text)


def show(console: Console, tables: Tables, labels: dict[str, str]) -> None:
    """Print all tables."""
    for interval in sorted({case.interval for case in tables.of("loop")}):
        console.print(_loops(tables, interval, labels))
    if tables.of("kill"):
        console.print(_kills(tables, labels))
    if any(case.batch for case in tables.of("table")):
        console.print(_wasted_title(tables), highlight=False)
        console.print(_wasted(tables))
    for case, reason in tables.results.absent.items():
        console.print(f"{case.name} is absent: {reason}", highlight=False)
    for case, why in tables.results.errors.items():
        console.print(f"[red]{case.name} failed[/red]: {why}", highlight=False)


def _loops(tables: Tables, interval: int, labels: dict[str, str]) -> Table:
    title = "Every iteration" if interval == 1 else f"Every {interval} iterations"
    columns = [
        *("it/s", "slowdown", "quartiles", "CPU ms/it", "stall ms", "worst ms", "first ms", "durable s"),
        *("peak +MB", "MB/save", "restore s", "equal"),
    ]
    table = Table(title=title, title_justify="left")
    table.add_column("strategy", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for case in tables.of("loop"):
        if case.interval != interval:
            continue
        label = labels[case.strategy]
        if not tables.results.samples[case]:
            table.add_row(label, _why(tables, case))
            continue
        slowed = tables.slowdowns(case)
        spread = quartiles(slowed) if slowed else None
        table.add_row(
            label,
            _number(tables.median(case, "iterations_per_s"), ".2f"),
            _number(median(slowed) if slowed else None, ".3f"),
            "-" if spread is None else f"{spread[0]:.3f}-{spread[1]:.3f}",
            _number(tables.median(case, "thread_s"), ".1f", 1e-3),
            *(_number(tables.median(case, f"{kind}stall_s"), ".1f", 1e-3) for kind in ("", "worst_", "first_")),
            _number(tables.median(case, "durable_s"), ".3f"),
            _number(tables.median(case, "peak_rss"), ".0f", MEGABYTE),
            _number(tables.median(case, "bytes_per_save"), ".1f", MEGABYTE),
            _number(tables.median(case, "restore_s"), ".2f"),
            "-" if case.strategy == "none" else "yes",
        )
    return table


def _why(tables: Tables, case: Case) -> str:
    if case in tables.results.absent:
        return "absent"
    return "[red]failed[/red]" if case in tables.results.errors else "not run"


def _kills(tables: Tables, labels: dict[str, str]) -> Table:
    table = Table(title="Steps lost when the process is killed (SIGKILL at a random moment)", title_justify="left")
    table.add_column("strategy", no_wrap=True)
    for column in ("every", "kills", "lost, median", "most", "restore s", "equal"):
        table.add_column(column, justify="right")
    for case in tables.of("kill"):
        samples = tables.results.samples[case]
        label = labels[case.strategy]
        if not samples:
            table.add_row(label, str(case.interval), _why(tables, case))
            continue
        lost = [sample["lost"] for sample in samples]
        nothing = case.strategy == "none"
        table.add_row(
            *(label, str(case.interval), str(len(samples))),
            *(("all", "all") if nothing else (f"{median(lost):g}", str(max(lost)))),
            *(("-", "-") if nothing else (_number(tables.median(case, "restore_s"), ".2f"), "yes")),
        )
    return table


def grid(tables: Tables) -> tuple[list[int], list[int], list[list[float | None]]]:
    """(1/f, b, wasted time as a multiple of the least): Table I. None if nothing was measured."""
    cases = [case for case in tables.of("table") if case.batch]
    intervals, batches = sorted({case.interval for case in cases}), sorted({case.batch for case in cases})
    shares = {(case.interval, case.batch): tables.wasted(case) for case in cases}
    known = [share for share in shares.values() if share is not None]
    least = min(known, default=1.0) or 1.0
    return (
        intervals,
        batches,
        [
            [None if (share := shares.get((interval, batch))) is None else share / least for batch in batches]
            for interval in intervals
        ],
    )


def _wasted_title(tables: Tables) -> str:
    known = [share for case in tables.of("table") if case.batch and (share := tables.wasted(case)) is not None]
    least = f"; the least is {min(known):.2%} of the time trained" if known else ""
    return f"Wasted time over (1/f, b), step diffs, MTBF {tables.mtbf:g} s, as multiples of the least{least}"


def _wasted(tables: Tables) -> Table:
    intervals, batches, cells = grid(tables)
    table = Table()
    table.add_column("1/f \\ b", justify="right")
    for batch in batches:
        table.add_column(str(batch), justify="right")
    for interval, row in zip(intervals, cells, strict=True):
        table.add_row(str(interval), *(_number(cell, ".3f") for cell in row))
    return table


def draw(tables: Tables, labels: dict[str, str], title: str, out: Path) -> list[Path]:
    """Write ``training.png`` (throughput over the interval) and ``training_table.png`` -> the written files."""
    import matplotlib as mpl

    mpl.use("Agg")
    return [
        path
        for path, done in (
            (out / "training.png", _throughput(tables, labels, title, out / "training.png")),
            (out / "training_table.png", _heat(tables, title, out / "training_table.png")),
        )
        if done
    ]


def _throughput(tables: Tables, labels: dict[str, str], title: str, path: Path) -> bool:
    from matplotlib import pyplot

    cases = [case for case in tables.of("loop") if tables.results.samples[case]]
    if not cases:
        return False
    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    for number, strategy in enumerate(dict.fromkeys(case.strategy for case in cases)):
        line = sorted((case for case in cases if case.strategy == strategy), key=lambda case: case.interval)
        axes.plot(
            [case.interval for case in line],
            [tables.median(case, "iterations_per_s") for case in line],
            color="0.4" if strategy == "none" else _COLOURS[number % len(_COLOURS)],
            linestyle=":" if strategy == "none" else "-",
            marker=_MARKS[number % len(_MARKS)],
            label=labels[strategy],
        )
    intervals = sorted({case.interval for case in cases})
    axes.set(xscale="log", xlabel="iterations from one save to the next", ylabel="iterations per second", title=title)
    axes.set_xticks(intervals, [str(interval) for interval in intervals])
    axes.minorticks_off()
    axes.set_ylim(0, None)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return True


def _heat(tables: Tables, title: str, path: Path) -> bool:
    intervals, batches, cells = grid(tables)
    if not any(cell is not None for row in cells for cell in row):
        return False
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(1.2 + 1.0 * len(batches), 1.6 + 0.7 * len(intervals)), layout="constrained")
    values: Sequence[Sequence[float]] = [[float("nan") if cell is None else cell for cell in row] for row in cells]
    axes.imshow(values, cmap="viridis_r", vmin=1, vmax=2.5, aspect="auto")
    for row, line in enumerate(cells):
        for column, cell in enumerate(line):
            if cell is not None:
                axes.text(column, row, f"{cell:.3f}", ha="center", va="center", color="w" if cell > 1.6 else "k")
    axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
    axes.set_yticks(range(len(intervals)), [str(interval) for interval in intervals])
    axes.set(xlabel="b: diffs in one write", ylabel="1/f")
    axes.set_title(f"Wasted time, multiples of the least\n{title}", fontsize=9)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return True
