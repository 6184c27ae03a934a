"""From samples to medians, ratios and tables."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

MEGABYTE = 1e6


def median(values: Sequence[float]) -> float:
    """Middle value."""
    return float(statistics.median(values))


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """First and third quartile; of one value, that value twice."""
    if len(values) < 2:
        return float(values[0]), float(values[0])
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return float(first), float(third)


@dataclass(frozen=True, slots=True)
class Row:
    """One case: its name, and the samples of its rounds, or why there are none."""

    phase: str
    """``save``, ``cold`` or ``warm``."""
    method: str
    label: str
    samples: tuple[Mapping[str, float], ...]
    error: str | None = None
    is_limit: bool = False
    """A raw transfer in the same conditions: the others' times are divided by the fastest of these."""

    def median(self, name: str) -> float | None:
        """Median of the samples' field `name`, or None if they have none."""
        values = [sample[name] for sample in self.samples if name in sample]
        return median(values) if values else None

    @property
    def seconds(self) -> float:
        """Median wall time. Only of a row that has samples."""
        return median([sample["seconds"] for sample in self.samples])


@dataclass(frozen=True, slots=True)
class Yardsticks:
    """The seconds by which the times of one phase are divided; None: not measured."""

    raw: float | None
    safetensors: float | None

    @staticmethod
    def of(rows: Sequence[Row]) -> Yardsticks:
        """The fastest raw transfer and safetensors among the rows of one phase."""
        limits = [row.seconds for row in rows if row.is_limit and row.samples]
        peer = [row.seconds for row in rows if row.method == "safetensors" and row.samples]
        return Yardsticks(min(limits, default=None), peer[0] if peer else None)


def _number(value: float | None, text: str, scale: float = 1.0) -> str:
    return "-" if value is None else format(value / scale, text)


def _ratio(seconds: float, yardstick: float | None) -> str:
    return "-" if not yardstick else f"{seconds / yardstick:.2f}x"


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(columns[0], no_wrap=True)
    for column in columns[1:]:
        table.add_column(column, justify="right")
    return table


def _common(row: Row, yardsticks: Yardsticks) -> list[str]:
    low, high = quartiles([sample["seconds"] for sample in row.samples])
    size = row.median("state_bytes")
    return [
        row.label,
        f"{row.seconds:.3f}",
        f"{low:.3f}-{high:.3f}",
        _number(None if size is None else size / row.seconds, ".2f", 1e9),
        _ratio(row.seconds, yardsticks.raw),
        _ratio(row.seconds, yardsticks.safetensors),
    ]


def _save_table(rows: Sequence[Row], yardsticks: Yardsticks) -> Table:
    table = _table(
        "Save: seconds from the call until files and folder are synced",
        [
            "method",
            "durable s",
            "quartiles",
            "GB/s",
            "/ raw",
            "/ safetensors",
            "stall s",
            "loop loss s",
            "CPU s",
            "peak +MB",
            "written MB",
        ],
    )
    for row in rows:
        if not row.samples:
            table.add_row(row.label, "[red]failed[/red]")
            continue
        loss = row.median("loop_loss_s")
        table.add_row(
            *_common(row, yardsticks),
            _number(row.median("stall_s"), ".3f"),
            # A call that is durable on return costs the loop exactly that call.
            _number(row.seconds if loss is None and not row.method.startswith("raw") else loss, ".3f"),
            _number(row.median("cpu_s"), ".2f"),
            _number(row.median("peak_rss"), ".0f", MEGABYTE),
            _number(row.median("written_bytes"), ".0f", MEGABYTE),
        )
    return table


def _load_table(title: str, rows: Sequence[Row], yardsticks: Yardsticks) -> Table:
    table = _table(
        title,
        ["method", "ready s", "quartiles", "GB/s", "/ raw", "/ safetensors", "call s", "CPU s", "peak +MB", "read MB"],
    )
    for row in rows:
        if not row.samples:
            table.add_row(row.label, "[red]failed[/red]")
            continue
        table.add_row(
            *_common(row, yardsticks),
            _number(row.median("load_s"), ".3f"),
            _number(row.median("cpu_s"), ".2f"),
            _number(row.median("peak_rss"), ".0f", MEGABYTE),
            _number(row.median("read_bytes"), ".0f", MEGABYTE),
        )
    return table


TITLES = {
    "cold": "Cold load: no page resident at the start, every byte touched at the end",
    "warm": "Warm load: every page resident at the start, every byte touched at the end",
}


def by_phase(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each phase that was measured, in the order of `rows`."""
    return {phase: kept for phase in ("save", "cold", "warm") if (kept := [row for row in rows if row.phase == phase])}


def show(console: Console, rows: Sequence[Row]) -> None:
    """Print one table for each phase."""
    for phase, kept in by_phase(rows).items():
        yardsticks = Yardsticks.of(kept)
        console.print(
            _save_table(kept, yardsticks) if phase == "save" else _load_table(TITLES[phase], kept, yardsticks)
        )
    for row in rows:
        if row.error is not None:
            console.print(f"[red]{row.phase}/{row.method} failed[/red]: {row.error}", highlight=False)


def as_json(rows: Sequence[Row]) -> list[dict[str, object]]:
    """Every sample, with medians, quartiles and ratios beside them."""
    out: list[dict[str, object]] = []
    for phase, kept in by_phase(rows).items():
        yardsticks = Yardsticks.of(kept)
        for row in kept:
            entry: dict[str, object] = {"phase": phase, "method": row.method, "label": row.label}
            if row.error is not None:
                entry["error"] = row.error
            if row.samples:
                names = sorted({name for sample in row.samples for name in sample})
                entry["median"] = {name: row.median(name) for name in names}
                entry["seconds_quartiles"] = quartiles([sample["seconds"] for sample in row.samples])
                entry["over_raw"] = row.seconds / yardsticks.raw if yardsticks.raw else None
                entry["over_safetensors"] = row.seconds / yardsticks.safetensors if yardsticks.safetensors else None
                entry["samples"] = [dict(sample) for sample in row.samples]
            out.append(entry)
    return out
