"""Accelerate: a `Checkpointer` for what ``accelerator.prepare`` returned.

::

    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    with checkpointer(accelerator, "runs/gpt", model, optimizer, loader, schedule) as saved:
        saved.resume()
        for epoch in range(saved.loader.iteration, epochs):
            for batch in saved.loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch))
                    optimizer.step(); schedule.step(); optimizer.zero_grad()
                saved.step()

An Accelerator has no public list of what it prepared, so the objects are passed here, too. Their kinds tell them apart,
as in `prepare`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Final, Unpack

import torch
from torch.utils.data import DataLoader

from ckptstore.errors import MissingDependencyError, UsageError
from ckptstore.host.caller_warnings import DeterminismWarning, warn
from ckptstore.store import Store
from ckptstore.training.checkpointer import Checkpointer
from ckptstore.training.loaders.counted_batches import CountedBatches
from ckptstore.training.loaders.loader_plans import is_stateful
from ckptstore.training.resume.schedules import is_schedule
from ckptstore.training.settings import CheckpointerOptions
from ckptstore.write.saves.ledger import PendingSave

try:
    from accelerate import Accelerator
    from accelerate.scheduler import AcceleratedScheduler
    from accelerate.utils import DistributedType
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "accelerate":
        raise
    raise MissingDependencyError(
        "ckptstore.integrations.accelerate needs accelerate: pip install 'ckptstore[accelerate]'"
    ) from error

__all__ = ["AcceleratedCheckpointer", "checkpointer"]

_KINDS: Final = {
    DistributedType.NO: "",
    DistributedType.MULTI_CPU: "",
    DistributedType.MULTI_GPU: "",
    DistributedType.DEEPSPEED: "DeepSpeed keeps the optimizer's state to itself",
    DistributedType.MEGATRON_LM: "Megatron-LM keeps model and optimizer to itself",
    DistributedType.FSDP: "its FSDP version 1 has flat parameters; take fsdp_version=2",
}
"""What is supported, and why something else is not."""
_EXTRA: Final = "accelerator"
_OWN: Final = {
    "model": "positional objects",
    "optimizer": "positional objects",
    "scheduler": "positional objects",
    "loader": "positional objects",
    "scaler": "the accelerator's own scaler",
}


def checkpointer(
    accelerator: Accelerator,
    store: Store | str | os.PathLike[str],
    *prepared: Any,
    strategy: str = "auto",
    **options: Unpack[CheckpointerOptions],
) -> AcceleratedCheckpointer:
    """A `Checkpointer` of an Accelerate script: one call with everything that the script prepared and registered.

    Args:
        accelerator: its scaler and its count of micro-batches (``step``) are saved, too.
        store: a path or URL, or a store.
        prepared: what ``accelerator.prepare`` returned: models, optimizers, schedules and the training loader, in any
            order; and what was passed to ``accelerator.register_for_checkpointing``. Several of a kind keep their
            order. Registered objects are ``extra.custom_checkpoint_0`` and so on; ``extra=`` gives them names.
        strategy, options: as for the `Checkpointer`.

    Raises:
        UsageError: an invalid object or option, or a kind of distribution that is not supported.
        as `ckptstore.open`.
    """
    return AcceleratedCheckpointer(accelerator, store, prepared, strategy=strategy, **options)


class AcceleratedCheckpointer(Checkpointer):
    """A `Checkpointer` whose steps are those of the accelerator's optimizers; see `checkpointer`."""

    def __init__(
        self,
        accelerator: Accelerator,
        store: Store | str | os.PathLike[str],
        prepared: Sequence[Any],
        *,
        strategy: str = "auto",
        **options: Unpack[CheckpointerOptions],
    ) -> None:
        """See `checkpointer`."""
        _check_kind(accelerator)
        for name in _OWN:
            if name in options:
                raise UsageError(f"{name}: this Checkpointer takes {_OWN[name]}")
        found = _Sorted(prepared)
        extra: dict[str, Any] = {f"custom_checkpoint_{number}": one for number, one in enumerate(found.others)}
        extra[_EXTRA] = _MicroBatches(accelerator)
        named = options.get("extra") or {}
        for name in sorted(named.keys() & extra.keys()):
            raise UsageError(f"extra[{name!r}]: this name is reserved; use another one")
        more: Any = {**options, "extra": {**extra, **named}, "scaler": accelerator.scaler}
        super().__init__(
            store,
            model=_one_or_all(found.models),
            optimizer=_one_or_all(found.optimizers),
            scheduler=_one_or_all(found.schedules),
            loader=_one_or_all(found.loaders),
            strategy=strategy,
            **more,
        )
        self._accelerator = accelerator
        self._said_loader = False

    def step(
        self, metrics: Mapping[str, Any] | None = None, *, tags: str | Sequence[str] = (), save: bool | None = None
    ) -> PendingSave | None:
        """As `Checkpointer.step`. After a micro-batch whose gradients are only accumulated it does nothing.

        So call it in every iteration, after ``optimizer.step()``; `steps_done` counts optimizer steps.
        """
        self._check_open()
        if not self._accelerator.sync_gradients:
            return None
        self._check_loader()
        return super().step(metrics, tags=tags, save=save)

    def _check_loader(self) -> None:
        """Warn, once, if no loader was passed, and the batches come from a prepared one."""
        active = self._accelerator.gradient_state.active_dataloader
        if self._said_loader or self.loader is not None or active is None:
            return
        self._said_loader = True
        warn(
            f"the accelerator is in a {type(active).__name__} that the Checkpointer was not given: a resumed run "
            "begins its epoch again. Pass the training loader that accelerator.prepare returned",
            DeterminismWarning,
        )


class _MicroBatches:
    """The accelerator's count of micro-batches, by which it decides when gradients are synchronized."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, int]:
        return {"step": self._accelerator.step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._accelerator.step = state["step"]


class _Sorted:
    """What a script prepared, by kind, in the given order."""

    def __init__(self, prepared: Sequence[Any]) -> None:
        """Raises `UsageError`."""
        self.models: list[torch.nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.schedules: list[Any] = []
        self.loaders: list[Any] = []
        self.others: list[Any] = []
        for number, one in enumerate(prepared):
            self._of(one, number).append(one)
        if not self.models:
            raise UsageError(
                "no model was passed, and an Accelerator has no public list of what it prepared: "
                "checkpointer(accelerator, URL, model, optimizer, loader, schedule) with what prepare() returned"
            )
        if len(self.loaders) > 1:
            raise UsageError(
                f"{len(self.loaders)} loaders were passed; a Checkpointer continues one, the training loader. Leave "
                "out those for evaluation: they start again each time"
            )

    def _of(self, one: Any, number: int) -> list[Any]:
        if isinstance(one, torch.nn.Module):
            return self.models
        if isinstance(one, torch.optim.Optimizer):
            return self.optimizers
        if isinstance(one, AcceleratedScheduler) or is_schedule(one):
            return self.schedules
        if isinstance(one, DataLoader | CountedBatches):
            return self.loaders
        if is_stateful(one):
            return self.others
        raise UsageError(
            f"object {number} ({type(one).__name__}) is not a model, optimizer, schedule or loader, and has no "
            "state_dict and load_state_dict"
        )


def _one_or_all(found: list[Any]) -> Any:
    return found[0] if len(found) == 1 else found or None


def _check_kind(accelerator: Accelerator) -> None:
    """Raise `UsageError` for a kind of distribution that is not supported."""
    kind = accelerator.distributed_type
    if kind == DistributedType.FSDP and accelerator.is_fsdp2:
        return
    why = _KINDS.get(kind, "it was never tried")
    if why:
        raise UsageError(f"Accelerate with {kind.value} is not supported: {why}")
