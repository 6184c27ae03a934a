"""`save_every` of a Checkpointer: a controller chooses the interval from the durations of steps and saves."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

import ckptstore  # noqa: E402 - torch decides whether this file runs at all
from ckptstore.backends.local_disk.local import LocalBackend  # noqa: E402
from ckptstore.errors import UsageError  # noqa: E402
from ckptstore.training import Checkpointer  # noqa: E402
from ckptstore.tuning import IntervalController  # noqa: E402


def trained(folder: Path, pace: Any, steps: int, micro: int = 1, **options: Any) -> list[int]:
    """The steps that are in the store afterwards."""
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"strategy": "full", "save_every": pace} | options
    with Checkpointer(folder, model=model, optimizer=optimizer, **options) as checkpointer:
        for step in range(checkpointer.resume(), steps):
            model(torch.ones(1, 8)).sum().backward()
            if (step + 1) % micro == 0:
                optimizer.step()
            checkpointer.step()
            checkpointer.wait()  # so that the next step knows the save's duration
    return [info.step for info in ckptstore.open(folder).checkpoints()]


def test_the_controller_says_when(tmp_path: Path) -> None:
    pace = IntervalController(first=4, shortest=7, longest=7, in_flight=2)
    assert trained(tmp_path / "run", pace, 20) == [4, 11, 18, 20]  # the last when the `with` is left
    assert pace.interval == 7


def test_it_gets_the_durations_of_saves(tmp_path: Path) -> None:
    """Steps are very short here, so at 5 % hardly any may be saved."""
    pace = IntervalController(slowdown=1.05, first=2, in_flight=2)
    steps = trained(tmp_path / "run", pace, 40)
    assert pace.interval is not None
    assert pace.interval > 5
    assert steps[0] == 2
    assert len(steps) < 9


def test_continuous_saves_begin_when_the_one_before_is_durable(tmp_path: Path) -> None:
    """The medium is held up during steps 2 to 5."""
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held, begun = threading.Event(), threading.Event()
    held.set()
    open_sink = LocalBackend.open_sink

    def slow(*args: Any) -> Any:
        begun.set()
        assert held.wait(60)
        return open_sink(*args)

    with (
        mock.patch.object(LocalBackend, "open_sink", slow),
        Checkpointer(
            tmp_path / "run", model=model, optimizer=optimizer, strategy="full", save_every="continuous"
        ) as checkpointer,
    ):
        for step in range(checkpointer.resume() + 1, 9):
            model(torch.ones(1, 8)).sum().backward()
            optimizer.step()
            if step == 2:
                held.clear()
                begun.clear()
            checkpointer.step()
            if step == 5:
                held.set()
            if step == 2:
                assert begun.wait(60)
            if not 2 <= step < 5:
                checkpointer.wait()
    assert [info.step for info in ckptstore.open(tmp_path / "run").checkpoints()] == [1, 2, 6, 7, 8]


def test_micro_batches_are_not_asked_about(tmp_path: Path) -> None:
    """The third call falls between two steps of the optimizer: it saves nothing, the next one does."""
    pace = IntervalController(first=3, shortest=100, longest=100, in_flight=2)
    assert trained(tmp_path / "run", pace, 9, micro=2) == [4, 9]  # the last when the `with` is left


def test_an_agent_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTSTORE_RUNTIME_DIR", str(tmp_path / "runtime"))
    pace = IntervalController(first=3, shortest=5, longest=5, in_flight=2)
    assert trained(tmp_path / "run", pace, 9, agent=True, linger_seconds=0) == [3, 8, 9]


@pytest.mark.parametrize("strategy", ["gradient", "replica"])
def test_strategies_of_every_step_take_none(tmp_path: Path, strategy: str) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="save_every"):
        Checkpointer(
            tmp_path, model=model, optimizer=optimizer, strategy=strategy, agent=strategy == "replica",
            save_every=IntervalController(),
        )  # fmt: skip
    with pytest.raises(UsageError, match="save_every"):
        Checkpointer(tmp_path, model=model, optimizer=optimizer, save_every="often")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="save_every"):
        Checkpointer(
            tmp_path, model=model, optimizer=optimizer, strategy=strategy, agent=strategy == "replica",
            save_every="continuous",
        )  # fmt: skip
