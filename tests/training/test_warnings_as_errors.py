"""If warnings are errors, `Checkpointer.step` raises one once its step is in flight, and no hook raises any."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
import ckptstore.agent
import ckptstore.training
from ckptstore.host.caller_warnings import warn
from ckptstore.training import Checkpointer, UnsavedStepWarning
from tests import warmth

pytestmark = pytest.mark.filterwarnings("error")

CATEGORIES = sorted(
    {
        one
        for module in (ckptstore, ckptstore.training, ckptstore.agent)
        for one in (getattr(module, name) for name in module.__all__)
        if inspect.isclass(one) and issubclass(one, Warning)
    },
    key=lambda one: one.__name__,
)


class Says:
    """Warns whenever it is saved."""

    def __init__(self, category: type[Warning]) -> None:
        self.category = category

    def state_dict(self) -> dict[str, Any]:
        warn("said within the step", self.category)
        return {"a": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        warn("said within the resume", self.category)


def script() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 8)
    return model, torch.optim.AdamW(model.parameters())


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("category", CATEGORIES)
@pytest.mark.parametrize("strategy", ["full", "gradient"])
def test_a_step_that_warns_is_saved(tmp_path: Path, category: type[Warning], strategy: str) -> None:
    model, optimizer = script()
    weights = []
    with Checkpointer(
        tmp_path / "run", model=model, optimizer=optimizer, extra={"says": Says(category)}, strategy=strategy
    ) as checkpointer:
        for _ in range(3):
            train(model, optimizer)
            with pytest.raises(category, match="said within the step"):
                checkpointer.step()
            weights.append(model.weight.detach().clone())
    store = ckptstore.open(tmp_path / "run")
    assert [info.step for info in store.checkpoints()] == [1, 2, 3]
    for step, weight in enumerate(weights, 1):
        assert torch.equal(store.load(step, framework="torch")["model"]["weight"], weight)

    model, optimizer = script()
    again = Checkpointer(tmp_path / "run", model=model, optimizer=optimizer, extra={"says": Says(category)})
    with pytest.raises(category, match="said within the"):
        again.resume()
    assert again.steps_done == 3
    assert torch.equal(model.weight, weights[-1])
    train(model, optimizer)
    with pytest.raises(category, match="said within the step"):
        again.step()
    again.close()
    assert store.latest_step() == 4


def test_an_optimizer_that_was_not_given(tmp_path: Path) -> None:
    """It is noticed in a hook of torch's. A warning raised there would end the script's own ``optimizer.step()``."""
    model, optimizer = script()
    with Checkpointer(tmp_path / "run", model=model) as checkpointer:
        train(model, optimizer)
        with pytest.raises(ckptstore.DeterminismWarning, match="AdamW moves the model"):
            checkpointer.step()
        train(model, optimizer)
        checkpointer.step()
    assert [info.step for info in ckptstore.open(tmp_path / "run").checkpoints()] == [1, 2]


def test_a_step_in_the_wrong_place(tmp_path: Path) -> None:
    model, optimizer = script()
    said = []
    with Checkpointer(tmp_path / "run", model=model, optimizer=optimizer) as checkpointer:
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            try:
                checkpointer.step()
            except ckptstore.DeterminismWarning as warning:
                said.append(str(warning))
            optimizer.step()  # nothing is raised here
    assert len(said) == 1
    assert "between backward() and optimizer.step()" in said[0]


def test_a_metric_that_ranks_nothing(tmp_path: Path) -> None:
    model, optimizer = script()
    with Checkpointer(tmp_path / "run", model=model, optimizer=optimizer, keep_best="loss") as checkpointer:
        train(model, optimizer)
        with pytest.raises(UnsavedStepWarning, match="keep_best"):
            checkpointer.step(metrics={"loss": float("nan")})
    assert ckptstore.open(tmp_path / "run").latest_step() == 1


_REQUEUED = """
import os, sys
import torch
from ckptstore.training import Checkpointer
from ckptstore.write.ranks.messages.key_value_store import Group, LocalMailbox

group = {"group": Group(0, 1, LocalMailbox())} if sys.argv[1] == "ranks" else {}
model = torch.nn.Linear(40, 40)
optimizer = torch.optim.AdamW(model.parameters())
with Checkpointer(sys.argv[2], model=model, optimizer=optimizer, strategy="gradient", batch=8, **group) as checkpointer:
    start = checkpointer.resume()
    print(start, flush=True)
    if sys.argv[3:] == ["at once"]:
        os._exit(9)
    for step in range(13):
        model(torch.ones(2, 40)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpointer.step()
    checkpointer.wait()
    optimizer.step()
    checkpointer.step()
    os._exit(9)
"""


@pytest.mark.parametrize("kind", ["local", "ranks"])
def test_a_job_that_is_killed_and_requeued_again_and_again_gets_further(tmp_path: Path, kind: str) -> None:
    """It loses a step each time. The next start reports that as an error, and the one after it does not."""
    reached = []
    for _ in range(3):
        done = warmth.run([sys.executable, "-W", "error", "-c", _REQUEUED, kind, str(tmp_path / "run")])
        if done.stdout:
            assert done.returncode == 9, done.stderr
            reached.append(int(done.stdout))
        else:
            assert "LostStepsWarning: term 1 ended without closing" in done.stderr
    assert len(reached) == 2
    assert reached[1] >= 13


@pytest.mark.parametrize("kind", ["local", "ranks"])
def test_a_job_that_is_killed_before_its_first_checkpoint_is_told_so(tmp_path: Path, kind: str) -> None:
    command = [sys.executable, "-W", "error", "-c", _REQUEUED, kind, str(tmp_path / "run"), "at once"]
    assert warmth.run(command).returncode == 9
    told = warmth.run(command)
    assert told.stdout == ""
    assert "LostStepsWarning: term 1 ended without closing, before its first checkpoint was durable" in told.stderr
    assert "training starts from scratch" in told.stderr
    assert warmth.run(command[:-1]).stdout == "0\n"
