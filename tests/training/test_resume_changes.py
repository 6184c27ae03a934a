"""A script that changed between two runs: what fits is restored, all else is said or refused, and nothing changed."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import ckptstore  # noqa: E402
from ckptstore import DeterminismWarning  # noqa: E402
from ckptstore.errors import FormatError, StateMismatchError, UsageError  # noqa: E402
from ckptstore.training import Checkpointer  # noqa: E402
from tests.warm_agents import start_warm  # noqa: E402

nn = torch.nn


class Two(nn.Module):  # type: ignore[misc]
    """Two layers of one shape; `swapped`: the same layers, made in another order."""

    def __init__(self, swapped: bool = False, **also: nn.Module) -> None:
        super().__init__()
        for name in ("b", "a") if swapped else ("a", "b"):
            self.add_module(name, nn.Linear(4, 4))
        for name, one in also.items():
            self.add_module(name, one)

    def forward(self, x: Any) -> Any:
        return self.b(torch.tanh(self.a(x)))


def trained(
    path: Path,
    model: Any,
    make: Callable[[Any], Any] = torch.optim.AdamW,
    steps: int = 3,
    scheduler: Any = None,
    strategy: str = "full",
    **also: Any,
) -> tuple[Any, Any]:
    """Train some steps, each parameter by other gradients, and save each."""
    optimizer = make(model.parameters()) if callable(make) else make
    schedule = None if scheduler is None else scheduler(optimizer)
    with Checkpointer(
        path, model=model, optimizer=optimizer, scheduler=schedule, strategy=strategy, **also
    ) as checkpointer:
        for step in range(checkpointer.resume(), steps):
            for number, parameter in enumerate(model.parameters()):
                if parameter.requires_grad:
                    parameter.grad = torch.full_like(parameter, float(number + step + 1))
            optimizer.step()
            if schedule is not None:
                schedule.step()
            checkpointer.step()
    return model, optimizer


def moments(model: Any, optimizer: Any) -> dict[str, Any]:
    """What an optimizer keeps, by names of parameters and slots."""
    return {
        f"{name.replace('_orig_mod.', '')}/{key}": value.clone() if isinstance(value, torch.Tensor) else value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def everything(model: Any, optimizer: Any) -> dict[str, Any]:
    weights = {f"model.{name}": one.clone() for name, one in model.state_dict().items()}
    groups = {
        f"group {number} {key}": value
        for number, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if key != "params"
    }
    return weights | moments(model, optimizer) | groups


def same(one: Any, other: Any) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == other[key].dtype, key
            assert torch.equal(value, other[key]), key
        else:
            assert value == other[key], key


def resumed(path: Path, model: Any, optimizer: Any, how: Any = None, **also: Any) -> int:
    with Checkpointer(path, model=model, optimizer=optimizer, strategy="full", **also) as checkpointer:
        return checkpointer.resume(**(how or {}))


def refused(path: Path, model: Any, optimizer: Any, **also: Any) -> StateMismatchError:
    """A resume that has to be refused, with nothing changed."""
    before = everything(model, optimizer)
    generator = torch.get_rng_state()
    with (
        Checkpointer(path, model=model, optimizer=optimizer, strategy="full", **also) as checkpointer,
        pytest.raises(StateMismatchError) as caught,
    ):
        checkpointer.resume()
    same(everything(model, optimizer), before)
    assert torch.equal(torch.get_rng_state(), generator)
    return caught.value


# -- names


@pytest.mark.parametrize("strategy", ["full", "delta", "gradient"])
def test_modules_made_in_another_order_get_their_own_moments(tmp_path: Path, strategy: str) -> None:
    model, optimizer = trained(tmp_path / "s", Two(), strategy=strategy)
    other = Two(swapped=True)
    fresh = torch.optim.AdamW(other.parameters())
    assert resumed(tmp_path / "s", other, fresh) == 3
    same(moments(other, fresh), moments(model, optimizer))
    x = torch.randn(3, 4)
    for net, optim in ((model, optimizer), (other, fresh)):
        optim.zero_grad()
        net(x).square().sum().backward()
        optim.step()
    assert all(torch.equal(one, other.state_dict()[name]) for name, one in model.state_dict().items())


def test_an_agent_and_a_replica_keep_names_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start_warm(monkeypatch)
    model, optimizer = trained(tmp_path / "s", Two(), strategy="replica", agent=True)
    other = Two(swapped=True)
    fresh = torch.optim.AdamW(other.parameters())
    assert resumed(tmp_path / "s", other, fresh, agent=True) == 3
    same(moments(other, fresh), moments(model, optimizer))


def test_groups_in_another_order_get_their_own_numbers(tmp_path: Path) -> None:
    def grouped(model: Any, names: tuple[str, str]) -> Any:
        decay = {"a": 0.1, "b": 0.0}
        return torch.optim.AdamW(
            [{"params": getattr(model, name).parameters(), "weight_decay": decay[name]} for name in names]
        )

    model = Two()
    _, optimizer = trained(tmp_path / "s", model, grouped(model, ("a", "b")))
    other = Two()
    fresh = grouped(other, ("b", "a"))
    resumed(tmp_path / "s", other, fresh)
    same(moments(other, fresh), moments(model, optimizer))
    assert [group["weight_decay"] for group in fresh.param_groups] == [0.0, 0.1]


def of_groups(names: tuple[str, ...]) -> dict[str, Callable[[Any], Any]]:
    """Schedules that have numbers of their own for each group."""
    rates, at = torch.optim.lr_scheduler, {"a": 1e-3, "b": 1e-2}
    functions = {"a": lambda step: 0.5**step, "b": lambda step: 0.9**step}
    return {
        "lambda": lambda o: rates.LambdaLR(o, lambda step: 0.5**step),
        "lambdas": lambda o: rates.LambdaLR(o, [functions[name] for name in names]),
        "cyclic": lambda o: rates.CyclicLR(
            o, [at[n] / 10 for n in names], [at[n] for n in names], step_size_up=4, cycle_momentum=False
        ),
        "sequential": lambda o: rates.SequentialLR(
            o, [rates.StepLR(o, 2), rates.LambdaLR(o, lambda step: 0.5**step)], [2]
        ),
        "plateau": lambda o: rates.ReduceLROnPlateau(o, min_lr=[at[n] / 2 for n in names], patience=0, factor=0.1),
    }


@pytest.mark.filterwarnings("ignore:The epoch parameter")  # by torch 2.6 of what it does itself
@pytest.mark.parametrize("kind", sorted(of_groups(())))
@pytest.mark.parametrize("in_extra", [False, True], ids=["given", "extra"])
def test_a_schedule_follows_the_groups_in_another_order(
    tmp_path: Path, kind: str, in_extra: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def run(names: tuple[str, str], steps: int, path: Path) -> dict[str, float]:
        model = Two()
        rates = {"a": 1e-3, "b": 1e-2}
        optimizer = torch.optim.AdamW([{"params": getattr(model, n).parameters(), "lr": rates[n]} for n in names])
        schedule = of_groups(names)[kind](optimizer)
        parts = {"optimizer": optimizer, "scheduler": schedule}
        given: dict[str, Any] = {"extra": {"a": schedule, "b": optimizer}} if in_extra else parts
        with Checkpointer(path, model=model, strategy="full", **given) as checkpointer:
            for _ in range(checkpointer.resume(), steps):
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
                schedule.step(*([1.0] if kind == "plateau" else []))
                checkpointer.step()
        return {name: group["lr"] for name, group in zip(names, optimizer.param_groups, strict=True)}

    whole = run(("a", "b"), 5, tmp_path / "whole")
    run(("a", "b"), 3, tmp_path / "s")
    with caplog.at_level(logging.WARNING):
        assert run(("b", "a"), 5, tmp_path / "s") == whole
    assert not caplog.text


def test_a_group_that_was_divided_keeps_the_schedule_s_numbers(tmp_path: Path) -> None:
    trained(tmp_path / "s", Two(), scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.5**step))
    other = Two()
    fresh = torch.optim.AdamW([{"params": other.a.parameters(), "lr": 0.1}, {"params": other.b.parameters()}], lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(fresh, lambda step: 0.5**step)
    with pytest.warns(DeterminismWarning, match="1 in the checkpoint, 2 in the script"):
        resumed(tmp_path / "s", other, fresh, {"strict": False}, scheduler=schedule)
    assert (schedule.base_lrs, schedule.last_epoch) == ([0.1, 1.0], 3)
    fresh.step()
    schedule.step()
    assert [group["lr"] for group in fresh.param_groups] == [0.1 / 16, 1 / 16]


def test_a_schedule_s_function_that_is_an_object_has_the_checkpoint_s_numbers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Decay:
        def __init__(self, by: float) -> None:
            self.by = by

        def __call__(self, step: int) -> float:
            return float(self.by**step)

    trained(tmp_path / "s", Two(), scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, Decay(0.5)))
    model = Two()
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, Decay(0.9))
    with caplog.at_level(logging.WARNING):
        resumed(tmp_path / "s", model, optimizer, scheduler=schedule)
    assert schedule.lr_lambdas[0].by == 0.5
    assert "by is 0.5, as in the checkpoint, not 0.9 as in the script" in caplog.text


@pytest.mark.parametrize("asked", [0.03, 0.01])
def test_a_learning_rate_that_is_a_tensor_is_compared_too(
    tmp_path: Path, asked: float, caplog: pytest.LogCaptureFixture
) -> None:
    trained(tmp_path / "s", Two(), lambda p: torch.optim.AdamW(p, lr=0.01))
    model = Two()
    with caplog.at_level(logging.WARNING):
        resumed(tmp_path / "s", model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(asked), foreach=False))
    assert ("lr is 0.01, as in the checkpoint, not 0.03 as in the script" in caplog.text) == (asked == 0.03)


@pytest.mark.parametrize("flag", ["fused", "foreach"])
def test_another_implementation_of_an_optimizer_is_told(
    tmp_path: Path, flag: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The script asks for a faster one, and torch takes the checkpoint's: slower, without a word."""
    trained(tmp_path / "s", Two(), lambda p: torch.optim.AdamW(p, **{flag: False}))
    for asked in (True, False):
        caplog.clear()
        model = Two()
        with caplog.at_level(logging.WARNING):
            resumed(tmp_path / "s", model, torch.optim.AdamW(model.parameters(), **{flag: asked}))
        assert (f"{flag} is False, as in the checkpoint, not True as in the script" in caplog.text) == asked


def test_parameters_in_another_group_are_refused(tmp_path: Path) -> None:
    model = Two()
    optimizer = torch.optim.SGD([{"params": model.a.parameters()}, {"params": model.b.parameters(), "lr": 0.1}], lr=1.0)
    trained(tmp_path / "s", model, optimizer)
    other = Two()
    fresh = torch.optim.SGD(
        [{"params": [other.a.weight]}, {"params": [other.a.bias, *other.b.parameters()], "lr": 0.1}], lr=1.0
    )
    error = refused(tmp_path / "s", other, fresh)
    assert "divided otherwise" in str(error)


def test_names_that_an_optimizer_was_given_count_for_parameters_of_no_model(tmp_path: Path) -> None:
    def scales(order: str) -> list[tuple[str, Any]]:
        return [(name, nn.Parameter(torch.zeros(3))) for name in order]

    def save(named: list[tuple[str, Any]], steps: int) -> Any:
        optimizer = torch.optim.Adam(named)
        with Checkpointer(tmp_path / "s", model=nn.Linear(1, 1), optimizer=optimizer, strategy="full") as checkpointer:
            for _ in range(checkpointer.resume(), steps):
                for name, one in named:
                    one.grad = torch.full((3,), float(ord(name)))
                optimizer.step()
                checkpointer.step()
        return {name: optimizer.state[one]["exp_avg"] for name, one in named}

    expected = save(scales("xyz"), 1)
    found = save(scales("zxy"), 1)
    assert all(torch.equal(expected[name], found[name]) for name in "xyz")


def test_parameters_of_no_model_go_by_number(tmp_path: Path) -> None:
    def made(*shapes: int) -> tuple[Any, Any]:
        parameters = [nn.Parameter(torch.zeros(size)) for size in shapes]
        return parameters, torch.optim.Adam(parameters)

    parameters, optimizer = made(3, 4)
    with Checkpointer(tmp_path / "s", model=nn.Linear(1, 1), optimizer=optimizer, strategy="full") as checkpointer:
        checkpointer.resume()
        for one in parameters:
            one.grad = torch.ones_like(one)
        optimizer.step()
        checkpointer.step()
    again, fresh = made(3, 4)
    resumed(tmp_path / "s", nn.Linear(1, 1), fresh)
    for one, other in zip(parameters, again, strict=True):
        assert torch.equal(optimizer.state[one]["exp_avg"], fresh.state[other]["exp_avg"])
    _, swapped = made(4, 3)
    error = refused(tmp_path / "s", nn.Linear(1, 1), swapped)
    assert "exp_avg of parameter 0: float32 [3] in the checkpoint, the parameter is float32 [4]" in str(error)


def test_a_checkpoint_without_names_resumes_by_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptstore.training.capture.script_state import ScriptState

    with monkeypatch.context() as patch:
        patch.setattr(ScriptState, "_script", lambda self, standing: {})
        patch.setattr(ScriptState, "watched", lambda self: None)
        model, optimizer = trained(tmp_path / "s", Two())
    assert "script" not in ckptstore.open(tmp_path / "s").load()
    other = Two()
    fresh = torch.optim.AdamW(other.parameters())
    assert resumed(tmp_path / "s", other, fresh) == 3
    same(everything(other, fresh), everything(model, optimizer))
    moved = Two(swapped=True)
    error = refused(tmp_path / "s", moved, torch.optim.AdamW(moved.parameters()))
    assert "another order" in str(error)


@pytest.mark.parametrize("strategy", ["delta", "gradient"])
def test_names_make_no_step_a_full(tmp_path: Path, strategy: str) -> None:
    trained(tmp_path / "s", Two(), strategy=strategy, steps=6)
    kinds = [info.kind for info in ckptstore.open(tmp_path / "s").checkpoints()]
    assert kinds == ["full", *[strategy] * 5]


# -- what is refused


def test_another_class_of_optimizer_is_refused_before_anything_is_restored(tmp_path: Path) -> None:
    trained(tmp_path / "s", Two(), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    model = Two()
    error = refused(tmp_path / "s", model, torch.optim.AdamW(model.parameters()))
    assert error.differences == ("optimizer: SGD in the checkpoint, AdamW in the script",)
    assert 'resume(parts=["model"])' in str(error)
    assert "resume(strict=False)" in str(error)
    assert isinstance(error, FormatError)


def test_layers_and_groups_that_were_added_are_listed(tmp_path: Path) -> None:
    trained(tmp_path / "s", Two())
    model = Two(c=nn.Linear(4, 2))
    error = refused(tmp_path / "s", model, torch.optim.AdamW(model.parameters()))
    assert {one.partition(":")[0] for one in error.differences} == {"model.c.weight", "model.c.bias", "optimizer"}
    assert any("model.c.weight: the script's optimizer has it" in one for one in error.differences)
    model = Two()
    groups = [{"params": model.a.parameters()}, {"params": model.b.parameters()}]
    error = refused(tmp_path / "s", model, torch.optim.AdamW(groups))
    assert "1 in the checkpoint, 2 in the script" in str(error)


def test_a_vocabulary_of_another_size_is_refused_and_on_request_left_out(tmp_path: Path) -> None:
    model, optimizer = trained(tmp_path / "s", Two(words=nn.Embedding(5, 4)))
    other = Two(words=nn.Embedding(7, 4))
    fresh = torch.optim.AdamW(other.parameters())
    error = refused(tmp_path / "s", other, fresh)
    assert "model.words.weight: float32 [5, 4] in the checkpoint, float32 [7, 4] in the script" in error.differences
    words = other.words.weight.clone()
    with pytest.warns(DeterminismWarning, match=r"left as the script has it: model\.words\.weight"):
        assert resumed(tmp_path / "s", other, fresh, {"strict": False}) == 3
    assert torch.equal(other.words.weight, words)
    assert other.words.weight not in fresh.state
    for name in ("a.weight", "b.bias"):
        mine, its = other.get_parameter(name), model.get_parameter(name)
        assert torch.equal(mine, its)
        assert torch.equal(fresh.state[mine]["exp_avg"], optimizer.state[its]["exp_avg"])


def test_parts_alone_are_restored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, _ = trained(tmp_path / "s", Two())
    other = Two()
    fresh = torch.optim.SGD(other.parameters(), lr=0.5)
    generator = torch.get_rng_state()
    with caplog.at_level(logging.WARNING), pytest.warns(DeterminismWarning, match="optimizer 0: AdamW.* -> SGD"):
        assert resumed(tmp_path / "s", other, fresh, {"parts": ["model"]}) == 3
    assert "restored: model; left as the script has them: optimizer, random generators" in caplog.text
    assert all(torch.equal(one, other.state_dict()[name]) for name, one in model.state_dict().items())
    assert not fresh.state
    assert fresh.param_groups[0]["lr"] == 0.5
    assert torch.equal(torch.get_rng_state(), generator)


@pytest.mark.parametrize("parts", [["weights"], ["scheduler"], [], [1]])
def test_parts_that_there_are_not_are_refused(tmp_path: Path, parts: Any) -> None:
    trained(tmp_path / "s", Two())
    model = Two()
    with pytest.raises(UsageError, match="parts"):
        resumed(tmp_path / "s", model, torch.optim.AdamW(model.parameters()), {"parts": parts})


def test_a_refused_resume_leaves_no_term_to_step_in(tmp_path: Path) -> None:
    trained(tmp_path / "s", Two())
    model = Two(c=nn.Linear(1, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    with Checkpointer(tmp_path / "s", model=model, optimizer=optimizer, strategy="full") as checkpointer:
        with pytest.raises(StateMismatchError):
            checkpointer.resume()
        with pytest.raises(UsageError, match="call resume"):
            checkpointer.step()
        with pytest.warns(DeterminismWarning):
            assert checkpointer.resume(strict=False) == 3
        optimizer.step()
        checkpointer.step()
    assert ckptstore.open(tmp_path / "s").latest_step() == 4


def test_going_back_compares_too(tmp_path: Path) -> None:
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(tmp_path / "s", model=model, optimizer=optimizer, strategy="full") as checkpointer:
        checkpointer.resume()
        optimizer.step()
        checkpointer.step()
        checkpointer.wait()
        model.add_module("c", nn.Linear(1, 1))
        before = everything(model, optimizer)
        with pytest.raises(StateMismatchError, match=r"model\.c\.weight"):
            checkpointer.rollback(1)
        same(everything(model, optimizer), before)
        assert checkpointer.rollback(1, parts="optimizer") == 1


def test_a_foreign_object_that_fails_puts_everything_back(tmp_path: Path) -> None:
    class Counter:
        def __init__(self, fails: bool) -> None:
            self.at, self.fails = 0, fails

        def state_dict(self) -> dict[str, int]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, int]) -> None:
            if self.fails and state != {"at": 0}:
                raise KeyError("of the script's own")
            self.at = state["at"]

    model = Two()
    model.register_buffer("mask", torch.zeros(1).expand(3))
    good, bad = Counter(False), Counter(True)
    good.at = bad.at = 5
    trained(tmp_path / "s", model, extra={"good": good, "bad": bad})
    other = Two()
    other.register_buffer("mask", torch.ones(1).expand(3))
    fresh = torch.optim.AdamW(other.parameters())
    good, bad = Counter(False), Counter(True)
    before, generator = everything(other, fresh), torch.get_rng_state()
    with (
        Checkpointer(
            tmp_path / "s", model=other, optimizer=fresh, extra={"good": good, "bad": bad}, strategy="full"
        ) as checkpointer,
        pytest.raises(KeyError, match="of the script's own") as caught,
    ):
        checkpointer.resume()
    assert "restoring extra['bad'] failed; the script's other objects are as they were" in caught.value.__notes__[0]
    same(everything(other, fresh), before)
    assert not fresh.state
    assert good.at == 0
    assert torch.equal(torch.get_rng_state(), generator)


# -- dtypes


@pytest.mark.parametrize("make", [torch.optim.AdamW, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)])
@pytest.mark.parametrize(("before", "after"), [("float32", "bfloat16"), ("float32", "float64"), ("float64", "float32")])
def test_another_dtype_is_cast_with_a_warning_and_trains_on(tmp_path: Path, make: Any, before: str, after: str) -> None:
    model, optimizer = trained(tmp_path / "s", Two().to(getattr(torch, before)), make)
    other = Two().to(getattr(torch, after))
    fresh = make(other.parameters())
    slots = sum(isinstance(one, torch.Tensor) and one.ndim > 0 for one in moments(model, optimizer).values())
    with pytest.warns(
        DeterminismWarning,
        match=f"Cast: 4 tensors of the model from {before} to {after}.*{slots} tensors of the optimizer from {before}",
    ):
        assert resumed(tmp_path / "s", other, fresh) == 3
    for name, one in moments(other, fresh).items():
        if isinstance(one, torch.Tensor) and one.ndim:
            assert torch.equal(one, moments(model, optimizer)[name].to(getattr(torch, after)))
    for parameter in other.parameters():
        parameter.grad = torch.ones_like(parameter)
    fresh.step()


MASK = torch.finfo(torch.float32).min


def test_a_dtype_that_cuts_numbers_off_is_refused(tmp_path: Path) -> None:
    for dtype in (torch.complex64, torch.float32):
        model = Two()
        model.register_buffer("kept", torch.full((2,), 1.5, dtype=dtype))
        trained(tmp_path / str(dtype), model)
        other = Two()
        other.register_buffer("kept", torch.zeros(2, dtype=torch.int64))
        error = refused(tmp_path / str(dtype), other, torch.optim.AdamW(other.parameters()))
        assert f"{str(dtype).removeprefix('torch.')} [2] in the checkpoint cannot become int64" in str(error)


@pytest.mark.parametrize(
    ("before", "values", "after", "lost"),
    [
        ("int64", [0, 1, 500], "int8", 1),
        ("int64", [0, 127, -128], "int8", 0),
        ("int64", [-129, 128, 3], "int8", 2),
        ("int64", [-1, 0, 5], "uint64", 1),
        ("uint64", [2**63, 0, 5], "int64", 1),
        ("uint16", [60_000, 0, 5], "int16", 1),
        ("int64", [10**6, 0, 5], "float16", 1),
        ("float32", [1e6, -1e6, float("inf")], "float16", 2),
        ("float32", [65_504.0, float("nan"), float("-inf")], "float16", 0),
        ("float64", [1e300, 0.1, 2.0], "float32", 1),
        ("float32", [MASK, -MASK, 1.0], "bfloat16", 0),
        ("float32", [MASK, -MASK, 1e6], "float16", 1),
        ("float32", [MASK, 0.999 * MASK, 1.0], "float16", 1),
        ("float16", [-65_504.0, 65_504.0, 1.0], "bfloat16", 0),
        ("bfloat16", [torch.finfo(torch.bfloat16).min, 0.0, 1e9], "float16", 1),
        ("float64", [torch.finfo(torch.float64).min, 0.0, 1.0], "float32", 0),
        ("float64", [MASK, 0.0, 1.0], "bfloat16", 1),
        ("float32", [MASK, -MASK, 1.0], "float8_e5m2", 0),
        ("float32", [MASK, -MASK, 1.0], "float8_e4m3fnuz", 2),
        ("float32", [1e6, 0.1, 2.0], "float8_e4m3fn", 1),
        ("complex128", [1e300j, 0.1, 2.0], "complex64", 1),
        ("bool", [True, False, True], "int8", 0),
    ],
)
def test_a_dtype_that_is_too_small_for_a_number_is_refused(
    tmp_path: Path, before: str, values: list[Any], after: str, lost: int
) -> None:
    def script(dtype: str, values: list[Any]) -> Any:
        model = Two()
        model.register_buffer("kept", torch.tensor(values, dtype=getattr(torch, dtype)))
        return model, torch.optim.AdamW(model.parameters())

    saved, _ = trained(tmp_path / "s", *script(before, values))
    model, optimizer = script(after, [0, 0, 0])
    if lost:
        error = refused(tmp_path / "s", model, optimizer)
        said = f"{before} [3] in the checkpoint cannot become {after}: {lost} of 3 values are too large for it"
        assert list(error.differences) == [f"model.kept: {said}"]
        with pytest.warns(DeterminismWarning, match="left as the script has it: model.kept"):
            assert resumed(tmp_path / "s", model, optimizer, {"strict": False}) == 3
        assert not model.kept.any()
    else:
        with pytest.warns(DeterminismWarning, match="tensors of the script have another dtype than the checkpoint's"):
            assert resumed(tmp_path / "s", model, optimizer) == 3
        found, wanted = (one.double().nan_to_num(7.0) for one in (model.kept, saved.kept.to(model.kept.dtype)))
        assert torch.equal(found, wanted)


def test_moments_that_would_become_infinite_are_refused(tmp_path: Path) -> None:
    model = Two()
    optimizer = torch.optim.AdamW(model.parameters())
    with Checkpointer(tmp_path / "s", model=model, optimizer=optimizer, strategy="full") as checkpointer:
        checkpointer.resume()
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1e5)  # squared, a thousandth of it: 1e7
        optimizer.step()
        checkpointer.step()
    half = Two().half()
    error = refused(tmp_path / "s", half, torch.optim.AdamW(half.parameters()))
    assert len(error.differences) == 4
    assert error.differences[0] == (
        "optimizer: exp_avg_sq of model.a.weight: float32 [4, 4] in the checkpoint cannot become float16: 16 of 16 "
        "values are too large for it"
    )


# -- modules


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("compiled", [(True, False), (False, True), (True, True)])
def test_compiled_submodules_have_the_names_of_the_bare_model(tmp_path: Path, compiled: tuple[bool, bool]) -> None:
    def net(wrap: bool) -> Any:
        model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
        if wrap:
            model[1][0] = torch.compile(model[1][0], backend="eager")
            model[0] = torch.compile(model[0], backend="eager")
        return model

    ema = torch.optim.swa_utils.AveragedModel(net(compiled[0]))
    model, optimizer = trained(tmp_path / "s", net(compiled[0]), extra={"ema": ema})
    state = ckptstore.open(tmp_path / "s").load()
    assert list(state["model"]) == ["0.weight", "0.bias", "1.0.weight", "1.0.bias"]
    assert not any("_orig_mod" in name for name in state["extra"]["ema"])
    other = net(compiled[1])
    fresh = torch.optim.AdamW(other.parameters())
    resumed(tmp_path / "s", other, fresh, extra={"ema": torch.optim.swa_utils.AveragedModel(net(compiled[1]))})
    same(moments(other, fresh), moments(model, optimizer))
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_repeated_elements_are_restored(tmp_path: Path) -> None:
    def net(value: float) -> Any:
        model = Two()
        model.register_buffer("base", torch.full((1,), value))
        model.register_buffer("spread", torch.full((1, 3), value).expand(2, 3))
        model.register_buffer("view", model.base.expand(4))
        model.register_buffer("windows", torch.full((4,), value).as_strided((3, 2), (1, 1)))
        return model

    model, optimizer = trained(tmp_path / "s", net(2.0))
    other = net(5.0)
    view = other.view
    fresh = torch.optim.AdamW(other.parameters())
    resumed(tmp_path / "s", other, fresh)
    same(everything(other, fresh), everything(model, optimizer))
    assert view.data_ptr() == other.base.data_ptr()  # equal by what it is a view of: left as it is
    equal = net(2.0)
    spread = equal.spread.data_ptr()
    resumed(tmp_path / "s", equal, torch.optim.AdamW(equal.parameters()))
    assert equal.spread.data_ptr() == spread
    assert equal.spread.stride() == (0, 1)


def test_non_contiguous_parameters_are_restored(tmp_path: Path) -> None:
    def net() -> Any:
        model = Two()
        model.turned = nn.Parameter(torch.randn(3, 5).t())
        return model

    model, optimizer = trained(tmp_path / "s", net())
    other = net()
    fresh = torch.optim.AdamW(other.parameters())
    resumed(tmp_path / "s", other, fresh)
    same(everything(other, fresh), everything(model, optimizer))
    assert other.turned.stride() == (1, 5)


def test_tensors_that_are_one_in_the_script_alone_are_refused(tmp_path: Path) -> None:
    trained(tmp_path / "s", Two())
    model = Two()
    model.b.weight = model.a.weight
    error = refused(tmp_path / "s", model, torch.optim.AdamW(model.parameters()))
    assert any("model.b.weight: one tensor with model.a.weight in the script" in one for one in error.differences)


def test_a_model_without_memory_is_refused(tmp_path: Path) -> None:
    trained(tmp_path / "s", Two())
    with torch.device("meta"):
        model = Two()
    with (
        Checkpointer(tmp_path / "s", model=model, strategy="full") as checkpointer,
        pytest.raises(StateMismatchError, match="on the meta device"),
    ):
        checkpointer.resume()


def test_a_buffer_that_is_not_kept_any_more_is_refused(tmp_path: Path) -> None:
    def net(persistent: bool) -> Any:
        model = Two()
        model.register_buffer("seen", torch.zeros(2), persistent=persistent)
        return model

    for one, said in ((True, "the script's has none"), (False, "the checkpoint has none")):
        trained(tmp_path / str(one), net(one))
        model = net(not one)
        error = refused(tmp_path / str(one), model, torch.optim.AdamW(model.parameters()))
        assert error.differences[0].startswith(f"model.seen: {said}")


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
def test_other_numbers_of_a_schedule_are_told(
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
def test_every_other_number_of_an_optimizer_is_told(
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
def test_numbers_that_a_schedule_keeps_in_the_groups_are_told(
    tmp_path: Path, make: Any, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """And those that it moves are not."""
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


def test_other_betas_are_told_beside_a_schedule_that_does_not_move_them(
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


def test_a_scaler_that_was_disabled_is_told_of(tmp_path: Path) -> None:
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
    """A loop that steps them itself: they are given as anything else with a state."""

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


@pytest.mark.parametrize("own", ["class", "hook"])
def test_a_module_that_loads_in_its_own_way_knows_what_fits(tmp_path: Path, own: str) -> None:
    """It renames what older checkpoints have; the rest of the model is compared as ever."""

    class Renamed(nn.Linear):  # type: ignore[misc]
        def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
            renamed(state, prefix)
            super()._load_from_state_dict(state, prefix, *rest)

    def renamed(state: Any, prefix: str, *_: Any) -> None:
        for name in ("weight", "bias"):
            if f"{prefix}{name}" not in state:
                state[f"{prefix}{name}"] = state.pop(f"{prefix}old_{name}")

    class Old(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.old_weight = nn.Parameter(torch.randn(4, 4))
            self.old_bias = nn.Parameter(torch.randn(4))

    model, _ = trained(tmp_path / "s", Two(c=Old()))
    layer = Renamed(4, 4) if own == "class" else nn.Linear(4, 4)
    if own == "hook":
        layer.register_load_state_dict_pre_hook(lambda module, state, prefix, *rest: renamed(state, prefix))
    other = Two(c=layer)
    assert resumed(tmp_path / "s", other, torch.optim.AdamW(other.parameters()), {"parts": "model"}) == 3
    assert torch.equal(other.c.weight, model.c.old_weight)
    assert torch.equal(other.a.weight, model.a.weight)


@pytest.mark.filterwarnings("ignore:loader= was given")
def test_nothing_is_put_aside_where_nothing_foreign_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Putting back takes a copy of the model: only if something of the script's own may fail."""
    from ckptstore.training.resume.module_fit import ModuleFit

    copies: list[str] = []
    monkeypatch.setattr(ModuleFit, "remember", lambda self: copies.append(self.path))
    batches = torch.utils.data.DataLoader(torch.randn(4, 4), batch_size=2)
    also = {"loader": batches, "scaler": torch.amp.GradScaler("cpu")}
    trained(tmp_path / "s", Two(), scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 2), **also)
    model = Two()
    optimizer = torch.optim.AdamW(model.parameters())
    resumed(tmp_path / "s", model, optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2), **also)
    assert copies == []


def test_several_models_and_optimizers_by_key(tmp_path: Path) -> None:
    def made(keys: str, dtype: Any = torch.float32) -> tuple[dict[str, Any], dict[str, Any]]:
        models = {key: Two(swapped=keys != "xy").to(dtype) for key in keys}
        return models, {key: torch.optim.Adam(models[key].parameters()) for key in keys}

    models, optimizers = made("xy")
    with Checkpointer(tmp_path / "s", model=models, optimizer=optimizers, strategy="full") as checkpointer:
        checkpointer.resume()
        for place, key in enumerate("xy"):
            for number, parameter in enumerate(models[key].parameters()):
                parameter.grad = torch.full_like(parameter, 10.0 * place + number + 1)
            optimizers[key].step()
        checkpointer.step()
    others, fresh = made("yx", torch.float64)
    with pytest.warns(DeterminismWarning, match=r"8 tensors of the model .* 16 tensors of the optimizer"):
        assert resumed(tmp_path / "s", others, fresh) == 1
    for key in "xy":
        before = moments(models[key], optimizers[key])
        for name, one in moments(others[key], fresh[key]).items():
            assert torch.equal(one, before[name].to(one.dtype)), (key, name)
    with (
        Checkpointer(tmp_path / "s", model={"x": Two()}, optimizer=None, strategy="full") as checkpointer,
        pytest.raises(StateMismatchError, match=r"model: \['x'\] are to be restored, the checkpoint has \['x', 'y'\]"),
    ):
        checkpointer.resume()
    mine = Two()
    with pytest.warns(DeterminismWarning):
        assert resumed(tmp_path / "s", {"x": mine, "z": Two()}, None, {"strict": False, "parts": "model"}) == 1
    assert torch.equal(mine.a.weight, models["x"].a.weight)


@pytest.mark.filterwarnings("ignore::ckptstore.UnexplainedStepWarning")
def test_an_optimizer_that_keeps_one_vector_wants_the_same_order(tmp_path: Path) -> None:
    def made(swapped: bool) -> tuple[Any, Any]:
        model = Two(swapped)
        return model, torch.optim.LBFGS(model.parameters(), max_iter=2)

    model, optimizer = made(False)
    with Checkpointer(tmp_path / "s", model=model, optimizer=optimizer, strategy="full") as checkpointer:
        checkpointer.resume()

        def closure() -> Any:
            optimizer.zero_grad()
            loss = sum(one.square().sum() * (number + 1) for number, one in enumerate(model.parameters()))
            loss.backward()
            return loss

        optimizer.step(closure)
        checkpointer.step()
    other, fresh = made(False)
    assert resumed(tmp_path / "s", other, fresh) == 1
    kept = [state[one.a.weight]["prev_flat_grad"] for one, state in ((model, optimizer.state), (other, fresh.state))]
    assert torch.equal(*kept)
    error = refused(tmp_path / "s", *made(True))
    assert error.differences == ("optimizer: LBFGS keeps all parameters in one vector, in another order",)


def test_parameters_that_became_one_are_refused_though_they_are_equal(tmp_path: Path) -> None:
    model = Two()
    with torch.no_grad():
        model.b.weight.copy_(model.a.weight)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with Checkpointer(tmp_path / "s", model=model, optimizer=optimizer, strategy="full") as checkpointer:
        checkpointer.resume()
        optimizer.step()
        checkpointer.step()
    other = Two()
    other.b.weight = other.a.weight
    error = refused(tmp_path / "s", other, torch.optim.SGD(other.parameters(), 0.0))
    assert error.differences[0] == "optimizer: model.b.weight: one parameter with model.a.weight in the script only"


def test_modules_that_are_called_alike_without_what_compile_puts_there_keep_their_names(tmp_path: Path) -> None:
    def made() -> Any:
        model = Two()
        model.a.add_module("_orig_mod", nn.Linear(4, 4))  # a.weight, and a._orig_mod.weight
        return model

    model, _ = trained(tmp_path / "s", made(), lambda p: torch.optim.SGD(p, 0.1))
    assert "a._orig_mod.weight" in ckptstore.open(tmp_path / "s").load()["model"]
    other = made()
    resumed(tmp_path / "s", other, torch.optim.SGD(other.parameters(), 0.1))
    assert all(map(torch.equal, other.parameters(), model.parameters()))


def test_a_group_that_was_divided_keeps_the_script_s_numbers(tmp_path: Path) -> None:
    trained(tmp_path / "s", Two(), lambda p: torch.optim.AdamW(p, weight_decay=0.3))
    other = Two()
    groups = [{"params": other.a.parameters(), "weight_decay": 0.1}, {"params": other.b.parameters()}]
    fresh = torch.optim.AdamW(groups, weight_decay=0.0)
    with pytest.warns(DeterminismWarning, match="1 in the checkpoint, 2 in the script"):
        assert resumed(tmp_path / "s", other, fresh, {"strict": False}) == 3
    assert [group["weight_decay"] for group in fresh.param_groups] == [0.1, 0.0]
    assert len(fresh.state) == 4


def test_what_a_module_s_own_way_of_loading_lacks_is_said_beside_repeated_elements(tmp_path: Path) -> None:
    def made(own: Any) -> Any:
        model = Two(c=own)
        model.register_buffer("spread", torch.rand(()).expand(3))
        return model

    class Own(nn.Linear):  # type: ignore[misc]
        def _load_from_state_dict(self, *rest: Any) -> None:
            super()._load_from_state_dict(*rest)

    trained(tmp_path / "s", made(nn.Linear(4, 4, bias=False)))
    other = made(Own(4, 4))
    before = {name: one.clone() for name, one in other.state_dict().items()}
    optimizer = torch.optim.AdamW(other.parameters())
    with pytest.raises(RuntimeError, match=r"model: not restored: c\.bias") as caught:
        resumed(tmp_path / "s", other, optimizer, {"parts": "model"})
    assert "are as they were before" in caught.value.__notes__[0]
    assert all(torch.equal(one, before[name]) for name, one in other.state_dict().items())


# Layers frozen and unfrozen


def half_frozen(frozen: bool, **also: Any) -> Any:
    torch.manual_seed(0)
    model = Two(**also)
    model.a.requires_grad_(not frozen)
    return model


@pytest.mark.parametrize("strategy", ["full", "delta", "gradient"])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_frozen_and_was_not_is_told(tmp_path: Path, strategy: str, frozen: bool, compiled: bool) -> None:
    trained(tmp_path, half_frozen(not frozen), strategy=strategy)
    model = half_frozen(frozen)
    optimizer = torch.optim.AdamW(model.parameters())
    if compiled:
        model.b = torch.compile(model.b, backend="eager")
        model.a = torch.compile(model.a, backend="eager")
    mine, its = ("frozen", "trained") if frozen else ("trained", "frozen")
    text = (
        rf"2 parameters are {mine} in the script, and {its} in the checkpoint \(requires_grad\): "
        r"model\.a\.weight, model\.a\.bias"
    )
    with (
        Checkpointer(tmp_path, model=model, optimizer=optimizer, strategy=strategy) as checkpointer,
        pytest.warns(DeterminismWarning, match=text),
    ):
        assert checkpointer.resume() == 3
    assert model.a.weight.requires_grad is not frozen, "the script's choice stays"


@pytest.mark.parametrize("frozen", [False, True])
def test_what_is_frozen_as_before_is_not_told(tmp_path: Path, frozen: bool) -> None:
    trained(tmp_path, half_frozen(frozen))
    model = half_frozen(frozen)
    assert resumed(tmp_path, model, torch.optim.AdamW(model.parameters())) == 3


def test_parts_say_nothing_of_it_and_neither_does_an_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(tmp_path, half_frozen(True))
    model = half_frozen(False)
    assert resumed(tmp_path, model, torch.optim.AdamW(model.parameters()), {"parts": ["model"]}) == 3
    state = ckptstore.open(tmp_path).load(3, framework="torch")
    del state["script"]["model"]
    with ckptstore.open(tmp_path).writer() as writer:
        writer.save(state, 4)
    assert resumed(tmp_path, model, torch.optim.AdamW(model.parameters())) == 3


def test_modules_of_extra_are_compared_too(tmp_path: Path) -> None:
    model = half_frozen(False)
    trained(tmp_path, model, extra={"ema": half_frozen(True)})
    with pytest.warns(DeterminismWarning, match=r"2 parameters are trained .*: extra\['ema'\]\.a\.weight"):
        resumed(tmp_path, model, torch.optim.AdamW(model.parameters()), extra={"ema": half_frozen(False)})


def test_a_layer_that_is_frozen_while_the_run_goes_on_is_known_as_it_was_saved(tmp_path: Path) -> None:
    """A plan of a state that stands must not keep what was frozen when it was made. SGD keeps nothing that tells."""
    model = half_frozen(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(tmp_path / "run", model=model, optimizer=optimizer, strategy="full") as checkpointer:
        for step in range(6):
            if step == 4:
                model.a.requires_grad_(True)
                model.b.requires_grad_(False)
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.full_like(parameter, float(step + 1))
            optimizer.step()
            checkpointer.step()
    store = ckptstore.open(tmp_path / "run")
    said = [store.load(step)["script"]["model"] for step in (4, 5, 6)]
    assert said == [{"frozen": ["a.weight", "a.bias"]}, *[{"frozen": ["b.weight", "b.bias"]}] * 2]
    head = Two(c=nn.Linear(1, 1), d=nn.Linear(1, 1))
    head.requires_grad_(False)
    head.d.bias.requires_grad_(True)
    trained(tmp_path / "head", head, lambda _: torch.optim.SGD([head.d.bias], lr=0.1))
    assert ckptstore.open(tmp_path / "head").load(3)["script"]["model"] == {"trained": ["d.bias"]}


@pytest.mark.parametrize("order", [("gen", "disc"), ("disc", "gen")])
def test_the_order_of_a_dict_of_optimizers_says_nothing(tmp_path: Path, order: tuple[str, str]) -> None:
    def given(names: tuple[str, ...]) -> dict[str, Any]:
        model = Two()
        made = {"gen": torch.optim.AdamW(model.a.parameters()), "disc": torch.optim.SGD(model.b.parameters(), lr=0.1)}
        return {"model": model, "optimizer": {name: made[name] for name in names}}

    first = given(order)
    with Checkpointer(tmp_path, **first, strategy="full") as checkpointer:
        checkpointer.resume()
        for parameter in first["model"].parameters():
            parameter.grad = torch.ones_like(parameter)
        for optimizer in first["optimizer"].values():
            optimizer.step()
        checkpointer.step()
    said = ckptstore.open(tmp_path).load(1)["environment"]
    assert (said["optimizer 0"].split(",")[0], said["optimizer 1"].split(",")[0]) == ("SGD", "AdamW")
    with Checkpointer(tmp_path, **given(order[::-1]), strategy="full") as checkpointer:
        assert checkpointer.resume() == 1
