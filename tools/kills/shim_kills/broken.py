"""Checkpointers that are wrong on purpose: a working harness must find each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

__all__ = ["BROKEN"]


def _forgets_generators() -> None:
    """A restore that leaves numpy's generator unchanged."""
    from ckptstore.training import rng

    real = rng.restore

    def restored(state: Mapping[str, Any]) -> None:
        before = np.random.get_state()
        real(state)
        np.random.set_state(before)

    rng.restore = restored


def _loses_a_bit() -> None:
    """A restore that flips the lowest bit of one number of one moment."""
    import torch

    real = torch.optim.Optimizer.load_state_dict

    def load_state_dict(optimizer: Any, state: Any) -> None:
        real(optimizer, state)
        moment = next(iter(optimizer.state.values()))["exp_avg"]
        moment.view(-1)[:1].view(torch.int32).bitwise_xor_(1)

    torch.optim.Optimizer.load_state_dict = load_state_dict


def _acknowledges_too_early() -> None:
    """A save that is reported as durable while it is in flight."""
    import ckptstore

    ckptstore.PendingSave.when_done = lambda _pending, call: call(True)  # type: ignore[method-assign]


BROKEN: Final[dict[str, Callable[[], None]]] = {
    "generators": _forgets_generators,
    "moments": _loses_a_bit,
    "acknowledgements": _acknowledges_too_early,
}
"""Name -> the function that breaks the Checkpointer in the calling process."""
