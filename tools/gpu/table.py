"""The table of costs: each way to save in a separate process (`case`), in turns, until the time is up."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.table import Table

from tools.warm import MODULES, Warm, WarmError

if TYPE_CHECKING:
    from tools.gpu.case import Load, Plan

__all__ = ["DIFFS", "HELD", "LEAST", "PEERS", "SAVES", "Measured", "Setup", "affordable", "measure", "show", "summary"]

PEERS: Final = ("torch.save", "checkfreq", "dcp-pinned", "dcp-async", "dcp-save")
SAVES: Final = ("full", "full-agent", "layer-host", "layer-device", "replica")
DIFFS: Final = ("topk-agent", "gradient-agent", "delta", "topk", "gradient")
"""The parts of the table, in the order of `ways.WAYS`, which imports torch; a test compares them."""
ROOT: Final = Path(__file__).resolve().parents[2]
_MODULES: Final = (
    *MODULES,
    *("torch.distributed.checkpoint.staging", "torch.distributed.checkpoint.state_dict_saver", "torch.profiler"),
)
HELD: Final = 4
"""Most checkpoints that exist in addition to those of a block with a save every iteration."""
LEAST: Final = 20.0
"""Fewest seconds that a case needs on a GPU: none begins with less."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The common settings of all cases.

    Attributes:
        load: the load of training; a first process finds `micro` if `iteration` is above 0.
        plan: the measurement.
        iteration: seconds that an iteration should take without saves.
        place: where checkpoints are written.
        case_seconds: the time limit of a case.
        least: no case begins with fewer seconds left.
    """

    load: Load
    plan: Plan
    iteration: float
    place: Path
    case_seconds: float = 75.0
    least: float = LEAST


@dataclass(frozen=True, slots=True)
class Measured:
    """One way.

    Attributes:
        samples: the output of `case`, by round.
        failed: why it did not end, or what differs.
        absent: why it does not exist here.
        not_run: why it did not begin.
    """

    way: str
    samples: tuple[dict[str, Any], ...] = ()
    failed: str = ""
    absent: str = ""
    not_run: str = ""

    @property
    def good(self) -> bool:
        """Whether nothing failed. A way that does not exist here, or whose time never came, is not a failure."""
        return not self.failed

    def median(self, *names: str) -> float | None:
        """Of a number by its path in the samples; None: no sample has it."""
        found = [value for one in self.samples if (value := _at(one, names)) is not None]
        return statistics.median(found) if found else None


def _at(document: Any, names: Sequence[str]) -> float | None:
    for name in names:
        document = document.get(name) if isinstance(document, dict) else None
    return document if isinstance(document, int | float) else None


def measure(
    setup: Setup, ways: Sequence[str], rounds: int, until: float, told: Callable[[str], None]
) -> tuple[Setup, list[Measured]]:
    """Measure every way in each round, in turns.

    Args:
        until: on the monotonic clock; cases that have not ended then are ended.
        told: called with a line for each case as soon as it has ended.

    Returns:
        the setup with the numbers found, and the ways in the given order.
    """
    found = {way: Measured(way) for way in ways}
    try:
        with Warm(_MODULES, env=dict(os.environ)) as warm:
            if setup.iteration > 0:
                fit = _run(warm, setup, "fit", until)
                if "micro" not in fit:
                    why = fit.get("failed", fit.get("late", ""))
                    return setup, [replace(one, failed=why) for one in found.values()]
                setup = replace(setup, load=replace(setup.load, micro=fit["micro"]))
                told(f"{fit['micro']} micro-batches make an iteration of about {setup.iteration} s")
            for turn in range(rounds):
                for place in range(len(ways)):
                    way = ways[(place + 5 * turn) % len(ways)]
                    found[way] = _turn(warm, setup, found[way], turn, until)
                    told(f"round {turn + 1}/{rounds} {_line(found[way])}")
    except WarmError as error:
        return setup, [one if one.samples else replace(one, failed=str(error)) for one in found.values()]
    return setup, list(found.values())


def _turn(warm: Warm, setup: Setup, before: Measured, turn: int, until: float) -> Measured:
    if before.failed or before.absent:
        return before
    left = until - time.monotonic()
    if left < setup.least:
        return (
            before if before.samples else replace(before, not_run=f"the time was up: {max(0.0, left):.0f} s were left")
        )
    said = _run(warm, setup, before.way, until)
    if "late" in said:
        return before if before.samples else replace(before, not_run=said["late"])
    if "failed" in said or "absent" in said:
        return replace(before, failed=said.get("failed", ""), absent=said.get("absent", ""))
    wrong = f"restored differently: {said['differs']}" if said.get("differs") else ""
    return replace(before, samples=(*before.samples, said | {"round": turn}), failed=wrong)


def _run(warm: Warm, setup: Setup, way: str, until: float) -> dict[str, Any]:
    """Run a case to its end -> its output, or why there is none: ``failed``, ``late`` (the time was up)."""
    seconds = min(setup.case_seconds, until - time.monotonic())
    folder = Path(tempfile.mkdtemp(prefix=f"gpu-{way}-", dir=setup.place))
    words = [sys.executable, "-W", "ignore", "-m", "tools.gpu.case", way, "--dir", str(folder)]
    words += ["--load", json.dumps(asdict(setup.load)), "--plan", json.dumps(asdict(setup.plan))]
    words += ["--iteration", str(setup.iteration)]
    try:
        done = warm.run(words, cwd=ROOT, env=dict(os.environ), timeout=max(0.1, seconds))
    except subprocess.TimeoutExpired:
        why = f"it was ended after {seconds:.0f} s"
        return {"failed": why} if seconds >= setup.case_seconds else {"late": f"the time was up: {why}"}
    finally:  # gigabytes of a tmpfs take seconds: the next case begins meanwhile
        threading.Thread(target=shutil.rmtree, args=(folder,), kwargs={"ignore_errors": True}).start()
    last = (done.stdout.strip().splitlines() or [""])[-1]
    if done.returncode or not last.startswith("{"):
        return {"failed": (done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"])[-1]}
    return dict(json.loads(last))


def affordable(saves: int, state_bytes: int, place: Path) -> int:
    """How many saves every iteration fit where checkpoints are written. Raises `ValueError` if fewer than two do."""
    free = shutil.disk_usage(place).free
    found = min(saves, int(0.9 * free / state_bytes) - HELD)
    if found < 2:
        needed = (HELD + 2) * state_bytes / 0.9
        raise ValueError(f"{place}: {free / 1e9:.0f} GB are free, {needed / 1e9:.0f} GB are needed; give --store")
    return found


# -- the printed table

_HEADS: Final = (
    *("ms/it", "loss", "stall ms", "worst", "loss at N", "stall ms", "worst", "durable s", "to host MB", "pageable"),
    *("device MB", "kept", "host MB", "stored MB", "restore s", "equal"),
)


def summary(one: Measured, interval: int) -> dict[str, float | None]:
    """The numbers of one way's row: seconds, bytes, and losses as fractions. None: not measured."""
    block, rare = ("blocks", "1"), ("blocks", str(interval))
    agent = one.median("agent_bytes") or 0.0
    host = one.median("host_bytes")
    return {
        "iteration_s": one.median("plain_s"),
        "loss": one.median("losses", "1"),
        "stall_s": one.median(*block, "stall_s"),
        "worst_stall_s": max((_at(sample, (*block, "worst_stall_s")) or 0.0 for sample in one.samples), default=None),
        "loss_rare": one.median("losses", str(interval)),
        "stall_rare_s": one.median(*rare, "stall_s"),
        "worst_stall_rare_s": one.median(*rare, "worst_stall_s"),
        "durable_s": one.median(*rare, "durable_s") or one.median(*block, "durable_s"),
        "durable_every_s": one.median(*block, "durable_s"),
        "to_host_bytes": one.median("traffic", "to_host"),
        "pageable_bytes": one.median("traffic", "pageable"),
        "to_device_bytes": one.median("traffic", "to_device"),
        "on_device_bytes": one.median("traffic", "on_device"),
        "device_peak_bytes": one.median("device_peak_bytes"),
        "device_held_bytes": one.median("device_held_bytes"),
        "host_bytes": None if host is None else host + agent,
        "stored_bytes": one.median("stored_bytes"),
        "restore_s": one.median("restore_s"),
        "first_stall_s": one.median("first_stall_s"),
    }


def _line(one: Measured) -> str:
    if one.failed or one.absent or one.not_run:
        return f"{one.way}: {_why(one)}"
    last = one.samples[-1]
    stall, loss = _at(last, ("blocks", "1", "stall_s")), _at(last, ("losses", "1"))
    if stall is None or loss is None:
        return f"{one.way}: {last['plain_s']:.3f} s an iteration"
    return f"{one.way}: {last['plain_s']:.3f} s an iteration, stall {stall * 1e3:.1f} ms, loss {loss:.1%}"


def _why(one: Measured) -> str:
    if one.failed:
        return f"FAILED: {one.failed}"
    return f"absent: {one.absent}" if one.absent else f"not run: {one.not_run}"


def show(console: Console, setup: Setup, found: Sequence[Measured]) -> None:
    """Print the table, and below it why a number or a row is missing."""
    interval = setup.plan.interval
    table = Table("way", title=f"Saves in a training loop; N = {interval}", title_justify="left")
    for head in _HEADS:
        table.add_column(head.replace("N", str(interval)), justify="right", no_wrap=True)
    reasons: dict[str, list[str]] = {}
    for one in found:
        if not one.samples:
            table.add_row(one.way, "absent" if one.absent else "not run" if one.not_run else "failed")
        else:
            table.add_row(one.samples[-1]["label"], *_cells(summary(one, interval)), "NO" if one.failed else "yes")
            why = one.samples[-1].get("no_traffic")
            if why:
                reasons.setdefault(f"bytes over the bus: {why}", []).append(one.way)
        if one.failed or one.absent or one.not_run:
            reasons.setdefault(_why(one), []).append(one.way)
    console.print(table)
    for why, names in reasons.items():
        console.print(f"{', '.join(names)}: {why}", highlight=False, soft_wrap=True)


def _cells(row: dict[str, float | None]) -> list[str]:
    def cell(name: str, text: str, scale: float = 1.0) -> str:
        value = row[name]
        return "-" if value is None else format(value / scale, text)

    return [
        cell("iteration_s", ".0f", 1e-3),
        cell("loss", ".1%"),
        cell("stall_s", ".1f", 1e-3),
        cell("worst_stall_s", ".1f", 1e-3),
        cell("loss_rare", ".1%"),
        cell("stall_rare_s", ".1f", 1e-3),
        cell("worst_stall_rare_s", ".1f", 1e-3),
        cell("durable_s", ".2f"),
        *(cell(f"{name}_bytes", ".0f", 1e6) for name in ("to_host", "pageable", "device_peak", "device_held", "host")),
        cell("stored_bytes", ".1f", 1e6),
        cell("restore_s", ".2f"),
    ]
