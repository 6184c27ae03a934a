"""A look at a checkpoint reads the log once: as often as opening it does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import ckptstore
from ckptstore.backends.memory import MemoryBackend
from ckptstore.cli.main import cli
from ckptstore.exchange.export import export
from ckptstore.log.journal import Journal
from ckptstore.reports.comparison import compare
from ckptstore.reports.inspection import inspect, statistics
from ckptstore.reports.restore_explanation import explain
from ckptstore.restore import restore_rates
from ckptstore.restore.open_checkpoint import opened


@pytest.fixture
def journal() -> Journal:
    store = ckptstore.open("memory://reads-once")
    with store.writer(parent=None, poll_seconds=None) as writer:
        for step in (1, 2):
            writer.save({"w": np.full(5, step, np.float32)}, step=step)
    return store.journal


@pytest.fixture
def gets(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    counted: Counter[str] = Counter()
    get = MemoryBackend.get

    def counting(self: MemoryBackend, key: str, *limit: int) -> bytes:
        counted["gets"] += 1
        return get(self, key, *limit)

    monkeypatch.setattr(MemoryBackend, "get", counting)
    return counted


def looks(tmp_path: Path) -> dict[str, tuple[int, Callable[[Journal], Any]]]:
    return {
        "export": (1, lambda journal: export(journal, "latest", tmp_path / "x.safetensors")),
        "compare": (2, lambda journal: compare(journal, "1", "latest")),
        "inspect": (1, lambda journal: inspect(journal, "latest")),
        "inspect and explain": (1, lambda journal: inspect(journal, "latest", explain=True)),
        "statistics": (1, lambda journal: statistics(journal, "latest", "w")),
        "explain": (1, lambda journal: explain(journal, "latest")),
    }


@pytest.mark.parametrize("look", ["export", "compare", "inspect", "inspect and explain", "statistics", "explain"])
def test_the_log_is_read_as_often_as_checkpoints_are_opened(
    tmp_path: Path, journal: Journal, gets: Counter[str], look: str
) -> None:
    journal.format  # noqa: B018  # the FORMAT file is read once for all
    gets.clear()
    with opened(journal, "latest"):
        opening = gets["gets"]
    assert opening > 0
    checkpoints, work = looks(tmp_path)[look]
    gets.clear()
    work(journal)
    assert gets["gets"] == checkpoints * opening


def test_the_command_reads_the_log_once(journal: Journal, gets: Counter[str]) -> None:
    """In a store with 10,000 checkpoints each reading costs as much as all of `ckpt log -n 5`. FORMAT is one more."""
    with opened(Journal(journal.backend), "latest"):
        opening = gets["gets"]
    gets.clear()
    told = CliRunner().invoke(cli, ["inspect", "memory://reads-once"])
    assert told.exit_code == 0, told.output
    assert gets["gets"] == opening


def test_only_what_a_restore_needs_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading the kernels that decode takes longer than everything else."""
    store = ckptstore.open("memory://reads-once-deltas")
    wave = np.sin(np.arange(5000, dtype=np.float32))
    with store.writer(parent=None, deltas=5, poll_seconds=None) as writer:
        for step in (1, 2):
            writer.save({"w": wave * np.float32(1 + step * 1e-6)}, step=step)
    measured: list[str] = []
    for name in ("_delta_rate", "_replay_rate"):
        monkeypatch.setattr(
            restore_rates,
            name,
            lambda _threads, name=name: measured.append(name) or restore_rates.KernelSpeed(0.0, 1e6, 1e6),
        )
    assert [one.kind for one in store.checkpoints()] == ["full", "delta"]
    plan = store.inspect(1, explain=True).plan
    assert plan is not None
    assert (plan.steps[0].kind, plan.rates.decode, measured) == ("full", restore_rates.TYPICAL.decode, [])
    plan = store.inspect(2, explain=True).plan
    assert plan is not None
    assert (plan.rates.replay, measured) == (restore_rates.TYPICAL.replay, ["_delta_rate"])
    assert store.explain(2).bytes_read == plan.bytes_read  # which measures all, as it always did
    assert measured == ["_delta_rate", "_delta_rate", "_replay_rate"]
    assert store.inspect(2).plan is None
