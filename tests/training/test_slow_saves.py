"""The warnings about a run's saves: that they slow it down, and how much space they need without retention."""

from __future__ import annotations

import logging
import re
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptstore
from ckptstore.training import Checkpointer, SlowSavesWarning, UnsavedStepWarning, save_pace
from ckptstore.training.save_pace import SavePace
from ckptstore.training.save_reports import GrowthForecast
from ckptstore.tuning import IntervalController
from ckptstore.write.saves.save_metrics import SaveMetrics
from tools.objects.proxy import FaultProxy, Rule
from tools.objects.server import Server, options_for


class Clocked:
    """A pace whose clock the test moves."""

    def __init__(self, every: int | IntervalController = 1) -> None:
        self._now = 0.0
        self.pace = SavePace(every, lambda: self._now)
        self.step(0.0, 0.0)  # the duration of the first iteration is unknown

    def step(self, trained: float, waited: float) -> None:
        self._now += trained
        self.pace.came()
        self._now += waited
        self.pace.left()

    def said(self, url: str = "x", strategy: str = "full", *, bucket: bool = False) -> str | None:
        return self.pace.slow_saves(url, strategy, bucket=bucket)


def after(steps: int, trained: float, waited: float, every: int | IntervalController = 1) -> Clocked:
    found = Clocked(every)
    for _ in range(steps):
        found.step(trained, waited)
    return found


def test_less_than_half_of_the_pace_causes_one_warning() -> None:
    one = after(30, 0.5, 1.0)
    said = one.said("s3://b/run", bucket=True)
    assert said is not None
    assert said.startswith("s3://b/run: training runs at 33% of its pace: saving took 27 s of the last 40 s. ")
    assert "ckptstore.open(FOLDER, remote='s3://b/run') in place of the URL" in said
    assert "save_every=N" in said
    assert said.endswith("strategy='gradient' or 'delta' stores less")
    assert one.said("s3://b/run", bucket=True) is None
    said = after(30, 0.5, 1.0).said("runs/x", "gradient")
    assert said is not None
    assert "FOLDER" not in said
    assert "strategy=" not in said


@pytest.mark.parametrize(
    ("steps", "trained", "waited", "every"),
    [(30, 1.0, 0.9, 1), (19, 0.1, 9.0, 1), (30, 0.01, 0.3, 1), (30, 0.5, 1.0, IntervalController())],
    ids=["quick enough", "few steps", "few seconds", "a controller"],
)
def test_cases_without_a_warning(steps: int, trained: float, waited: float, every: int | IntervalController) -> None:
    assert after(steps, trained, waited, every).said() is None


def test_the_first_steps_do_not_count() -> None:
    one = after(3, 0.1, 60.0)  # opening, memory
    for _ in range(40):
        one.step(1.0, 0.1)
    assert one.said() is None


def test_iterations_and_calls_are_measured() -> None:
    said = after(39, 1.0, 2.0).said()
    assert said is not None
    assert "training runs at 33% of its pace: saving took 72 s of the last 108 s" in said


def test_every_step_to_a_slow_bucket_causes_a_warning(s3: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_pace, "LONG", 0.5)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    with FaultProxy(s3.port) as proxy:
        url = s3.url()
        store = ckptstore.open(url, storage_options=options_for(proxy.port, read_timeout=30.0, tries=2))
        proxy.rules([Rule("slow", operation="create", seconds=0.05)])
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            with Checkpointer(store, model=model, optimizer=optimizer) as checkpointer:
                for _ in range(checkpointer.resume(), 28):
                    model(torch.ones(2, 64)).square().mean().backward()
                    optimizer.step()
                    checkpointer.step()
    told = [str(one.message) for one in seen if one.category is SlowSavesWarning]
    assert len(told) == 1
    assert "of its pace" in told[0]
    assert f"remote={url!r}" in told[0]
    assert {one.filename for one in seen if one.category is SlowSavesWarning} == {__file__}


# -- the space of a run without rules


def metrics(step: int, kind: str, stored: int, error: BaseException | None = None) -> SaveMetrics:
    return SaveMetrics(step, None if error else kind, 1000, stored, 0.0, 0.0, 0.0, 1, 0, error)


def heard(strategy: str, every: int | None, told: list[SaveMetrics]) -> list[tuple[int, str]]:
    said: list[tuple[int, str]] = []
    number = [0]
    one = GrowthForecast(lambda text: said.append((number[0], text)), strategy, every, 100)
    for number[0], each in enumerate(told, 1):
        one.saved(each)
    return said


def test_the_space_of_a_thousand_steps_is_reported_once_it_is_known() -> None:
    ((when, text),) = heard("full", 1, [metrics(1, "full", 0, OSError()), *[metrics(2, "full", 2048)] * 3])
    assert (when, "about 1.95 MiB in 1,000 steps; keep=" in text) == (2, True)
    ((_, text),) = heard("full", 10, [metrics(1, "full", 1024)])
    assert "about 100 KiB in 1,000 steps" in text
    ((_, text),) = heard("full", None, [metrics(1, "full", 1024)])
    assert "about 0.98 MiB in 1,000 saves" in text
    steps = [metrics(1, "full", 10_240), metrics(2, "gradient", 1024), metrics(3, "gradient", 1024)]
    ((when, text),) = heard("gradient", 1, steps)
    assert (when, "about 1.06 MiB in" in text) == (2, True)  # 10 fulls, and 990 steps
    deltas = [
        metrics(step, "full" if step % 10 == 1 else "delta", 2048 if step % 10 == 1 else 1024) for step in range(1, 30)
    ]
    ((when, text),) = heard("delta", 1, deltas)
    assert (when, "about 1.07 MiB in" in text) == (20, True)


def trained(folder: Path, last: int, **options: Any) -> None:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(folder, model=model, optimizer=optimizer, **options) as checkpointer:
        for _ in range(checkpointer.resume(), last):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            checkpointer.step()


def test_a_run_without_rules_says_so_at_its_first_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ckptstore.training")

    def said() -> list[str]:
        found = [one.getMessage() for one in caplog.records if "no rules" in one.getMessage()]
        caplog.clear()
        return found

    trained(tmp_path / "run", 3)
    (line,) = said()
    per = re.search(r"about ([\d.]+) MiB in 1,000 steps", line)
    assert per is not None
    stored = ckptstore.open(tmp_path / "run").checkpoint(1).stored
    assert float(per[1]) == pytest.approx(stored * 1000 / (1 << 20), rel=0.1)
    assert "docs/retention.md" in line
    trained(tmp_path / "run", 5)  # resumed: the warning was given
    assert said() == []
    trained(tmp_path / "kept", 2, keep_last=2)
    trained(tmp_path / "best", 2, keep_best="loss")
    store = ckptstore.open(tmp_path / "ruled", create=True)
    store.keep("last:2", take_over=True)
    trained(tmp_path / "ruled", 2)
    assert said() == []


def test_only_the_caller_s_own_function_needs_a_thread(tmp_path: Path) -> None:
    """Two threads beside the caller's take part in a save: one writes, one commits."""
    seen: list[set[str]] = []
    before = set(threading.enumerate())  # those of an earlier test may still be ending

    def names(metrics: SaveMetrics) -> None:
        seen.append({thread.name.rstrip("_0123456789") for thread in set(threading.enumerate()) - before})

    model = torch.nn.Linear(8, 8)
    for on_metrics in (None, names):
        with Checkpointer(tmp_path / "run", model=model, strategy="full", on_metrics=on_metrics) as checkpointer:
            checkpointer.resume()
            checkpointer.step()
            checkpointer.wait()
            names(metrics(1, "full", 1))
    without, *_, with_function = seen
    taking_part = {"ckptstore-persist", "ckptstore-commit", "ckptstore-metrics"}
    assert without & taking_part == {"ckptstore-persist", "ckptstore-commit"}
    assert with_function & taking_part == taking_part


def test_extra_belongs_to_the_state(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ckptstore.training")

    class Averages:
        def state_dict(self) -> dict[str, Any]:
            return {"ema": [torch.zeros(1000)], "seen": {"counts": np.zeros(500)}, "decay": 0.9}

        def load_state_dict(self, state: Any) -> None: ...

    class Broken(Averages):
        def state_dict(self) -> dict[str, Any]:
            raise RuntimeError("not yet")

    extra = {"ema": Averages(), "broken": Broken(), "rng": torch.Generator()}
    with Checkpointer(tmp_path / "run", model=torch.nn.Linear(2, 2), extra=extra) as checkpointer:
        checkpointer.resume()
        generator = torch.Generator().get_state().nbytes
        assert f"({(24 + 4000 + 4000 + generator) / 1024:.1f} KiB of state" in repr(checkpointer)


def test_nan_is_called_nan(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for value in (float("nan"), torch.tensor(float("nan"))):
        with Checkpointer(tmp_path / "run", model=model, optimizer=optimizer, keep_best="loss") as checkpointer:
            checkpointer.resume(None)
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            with pytest.warns(
                UnsavedStepWarning, match="keep_best: 'loss' is NaN; steps where it is that are not ranked"
            ):
                checkpointer.step(metrics={"loss": value})
