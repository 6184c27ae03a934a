"""A small model of two layers, trained and resumed: for tests of `resume()` in a script that has changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ckptstore.errors import StateMismatchError  # noqa: E402
from ckptstore.training import Checkpointer  # noqa: E402

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
    """Train some steps, each parameter with other gradients, and save each."""
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
    """An optimizer's state, by names of parameters and slots."""
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
    """A resume that must be refused, with nothing changed."""
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
