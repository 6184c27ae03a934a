"""The explained plan is the real plan: the reads that it lists are the reads that happen."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ckptstore
from ckptstore.formats import codecs
from ckptstore.host.threads import default_threads
from ckptstore.reports.restore_explanation import Explanation, PlanStep, explain
from ckptstore.restore import restore_rates
from ckptstore.restore.restore_plan import Rates
from tests.write.test_deltas import fill, trajectory


def test_a_chain_is_explained_with_its_costs(tmp_path: Path) -> None:
    store = fill(tmp_path / "store", trajectory(4), 1)
    plan = explain(store.journal, 4)
    assert [(step.ref, step.kind, step.base) for step in plan.steps] == [
        ("1@1", "full", None),
        ("2@1", "delta", "1@1"),
        ("3@1", "delta", "2@1"),
        ("4@1", "delta", "3@1"),
    ]
    infos = {info.ref: info for info in store.checkpoints()}
    assert all(0 < step.bytes_read <= infos[step.ref].stored for step in plan.steps)
    assert plan.nbytes == infos["4@1"].nbytes
    assert plan.steps[0].bytes_decoded == 0  # an uncompressed full
    assert plan.seconds > 0


def test_a_selection_reads_its_own_chains_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptstore.backends.local_disk import directio

    store = fill(tmp_path / "store", trajectory(4), 1)
    name = "optimizer.master.layer1.weight"
    plan = explain(store.journal, 4, name)
    assert plan.bytes_read < explain(store.journal, 4).bytes_read / 4
    asked: list[int] = []
    original = directio.FileSource.read_into

    def counting(self: Any, offset: int, out: memoryview) -> None:
        asked.append(out.nbytes)
        original(self, offset, out)

    headers = sum(entry.header for entry, _ in store.describe(4))
    monkeypatch.setattr(directio.FileSource, "read_into", counting)
    store.load(4, select=name)
    assert plan.bytes_read <= sum(asked) < plan.bytes_read + headers + 40_000  # indexes and log records


def test_a_derived_copy_counts_its_master(tmp_path: Path) -> None:
    store = fill(tmp_path / "store", trajectory(2), 1)
    assert explain(store.journal, 2, "model.*").bytes_read > 0
    with pytest.raises(ckptstore.TensorNotFoundError):
        explain(store.journal, 2, "nothing")


def test_loading_a_kernel_is_no_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded kernels decode a thousand times faster than the first call shows: an estimate was 30 times too long."""
    store = fill(tmp_path / "store", trajectory(4), 1)
    calls, before, clock = itertools.count(), codecs.apply, [0.0]
    lock = threading.Lock()

    def slow_at_first(*arguments: Any) -> Any:
        with lock:
            clock[0] += 1e-4 if next(calls) else 1.0
        return before(*arguments)

    monkeypatch.setattr(codecs, "apply", slow_at_first)
    monkeypatch.setattr(restore_rates, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    plan = explain(store.journal, 4)
    assert plan.rates.startup > 0.9
    # 1 MiB per second by each thread is the rate of the first call.
    assert plan.rates.decode > 2 * default_threads() << 20
    assert sum(step.seconds for step in plan.steps) < 5.0
    assert plan.seconds >= plan.rates.startup


def test_a_time_is_given_where_what_was_measured_agrees() -> None:
    def span(seconds: float, spread: float, startup: float = 0.0, tensors: int = 1) -> tuple[float, float] | None:
        step = PlanStep("2@1", "delta", "1@1", ("seg/a",), tensors, 100, 200, seconds)
        return Explanation("2@1", (step,), 200, Rates(1e9, 1e9, 1e9, startup, spread)).span

    assert span(10.0, 1.5) == (10.0, pytest.approx(15.0, abs=0.01))
    assert span(10.0, 5.0) is None
    assert span(0.1, 8.0) == (0.1, pytest.approx(0.8, abs=0.01))  # less than a second, whatever it is
    assert span(10.0, 1.0, startup=2.0) == (12.0, pytest.approx(12.0, abs=0.01))
    assert span(10.0, 0.5) == (10.0, pytest.approx(10.0, abs=0.01))
    assert span(2.0, 1.0, tensors=10_000) == (2.0, pytest.approx(4.5))  # each tensor of a step costs something
