"""Chooses how the batches of a loader are counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckptstore.training.loaders.counted_batches import CountedBatches
from ckptstore.training.loaders.prepared_batches import PreparedBatches, is_prepared

__all__ = ["counted"]


class _CountedIterator(CountedBatches):
    """For a loader that is its own iterator: `next` yields the next batch, too."""

    _running: Iterator[Any] | None = None

    def __next__(self) -> Any:
        if self._running is None or self._sent is not None:
            self._running = CountedBatches.__iter__(self)
        return next(self._running)


def counted(loader: Any) -> CountedBatches:
    """What to iterate over instead of a loader: it yields the same batches, and knows its position.

    A `Checkpointer` does this with its ``loader=``. A shim that owns the loader of a framework calls it itself, lets
    the framework iterate over the result, and saves and restores its ``state_dict()``.

    Args:
        loader: torch's `DataLoader`, torchdata's `StatefulDataLoader`, a loader that Accelerate prepared, any other
            iterable, or the result of an earlier call.
    """
    if isinstance(loader, CountedBatches):
        return loader  # of another Checkpointer
    if is_prepared(loader):
        return PreparedBatches(loader)
    return (_CountedIterator if hasattr(type(loader), "__next__") else CountedBatches)(loader)
