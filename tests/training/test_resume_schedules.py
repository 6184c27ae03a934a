"""`resume()` in a script whose schedules and settings have changed: other numbers are reported, other schedules
refused."""

from __future__ import annotations

import inspect
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import ckptstore  # noqa: E402
from ckptstore import DeterminismWarning  # noqa: E402
from ckptstore.errors import StateMismatchError  # noqa: E402
from ckptstore.training import Checkpointer  # noqa: E402
from tests.training.two_layers import Two, moments, refused, resumed, same, trained  # noqa: E402

# -- schedules


def test_another_schedule_is_refused_and_on_request_left_out(tmp_path: Path) -> None:
    trained(tmp_path / "s", Two(), scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 2))
    model = Two()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    error = refused(tmp_path / "s", model, optimizer, scheduler=scheduler)
    assert error.differences == ("scheduler: StepLR in the checkpoint, CosineAnnealingLR in the script",)
    with pytest.warns(DeterminismWarning, match="left as the script has it: scheduler: StepLR"):
        assert resumed(tmp_path / "s", model, optimizer, {"strict": False}, scheduler=scheduler) == 3
    assert scheduler.last_epoch == 0
    assert scheduler.T_max == 10
    assert optimizer.state


def nested(optimizer: Any, milestone: int, total: int) -> Any:
    schedules = torch.optim.lr_scheduler
    first = schedules.LinearLR(optimizer, total_iters=total)
    return schedules.SequentialLR(optimizer, [first, schedules.ExponentialLR(optimizer, 0.9)], [milestone])


def cyclic(optimizer: Any, scale: Any) -> Any:
    return torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, scale_fn=scale, cycle_momentum=False)


def cosine(step: int, *, warmup: int, total: int = 9) -> float:
    return min(1.0, step / warmup) * total


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (
            lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
            lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20, eta_min=0.1),
            ["T_max is 10, as in the checkpoint, not 20 as in the script", "eta_min is 0.0"],
        ),
        (
            lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4]),
            lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 5]),
            ["milestones is [2, 4], as in the checkpoint, not [2, 5] as in the script"],
        ),
        (
            lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
            lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=30),
            ["total_steps is 10, as in the checkpoint, not 30 as in the script"],
        ),
        (
            lambda o: nested(o, 2, 5),
            lambda o: nested(o, 3, 6),
            ["scheduler: milestones is [2]", "scheduler[0]: total_iters is 5"],
        ),
        (
            lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: step / 10),
            lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: step / 20),
            ["its constants are [20], as in the script; the checkpoint's run had [10]"],
        ),
        (
            lambda o: torch.optim.lr_scheduler.LambdaLR(o, __import__("functools").partial(cosine, warmup=1)),
            lambda o: torch.optim.lr_scheduler.LambdaLR(o, __import__("functools").partial(cosine, warmup=2)),
            ["function 0 (cosine): warmup is 2, as in the script; the checkpoint's run had 1"],
        ),
        (
            lambda o: torch.optim.lr_scheduler.LambdaLR(o, cosine_of(2)),
            lambda o: torch.optim.lr_scheduler.LambdaLR(o, cosine_of(4)),
            ["warmup is 4, as in the script; the checkpoint's run had 2"],
        ),
        (
            lambda o: torch.optim.lr_scheduler.LambdaLR(o, cosine_of(2)),
            lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1.0),
            ["is the script's; the checkpoint's run had cosine_of.<locals>.rate"],
        ),
        (
            lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=30),
            lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=30, pct_start=0.5),
            ["schedule_phases is [8.0, 29], as in the checkpoint, not [14.0, 29] as in the script"],
        ),
        (
            lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=30),
            lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=30, anneal_strategy="linear"),
            ["anneal_func_type is 'cos', as in the checkpoint, not 'linear' as in the script"],
        ),
        (
            lambda o: torch.optim.swa_utils.SWALR(o, 0.05),
            lambda o: torch.optim.swa_utils.SWALR(o, 0.05, anneal_strategy="linear"),
            ["anneal_strategy is 'cos', as in the checkpoint, not 'linear' as in the script"],
        ),
        (
            lambda o: cyclic(o, lambda cycle: 0.5**cycle),
            lambda o: cyclic(o, lambda cycle: 0.25**cycle),
            ["its constants are [0.25], as in the script; the checkpoint's run had [0.5]"],
        ),
        (
            lambda o: cyclic(o, None),
            lambda o: cyclic(o, lambda cycle: 0.5**cycle),
            ["scheduler: 1 functions, as in the script; the checkpoint's run had 0"],
        ),
        (
            lambda o: cyclic(o, lambda cycle: 0.5**cycle),
            lambda o: cyclic(o, None),
            ["scheduler: 0 functions, as in the script; the checkpoint's run had 1"],
        ),
    ],
    ids=[
        *("cosine", "milestones", "onecycle", "nested", "constant", "partial", "closure", "name"),
        *("phases", "annealing", "averaging", "cyclic", "function-added", "function-removed"),
    ],
)
@pytest.mark.filterwarnings("ignore:The epoch parameter")
def test_other_numbers_of_a_schedule_are_reported(
    tmp_path: Path, before: Any, after: Any, said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    made = before(torch.optim.AdamW(Two().parameters()))
    if any(map(inspect.isfunction, made.state_dict().values())):
        pytest.skip(f"torch {torch.__version__} puts a function into this scheduler's state")
    trained(tmp_path / "s", Two(), scheduler=before)
    for make, told in ((before, []), (after, said)):
        caplog.clear()
        model = Two()
        optimizer = torch.optim.AdamW(model.parameters())
        with caplog.at_level(logging.WARNING):
            resumed(tmp_path / "s", model, optimizer, scheduler=make(optimizer))
        assert all(one in caplog.text for one in told), caplog.text
        assert bool(told) or not caplog.text, caplog.text


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (
            torch.optim.RMSprop,
            lambda p: torch.optim.RMSprop(p, centered=True),
            "centered is False, as in the checkpoint, not True as in the script",
        ),
        (
            torch.optim.NAdam,
            lambda p: torch.optim.NAdam(p, momentum_decay=0.1, decoupled_weight_decay=True),
            "momentum_decay is 0.004, as in the checkpoint, not 0.1 as in the script; "
            "decoupled_weight_decay is False, as in the checkpoint, not True as in the script",
        ),
        (
            torch.optim.Rprop,
            lambda p: torch.optim.Rprop(p, etas=(0.4, 1.2), step_sizes=(1e-6, 10)),
            "etas is (0.5, 1.2), as in the checkpoint, not (0.4, 1.2) as in the script; "
            "step_sizes is (1e-06, 50), as in the checkpoint, not (1e-06, 10) as in the script",
        ),
        (
            torch.optim.ASGD,
            lambda p: torch.optim.ASGD(p, lambd=0.5, t0=7.0),
            "lambd is 0.0001, as in the checkpoint, not 0.5 as in the script; "
            "t0 is 1000000.0, as in the checkpoint, not 7.0 as in the script",
        ),
        (
            lambda p: torch.optim.AdamW([{"params": list(p), "lr_scale": 0.5}]),
            lambda p: torch.optim.AdamW([{"params": list(p), "lr_scale": 0.7}]),
            "lr_scale is 0.5, as in the checkpoint, not 0.7 as in the script",
        ),
        (
            lambda p: torch.optim.AdamW([{"params": list(p), "scales": torch.tensor([1.0, 2.0])}]),
            lambda p: torch.optim.AdamW([{"params": list(p), "scales": torch.tensor([1.0, 3.0])}]),
            "scales is (1.0, 2.0), as in the checkpoint, not (1.0, 3.0) as in the script",
        ),
        (
            torch.optim.AdamW,
            lambda p: torch.optim.AdamW([{"params": list(p), "other": 1}]),
            "other is gone: the checkpoint has none, the script has 1",
        ),
        (
            lambda p: torch.optim.AdamW([{"params": list(p), "other": 1}]),
            torch.optim.AdamW,
            "other is 1, as in the checkpoint: the script has none",
        ),
    ],
    ids=["centered", "nadam", "rprop", "asgd", "own", "tensor", "script-alone", "checkpoint-alone"],
)
def test_every_other_number_of_an_optimizer_is_reported(
    tmp_path: Path, before: Any, after: Any, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    trained(tmp_path / "s", Two(), before)
    for make, told in ((before, ""), (after, said)):
        caplog.clear()
        model = Two()
        with caplog.at_level(logging.WARNING):
            assert resumed(tmp_path / "s", model, make(model.parameters())) == 3
        texts = [one.getMessage() for one in caplog.records]
        end = "; to have the script's, set it in optimizer.param_groups after resume()"
        assert [text.partition(": resuming ")[2].partition(": ")[2] for text in texts] == [told + end] * bool(told)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (torch.optim.swa_utils.SWALR, "swa_lr is 0.05, as in the checkpoint, not 0.5"),
        (lambda o, rate: torch.optim.lr_scheduler.OneCycleLR(o, rate, 10, div_factor=rate * 100), "max_lr is 0.05"),
    ],
    ids=["averaging", "onecycle"],
)
def test_numbers_that_a_schedule_keeps_in_the_groups_are_reported(
    tmp_path: Path, make: Any, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """And those that it changes are not."""
    trained(tmp_path / "s", Two(), scheduler=lambda o: make(o, 0.05))
    for rate in (0.05, 0.5):
        caplog.clear()
        model = Two()
        optimizer = torch.optim.AdamW(model.parameters())
        with caplog.at_level(logging.WARNING):
            resumed(tmp_path / "s", model, optimizer, scheduler=make(optimizer, rate))
        assert (said in caplog.text) == (rate == 0.5), caplog.text
        assert "momentum is" not in caplog.text
        assert "betas is" not in caplog.text


def test_other_betas_are_reported_beside_a_schedule_that_does_not_move_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    step = torch.optim.lr_scheduler.StepLR
    trained(tmp_path / "s", Two(), scheduler=lambda o: step(o, 1))
    model = Two()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.8, 0.9))
    with caplog.at_level(logging.WARNING):
        resumed(tmp_path / "s", model, optimizer, scheduler=step(optimizer, 1))
    assert "betas is (0.9, 0.999), as in the checkpoint, not (0.8, 0.9) as in the script" in caplog.text


def cosine_of(warmup: int) -> Any:
    def rate(step: int) -> float:
        return min(1.0, step / warmup)

    return rate


def test_a_disabled_scaler_is_reported(tmp_path: Path) -> None:
    for enabled in (True, False):
        trained(tmp_path / str(enabled), Two(), scaler=torch.amp.GradScaler("cpu", enabled=enabled))
        model = Two()
        with pytest.warns(DeterminismWarning, match="scaler: "):
            resumed(
                tmp_path / str(enabled),
                model,
                torch.optim.AdamW(model.parameters()),
                scaler=torch.amp.GradScaler("cpu", enabled=not enabled),
            )


def test_warnings_that_are_errors_come_when_all_is_restored(tmp_path: Path) -> None:
    model, optimizer = trained(tmp_path / "s", Two())
    other = Two().double()
    fresh = torch.optim.AdamW(other.parameters())
    with Checkpointer(tmp_path / "s", model=other, optimizer=fresh, strategy="full") as checkpointer:
        with warnings.catch_warnings():
            warnings.simplefilter("error", DeterminismWarning)
            with pytest.raises(DeterminismWarning, match="Cast"):
                checkpointer.resume()
        assert checkpointer.steps_done == 3
        assert torch.equal(other.a.weight, model.a.weight.double())
        fresh.step()
        checkpointer.step()
    assert ckptstore.open(tmp_path / "s").latest_step() == 4
    assert optimizer.state


def test_optimizers_and_schedules_in_extra_are_compared_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A loop that steps them itself: they are passed like any other stateful object."""

    def made(swapped: bool, total: int = 10, kind: Any = torch.optim.Adam) -> tuple[Any, Any, Any]:
        model = Two(swapped)
        optimizer = kind(model.parameters())
        return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)

    def parts(model: Any, optimizer: Any, schedule: Any) -> dict[str, Any]:
        return {"model": model, "extra": {"optimizer": optimizer, "schedule": schedule}, "strategy": "full"}

    model, optimizer, schedule = made(False)
    with Checkpointer(tmp_path / "s", **parts(model, optimizer, schedule)) as checkpointer:
        checkpointer.resume()
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, float(number + 1))
        optimizer.step()
        schedule.step()
        checkpointer.step()
    other, fresh, longer = made(True, 20)
    with (
        caplog.at_level(logging.WARNING),
        Checkpointer(tmp_path / "s", **parts(other, fresh, longer)) as checkpointer,
    ):
        assert checkpointer.resume() == 1
    same(moments(other, fresh), moments(model, optimizer))
    assert "extra['schedule']: T_max is 10, as in the checkpoint, not 20 as in the script" in caplog.text
    with (
        Checkpointer(tmp_path / "s", **parts(*made(False, kind=torch.optim.RMSprop))) as checkpointer,
        pytest.raises(StateMismatchError, match=r"extra\['optimizer'\]: Adam in the checkpoint, RMSprop in the script"),
    ):
        checkpointer.resume()


def test_a_schedule_is_looked_at_in_its_wrapper(tmp_path: Path) -> None:
    class Wrapper:
        def __init__(self, scheduler: Any) -> None:
            self.scheduler = scheduler

        def step(self) -> None:
            self.scheduler.step()

        def state_dict(self) -> Any:
            return self.scheduler.state_dict()

        def load_state_dict(self, state: Any) -> None:
            self.scheduler.load_state_dict(state)

    trained(tmp_path / "s", Two(), scheduler=lambda o: Wrapper(torch.optim.lr_scheduler.StepLR(o, 2)))
    model = Two()
    optimizer = torch.optim.AdamW(model.parameters())
    wrapped = Wrapper(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    error = refused(tmp_path / "s", model, optimizer, scheduler=wrapped)
    assert error.differences == ("scheduler: StepLR in the checkpoint, ExponentialLR in the script",)
