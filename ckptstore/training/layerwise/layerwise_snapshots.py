"""Snapshots layer by layer while training continues, for torch's optimizers (LightCheck, section III-B).

::

    with store.writer(max_in_flight=2) as writer:
        with LayerwiseSnapshots(writer, model, optimizer, state=state) as snapshots:
            for step in range(1, steps + 1):
                snapshots.begin(step)          # optional: layers are copied as soon as they are updated
                loss(model, batch).backward()
                optimizer.step()               # waits, layer by layer, for the copies of the last step
                optimizer.zero_grad()
                scheduler.step()
                snapshots.save(step)           # copies what no optimizer owns here, at once

A checkpoint is bit for bit what ``writer.save(state(), step)`` would have stored instead of `LayerwiseSnapshots.save`.

**What overlaps** depends on the optimizers, because only their step hooks are used:

- One optimizer for all (fused, foreach or not): all layers change in one call. Copies overlap the next forward and
  backward, and the gate of every layer is before the next ``optimizer.step()``.
- Several optimizers, one for each layer or parameter: a layer's gate is before the step of its own optimizers.
  After `begin` its copy starts right after that step, while the other layers are still being updated.
- The optimizer in backward (an optimizer for each parameter, whose ``step`` is called by
  ``register_post_accumulate_grad_hook``) works the same: updates, copies and gates happen within backward.

`LayerwiseSnapshots.case` says which case applies.

**No checkpoint mixes steps.** A layer is what one of these optimizers owns: its parameters and its slots for them.
Everything else (buffers such as BatchNorm's, which change in the next forward, RNG states, the scheduler, frozen
parameters, averaged weights, copies) is copied while `save` runs. Between a layer's copy and its gate only its
optimizers may change it. A script that changes weights in another way (a clamp, a load) has to call
`LayerwiseSnapshots.wait` first; after `begin` it has to do so before the optimizer's step or not at all. In-place
changes that torch counts are noticed and fail that save. Torch counts neither changes of ``.data`` nor those of fused
optimizers.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Literal, Self

import torch

from ckptstore.errors import UsageError
from ckptstore.formats.states.state import FlatState
from ckptstore.frameworks import bridge
from ckptstore.frameworks.torch_tensors import TorchSource
from ckptstore.host.caller_warnings import warn, warns_last
from ckptstore.training.layerwise.gate_times import GateLog, LayerwiseReport
from ckptstore.training.layerwise.layer_saves import LayerDivision, StartedSave
from ckptstore.training.layerwise.layer_sources import marks_of, staged
from ckptstore.training.layerwise.layers import PACKED, layers_of, members_of
from ckptstore.write.capture.layerwise_save import LayeredSave
from ckptstore.write.saves.ledger import PendingSave
from ckptstore.write.steps.updates import Updates
from ckptstore.write.writer import Writer

__all__ = ["LayerwiseSnapshots", "Mode"]

Mode = Literal["host", "device", "direct"]

_MODES: Final = ("host", "device", "direct")


class LayerwiseSnapshots:
    """Saves whose snapshots optimizer hooks take layer by layer. Leaving the ``with`` removes the hooks.

    Attributes:
        mode: where layers are copied first.
        layers: the layers, in the order of the model.
    """

    def __init__(
        self,
        writer: Writer,
        model: torch.nn.Module | Sequence[torch.nn.Module],
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        state: Callable[[], Any] | None = None,
        *,
        mode: Mode = "host",
        packed: int = PACKED,
    ) -> None:
        """Put hooks on the optimizers.

        Args:
            writer: its `max_in_flight` limits the snapshots in host memory. With 1, each save waits until the last one
                is durable.
            model: names the layers.
            optimizers: all optimizers whose parameters should be copied layer by layer.
            state: returns the whole state, as `Writer.save` takes it, with the model's and the optimizers' own tensors,
                not copies. None: ``{"model": ..., "optimizer": ...}`` with their ``state_dict()``, or lists of them.
            mode: ``host`` copies a layer to host memory. ``device`` copies it on its device first, in the stream that
                updated it, and from there to the host: the gate costs next to nothing, and the device's memory holds a
                copy of the layers that are not on the host yet. On the CPU training's own thread makes that copy.
                ``direct`` copies it straight into the mapped segments of a store on persistent memory (``pmem://``).
            packed: neighboring layers are packed into one up to this many bytes of parameters.

        Raises:
            UsageError: no torch optimizers; optimizers without parameters; an unknown mode.
        """
        if mode not in _MODES:
            raise UsageError(f"mode: {mode!r}; it may be {', '.join(map(repr, _MODES))}")
        self._optimizers = _checked(optimizers)
        self.mode: Mode = mode
        self._writer = writer
        self._models = [model] if isinstance(model, torch.nn.Module) else list(model)
        self._state = self._default_state if state is None else state
        self.layers = tuple(layers_of(self._models, self._optimizers, packed))
        self._gated = [
            [layer for layer in self.layers if number in layer.optimizers] for number in range(len(self._optimizers))
        ]
        self._lock = threading.RLock()  # with the optimizer in backward, hooks run in autograd's threads
        self._log = GateLog(layer.name for layer in self.layers)
        self._form: LayerDivision | None = None
        self._early: StartedSave | None = None
        self._under_way: list[StartedSave] = []
        self._warned = False
        self._hooks: list[torch.utils.hooks.RemovableHandle] | None = []
        for number, optimizer in enumerate(self._optimizers):
            self._hooks += (
                optimizer.register_step_pre_hook(self._hook(self._before, number)),
                optimizer.register_step_post_hook(self._hook(self._after, number)),
                optimizer.register_load_state_dict_pre_hook(lambda *_: self._loading()),
            )

    @staticmethod
    def _hook(call: Callable[[int], None], number: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            call(number)

        return hook

    @property
    def case(self) -> str:
        """Which part of training the copies overlap, as a sentence."""
        if len(self._optimizers) == 1:
            how = next((name for name in ("fused", "foreach") if self._optimizers[0].defaults.get(name)), "")
            name = f"{how} {type(self._optimizers[0]).__name__}".strip()
            return (
                f"one optimizer ({name}) updates all {len(self.layers)} layers in one call: their gates are before "
                "its step, and copies overlap forward and backward"
            )
        alone = [number for number, layers in enumerate(self._gated) if len(layers) == 1]
        single = sum(layer.optimizers <= set(alone) for layer in self.layers)
        return (
            f"{len(self._optimizers)} optimizers update {len(self.layers)} layers ({single} of them have one of their "
            "own): each layer's gate is before the step of its own optimizers; after begin() copies overlap the "
            "rest of the update as well"
        )

    def begin(self, step: int) -> None:
        """Announce a `save` before its step is taken: each layer is copied as soon as it is updated.

        Without it `save` starts the copies of all layers. It helps if layers have their own optimizers (see `case`).
        The first time optimizers have no state yet, and `save` starts all copies again.

        Raises:
            UsageError: another step is begun already; this was closed; `state` holds none of the optimizers' tensors.
            as `Writer.save_async`.
        """
        with self._timed():
            self._check()
            if self._early is not None:
                raise UsageError(f"step {self._early.save.step} was begun: save it, or abandon it, before step {step}")
            form = self._form or self._formed()[1]
            missing = {layer.name: set(layer.optimizers) for layer in self.layers if form.members[layer.name]}
            self._early = StartedSave(self._begun(form.flat, step, form), form, missing)

    @warns_last
    def save(
        self,
        step: int,
        *,
        metadata: Mapping[str, Any] | None = None,
        tags: str | Sequence[str] = (),
        updates: Updates | None = None,
    ) -> PendingSave:
        """Save the current state in the background. The optimizers' next steps wait for layers that are not copied yet.

        Args:
            step: the number of optimizer steps done; after `begin` the same number as there.
            metadata, tags, updates: as for `Writer.save_async`.

        Raises:
            UsageError: another step was begun; this was closed; `state` holds none of the optimizers' tensors.
            as `Writer.save_async`. `PendingSave.result` raises the errors of copies.
        """
        with self._timed():
            self._check()
            early, self._early = self._early, None
            try:
                if early is not None and early.save.step != step:
                    raise UsageError(f"step {early.save.step} was begun, and step {step} is to be saved")
                flat, form = self._formed()
                if early is not None and (why := _unfit(early, flat, form)):
                    self._restart(early, why)
                    early = None
                begun = early or StartedSave(self._begun(flat, step, form), form, {})
            except BaseException:
                if early is not None:
                    early.abandon()
                raise
            return self._handed(begun, flat, form, metadata=metadata, tags=tags, updates=updates)

    def _begun(self, flat: FlatState, step: int, form: LayerDivision) -> LayeredSave:
        return self._writer.begin(flat, step, form.names(), direct=self.mode == "direct")

    def _handed(self, begun: StartedSave, flat: FlatState, form: LayerDivision, **said: Any) -> PendingSave:
        try:
            begun.save.rest(flat)
            for layer, members in form.members.items():
                early = begun.staged.get(layer)
                if members and (early is None or begun.stale or early.marks != marks_of(members)):
                    self._start(begun, layer, members)
            self._under_way.append(begun)
            pending = begun.save.finish(**said)
        except BaseException:
            begun.abandon()
            raise
        self._form = form
        self._log.saves += 1
        layered = {name for members in form.members.values() for name in members}
        self._log.immediate_bytes += sum(one.nbytes for name, one in flat.tensors.items() if name not in layered)
        return pending

    def wait(self) -> None:
        """Wait until every layer is copied. After that the script may change weights without the optimizers.

        `save` copies again what was copied early, after `begin`.
        """
        with self._lock:
            for begun in self._in_flight():
                for layer, found in begun.staged.items():
                    if not found.private:
                        begun.save.wait(layer)
                    found.gate()
            if self._early is not None:
                self._early.stale = True
            self._tidy()

    def abandon(self) -> None:
        """Discard what was begun. Does nothing without a `begin`."""
        with self._lock:
            early, self._early = self._early, None
            if early is not None:
                early.abandon()

    def report(self) -> LayerwiseReport:
        """What the snapshots have cost so far."""
        with self._lock:
            self._tidy()
            return self._log.report(self.mode)

    def close(self) -> None:
        """Remove the hooks, and wait for the copies. Saves in flight continue. A second call does nothing."""
        with self._lock:
            hooks, self._hooks = self._hooks, None
            for hook in hooks or ():
                hook.remove()
            self.abandon()
            self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- hooks

    def _before(self, number: int) -> None:
        """An optimizer is about to change its layers."""
        with self._lock:
            if not self._under_way and self._early is None:
                return
            for layer in self._gated[number]:
                seconds, asked = 0.0, False
                for begun in self._in_flight():
                    if (found := begun.staged.get(layer.name)) is None:
                        continue
                    asked = True
                    seconds += 0.0 if found.private else begun.save.wait(layer.name)
                    found.gate()
                if asked:
                    self._log.passed(layer.name, seconds)
            self._tidy()

    def _after(self, number: int) -> None:
        """An optimizer has changed its layers. An error in a copy must not stop training."""
        with self._lock:
            early = self._early
            if early is None:
                return
            try:
                for layer in self._gated[number]:
                    members = early.form.members[layer.name]
                    early.missing.get(layer.name, set()).discard(number)
                    if members and not early.missing.get(layer.name):
                        self._start(early, layer.name, members)
            except Exception as error:  # noqa: BLE001  # save() starts again, and raises what persists
                self._early = None
                self._restart(early, f"{type(error).__name__}: {error}")

    def _loading(self) -> None:
        """An optimizer's state is about to be loaded, into the same memory."""
        self.wait()

    # -- copies

    def _start(self, begun: StartedSave, layer: str, members: Mapping[str, TorchSource]) -> None:
        self._log.copied_again += layer in begun.staged
        found = staged(members, self.mode)
        self._log.refused += found.refused
        begun.staged.pop(layer, None)
        begun.save.ready(layer, found.sources, found.end(layer))
        begun.staged[layer] = found  # last: after an earlier Ctrl-C, save() copies it again

    def _in_flight(self) -> list[StartedSave]:
        return [*self._under_way, *([] if self._early is None else [self._early])]

    def _tidy(self) -> None:
        """Forget the saves whose layers are copied."""
        for begun in [one for one in self._under_way if not one.save.copying]:
            self._under_way.remove(begun)
            self._log.copied(begun.save.copies())

    def _restart(self, early: StartedSave, why: str) -> None:
        early.abandon()
        self._log.restarts += 1
        self._log.restarted = why

    # -- states

    def _default_state(self) -> dict[str, Any]:
        models = [model.state_dict() for model in self._models]
        optimizers = [optimizer.state_dict() for optimizer in self._optimizers]
        return {
            "model": models[0] if len(models) == 1 else models,
            "optimizer": optimizers[0] if len(optimizers) == 1 else optimizers,
        }

    def _formed(self) -> tuple[FlatState, LayerDivision]:
        state = self._state()
        flat = state if isinstance(state, FlatState) else bridge.flattened(state)
        members = members_of(self.layers, self._optimizers, flat)
        self._check_members(members)
        return flat, LayerDivision.of(flat, members)

    def _check_members(self, members: Mapping[str, Mapping[str, TorchSource]]) -> None:
        """Prevents: a state of copies, which `save` would silently copy again while training waits."""
        missing = [layer for layer, tensors in members.items() if not tensors]
        if not missing or self._warned:
            return
        why = "state() has to hold the model's and the optimizers' own tensors, not copies (clones, .cpu(), .numpy())"
        if len(missing) == len(members):
            raise UsageError(f"state() holds no tensor that the optimizers update: {why}")
        self._warned = True
        warn(
            f"{len(missing)} of {len(members)} layers, such as {missing[0]!r}, are not in the state, or only as "
            f"copies, which save() itself copies: {why}",
            UserWarning,
        )

    def _check(self) -> None:
        if self._hooks is None:
            raise UsageError("these layer-wise snapshots are closed: their hooks are removed")

    @contextlib.contextmanager
    def _timed(self) -> Any:
        began = time.monotonic()
        with self._lock:
            try:
                yield
            finally:
                self._log.call_seconds += time.monotonic() - began


def _unfit(early: StartedSave, flat: FlatState, form: LayerDivision) -> str:
    """Why early copies cannot be used; empty: they can."""
    if not early.save.is_open:
        return "the writer was closed"
    same = early.form.same(flat, form.members)
    return "" if same else "the state has other tensors than when it was begun"


def _checked(optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    found = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else optimizers
    if isinstance(found, Sequence) and found and all(isinstance(one, torch.optim.Optimizer) for one in found):
        return list(found)
    inner = " (its .optimizer is one)" if isinstance(getattr(found, "optimizer", None), torch.optim.Optimizer) else ""
    raise UsageError(f"optimizers: {type(found).__name__}; expected a torch.optim.Optimizer{inner}, or several")
