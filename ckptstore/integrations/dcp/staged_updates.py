"""What the optimizers did in a step whose state ``dcp.async_save`` has copied: looked up before, found in the copy."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

import torch

from ckptstore.errors import UnsupportedStateError
from ckptstore.formats.states.state import FlatState, TensorSource
from ckptstore.frameworks.torch_tensors import TorchSource
from ckptstore.integrations.dcp.host_copy import Pairs
from ckptstore.write.steps.updates import Found, Update, Updates, looked_up, with_sparse_copies

__all__ = ["StagedUpdates"]

_UNNAMED = "the checkpoint does not hold tensors that the copied state held"


class StagedUpdates:
    """A callable for ``updates=``, as the one from which it was made, for the copy of a state.

    It holds its own copies of the gradients, so training may change them.
    """

    def __init__(self, updates: Updates, pairs: Pairs) -> None:
        """Look the updates up in the state that was copied. It must not have changed since.

        Args:
            pairs: the tensors of the state, and their copies.

        Raises:
            UsageError: see `looked_up`.
        """
        before: dict[str, TensorSource] = {}
        self._copies: dict[str, Hashable] = {}
        for number, (original, copy) in enumerate(pairs):
            try:
                before[str(number)] = TorchSource(original)
                self._copies[str(number)] = TorchSource(copy).identity
            except UnsupportedStateError:  # the save says so
                before.pop(str(number), None)
        found = looked_up(updates, FlatState(None, before))
        self._left_out = getattr(found, "left_out", None)
        self._reasons = frozenset(getattr(found, "reasons", ()))
        self._updates = [_with_own_gradient(one) for one in with_sparse_copies(found)]

    def __call__(self, flat: FlatState) -> Sequence[Update]:
        """The updates with the names that `flat` gives to the copies."""
        names = {source.identity: name for name, source in flat.tensors.items()}
        renamed = []
        for update in self._updates:
            slots = [names.get(self._copies[slot]) for slot in update.slots]
            if all(slot is not None for slot in slots):
                renamed.append(replace(update, slots=tuple(slot for slot in slots if slot is not None)))
        if len(renamed) == len(self._updates) or self._left_out is not None:
            return Found(renamed, self._left_out, self._reasons)
        return Found(renamed, f"{len(self._updates) - len(renamed)} updates are not used: {_UNNAMED}", {_UNNAMED})


def _with_own_gradient(update: Update) -> Update:
    """An update whose dense gradient is a copy in host memory; none stays on a device."""
    gradient = update.gradient
    if isinstance(gradient, TorchSource):
        with torch.no_grad():
            gradient = TorchSource(gradient.resolved.to("cpu", copy=True))
    return replace(update, gradient=gradient, carried=None)
