"""Private parts of layer-wise snapshots and planned states that these tests use; each function states why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ckptstore.training import Checkpointer, LayerwiseSnapshots
from ckptstore.training.capture import planned_saves
from ckptstore.training.layerwise import layer_sources
from ckptstore.training.replica import arithmetic_probe

__all__ = [
    "MOST_MISFITS",
    "copied_during_backward",
    "copying",
    "fill_the_device",
    "hook_state_dict",
    "hooks_of",
    "interrupt_early_copy",
    "members_of",
    "not_persistent",
    "on_copies",
    "other_members",
    "plan_nothing",
    "save_by",
    "waits_for",
    "without_torchs_kernels",
]

MOST_MISFITS = planned_saves._MOST_MISFITS
"""Number of failed plans after which no further plan is made: nothing public shows plans."""


def plan_nothing(checkpointer: Checkpointer) -> None:
    """Make the Checkpointer take every state apart: `PlannedSaves._pause`. No public option does, because no user
    should want it."""
    assert checkpointer._term is not None
    assert checkpointer._term.saves._planned is not None
    checkpointer._term.saves._planned._pause = 1000


def members_of(module: torch.nn.Module) -> dict[str, Any]:
    """The modules in a module, for renaming and reordering: `torch.nn.Module._modules`."""
    members: dict[str, Any] = module._modules
    return members


def other_members(module: torch.nn.Module) -> None:
    """Replace `torch.nn.Module._modules` by another dict, with the modules in another order."""
    module.__dict__["_modules"] = dict(reversed(module._modules.items()))


def not_persistent(module: torch.nn.Module, name: str) -> None:
    """Exclude a buffer from the state from now on: `torch.nn.Module._non_persistent_buffers_set`."""
    module._non_persistent_buffers_set.add(name)


def save_by(module: torch.nn.Module, save: Callable[..., None]) -> None:
    """Give a module its own save function: `torch.nn.Module._save_to_state_dict`, which torch documents."""
    module._save_to_state_dict = save


def hook_state_dict(module: torch.nn.Module, hook: Callable[..., Any]) -> None:
    """`torch.nn.Module._register_state_dict_hook`: public only since torch 2.7, under another name."""
    module._register_state_dict_hook(hook)  # type: ignore[no-untyped-call]


def on_copies(snapshots: LayerwiseSnapshots, patch: pytest.MonkeyPatch, call: Callable[[str], object]) -> None:
    """Call `call` with the name of each layer when its copy begins: `LayerwiseSnapshots._start`.

    Copying threads run at any time; they do not show that a copy began before a later layer was updated.
    """
    start = snapshots._start

    def started(begun: Any, layer: str, members: Any) -> None:
        call(layer)
        start(begun, layer, members)

    patch.setattr(snapshots, "_start", started)


def copying(snapshots: LayerwiseSnapshots) -> bool:
    """Whether the unsaved early copies are still in progress: `LayerwiseSnapshots._early`.

    `wait` waits for them, and copies everything again; here that must not happen.
    """
    assert snapshots._early is not None
    return snapshots._early.save.copying


def waits_for(snapshots: LayerwiseSnapshots) -> int:
    """How many saves have layers that a next step might wait for: `LayerwiseSnapshots._under_way`.

    `report` lists them, and forgets those that are copied by then.
    """
    return len(snapshots._under_way)


def interrupt_early_copy(snapshots: LayerwiseSnapshots, patch: pytest.MonkeyPatch) -> None:
    """Ctrl-C where the copy of a layer is passed to its thread: `LayerwiseSnapshots._early`, its filling's pool.

    It comes between two lines, in the hook of an optimizer.
    """

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    assert snapshots._early is not None
    patch.setattr(snapshots._early.save._filling._pool, "submit", interrupted)


def fill_the_device(patch: pytest.MonkeyPatch) -> None:
    """Make the device refuse memory for a copy: `staging._on_device`. A CPU never reliably runs out of it."""

    def full(_: Any) -> Any:
        raise torch.OutOfMemoryError

    patch.setattr(layer_sources, "_on_device", full)


def copied_during_backward(checkpointer: Any) -> int:
    """How many gradients were sent to the agent before the optimizer's step (strategy ``replica``)."""
    return len(checkpointer._term.saves._consumed._step.early)


def hooks_of(parameter: Any) -> int:
    """The number of hooks on its gradient."""
    return len(parameter._post_accumulate_grad_hooks or ())


def without_torchs_kernels(patch: pytest.MonkeyPatch) -> None:
    """Let an agent compute steps only with the exact variants: `arithmetic_probe._VARIANTS`. On many processors torch's
    kernels give the same bits as one of them."""
    patch.setattr(arithmetic_probe, "_VARIANTS", {})
