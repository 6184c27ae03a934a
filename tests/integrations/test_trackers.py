"""The numbers of saves in experiment trackers: objects with the methods, and the order of arguments, of the real ones.

tensorboard, wandb and mlflow are not installed for tests. These classes have the signatures of tensorboard 2.21, wandb
0.31 and mlflow 3.17.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ckptstore.errors import UsageError
from ckptstore.integrations.trackers import tracked
from ckptstore.training import Checkpointer
from ckptstore.write.saves.save_metrics import SaveMetrics

NAMES = {"stall", "waited", "in_flight", "lag", "durable", "stored", "ratio"}


class SummaryWriter:
    def __init__(self) -> None:
        self.found: dict[tuple[str, int], float] = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: Any = None, walltime: Any = None) -> None:
        self.found[tag, global_step] = scalar_value


class Run:
    """Of Weights & Biases."""

    def __init__(self) -> None:
        self.axes: dict[str, Any] = {}
        self.rows: list[dict[str, Any]] = []

    def define_metric(
        self, name: str, step_metric: Any = None, step_sync: Any = None, hidden: Any = None, summary: Any = None
    ) -> None:
        self.axes[name] = step_metric

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        assert step is None, "a run drops steps that are older than its newest"
        assert commit is False, "the script's own log() decides when a step of the run ends"
        self.rows.append(data)


class Mlflow:
    """The module, or a client."""

    def __init__(self, active: str | None = "abc") -> None:
        self.active = active
        self.found: dict[tuple[str, str, int], float] = {}

    def active_run(self) -> Any:
        return None if self.active is None else SimpleNamespace(info=SimpleNamespace(run_id=self.active))

    def log_metrics(
        self, metrics: dict[str, float], step: Any = None, synchronous: Any = None, run_id: Any = None
    ) -> None:
        self.found |= {(run_id, name, step): value for name, value in metrics.items()}


class MlflowClient:
    def __init__(self) -> None:
        self.found: dict[tuple[str, str, int], float] = {}

    def log_metric(self, run_id: str, key: str, value: float, timestamp: Any = None, step: Any = None) -> None:
        self.found[run_id, key, step] = value

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = (), tags: Any = ()) -> None:
        raise AssertionError("it needs classes of mlflow")


def train(store: Path, hook: Any) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    with Checkpointer(store, model=model, optimizer=optimizer, strategy="full", on_metrics=hook) as checkpointer:
        checkpointer.resume()
        for _ in range(3):
            model(torch.ones(2)).sum().backward()
            optimizer.step()
            checkpointer.step()


def test_tensorboard(tmp_path: Path) -> None:
    writer = SummaryWriter()
    train(tmp_path / "run", tracked(writer))
    assert writer.found.keys() == {(f"ckptstore/{name}", step) for name in NAMES for step in (1, 2, 3)}
    assert writer.found["ckptstore/stored", 1] > 0


def test_weights_and_biases(tmp_path: Path) -> None:
    run = Run()
    train(tmp_path / "run", tracked(run, prefix="saves/"))
    assert run.axes == {"saves/step": None, "saves/*": "saves/step"}
    assert sorted(row["saves/step"] for row in run.rows) == [1, 2, 3]
    assert all(row.keys() == {f"saves/{name}" for name in {*NAMES, "step"}} for row in run.rows)


def test_mlflow(tmp_path: Path) -> None:
    module, client = Mlflow(), MlflowClient()
    hook = tracked(module)
    module.active = None  # saves end in another thread, which has no active run
    train(tmp_path / "run", hook)
    assert module.found.keys() == {("abc", f"ckptstore/{name}", step) for name in NAMES for step in (1, 2, 3)}
    train(tmp_path / "other", tracked(client, run_id="of-client"))
    assert {run for run, _, _ in client.found} == {"of-client"}
    assert {step for _, _, step in client.found} == {1, 2, 3}
    with pytest.raises(UsageError, match="mlflow has no active run in this thread"):
        tracked(module)
    with pytest.raises(UsageError, match="MlflowClient has no active run: pass run_id="):
        tracked(client)


def test_a_save_that_failed() -> None:
    writer = SummaryWriter()
    lost = SaveMetrics(7, None, 8, 0, 0.1, 0.0, 0.2, 1, 0, error=OSError("no space"))
    tracked(writer)(lost)
    assert writer.found["ckptstore/failed", 7] == 1.0
    assert ("ckptstore/stored", 7) not in writer.found


@pytest.mark.parametrize("wrong", [None, 3, {}, torch.nn.Linear(1, 1), SummaryWriter, print])
def test_other_objects_are_refused_by_name(wrong: Any) -> None:
    name = wrong.__name__ if isinstance(wrong, type) else type(wrong).__name__
    with pytest.raises(UsageError, match=f"{name} is not a known tracker: pass a SummaryWriter"):
        tracked(wrong)
    with pytest.raises(UsageError, match="run_id: only MLflow has it"):
        tracked(SummaryWriter(), run_id="abc")
