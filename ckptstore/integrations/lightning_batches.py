"""The training loader as Lightning iterates over it: saves the step before, then fetches the next batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from ckptstore.training.loaders.counted_batches import CountedBatches

__all__ = ["TrainBatches"]

_OWN: Final = frozenset({"_batches", "_before", "_running"})


class TrainBatches:
    """Yields a loader's batches to Lightning. All other attributes are the loader's.

    Before it fetches a batch, everything that Lightning does after the batch before is done: all hooks, validation, the
    end of the epoch, schedules. So that is the place to save: a resumed run continues by fetching the same batch.

    Lightning calls ``iter`` before the first batch is wanted, and never asks for a batch after the last one of an
    epoch. So nothing happens before the first batch, and a new iteration means that the epoch before is over.
    """

    def __init__(self, batches: CountedBatches, before: Callable[[], None]) -> None:
        """
        Args:
            before: called before each batch is fetched.
        """
        self._batches = batches
        self._before = before
        self._running = False  # whether this process has begun an epoch

    def __iter__(self) -> Iterator[Any]:
        if self._running:
            self._batches.finish()  # Lightning has left the epoch before
        self._running = True
        self._before()
        for batch in self._batches:
            yield batch
            self._before()

    def __len__(self) -> int:
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:
            raise AttributeError(name)  # a copy that is being made has none yet
        return getattr(self._batches, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._batches, name, value)

    # -- Lightning's checkpoints hold nothing of it: the Checkpointer's do

    def state_dict(self) -> dict[str, Any]:
        """Nothing. A loader without this method is reported as one that cannot be resumed."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load nothing."""
