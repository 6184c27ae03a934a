"""The state of a training script: gathers from its objects what a checkpoint holds.

::

    {"format": 1, "step": ..., "model": ..., "optimizer": ..., "scheduler": ..., "scaler": ..., "loader": ...,
     "extra": {...}, "random": {...}, "script": {"model": ..., "optimizer": ..., "scheduler": ...},
     "environment": {...}}

Several models, optimizers or schedulers are a list or dict, as the script passed them. Parameters have the names of the
model itself, without what `torch.compile` and DistributedDataParallel add to them.

``script`` records what the states do not: the class of each optimizer and schedule, the names of an optimizer's
parameters by number, the functions of a schedule. A resumed script is compared with it (`resume_checks`).
"""

from __future__ import annotations

import contextlib
import glob
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from ckptstore.errors import UsageError
from ckptstore.training import rng
from ckptstore.training.capture.dtensor_targets import DTensorTargets, sharding
from ckptstore.training.capture.identity_guard import (
    WatchedModule,
    WatchedOptimizer,
    is_plain_module,
    is_plain_optimizer,
)
from ckptstore.training.environment import described
from ckptstore.training.frozen_weights import FrozenWeights
from ckptstore.training.loaders.loader_plans import is_stateful
from ckptstore.training.parameter_names import bare, bare_state, parameter_paths
from ckptstore.training.resume import module_fit, optimizer_fit, schedules
from ckptstore.training.resume.module_fit import ModuleFit
from ckptstore.training.resume.optimizer_fit import OptimizerFit
from ckptstore.training.resume.part_fit import PartFit
from ckptstore.training.resume.resume_checks import FORMAT, Comparison
from ckptstore.training.script_objects import ScriptObjects, flat, placed, states

__all__ = ["ScriptState"]


class ScriptState:
    """The objects of a training script, as one state.

    Attributes:
        models: the modules without wrappers, in the order in which they were passed.
        optimizers: torch's own, without wrappers.
        loader: what the script has to iterate over; see `CountedBatches`.
        sharding: how DTensor parameters are sharded (FSDP2): each rank has its shards. Empty: there are none.
        random: the global generators in the last `state`; None: there was none.
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
        only: str | None = None,
    ) -> None:
        """Check the objects.

        Args:
            model: a module, or a list, tuple or dict of modules.
            optimizer: an optimizer, or several. A wrapper with an ``.optimizer`` stands for that.
            scheduler: an object with ``state_dict`` and ``load_state_dict``, or several.
            loader: a data loader. If it has no ``state_dict``, its batches are counted.
            scaler: a ``GradScaler``.
            extra: other objects by name: with ``state_dict`` and ``load_state_dict``, or generators of torch, numpy or
                Python.
            compressor: a `TopKHook`. It gets the names of the parameters.
            only: ``trainable``: leave frozen weights of ``model`` out (`FrozenWeights`).

        Raises:
            UsageError: an object of the wrong kind; frozen weights in shards cannot be left out.
        """
        self.given = given = ScriptObjects(model, optimizer, scheduler, loader, scaler, extra, compressor)
        self.loader = given.loader
        self.random: dict[str, Any] | None = None
        self._model, self._optimizer, self._scheduler = given.model, given.optimizer, given.scheduler
        self._scaler, self._compressor = given.scaler, given.compressor
        self._extra, self._given = given.extra, given.extra_objects
        self._planned_extra: list[str] = []  # the modules among them, since `watched`
        self.models: list[torch.nn.Module] = flat(given.model)
        self.optimizers: list[torch.optim.Optimizer] = flat(given.optimizer)
        self.sharding = sharding(one for model in self.models for one in model.parameters())
        self._frozen: FrozenWeights | None = None
        if only == "trainable":
            if self.sharding:
                raise UsageError(
                    "only='trainable': frozen weights are compared whole when a run is resumed, and a rank has shards "
                    "of DTensors (FSDP2): leave it out. strategy='delta' stores frozen weights once"
                )
            self._frozen = FrozenWeights(self.models)
        self._compressed: dict[str, torch.Tensor] = {}
        if compressor is not None:
            models = [(f"model{place}", one) for place, one in placed(given.model)]
            names = {id(one): path for path, one in reversed(parameter_paths(models).items())}  # tied: the first
            self._compressed = {names[id(one)]: one for model in self.models for one in model.parameters()}
            compressor.named(self._compressed.items())

    @property
    def leaves_out(self) -> bool:
        """Whether frozen weights are left out of the state."""
        return self._frozen is not None

    @property
    def left_out(self) -> tuple[frozenset[str], ...]:
        """For each model, the names that the last `state` left out."""
        return () if self._frozen is None else self._frozen.left_out

    def note_frozen(self) -> None:
        """Note the frozen weights as the script loaded them. Only the first call does anything.

        Call it before a restore: weights that a checkpoint changes have to be stored again.
        """
        if self._frozen is not None:
            self._frozen.note()

    @property
    def scaled(self) -> bool:
        """Whether a scaler changes gradients after backward; torch does not count these changes."""
        return self._scaler is not None

    @property
    def per_rank(self) -> tuple[str, ...]:
        """Names of tensors that may differ between ranks: generators, positions, modules' buffers, objects in ``extra``
        that say so (``per_rank``), what a compressor keeps of whole gradients.

        DDP broadcasts the first rank's buffers when forward begins. Then BatchNorm changes them on each rank.
        """
        modules = self.given.modules()
        names = [f"{prefix}.{bare(name)}" for prefix, module in modules for name, _ in module.named_buffers()]
        given = self._given.items()
        names += [f"extra.{name}" for name, one in given if not is_stateful(one) or getattr(one, "per_rank", False)]
        compressed: tuple[str, ...] = ("compressor",)
        if self.sharding:  # what is kept of shards belongs to the parameter, whichever rank has it
            plain = [name for name, one in self._compressed.items() if not hasattr(one, "placements")]
            compressed = tuple(f"compressor.{kept}.{name}" for kept in ("residuals", "velocities") for name in plain)
        return ("random", "loader", *(glob.escape(name) for name in (*compressed, *names)))

    def state(self, step: int, ranks: int = 1, *, light: bool = False) -> dict[str, Any]:
        """Everything that the next step depends on, with the script's own tensors, not copies.

        Args:
            light: leave out what `add_planned` puts in.
        """
        found: dict[str, Any] = {"format": FORMAT, "step": step}
        if self._frozen is not None:
            self._frozen.compare()
        found["model"] = None if light else states(self._model, self._state_of_module)
        if self._optimizer is not None:
            found["optimizer"] = states(self._optimizer, _numbers if light else _state_of_optimizer)
        if self._scheduler is not None:
            found["scheduler"] = states(self._scheduler, _state_of)
        if self._scaler is not None:
            found["scaler"] = self._scaler.state_dict()
        if self.loader is not None:
            found["loader"] = self.loader.state_dict()
        if self._compressor is not None:
            found["compressor"] = self._compressor.state_dict()
        if self._extra:
            left_out = self._planned_extra if light else ()
            found["extra"] = {name: None if name in left_out else get() for name, (get, _) in self._extra.items()}
        found["random"] = self.random = rng.global_states()
        if script := self._script(light=light):
            found["script"] = script
        found["environment"] = self.environment(ranks)
        return found

    def _state_of_module(self, module: torch.nn.Module) -> Any:
        state = bare_state(module.state_dict())
        return state if self._frozen is None else self._frozen.without(module, state)

    def _script(self, *, light: bool) -> dict[str, Any]:
        """The record that a resumed script is compared with."""
        found: dict[str, Any] = {"model": None if light else states(self._model, module_fit.described)}
        if self._frozen is not None:
            found["left_out"] = states(self._model, self._frozen.record)
        if self._optimizer is not None:
            paths = {} if light else self.given.paths()
            found["optimizer"] = (
                None if light else states(self._optimizer, partial(optimizer_fit.described, paths=paths))
            )
        if self._scheduler is not None:
            found["scheduler"] = states(self._scheduler, schedules.described)
        extra: dict[str, Any] = {}
        for name, one in self._given.items():
            if isinstance(one, torch.nn.Module):
                extra[name] = None if light and name in self._planned_extra else module_fit.described(one)
            elif isinstance(one, torch.optim.Optimizer):
                extra[name] = optimizer_fit.described(one, self.given.paths())
            elif schedules.is_schedule(one):
                extra[name] = schedules.described(one)
        return {**found, "extra": extra} if extra else found

    @property
    def extra_bytes(self) -> int:
        """Bytes of the tensors in ``extra``, as far as their states can be read now."""
        found = 0
        for get, _ in self._extra.values():
            with contextlib.suppress(Exception):  # the save will raise it again
                found += _tensor_bytes(get())
        return found

    @property
    def may_have_schedule(self) -> bool:
        """Whether one of the script's objects may be the optimizers' schedule."""
        others = [one for one in self._given.values() if is_stateful(one) and not isinstance(one, torch.nn.Module)]
        return self._scheduler is not None or bool(others)

    def environment(self, ranks: int) -> dict[str, str]:
        """What in the script decides its bits, on this number of ranks."""
        given = self._optimizer
        # Prevents: a warning because the script only lists its optimizers in another order.
        optimizers = [given[key] for key in sorted(given)] if isinstance(given, dict) else self.optimizers
        return described(optimizers, ranks, self.sharding)

    def watched(self) -> tuple[list[WatchedModule], list[WatchedOptimizer]] | None:
        """The objects that `add_planned` puts into a state, watched; None: one of them cannot be watched."""
        self._planned_extra = [
            name for name, one in self._given.items() if isinstance(one, torch.nn.Module) and is_plain_module(one)
        ]
        modules = [*self.models, *(self._given[name] for name in self._planned_extra)]
        if not all(map(is_plain_module, self.models)) or not all(map(is_plain_optimizer, self.optimizers)):
            return None
        return list(map(WatchedModule, modules)), list(map(WatchedOptimizer, self.optimizers))

    def add_planned(self, tree: Any, whole: Any) -> None:
        """Complete the tree of a state that was taken with ``light``, from a whole one.

        That adds the modules, and everything in an optimizer but the numbers of its groups.
        """
        tree["model"] = whole["model"]
        tree["script"]["model"] = whole["script"]["model"]
        for name in self._planned_extra:
            tree["extra"][name] = whole["extra"][name]
            tree["script"]["extra"][name] = whole["script"]["extra"][name]
        if self._optimizer is None:
            return
        tree["script"]["optimizer"] = whole["script"]["optimizer"]
        mine_and_whole = (_each_tree(one["optimizer"], self._optimizer) for one in (tree, whole))
        for mine, its in zip(*mine_and_whole, strict=True):
            mine["state"] = its["state"]
            for group, complete in zip(mine["param_groups"], its["param_groups"], strict=True):
                group["params"] = complete["params"]

    def rooms(self, comparison: Comparison) -> dict[str, torch.Tensor]:
        """DTensors that a checkpoint's tensors are read into, by their names in it; see `Rooms`.

        Args:
            comparison: of the checkpoint with the script, with a `TensorEntry` for each tensor.
        """
        rooms = DTensorTargets()
        for fit in comparison.fits:
            if isinstance(fit, ModuleFit):
                rooms.of(fit.fitting, fit.live)
            elif isinstance(fit, OptimizerFit):
                rooms.of_optimizer(fit.state, fit.optimizer, fit.pairs)
            elif isinstance(fit, PartFit) and fit.part == "compressor":
                rooms.of_parameters(fit.state, self._compressed)
            elif isinstance(fit, PartFit) and fit.part == "extra" and fit.get is not None:
                rooms.of(fit.state, fit.get())
        return rooms.found


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


def _numbers(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's state without its slots and its parameters' numbers."""
    groups = [{name: one for name, one in group.items() if name != "params"} for group in optimizer.param_groups]
    return {"state": None, "param_groups": [{**group, "params": None} for group in groups]}


def _each_tree(tree: Any, given: Any) -> list[Any]:
    """The trees of the single objects."""
    if isinstance(given, dict):
        return [tree[key] for key in given]
    return list(tree) if isinstance(given, list) else [tree]


def _tensor_bytes(tree: Any) -> int:
    if isinstance(tree, torch.Tensor):
        return tree.numel() * tree.element_size()
    if isinstance(tree, np.ndarray):
        return tree.nbytes
    inner = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, list | tuple) else ()
    return sum(map(_tensor_bytes, inner))
