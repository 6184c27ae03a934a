"""The objects that a script passed to its `Checkpointer`: checked, unwrapped, with their places in the state."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from ckptstore.errors import UsageError
from ckptstore.training.loaders.loader_counting import counted
from ckptstore.training.loaders.loader_plans import is_stateful
from ckptstore.training.parameter_names import bare_state, parameter_paths

__all__ = ["ScriptObjects", "flat", "inner_model", "inner_optimizer", "placed", "states"]


class ScriptObjects:
    """The objects; each part is one object, or a list or dict of several, as the script passed it.

    Attributes:
        model, optimizer, scheduler: without wrappers; None: there is none.
        loader: what the script has to iterate over.
        scaler, compressor: or None.
        extra: by name, the functions that read and set an object's state.
        extra_objects: by name, the object.
    """

    def __init__(
        self, model: Any, optimizer: Any, scheduler: Any, loader: Any, scaler: Any, extra: Any, compressor: Any
    ) -> None:
        """See `ScriptState`."""
        self.model = _each("model", model, inner_model)
        self.optimizer = _each("optimizer", optimizer, inner_optimizer)
        self.scheduler = _each("scheduler", scheduler, _stateful)
        self.scaler = None if scaler is None else _stateful("scaler", scaler)
        self.loader = None if loader is None else counted(loader)
        if extra is not None and not isinstance(extra, Mapping):
            raise UsageError(f"extra: {type(extra).__name__}; expected objects by name, as in extra={{'ema': ema}}")
        self.extra_objects: dict[str, Any] = dict(extra or {})
        self.extra = {name: _accessors(f"extra[{name!r}]", one) for name, one in self.extra_objects.items()}
        self.compressor = compressor

    def of(self, part: str) -> Any:
        """The object passed as ``model``, ``optimizer``, ...; None: there is none."""
        return None if part == "random" else getattr(self, part)

    def has(self, part: str) -> bool:
        """Whether the script has that part. It always has generators."""
        return part == "random" or (bool(self.extra) if part == "extra" else self.of(part) is not None)

    def several(self, part: str) -> bool:
        """Whether there is a list or dict of it."""
        return isinstance(self.of(part), dict | list)

    def modules(self) -> list[tuple[str, torch.nn.Module]]:
        """All modules with their places in the state: the models, and those in ``extra``."""
        found = [(f"model{place}", one) for place, one in placed(self.model)]
        extra = self.extra_objects.items()
        return found + [(f"extra.{name}", one) for name, one in extra if isinstance(one, torch.nn.Module)]

    def paths(self) -> dict[int, list[str]]:
        """Every parameter's paths in the state, by its identity."""
        found: dict[int, list[str]] = {}
        for path, parameter in parameter_paths(self.modules()).items():
            found.setdefault(id(parameter), []).append(path)
        return found


def inner_model(name: str, model: Any) -> torch.nn.Module:
    """The module inside wrappers that only compile or distribute it.

    Raises:
        UsageError: it is not a module.
    """
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod  # torch.compile
        elif isinstance(model, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
            model = model.module
        elif isinstance(model, torch.nn.Module):
            return model
        else:
            raise UsageError(f"{name}: {type(model).__name__}; expected a torch.nn.Module")


def inner_optimizer(name: str, optimizer: Any) -> torch.optim.Optimizer:
    """Torch's optimizer itself, without wrappers. Raises `UsageError`."""
    seen: set[int] = set()
    # Accelerate's wrapper is an Optimizer, too, but its __init__ was never called, so it has no groups itself.
    while not (isinstance(optimizer, torch.optim.Optimizer) and "param_groups" in vars(optimizer)):
        seen.add(id(optimizer))
        inner = getattr(optimizer, "optimizer", None)
        if inner is None or id(inner) in seen:
            raise UsageError(f"{name}: {type(optimizer).__name__}; expected a torch.optim.Optimizer")
        optimizer = inner
    return optimizer


def _stateful(name: str, value: Any) -> Any:
    if not is_stateful(value):
        raise UsageError(f"{name}: {type(value).__name__} has no state_dict and load_state_dict")
    return value


def _each(name: str, given: Any, check: Callable[[str, Any], Any]) -> Any:
    if given is None:
        return None
    if isinstance(given, Mapping):
        return {str(key): check(f"{name}[{key!r}]", one) for key, one in given.items()}
    if isinstance(given, list | tuple):
        return [check(f"{name}[{number}]", one) for number, one in enumerate(given)]
    return check(name, given)


def placed(given: Any) -> list[tuple[str, Any]]:
    """The objects of a part, each with its place in the state."""
    if isinstance(given, dict):
        return [(f".{key}", one) for key, one in given.items()]
    return [(f".{number}", one) for number, one in enumerate(given)] if isinstance(given, list) else [("", given)]


def flat(given: Any) -> list[Any]:
    """The objects of a part, in order."""
    if given is None:
        return []
    return list(given.values()) if isinstance(given, dict) else given if isinstance(given, list) else [given]


def states(given: Any, state_of: Callable[[Any], Any]) -> Any:
    """The states of a part's objects, nested as they were given."""
    if isinstance(given, dict):
        return {key: state_of(one) for key, one in given.items()}
    return [state_of(one) for one in given] if isinstance(given, list) else state_of(given)


def _accessors(name: str, value: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """The functions that read and set an object's state."""
    if isinstance(value, torch.nn.Module):
        return lambda: bare_state(value.state_dict()), value.load_state_dict
    if is_stateful(value):
        return value.state_dict, value.load_state_dict
    if isinstance(value, torch.Generator):
        return value.get_state, lambda state: value.set_state(torch.as_tensor(state).cpu())
    if isinstance(value, np.random.Generator):

        def put(state: Any) -> None:
            value.bit_generator.state = state

        return lambda: value.bit_generator.state, put
    if isinstance(value, np.random.RandomState):
        return lambda: value.get_state(legacy=True), value.set_state
    if isinstance(value, random.Random):
        return value.getstate, value.setstate
    raise UsageError(
        f"{name}: {type(value).__name__} has no state_dict and load_state_dict, and is not a random generator"
    )
