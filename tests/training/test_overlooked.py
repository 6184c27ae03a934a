"""What a script does that its Checkpointer cannot save or restore as it is meant is said, once."""

from __future__ import annotations

import logging
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import ckptstore  # noqa: E402 - torch decides whether this file runs at all
from ckptstore import DeterminismWarning, UsageError  # noqa: E402
from ckptstore.errors import FormatError  # noqa: E402
from ckptstore.training import Checkpointer  # noqa: E402
from tools.warm import Warm  # noqa: E402


class Script:
    """A model and its optimizer, which step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def one(self, batch: Any = None) -> None:
        self.model(torch.ones(3, 4) if batch is None else batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def opened(self, folder: Path, **options: Any) -> Checkpointer:
        given = {"model": self.model, "optimizer": self.optimizer, "strategy": "full"} | options
        return Checkpointer(folder / "run", **given)


@pytest.fixture
def said() -> Iterator[Callable[[], list[str]]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield lambda: [f"{one.category.__name__}: {one.message}" for one in caught]


def test_another_optimizer_steps(tmp_path: Path, said: Callable[[], list[str]]) -> None:
    script = Script()
    other = torch.optim.AdamW(script.model.parameters())
    with script.opened(tmp_path, optimizer=other) as checkpointer:
        for step in range(10):
            script.one()
            checkpointer.step()
            assert len(said()) == (step >= 2)
    (text,) = said()
    assert text.startswith("UnsavedStepWarning: none of the last 3 steps was saved, because no optimizer that")


def test_micro_batches_are_nothing_to_remark(tmp_path: Path, said: Callable[[], list[str]]) -> None:
    script = Script()
    with script.opened(tmp_path) as checkpointer:
        for step in range(24):
            script.model(torch.ones(3, 4)).square().mean().backward()
            if step % 8 == 7:
                script.optimizer.step()
                script.optimizer.zero_grad()
            checkpointer.step()
    assert said() == []


def test_too_few_steps_to_be_sure_are_remarked_on_at_the_end(tmp_path: Path, said: Callable[[], list[str]]) -> None:
    script = Script()
    with script.opened(tmp_path) as checkpointer:
        checkpointer.step()
        checkpointer.step()
        assert said() == []
    (text,) = said()
    assert text.startswith("UnsavedStepWarning: none of the last 2 steps was saved, because no optimizer")


@pytest.mark.parametrize("counted", [True, False])
def test_a_loader_that_nobody_iterates_over(tmp_path: Path, said: Callable[[], list[str]], counted: bool) -> None:
    script = Script()
    data = torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2)
    for lives in (1, 2):  # the second resumes
        with script.opened(tmp_path, loader=data) as checkpointer:
            checkpointer.resume()
            for batch in checkpointer.loader if counted else data:
                script.one(batch)
                checkpointer.step()
        texts = said()
        assert len(texts) == (0 if counted else lives)
        assert all("nothing iterates over Checkpointer.loader" in text for text in texts)


@pytest.mark.parametrize("given", ["scheduler", "extra", ""])
def test_a_schedule_that_was_not_given(tmp_path: Path, said: Callable[[], list[str]], given: str) -> None:
    script = Script()
    schedule = torch.optim.lr_scheduler.StepLR(script.optimizer, 2)
    options = {"scheduler": {"scheduler": schedule}, "extra": {"extra": {"schedule": schedule}}, "": {}}[given]
    with script.opened(tmp_path, **options) as checkpointer:
        for _ in range(3):
            script.one()
            schedule.step()
            checkpointer.step()
    assert [text.partition(":")[0] for text in said()] == ([] if given else ["DeterminismWarning"])


def test_parts_of_a_checkpoint_that_nobody_takes(tmp_path: Path) -> None:
    script = Script()
    schedule = torch.optim.lr_scheduler.StepLR(script.optimizer, 2)
    more = {"scheduler": schedule, "extra": {"one": torch.Generator(), "two": torch.Generator()}}
    with script.opened(tmp_path, **more) as checkpointer:
        script.one()
        schedule.step()
        checkpointer.step()
    again = Script()
    with (
        pytest.warns(DeterminismWarning, match=r"also holds scheduler, extra\['two'\], which this"),
        again.opened(tmp_path, extra={"one": torch.Generator()}) as checkpointer,
    ):
        assert checkpointer.resume() == 1
    with (
        pytest.raises(FormatError, match=r"holds no scaler: it was saved by a Checkpointer that was given none"),
        again.opened(tmp_path, **more, scaler=torch.amp.GradScaler("cpu")) as checkpointer,
    ):
        checkpointer.resume()


@pytest.mark.parametrize("name", ["loss", "min:loss", "los", "max:accuracy", "text"])
def test_a_metric_that_no_step_has(tmp_path: Path, said: Callable[[], list[str]], name: str) -> None:
    script = Script()
    with script.opened(tmp_path, keep_best=name, keep_last=2) as checkpointer:
        for step in range(3):
            script.one()
            checkpointer.step(metrics={"loss": 3.0 - step, "text": "good"})
    found = ckptstore.open(tmp_path / "run").tags()
    if name.endswith("loss"):
        assert found["best"].step == 3
        assert said() == []
        return
    assert found == {}
    (text,) = said()
    wanted = "'text' is no number but str" if name == "text" else "they have 'loss', 'text'"
    assert text.startswith("UnsavedStepWarning: keep_best:")
    assert wanted in text


def test_metrics_are_by_name(tmp_path: Path) -> None:
    script = Script()
    with script.opened(tmp_path) as checkpointer:
        script.one()
        with pytest.raises(UsageError, match=r"metrics: float; numbers by name"):
            checkpointer.step(metrics=1.5)  # type: ignore[arg-type]  # as a script in a hurry has it


def test_a_last_step_that_is_lost_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    script = Script()

    def fail() -> None:
        with script.opened(tmp_path, save_every=2) as checkpointer:
            for _ in range(3):
                script.one()
                checkpointer.step()
            raise ZeroDivisionError

    with caplog.at_level(logging.WARNING, "ckptstore.training"), pytest.raises(ZeroDivisionError):
        fail()
    assert ckptstore.open(tmp_path / "run").latest_step() == 2
    (text,) = caplog.messages
    assert "step 3 was not to be saved (save_every=2), and is lost: ZeroDivisionError ended the with" in text


def test_a_last_step_of_a_script_without_a_with_is_named(tmp_path: Path, warm: Warm) -> None:
    script = tmp_path / "script.py"
    script.write_text(_WITHOUT)
    run = warm.start([sys.executable, str(script)], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    _, said = run.communicate(timeout=120)
    assert run.returncode == 0, said
    assert ckptstore.open(tmp_path / "run").latest_step() == 2
    assert "step 3 was not to be saved (save_every=2), and is lost: the script ended without leaving a with" in said


_WITHOUT = """
import torch
from ckptstore.training import Checkpointer

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters())
checkpointer = Checkpointer("run", model=model, optimizer=optimizer, save_every=2, strategy="full")
for step in range(3):
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    checkpointer.step()
"""
