"""Continues an epoch after a given sample, for a loader whose batch size or number of ranks has changed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import BatchSampler

from ckptstore.training.loaders.loader_facts import order_of_all_ranks, sharing_sampler

__all__ = ["RestOfEpoch", "padding"]


def padding(left: int, ranks: int, *, drop_last: bool) -> int:
    """How many samples are added (negative: dropped) so that all ranks get equal shares of the rest."""
    return -(left % ranks) if drop_last else -left % ranks


class RestOfEpoch:
    """Replaces a batch sampler's sampler until `remove`, and skips the samples that were yielded before.

    Attributes:
        in_place_of: the replaced sampler.
    """

    def __init__(self, batches: BatchSampler, start: int) -> None:
        """Replace the sampler.

        Args:
            batches: the batch sampler.
            start: samples of the order, over all ranks that share it, that were yielded before.
        """
        self._batches = batches
        self.in_place_of: Any = batches.sampler
        self._start = start
        self._ready: Iterator[int] | None = None
        self._asked = False
        batches.sampler = self

    def __len__(self) -> int:
        return len(self.in_place_of)  # of the whole epoch: the loader's length does not change in the middle

    def __getattr__(self, name: str) -> Any:
        if name == "in_place_of":
            raise AttributeError(name)  # a copy under construction has none yet
        return getattr(self.in_place_of, name)

    def __iter__(self) -> Iterator[int]:
        self._asked = True
        ready, self._ready = self._ready, None
        return self._rest() if ready is None else ready

    def draw(self) -> None:
        """Draw the random numbers for the order now, if no index has been requested yet."""
        if not self._asked:
            self._ready = self._rest()

    def remove(self) -> None:
        """Give the batch sampler its own sampler back."""
        if self._batches.sampler is self:
            self._batches.sampler = self.in_place_of

    def _rest(self) -> Iterator[int]:
        sharing = sharing_sampler(self.in_place_of)
        if sharing is None:
            return _drawn(itertools.islice(iter(self.in_place_of), self._start, None))
        order = order_of_all_ranks(sharing)
        rest = order[self._start :]
        more = padding(len(rest), sharing.num_replicas, drop_last=sharing.drop_last)
        rest = rest[:more] if more < 0 else rest + list(itertools.islice(itertools.cycle(order), more))
        return iter(rest[sharing.rank :: sharing.num_replicas])


def _drawn(indices: Iterable[int]) -> Iterator[int]:
    """Return the same indices. The first one is drawn at once, because samplers draw random numbers there."""
    iterator = iter(indices)
    head = list(itertools.islice(iterator, 1))
    return itertools.chain(head, iterator)
