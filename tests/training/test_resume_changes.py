"""A script that changed between two runs: matching parts are restored, others reported or refused unchanged."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import ckptstore  # noqa: E402
from ckptstore import DeterminismWarning  # noqa: E402
from ckptstore.errors import FormatError, StateMismatchError, UsageError  # noqa: E402
from ckptstore.training import Checkpointer  # noqa: E402
from tests.training.two_layers import Two, everything, moments, nn, refused, resumed, same, trained  # noqa: E402
from tests.warm_agents import start_warm  # noqa: E402

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
    """Schedules that have their own numbers for each group."""
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


@pytest.mark.filterwarnings("ignore:The epoch parameter")  # torch 2.6 warns of its own code
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
def test_another_implementation_of_an_optimizer_causes_a_warning(
    tmp_path: Path, flag: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The script requests a faster one, and torch silently takes the checkpoint's, which is slower."""
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
        patch.setattr(ScriptState, "_script", lambda self, light: {})
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


# -- refusals


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
