"""Copies the gradients and numbers that the optimizers consume in a step to the agent.

A gradient is copied during backward, when it was accumulated. What counts is what the optimizer consumes. So before its
step each gradient is checked, and copied (again) if it is another tensor, or if another micro-batch or clipping has
changed it. If that happens in several steps, gradients are not copied during backward any more; nor are they with a
``GradScaler``, because torch does not count unscaling as a change.

With a compressor (`TopKHook`) only the entries of a gradient that are left are copied, before the optimizer's step.

Gradients on a CUDA device are copied before the optimizer's step, too. The device does that: the copies are queued, and
the step that is queued afterwards waits for them on the device. Only indices and values of a compressed gradient leave
the device. A thread sorts them into the area when they are there, and tells the agent of the step after that.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch

from ckptstore.agent.client.buffer_client import BorrowedBuffer
from ckptstore.agent.client.replica_client import ReplicaClient
from ckptstore.agent.protocol.replica_recipe import Recipe, write_entries
from ckptstore.errors import UnsupportedStateError
from ckptstore.formats.optim import SparseGradient
from ckptstore.formats.sources import TensorSource
from ckptstore.frameworks.torch_optimizers import settings_of
from ckptstore.frameworks.torch_shards import local_gradient
from ckptstore.frameworks.torch_tensors import TorchSource, counted_changes, from_buffer, on_host
from ckptstore.host.batched_copies import BatchedCopies
from ckptstore.host.buffers import Bytes
from ckptstore.training.optimizers.optimizer_tracker import Compressor
from ckptstore.training.replica.replicable_state import Replicable
from ckptstore.write.capture.snapshot import copy_queued
from ckptstore.write.steps.updates import LateGradient

__all__ = ["ConsumedGradients", "ConsumedStep", "is_all_of"]

_LOG: Final = logging.getLogger("ckptstore.training")
_WORTH: Final = 64 << 10
"""Gradients of at least this many bytes are copied alone; smaller ones together, before the optimizer's step."""
_MOST_USELESS: Final = 3
"""Consecutive steps whose gradients were copied during backward for nothing, before that stops."""


@dataclass(slots=True)
class ConsumedStep:
    """The step that training takes now.

    Attributes:
        area: the memory of its gradients; None: none yet.
        calls: the optimizers' steps, as in `agent.client.replica_client.ReplicaStep`. How many entries of gradients
            come from devices is in it after `arrive`.
        why: why the agent cannot repeat the step; None: it can.
        early: for each row whose gradient was copied during backward, its address and version.
        arriving: functions that wait for devices that still copy to the area.
        late: functions that wait for entries, and write them into the area. Devices copy these to other memory.
    """

    area: BorrowedBuffer | None = None
    calls: list[Any] = field(default_factory=list)
    why: str | None = None
    early: dict[int, tuple[int, int]] = field(default_factory=dict)
    arriving: list[Callable[[], None]] = field(default_factory=list)
    late: list[Callable[[], None]] = field(default_factory=list)

    def arrive(self) -> None:
        """Wait until everything that was consumed is in the area. Raises the error of a copy."""
        for one in (*self.arriving, *self.late):
            one()

    def settle(self) -> None:
        """Wait until no device copies to the area any more, which is given up. Raises nothing."""
        # Prevents: an agent that uses the area for something else while a device still copies to it.
        for one in self.arriving:
            with contextlib.suppress(Exception):  # a failed device copies no more
                one()

    def left(self, replicated: ReplicaClient) -> None:
        """It is not sent: return its area, once no device copies to it any more. Waits for nothing."""
        if self.area is not None:
            replicated.leave(self.area, self.settle if self.arriving else None)


class ConsumedGradients:
    """Hooks of optimizers and parameters, from `attach` to `detach`. The script's thread runs them."""

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        pool: ThreadPoolExecutor,
        compressor: Compressor | None = None,
        *,
        register: Callable[[Bytes, Any], None],
        early: bool,
        counted: bool = False,
    ) -> None:
        """
        Args:
            pool: the threads that copy.
            register: registers an area with a device, in the background.
            compressor: knows which entries of the gradients are left; None: gradients are dense.
            early: copy gradients during backward. Ignored with a compressor, which changes them after that.
            counted: count the entries of every compressed gradient in every step. For ranks: torch does not count
                ``all_reduce`` of a gradient as a change.
        """
        self._optimizers = list(optimizers)
        self._pool = pool
        self._compressor = compressor
        self._register = register
        self._instead: Mapping[tuple[int, int], Mapping[str, Any]] = {}
        self._hooks: list[Any] = []
        self._early_hooks: list[Any] = []
        self._replicated: ReplicaClient | None = None
        self._rows: list[list[tuple[int, torch.Tensor, bool]]] = []
        self._devices: list[torch.device] = []  # of the parameters, by row
        self._rooms: dict[int, dict[int, torch.Tensor]] = {}
        self._step = ConsumedStep()
        self._stashed: dict[int, Any] = {}
        self._process = os.getpid()
        self._useless_steps = 0 if early and compressor is None else _MOST_USELESS
        # The entries of these parameters' gradients are counted before they are taken for all of it.
        self._count_all = counted
        self._counted: set[torch.Tensor] = set()
        self._dense: set[torch.Tensor] = set()  # parameters on devices whose gradients had other entries, too

    def attach(
        self,
        replicated: ReplicaClient,
        form: Replicable,
        instead: Mapping[tuple[int, int], Mapping[str, Any]] = MappingProxyType({}),
    ) -> None:
        """Copy what is consumed from now on to this replica.

        Args:
            instead: settings that replace those of a group at the agent, by the positions of its optimizer and group.
        """
        self.detach()
        self._replicated = replicated
        self._instead = instead
        self._rows = [[] for _ in self._optimizers]
        self._devices = [parameter.device for parameter in form.parameters]
        if self._count_all:
            self._counted.update(form.parameters)
        for number, (row, parameter) in enumerate(zip(form.recipe.rows, form.parameters, strict=True)):
            self._rows[row.optimizer].append((number, parameter, row.made))
        for place, optimizer in enumerate(self._optimizers):
            self._hooks.append(optimizer.register_step_pre_hook(self._guarded(partial(self._before, place))))
            self._hooks.append(optimizer.register_step_post_hook(self._guarded(partial(self._after, place))))
        if self._useless_steps >= _MOST_USELESS:
            return
        for rows in self._rows:
            for number, parameter, made in rows:
                worth = parameter.nbytes >= _WORTH and on_host(parameter)
                if made and parameter.requires_grad and parameter.is_leaf and worth:
                    hook = self._guarded(partial(self._accumulated, number))
                    register: Any = parameter.register_post_accumulate_grad_hook  # torch has no types for it
                    self._early_hooks.append(register(hook))

    def detach(self) -> None:
        """Remove the hooks from parameters and optimizers."""
        for hook in (*self._hooks, *self._early_hooks):
            hook.remove()
        self._hooks.clear()
        self._early_hooks.clear()
        self.dropped()
        self._replicated = None
        self._rooms.clear()

    def taken(self) -> ConsumedStep:
        """Return what was consumed since the last call. The caller owns its area."""
        step, self._step = self._step, ConsumedStep()
        self._stashed.clear()
        return step

    def dropped(self) -> None:
        """A whole state is sent instead: release what was consumed."""
        step = self.taken()
        if self._replicated is not None:
            step.left(self._replicated)

    def _guarded(self, call: Callable[..., None]) -> Callable[..., None]:
        def hook(*arguments: Any) -> None:
            if os.getpid() != self._process:
                return  # a fork that trains: the memory belongs to the agent and the parent
            try:
                call(*arguments)
            except Exception as error:  # noqa: BLE001  # a training step matters more than a replica
                self._step.why = self._step.why or f"{type(error).__name__}: {error}"
                _LOG.debug("a step's gradients could not be taken", exc_info=True)

        return hook

    # -- during backward

    def _accumulated(self, row: int, parameter: torch.Tensor) -> None:
        replicated, gradient = self._replicated, parameter.grad
        if replicated is None or gradient is None or self._step.why is not None:
            return
        if self._step.area is None:
            self._step.area = replicated.area(wait=False)
        area = self._step.area
        if area is None:
            return  # the agent is behind: if training waits for it, then before the optimizer's step
        target = self._room(area)[row]
        _check_form(gradient, target, parameter.device)
        with torch.no_grad():
            target.copy_(gradient)
        self._step.early[row] = (gradient.data_ptr(), counted_changes(gradient))

    def _room(self, area: BorrowedBuffer) -> dict[int, torch.Tensor]:
        """The target tensor of each gradient."""
        room = self._rooms.get(area.number)
        if room is None:
            recipe = self._replicated_recipe()
            room = self._rooms[area.number] = {}
            for row, start in recipe.gradients.items():
                one = recipe.layout.tensors[recipe.rows[row].weight]
                room[row] = from_buffer(one.dtype, one.shape, area.memory[start : start + one.nbytes])
        return room

    # -- around the optimizer's step

    def _before(
        self, place: int, optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], named: Mapping[str, Any]
    ) -> None:  # the optimizer is its first argument, too
        replicated, step = self._replicated, self._step
        if replicated is None or step.why is not None or replicated.lost is not None:
            return
        if any(one is not None for one in (*arguments[1:], named.get("closure"))):
            step.why = "step(closure) makes gradients within the step"
        elif any(call[0] == place for call in step.calls):
            step.why = "an optimizer has stepped twice between two calls of Checkpointer.step"
        if step.why is not None:
            return
        if step.area is None:
            step.area = replicated.area(wait=True)
        if step.area is None:
            step.why = replicated.lost or "the agent has no memory for it"
            return
        try:
            settings = [
                settings_of(optimizer, group) | dict(self._instead.get((place, number), {}))
                for number, group in enumerate(optimizer.param_groups)
            ]
        except UnsupportedStateError as error:
            step.why = str(error)
            return
        scaled = [getattr(optimizer, name, None) for name in ("grad_scale", "found_inf")]
        if any(isinstance(one, torch.Tensor) and not on_host(one) for one in scaled):
            step.why = "a scaler passes its scale to a fused optimizer on a device"
            return
        moved, sparse = self._copied(self._rows[place], step.area)
        scaling = [_value(one) for one in scaled]
        self._stashed[place] = [place, settings, moved, scaling, sparse]

    def _copied(
        self, rows: Sequence[tuple[int, torch.Tensor, bool]], area: BorrowedBuffer
    ) -> tuple[list[int] | None, list[list[int]]]:
        """Copy what was not copied during backward.

        Returns:
            the rows that have a gradient (None: all have one); and [row, number of entries] of each gradient of which
            only the entries were copied. Those of devices are added to it when they arrive.
        """
        room, early = self._room(area), self._step.early
        sparse = self._copied_entries(rows, area)
        late = self._queued_entries(rows, area)
        copies: list[tuple[int, int, int]] = []
        queued: dict[str, tuple[TensorSource, Bytes]] = {}
        moved: list[int] = []
        kept = stale = 0
        for row, parameter, made in rows:
            gradient = local_gradient(parameter)
            if gradient is None:
                continue
            moved.append(row)
            if not made or row in sparse or row in late:
                continue
            if row in early:
                if early[row] == (gradient.data_ptr(), counted_changes(gradient)):
                    kept += 1
                    continue
                stale += 1
            target = room[row]
            _check_form(gradient, target, self._devices[row])
            if not on_host(gradient):
                start = self._replicated_recipe().gradients[row]
                queued[str(row)] = TorchSource(gradient), area.memory[start : start + gradient.nbytes]
            elif gradient.is_contiguous() and not gradient.is_neg():
                copies.append((target.data_ptr(), gradient.data_ptr(), gradient.nbytes))
            else:
                target.copy_(gradient.detach())
        if copies:
            BatchedCopies(copies).run(self._pool)
        if queued:
            arrive = copy_queued(queued, area.memory, _in_turn, partial(self._register, area.memory))
            self._step.arriving += [] if arrive is None else [arrive]
        self._judge(kept, stale)
        counts = [[row, count] for row, count in sparse.items()]
        if late:
            self._step.late.append(partial(self._put_entries, late, area.memory, self._replicated_recipe(), counts))
        return None if len(moved) == len(rows) else moved, counts

    def _copied_entries(self, rows: Sequence[tuple[int, torch.Tensor, bool]], area: BorrowedBuffer) -> dict[int, int]:
        """Copy the entries of compressed gradients -> their number, by row."""
        found: dict[int, int] = {}
        if self._compressor is None:
            return found
        recipe = self._replicated_recipe()
        here = [(row, parameter) for row, parameter, made in rows if made and on_host(parameter)]
        entries = self._compressor.consumed([parameter for _, parameter in here])
        for row, parameter in here:
            sparse = entries.get(parameter)
            if sparse is None:
                continue
            if parameter in self._counted and not is_all_of(sparse, local_gradient(parameter)):
                continue
            form = recipe.layout.tensors[recipe.rows[row].weight]
            if (form.dtype, form.nbytes) != ("F32", 4 * sparse.size):
                continue  # the parameter has another form now: the copy of the dense gradient says so
            start = recipe.gradients[row]
            if write_entries(sparse, area.memory[start : start + form.nbytes]):
                found[row] = len(sparse.indices)
        return found

    def _queued_entries(
        self, rows: Sequence[tuple[int, torch.Tensor, bool]], area: BorrowedBuffer
    ) -> dict[int, tuple[torch.Tensor, LateGradient]]:
        """Queue the copies of the entries of compressed gradients on devices -> parameter and gradient, by row."""
        found: dict[int, tuple[torch.Tensor, LateGradient]] = {}
        away = [
            (row, parameter)
            for row, parameter, made in rows
            if made and not on_host(parameter) and parameter not in self._dense
        ]
        if self._compressor is None or not away:
            return found
        entries = self._compressor.consumed_later([parameter for _, parameter in away], checked=self._counted)
        room = self._room(area)
        for row, parameter in away:
            late = entries.get(parameter)
            gradient = local_gradient(parameter)
            if isinstance(late, LateGradient) and gradient is not None:
                _check_form(gradient, room[row], self._devices[row])
                found[row] = parameter, late
        return found

    def _put_entries(
        self,
        late: Mapping[int, tuple[torch.Tensor, LateGradient]],
        memory: Bytes,
        recipe: Recipe,
        counts: list[list[int]],
    ) -> None:
        """Wait for the entries from devices, write them into an area, and add their numbers to `counts`.

        A thread calls it, before the agent gets the step.
        """
        for row, (parameter, gradient) in late.items():
            sparse = gradient.read()
            if sparse is None:
                # The device found entries elsewhere. They are gone by now: the digests tell that the agent's tensors
                # differ, and these are sent.
                _LOG.debug("a gradient on %s was not only its entries: it is sent dense from now on", parameter.device)
                self._dense.add(parameter)
                sparse = SparseGradient(np.empty(0, np.int64), np.empty(0, np.float32), gradient.size)
            start = recipe.gradients[row]
            place = memory[start : start + 4 * gradient.size]
            if write_entries(sparse, place):
                counts.append([row, len(sparse.indices)])
            else:  # more than half of the numbers are entries
                place[:] = 0
                place.view(np.float32)[sparse.indices] = sparse.values

    def _replicated_recipe(self) -> Recipe:
        assert self._replicated is not None  # an area is there
        return self._replicated.recipe

    def _judge(self, kept: int, stale: int) -> None:
        """Stop copying during backward if it does not pay."""
        if kept or stale:
            self._useless_steps = self._useless_steps + 1 if stale > kept else 0
        if self._useless_steps >= _MOST_USELESS:
            self.late()

    def differed(self, rows: Collection[int]) -> None:
        """The agent computed another state of these rows: their gradients are checked from now on, and copied late."""
        # Prevents: whole tensors that are sent in every step, because a script changes gradients past torch's count
        # (``.grad.data``), where the dense gradient would do.
        for own in self._rows:
            self._counted.update(parameter for row, parameter, _ in own if row in rows)
        self.late()

    def late(self) -> None:
        """Stop copying during backward."""
        self._useless_steps = _MOST_USELESS
        if self._early_hooks:
            _LOG.debug("gradients are changed after backward (clipped, accumulated): they are copied before the step")
        for hook in self._early_hooks:
            hook.remove()
        self._early_hooks.clear()
        self._step.early.clear()

    def _after(self, place: int, *_: Any) -> None:
        call = self._stashed.pop(place, None)
        if call is not None:
            self._step.calls.append(call)
        elif self._replicated is not None and self._step.why is None:
            self._step.why = self._replicated.lost or "a step was taken that was not seen to begin"


def _check_form(gradient: torch.Tensor, target: torch.Tensor, device: torch.device) -> None:
    """Raise `UnsupportedStateError` if a gradient does not fit its target, or is not where its parameter was."""
    # Prevents: bytes written beyond the target after a parameter got more elements, or read from a device's address.
    if (gradient.dtype, gradient.shape, gradient.device) != (target.dtype, target.shape, device):
        raise UnsupportedStateError(
            f"a gradient is {gradient.dtype} {tuple(gradient.shape)} on {gradient.device}, and its parameter was "
            f"{target.dtype} {tuple(target.shape)} on {device} when the step before was saved"
        )
    if gradient.layout is not torch.strided:
        raise UnsupportedStateError(f"a gradient is {gradient.dtype}, {gradient.layout}")


def _in_turn(jobs: Sequence[Callable[[], None]]) -> None:
    for job in jobs:
        job()


def is_all_of(sparse: SparseGradient, gradient: torch.Tensor | None) -> bool:
    """Whether an fp32 gradient is +0.0 everywhere but in its entries."""
    if gradient is None:
        return False
    dense = gradient.detach().reshape(-1).view(torch.int32).numpy()  # numpy counts five times as fast as torch
    return bool(np.count_nonzero(dense) == np.count_nonzero(sparse.values.view(np.int32)))


def _value(number: Any) -> float | None:
    return None if number is None else float(number)
