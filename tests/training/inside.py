"""What the tests of this room reach inside layer-wise snapshots for; see each function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ckptstore.training import LayerwiseSnapshots, staging

__all__ = ["copying", "fill_the_device", "interrupt_early_copy", "on_copies", "waits_for"]


def on_copies(snapshots: LayerwiseSnapshots, patch: pytest.MonkeyPatch, call: Callable[[str], object]) -> None:
    """`call` with the name of each layer when its copy is begun: `LayerwiseSnapshots._start`.

    Threads that copy run when they may; that a copy was begun before a later layer was updated they do not tell.
    """
    start = snapshots._start

    def started(begun: Any, layer: str, members: Any) -> None:
        call(layer)
        start(begun, layer, members)

    patch.setattr(snapshots, "_start", started)


def copying(snapshots: LayerwiseSnapshots) -> bool:
    """Whether what was begun, and not saved yet, is being copied: `LayerwiseSnapshots._early`.

    `wait` waits for that, and has everything copied again; this is about what is not.
    """
    assert snapshots._early is not None
    return snapshots._early.save.copying


def waits_for(snapshots: LayerwiseSnapshots) -> int:
    """How many saves have layers that a next step might wait for: `LayerwiseSnapshots._under_way`.

    `report` tells of them, and forgets those that are copied by then.
    """
    return len(snapshots._under_way)


def interrupt_early_copy(snapshots: LayerwiseSnapshots, patch: pytest.MonkeyPatch) -> None:
    """Ctrl-C where the copy of a layer is handed to its thread: `LayerwiseSnapshots._early`, its filling's pool.

    Between two lines, in the hook of an optimizer.
    """

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    assert snapshots._early is not None
    patch.setattr(snapshots._early.save._filling._pool, "submit", interrupted)


def fill_the_device(patch: pytest.MonkeyPatch) -> None:
    """Let the device have no memory for a copy: `staging._on_device`. A CPU never runs out of it for certain."""

    def full(_: Any) -> Any:
        raise torch.OutOfMemoryError

    patch.setattr(staging, "_on_device", full)
