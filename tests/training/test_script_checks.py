"""Actions of a script that its Checkpointer cannot save or restore correctly cause one warning."""

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
    other = torch.optim.AdamW(script.model.parameters())
    with script.opened(tmp_path, optimizer=other) as checkpointer:
        for _ in range(2):
            script.one()
            checkpointer.step()
        assert said() == []
    (text,) = said()
    assert text.startswith("UnsavedStepWarning: none of the last 2 steps was saved, because no optimizer")


def test_a_hundred_calls_without_a_step_are_remarked_on_once(tmp_path: Path, said: Callable[[], list[str]]) -> None:
    script = Script()
    with script.opened(tmp_path) as checkpointer:
        for _ in range(2):
            for _ in range(120):
                checkpointer.step()
            script.one()
            checkpointer.step()
    (text,) = said()
    assert text.startswith("UnsavedStepWarning: none of the last 100 steps was saved")


@pytest.mark.parametrize("counted", [True, False])
def test_a_loader_that_is_not_iterated_over(tmp_path: Path, said: Callable[[], list[str]], counted: bool) -> None:
    script = Script()
    data = torch.utils.data.DataLoader(torch.ones(16, 4), batch_size=2)
    for until in (4, 8):  # the second resumes
        with script.opened(tmp_path, loader=data) as checkpointer:
            checkpointer.resume()
            for batch in checkpointer.loader if counted else data:
                script.one(batch)
                checkpointer.step()
                if checkpointer.steps_done == until:
                    break
        texts = said()
        assert checkpointer.steps_done == until
        assert len(texts) == (0 if counted else until // 4)
        assert all("nothing iterates over Checkpointer.loader" in text for text in texts)


def test_an_epoch_that_was_complete_is_not_gone_through_again(tmp_path: Path) -> None:
    data = torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2)
    for until in (4, 12):
        script = Script()
        with script.opened(tmp_path, loader=data) as checkpointer:
            checkpointer.resume()
            while checkpointer.steps_done < until:
                for batch in checkpointer.loader:
                    script.one(batch)
                    checkpointer.step()
        assert checkpointer.steps_done == until


@pytest.mark.parametrize("save", [True, False])
def test_closing_says_what_it_does_not_save(tmp_path: Path, caplog: pytest.LogCaptureFixture, save: bool) -> None:
    script = Script()
    checkpointer = script.opened(tmp_path, save_every=2)
    script.one()
    checkpointer.step()
    with caplog.at_level(logging.WARNING, "ckptstore.training"):
        checkpointer.close(save=save)
    assert ["step 1 was not saved" in text for text in caplog.messages] == ([] if save else [True])


class Wrapper(torch.optim.Optimizer):
    """Like Accelerate's: an Optimizer whose own __init__ never runs."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step(closure)


def test_a_wrapper_that_is_an_optimizer_only_by_name(tmp_path: Path) -> None:
    script = Script()
    inner, script.optimizer = script.optimizer, Wrapper(script.optimizer)
    inner.zero_grad()
    with script.opened(tmp_path) as checkpointer:
        script.model(torch.ones(3, 4)).square().mean().backward()
        script.optimizer.step()
        checkpointer.step()
    assert ckptstore.open(tmp_path / "run").latest_step() == 1


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


def test_parts_of_a_checkpoint_that_are_not_restored(tmp_path: Path) -> None:
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


def test_a_learning_rate_that_the_script_sets_is_no_schedule(tmp_path: Path, said: Callable[[], list[str]]) -> None:
    script = Script()
    for group in script.optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    with script.opened(tmp_path) as checkpointer:
        script.one()
        checkpointer.step()
    assert said() == []


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
    assert text.startswith("UnsavedStepWarning: keep_best:")
    assert ("'text' is not a number but str" if name == "text" else "among its metrics ('loss', 'text')") in text


@pytest.mark.parametrize("without", [{}, {"val": None}])
def test_a_metric_that_few_steps_have(tmp_path: Path, said: Callable[[], list[str]], without: dict[str, None]) -> None:
    script = Script()
    with script.opened(tmp_path, keep_best="val", save_every=2) as checkpointer:
        for step in range(211):  # the last one, which leaving saves, is the only validated one
            script.one()
            checkpointer.step(metrics={"loss": 1.0} | (without if step < 210 else {"val": 0.5}))
    assert said() == []
    assert ckptstore.open(tmp_path / "run").tags()["best"].step == 211


def test_a_metric_with_a_slip_is_named_before_the_end(tmp_path: Path, said: Callable[[], list[str]]) -> None:
    script = Script()
    with script.opened(tmp_path, keep_best="vall") as checkpointer:
        for step in range(100):
            script.one()
            checkpointer.step(metrics={"val": 1.0})
            assert len(said()) == (step == 99)


def test_metrics_are_by_name(tmp_path: Path) -> None:
    script = Script()
    with script.opened(tmp_path) as checkpointer:
        script.one()
        with pytest.raises(UsageError, match=r"metrics: float; expected numbers by name"):
            checkpointer.step(metrics=1.5)  # type: ignore[arg-type]  # as in a careless script


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
    assert "step 3 was not saved (save_every=2), and is lost: ZeroDivisionError ended the with" in text


def test_a_last_step_of_a_script_without_a_with_is_named(tmp_path: Path, warm: Warm) -> None:
    script = tmp_path / "script.py"
    script.write_text(_WITHOUT)
    run = warm.start([sys.executable, str(script)], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    _, said = run.communicate(timeout=120)
    assert run.returncode == 0, said
    assert ckptstore.open(tmp_path / "run").latest_step() == 2
    assert "step 3 was not saved (save_every=2), and is lost: the script ended without leaving a with" in said


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


def test_step_before_the_optimizers_step(tmp_path: Path, said: Callable[[], list[str]]) -> None:
    """Each checkpoint lacks a step whose batch counts as used: the resumed run would never take it."""
    script = Script()
    with script.opened(tmp_path) as checkpointer:
        for _ in range(8):
            script.model(torch.ones(3, 4)).square().mean().backward()
            checkpointer.step()
            script.optimizer.step()
            script.optimizer.zero_grad()
    (text,) = said()
    assert text.startswith("DeterminismWarning: step was called between backward() and optimizer.step()")


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_stay_or_are_zero_are_nothing_to_remark(
    tmp_path: Path, said: Callable[[], list[str]], to_none: bool
) -> None:
    """And of two models that train each other, the first one's gradients are newer than its optimizer's step."""
    script, judge = Script(), torch.nn.Linear(2, 1)
    other = torch.optim.AdamW(judge.parameters())
    both = {"model": [script.model, judge], "optimizer": [other, script.optimizer]}
    with script.opened(tmp_path, **both) as checkpointer:
        for _ in range(6):
            other.zero_grad(set_to_none=to_none)
            judge(script.model(torch.ones(3, 4)).detach()).square().mean().backward()
            other.step()
            script.optimizer.zero_grad(set_to_none=to_none)
            judge(script.model(torch.ones(3, 4))).square().mean().backward()
            script.optimizer.step()
            if not to_none:
                script.optimizer.zero_grad(set_to_none=False)
            checkpointer.step()
    assert said() == []


def test_no_optimizer_was_given(tmp_path: Path, said: Callable[[], list[str]]) -> None:
    script = Script()
    stranger = torch.optim.AdamW(torch.nn.Linear(2, 2).parameters())
    with script.opened(tmp_path, optimizer=None) as checkpointer:
        for step in range(4):
            stranger.step()
            assert len(said()) == (step > 0)
            script.one()
            checkpointer.step()
    (text,) = said()
    assert text.startswith("DeterminismWarning: AdamW moves the model, but optimizer= was not given")


def test_numbers_that_differ_from_the_checkpoint_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def run(steps: int, lr: float, decay: float = 0.01, *, scheduled: bool = False) -> list[str]:
        caplog.clear()
        script = Script()
        script.optimizer = torch.optim.AdamW(script.model.parameters(), lr=lr, weight_decay=decay)
        schedule = torch.optim.lr_scheduler.StepLR(script.optimizer, 1, 0.5) if scheduled else None
        with script.opened(tmp_path / str(scheduled), scheduler=schedule) as checkpointer:
            for _ in range(checkpointer.resume(), steps):
                script.one()
                if schedule is not None:
                    schedule.step()
                checkpointer.step()
        return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]

    assert run(2, 0.1) == []
    assert run(4, 0.1) == []
    (text,) = run(6, 0.2, 0.5)
    assert "weight_decay is 0.01, as in the checkpoint, not 0.5 as in the script" in text
    assert "lr is 0.1, as in the checkpoint, not 0.2 as in the script" in text
    assert run(2, 0.1, scheduled=True) == []
    assert run(4, 0.1, scheduled=True) == []  # which the schedule has halved twice
    (text,) = run(6, 0.3, scheduled=True)
    assert "lr is 0.1, as in the checkpoint, not 0.3 as in the script" in text


def test_the_second_tier_is_the_stores(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"option of the store: Checkpointer\(ckptstore.open\(PATH, remote="):
        Script().opened(tmp_path, remote=str(tmp_path / "far"))


def test_a_loss_of_one_element_is_a_number(tmp_path: Path) -> None:
    script = Script()
    with script.opened(tmp_path) as checkpointer:
        script.one()
        checkpointer.step(metrics={"loss": torch.ones(1)})
        checkpointer.wait()
        script.one()
        with pytest.raises(UsageError, match=r"Tensor is not a JSON value.*it has shape \[2\]: pass .mean\(\)"):
            checkpointer.step(metrics={"loss": torch.ones(2)})
    assert ckptstore.open(tmp_path / "run").checkpoint(1).metadata == {"metrics": {"loss": 1.0}}


def test_a_validation_that_goes_backward_is_no_step_before_the_optimizers(
    tmp_path: Path, said: Callable[[], list[str]]
) -> None:
    script = Script()
    with script.opened(tmp_path) as checkpointer:
        for _ in range(8):
            script.optimizer.zero_grad()
            script.model(torch.ones(3, 4)).square().mean().backward()
            script.optimizer.step()
            script.model(torch.ones(3, 4)).sum().backward()  # of an attack, or a saliency map
            checkpointer.step()
    assert said() == []


class Wrapped(torch.optim.Optimizer):
    """As libraries wrap one: its step is the other's, and torch runs all hooks for each of the two."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


@pytest.mark.parametrize("wrapped", [False, True])
def test_two_checkpointers_without_an_optimizer_both_warn(
    tmp_path: Path, said: Callable[[], list[str]], wrapped: bool
) -> None:
    model = torch.nn.Linear(4, 2)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if wrapped:
        optimizer = Wrapped(optimizer)
    with (
        Checkpointer(tmp_path / "a", model=model, strategy="full", signals=False) as one,
        Checkpointer(tmp_path / "b", model=model, strategy="full", signals=False) as other,
    ):
        for checkpointer in (one, other):
            checkpointer.resume()
        for _ in range(2):
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()  # torch runs the hooks of both
            optimizer.zero_grad()
            one.step()
            other.step()
    assert [text.split(",")[0] for text in said()] == ["DeterminismWarning: SGD moves the model"] * 2


def test_two_checkpointers_called_before_the_optimizer_both_warn(tmp_path: Path, said: Callable[[], list[str]]) -> None:
    script = Script()
    with script.opened(tmp_path / "a", signals=False) as one, script.opened(tmp_path / "b", signals=False) as other:
        for _ in range(8):
            script.model(torch.ones(3, 4)).square().mean().backward()
            one.step()
            other.step()
            script.optimizer.step()  # torch runs the hooks of both
            script.optimizer.zero_grad()
    assert [text.split("(")[0] for text in said()] == ["DeterminismWarning: step was called between backward"] * 2
