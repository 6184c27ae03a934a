"""`resume()` in a script whose modules have changed: frozen, added to `extra`, loaded by their own functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import ckptstore  # noqa: E402
from ckptstore import DeterminismWarning  # noqa: E402
from ckptstore.errors import StateMismatchError  # noqa: E402
from ckptstore.training import Checkpointer  # noqa: E402
from tests.training.two_layers import Two, moments, nn, refused, resumed, trained  # noqa: E402


@pytest.mark.parametrize("own", ["class", "hook"])
def test_a_module_that_loads_in_its_own_way_knows_what_fits(tmp_path: Path, own: str) -> None:
    """It renames keys of older checkpoints; the rest of the model is compared as usual."""

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
    """A rollback needs a copy of the model: it is made only if code of the script may fail."""
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


def test_keys_missing_in_a_modules_own_loading_are_reported_beside_repeated_elements(tmp_path: Path) -> None:
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
def test_a_newly_frozen_parameter_causes_a_warning(tmp_path: Path, strategy: str, frozen: bool, compiled: bool) -> None:
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
def test_a_parameter_frozen_as_before_causes_no_warning(tmp_path: Path, frozen: bool) -> None:
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


def test_a_layer_frozen_during_the_run_is_recorded_as_it_was_saved(tmp_path: Path) -> None:
    """A plan of an existing state must not keep the frozen layers of its time. SGD has no state that shows it."""
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


class Quantized(nn.Linear):  # type: ignore[misc]
    """Cannot load what it saves, as layers with quantized weights."""

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        if f"{prefix}weight" in state:
            raise RuntimeError("quantized weights cannot be loaded")
        super()._load_from_state_dict(state, prefix, *rest)


@pytest.mark.parametrize("other", ["", "bits", "trained", "more"])
def test_a_frozen_layer_that_has_its_bits_already_is_not_loaded(tmp_path: Path, other: str) -> None:
    layer = Quantized(4, 4).requires_grad_(False)
    trained(tmp_path / "s", Two(c=layer))
    again = Quantized(4, 4).requires_grad_(False)
    with torch.no_grad():
        again.weight.copy_(layer.weight)
        again.bias.copy_(layer.bias)
        if other == "bits":
            again.weight[0, 0] += 1
    again.requires_grad_(other == "trained")
    if other == "more":
        again.register_buffer("scale", torch.ones(1))
    model = Two(c=again)
    optimizer = torch.optim.AdamW(model.parameters())
    if not other:
        assert resumed(tmp_path / "s", model, optimizer, {"parts": "model"}) == 3
        return
    with pytest.raises(RuntimeError, match="quantized weights cannot be loaded"):
        resumed(tmp_path / "s", model, optimizer, {"parts": "model"})
