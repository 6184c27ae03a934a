"""Where a data loader is: asked of loaders that know it, counted for those that do not.

A counted epoch is begun again with the generators as they were when it began, and as many batches as had been given out
are drawn and thrown away: whatever shuffles and augments draws what it drew. That takes as long as loading them does;
a loader with ``state_dict`` (torchdata's ``StatefulDataLoader``) is spared it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from ckptstore.errors import FormatError
from ckptstore.training import rng

__all__ = ["CountedBatches", "is_stateful"]


def is_stateful(value: object) -> bool:
    """Whether it says where it is, and can be sent there."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


class CountedBatches:
    """Gives out a loader's batches, epoch by epoch, and counts them. Iterate over this, not over the loader.

    One iteration at a time: a second one begins the next epoch. What shuffles has to draw when the epoch begins, as
    torch's samplers do, from the global generators or from the loader's or its sampler's own ``generator``.

    Attributes:
        loader: what gives the batches.
        epoch: epochs that were begun before the present one.
        given: batches of it that were given out.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.epoch = 0
        self.given = 0
        self._begun: dict[str, Any] | None = None
        self._resuming = False

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # the loader's own error, if it has no length

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)  # a copy that is being made has none yet
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        if self._resuming:
            batches = self._continued()
        else:
            self.epoch += self._begun is not None
            self.given = 0
            self._begun = {"global": rng.gathered(), "own": [one.get_state() for one in self._own()]}
            batches = iter(self.loader)
        for batch in batches:
            self.given += 1
            yield batch

    def _continued(self) -> Iterator[Any]:
        """The rest of the epoch."""
        self._resuming = False
        assert self._begun is not None
        now = rng.gathered()
        rng.restored(self._begun["global"])
        for one, saved in zip(self._own(), self._begun["own"], strict=True):
            one.set_state(torch.as_tensor(saved).cpu())
        batches = iter(self.loader)
        for number in range(self.given):
            if next(batches, self) is self:
                raise FormatError(f"the loader ends after {number} batches, and {self.given} had been given out")
        rng.restored(now)  # what training has drawn meanwhile, dropout above all, was not drawn again
        return batches

    @property
    def untouched(self) -> bool:
        """Whether nobody has iterated over this, since it was made or sent to a place."""
        return self._begun is None or self._resuming

    def state_dict(self) -> dict[str, Any]:
        """Epoch, batches given out, and the generators as the epoch found them."""
        return {"epoch": self.epoch, "given": self.given, "begun": self._begun}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go there: the next iteration gives the rest of the epoch."""
        self.epoch, self.given, self._begun = state["epoch"], state["given"], state["begun"]
        self._resuming = self._begun is not None

    def _own(self) -> list[torch.Generator]:
        holders = (self.loader, getattr(self.loader, "sampler", None))
        found = [getattr(holder, "generator", None) for holder in holders]
        unique = {id(one): one for one in found if isinstance(one, torch.Generator)}
        return list(unique.values())
