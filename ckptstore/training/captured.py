"""What a checkpoint of a training script holds: gathered from its objects, and given back to them.

::

    {"format": 1, "step": ..., "model": ..., "optimizer": ..., "scheduler": ..., "scaler": ..., "loader": ...,
     "extra": {...}, "random": {...}, "environment": {...}}

Of several models, optimizers or schedulers there is a list (or a dict, as they were given). Names of parameters are
those of the model itself: without what `torch.compile` and DistributedDataParallel put before them.
"""

from __future__ import annotations

import contextlib
import glob
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from ckptstore.errors import FormatError, UsageError
from ckptstore.host.caller_warnings import DeterminismWarning, warn
from ckptstore.training import rng
from ckptstore.training.batches import CountedBatches, is_stateful
from ckptstore.training.environment import described
from ckptstore.training.sharded import Rooms, sharding
from ckptstore.training.standing import WatchedModule, WatchedOptimizer, is_plain_module, is_plain_optimizer

__all__ = ["Captured", "inner_model", "inner_optimizer"]

_FORMAT: Final = 1


class Captured:
    """The objects of a training script, as one state.

    Attributes:
        models: bare, in the order given.
        optimizers: torch's own, of wrappers what they wrap.
        loader: what the script is to iterate over; see `CountedBatches`.
        sharding: how parameters are cut that are DTensors (FSDP2): each rank has its shards of them. Empty: none is.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any = None,
        scheduler: Any = None,
        loader: Any = None,
        scaler: Any = None,
        extra: Mapping[str, Any] | None = None,
        compressor: Any = None,
    ) -> None:
        """Look at what was given.

        Args:
            model: a module, or a list, tuple or dict of them.
            optimizer: likewise of optimizers; what wraps one in ``.optimizer`` is taken for it.
            scheduler: likewise of whatever has ``state_dict`` and ``load_state_dict``.
            loader: what gives the batches; one without ``state_dict`` is counted.
            scaler: a ``GradScaler``.
            extra: anything else by name: with ``state_dict`` and ``load_state_dict``, or a generator of torch, numpy
                or python.
            compressor: a `TopKHook`, which is told what the parameters are called.

        Raises:
            UsageError: one of them is something else.
        """
        self._model = _each("model", model, inner_model)
        self._optimizer = _each("optimizer", optimizer, inner_optimizer)
        self._scheduler = _each("scheduler", scheduler, _stateful)
        self._scaler = None if scaler is None else _stateful("scaler", scaler)
        self.loader = loader if loader is None or is_stateful(loader) else CountedBatches(loader)
        if extra is not None and not isinstance(extra, Mapping):
            raise UsageError(f"extra: {type(extra).__name__}; objects by name are wanted, as in extra={{'ema': ema}}")
        self._given = dict(extra or {})
        self._extra = {name: _accessors(f"extra[{name!r}]", one) for name, one in (extra or {}).items()}
        self._compressor = compressor
        self._standing_extra: list[str] = []  # the modules among them, since `watched`
        self.models: list[torch.nn.Module] = _flat(self._model)
        self.optimizers: list[torch.optim.Optimizer] = _flat(self._optimizer)
        self.sharding = sharding(one for model in self.models for one in model.parameters())
        if compressor is not None:
            if self.sharding:
                raise UsageError(
                    "compressor: it takes the largest entries of whole gradients, and a rank has shards of DTensors "
                    "(FSDP2): leave it out"
                )
            compressor.named(
                (f"model{place}.{name}", parameter)
                for place, module in _placed(self._model)
                for name, parameter in module.named_parameters()
            )

    @property
    def scaled(self) -> bool:
        """Whether a scaler changes gradients after backward, in a way that their version does not tell."""
        return self._scaler is not None

    @property
    def per_rank(self) -> tuple[str, ...]:
        """Names of tensors of which ranks may have their own: generators, positions, and modules' buffers.

        DDP gives all ranks the first one's buffers when forward begins; BatchNorm then changes them on each.
        """
        modules = [(f"model{place}", one) for place, one in _placed(self._model)]
        modules += [(f"extra.{name}", one) for name, one in self._given.items() if isinstance(one, torch.nn.Module)]
        names = [f"{prefix}.{name}" for prefix, module in modules for name, _ in module.named_buffers()]
        names += [f"extra.{name}" for name, one in self._given.items() if not is_stateful(one)]
        return ("random", "loader", "compressor", *(glob.escape(name) for name in names))

    def state(self, step: int, ranks: int = 1, *, standing: bool = False) -> dict[str, Any]:
        """Everything that the next step depends on. Tensors are the script's own, not copies.

        Args:
            standing: leave out what `with_standing` puts in.
        """
        found: dict[str, Any] = {"format": _FORMAT, "step": step}
        found["model"] = None if standing else _states(self._model)
        if self._optimizer is not None:
            found["optimizer"] = _states(self._optimizer, _numbers if standing else _state_of_optimizer)
        if self._scheduler is not None:
            found["scheduler"] = _states(self._scheduler)
        if self._scaler is not None:
            found["scaler"] = self._scaler.state_dict()
        if self.loader is not None:
            found["loader"] = self.loader.state_dict()
        if self._compressor is not None:
            found["compressor"] = self._compressor.state_dict()
        if self._extra:
            left_out = self._standing_extra if standing else ()
            found["extra"] = {name: None if name in left_out else get() for name, (get, _) in self._extra.items()}
        found["random"] = rng.gathered()
        found["environment"] = self.environment(ranks)
        return found

    @property
    def extra_bytes(self) -> int:
        """Bytes of the tensors of ``extra``, as far as they can be asked for now."""
        found = 0
        for get, _ in self._extra.values():
            with contextlib.suppress(Exception):  # what it raises is for the save that needs it
                found += _tensor_bytes(get())
        return found

    @property
    def may_have_schedule(self) -> bool:
        """Whether something that was given may be the optimizers' schedule."""
        others = [one for one in self._given.values() if is_stateful(one) and not isinstance(one, torch.nn.Module)]
        return self._scheduler is not None or bool(others)

    def environment(self, ranks: int) -> dict[str, str]:
        """What of the script decides its bits, on so many ranks."""
        return described(self.optimizers, ranks, self.sharding)

    def watched(self) -> tuple[list[WatchedModule], list[WatchedOptimizer]] | None:
        """What `with_standing` puts into a state, watched; None: something of it cannot be."""
        self._standing_extra = [
            name for name, one in self._given.items() if isinstance(one, torch.nn.Module) and is_plain_module(one)
        ]
        modules = [*self.models, *(self._given[name] for name in self._standing_extra)]
        if not all(map(is_plain_module, self.models)) or not all(map(is_plain_optimizer, self.optimizers)):
            return None
        return list(map(WatchedModule, modules)), list(map(WatchedOptimizer, self.optimizers))

    def with_standing(self, tree: Any, whole: Any) -> None:
        """Complete the tree of a state that was taken with ``standing`` from that of a whole one.

        That is modules, and all of an optimizer but the numbers of its groups.
        """
        tree["model"] = whole["model"]
        for name in self._standing_extra:
            tree["extra"][name] = whole["extra"][name]
        if self._optimizer is None:
            return
        mine_and_whole = (_each_tree(one["optimizer"], self._optimizer) for one in (tree, whole))
        for mine, its in zip(*mine_and_whole, strict=True):
            mine["state"] = its["state"]
            for group, complete in zip(mine["param_groups"], its["param_groups"], strict=True):
                group["params"] = complete["params"]

    def rooms(self, outline: Any) -> dict[str, torch.Tensor]:
        """DTensors that a checkpoint's tensors are to be read into, by their names in it; see `sharded.Rooms`.

        Args:
            outline: its state, with a `TensorEntry` in place of each tensor.

        Raises:
            FormatError: it is no state of a `Checkpointer`.
        """
        _check_format(outline)
        rooms = Rooms()
        rooms.of(outline.get("model"), _states(self._model))
        if self._optimizer is not None:
            with contextlib.suppress(KeyError, TypeError, ValueError):  # others than these: `restore` says so
                for one, optimizer in zip(
                    _each_tree(outline["optimizer"], self._optimizer), self.optimizers, strict=True
                ):
                    rooms.of_optimizer(one, optimizer)
        rooms.of(outline.get("extra"), {name: get() for name, (get, _) in self._extra.items()})
        return rooms.found

    def restore(self, state: Any) -> int:
        """Give every object its part of a state back -> the step it is the state of.

        Generators come last: what the others draw while they load is not to count.

        Raises:
            FormatError: it is no state of a `Checkpointer`, or lacks a part (the message names it).
            and what the objects' own ``load_state_dict`` raise.
        """
        _check_format(state)
        parts = [("model", self._model is not None), ("optimizer", self._optimizer is not None)]
        parts += [("scheduler", self._scheduler is not None), ("scaler", self._scaler is not None)]
        parts += [("compressor", self._compressor is not None)]
        parts += [("loader", self.loader is not None), ("extra", bool(self._extra))]
        for name, wanted in parts:
            if wanted and name not in state:
                raise FormatError(
                    f"the checkpoint holds no {name}: it was saved by a Checkpointer that was given none. Without "
                    f"{name}= the others are restored"
                )
        missing = [name for name in self._extra if name not in state["extra"]]
        if missing:
            raise FormatError(
                f"the checkpoint holds no extra[{missing[0]!r}]: it was saved by a Checkpointer that was not given it"
            )
        left = [name for name, wanted in parts if not wanted and state.get(name)]
        left += [f"extra[{name!r}]" for name in state.get("extra") or () if self._extra and name not in self._extra]
        if left:
            warn(
                f"the checkpoint also holds {', '.join(left)}, which this Checkpointer was not given and does not "
                "restore: the run will not be the one that was saved",
                DeterminismWarning,
            )
        _load("model", self._model, state["model"], lambda model, one: model.load_state_dict(one))
        if self._optimizer is not None:
            _load("optimizer", self._optimizer, state["optimizer"], _load_optimizer)
        if self._scheduler is not None:
            _load("scheduler", self._scheduler, state["scheduler"], lambda each, one: each.load_state_dict(one))
        if self._scaler is not None and state["scaler"]:
            self._scaler.load_state_dict(state["scaler"])
        if self.loader is not None:
            self.loader.load_state_dict(state["loader"])
        if self._compressor is not None:
            self._compressor.load_state_dict(state["compressor"])
        for name, (_, put) in self._extra.items():
            put(state["extra"][name])
        rng.restored(state["random"])
        step: int = state["step"]
        return step


def inner_model(name: str, model: Any) -> torch.nn.Module:
    """The module itself, of what compiles, distributes or averages nothing but passes calls on.

    Raises:
        UsageError: it is no module.
    """
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod  # torch.compile
        elif isinstance(model, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
            model = model.module
        elif isinstance(model, torch.nn.Module):
            return model
        else:
            raise UsageError(f"{name}: {type(model).__name__}; a torch.nn.Module is wanted")


def inner_optimizer(name: str, optimizer: Any) -> torch.optim.Optimizer:
    """Torch's optimizer, of a wrapper what it wraps. Raises `UsageError`."""
    seen: set[int] = set()
    # Accelerate's wrapper is an Optimizer as well, whose __init__ was never called: it has no hooks, and no state.
    while not (isinstance(optimizer, torch.optim.Optimizer) and hasattr(optimizer, "_optimizer_step_post_hooks")):
        seen.add(id(optimizer))
        inner = getattr(optimizer, "optimizer", None)
        if inner is None or id(inner) in seen:
            raise UsageError(f"{name}: {type(optimizer).__name__}; a torch.optim.Optimizer is wanted")
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


def _placed(given: Any) -> list[tuple[str, Any]]:
    """What was given, each with where it stands in the state."""
    if isinstance(given, dict):
        return [(f".{key}", one) for key, one in given.items()]
    return [(f".{number}", one) for number, one in enumerate(given)] if isinstance(given, list) else [("", given)]


def _flat(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given.values()) if isinstance(given, dict) else given if isinstance(given, list) else [given]


def _state_of(given: Any) -> Any:
    return given.state_dict()


def _state_of_optimizer(optimizer: torch.optim.Optimizer) -> Any:
    try:
        return optimizer.state_dict()
    except KeyError as error:
        there = {id(one) for group in optimizer.param_groups for one in group["params"]}
        left = [one for one in optimizer.state if isinstance(one, torch.Tensor) and id(one) not in there]
        if not left:
            raise
        raise UsageError(
            f"{type(optimizer).__name__} keeps the state of parameters ({len(left)}) that are in none of its "
            "param_groups, so that state_dict() is a KeyError: take that out as well (del optimizer.state[it])"
        ) from error


def _states(given: Any, state_of: Callable[[Any], Any] = _state_of) -> Any:
    if isinstance(given, dict):
        return {key: state_of(one) for key, one in given.items()}
    return [state_of(one) for one in given] if isinstance(given, list) else state_of(given)


def _check_format(state: Any) -> None:
    """Raise `FormatError` for what is no state of a `Checkpointer`."""
    if not isinstance(state, dict) or state.get("format") != _FORMAT or "random" not in state:
        raise FormatError(
            "the checkpoint was not made by a Checkpointer: load it with Store.load, and give its parts to the "
            "objects that they belong to"
        )


def _numbers(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's state without what it keeps for parameters, and without their numbers."""
    groups = [{name: one for name, one in group.items() if name != "params"} for group in optimizer.param_groups]
    return {"state": None, "param_groups": [{**group, "params": None} for group in groups]}


def _each_tree(tree: Any, given: Any) -> list[Any]:
    """The trees of what was given."""
    if isinstance(given, dict):
        return [tree[key] for key in given]
    return list(tree) if isinstance(given, list) else [tree]


def _load(name: str, given: Any, state: Any, load: Callable[[Any, Any], Any]) -> None:
    if isinstance(given, dict):
        if not isinstance(state, dict) or set(state) != set(given):
            raise FormatError(f"{name}: {sorted(given)} are to be restored, the checkpoint has {_said(state)}")
        for key, one in given.items():
            load(one, state[key])
    elif isinstance(given, list):
        if not isinstance(state, Sequence) or len(state) != len(given):
            raise FormatError(f"{name}: {len(given)} are to be restored, the checkpoint has {_said(state)}")
        for one, its in zip(given, state, strict=True):
            load(one, its)
    else:
        load(given, state)


def _said(state: Any) -> str:
    """What a checkpoint has where several were looked for."""
    if isinstance(state, dict):
        return str(sorted(state))
    return f"{len(state)} of them, by number" if isinstance(state, Sequence) else type(state).__name__


def _load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """As `load_state_dict`, but with the dtypes that were saved: torch makes a bf16 parameter's fp32 moments bf16."""
    optimizer.load_state_dict(state)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        for key, saved in state["state"].get(number, {}).items():
            now = optimizer.state[parameter].get(key)
            if isinstance(saved, torch.Tensor) and isinstance(now, torch.Tensor) and saved.dtype != now.dtype:
                optimizer.state[parameter][key] = saved.to(now.device)


def _accessors(name: str, value: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """What reads an object's state, and what sets it."""
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
        f"{name}: {type(value).__name__} has no state_dict and load_state_dict, and is no random generator"
    )


def _tensor_bytes(tree: Any) -> int:
    if isinstance(tree, torch.Tensor):
        return tree.numel() * tree.element_size()
    if isinstance(tree, np.ndarray):
        return tree.nbytes
    inner = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, list | tuple) else ()
    return sum(map(_tensor_bytes, inner))
