"""Stagers of `torch.distributed.checkpoint.async_save`, as its documentation advises: one that keeps its buffers."""

from __future__ import annotations

from typing import Any

__all__ = ["Stagers"]


class Stagers:
    """The stager of each save: the same one, with its buffers, or a new one where torch lets no stager stage twice.

    torch 2.11's `DefaultStager` frees its buffers and its tables after each stage. Its second stage raises
    ``KeyError: <class 'type'>`` (reported in pytorch's tracker).
    """

    def __init__(self, *, pinned: bool, background: bool = False) -> None:
        """
        Args:
            pinned: stage into page-locked memory, for tensors of a CUDA device.
            background: stage in a thread, by copies on a stream of its own.
        """
        self._pinned, self._background = pinned, background
        self._stager = self._new()
        self._warm = _stages_twice()

    def next(self) -> Any:
        """The stager of the next save, once the save before is done."""
        if not self._warm:
            self._stager.close()
            self._stager = self._new()
        return self._stager

    def close(self) -> None:
        """Free the buffers."""
        self._stager.close()

    def _new(self) -> Any:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        return DefaultStager(StagingOptions(self._pinned, False, self._background, self._background))


def _stages_twice() -> bool:
    """Whether a `DefaultStager` stages a state again and returns the same: not in torch 2.11."""
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    stager = DefaultStager(StagingOptions(False, False, False, False))
    state = {"numbers": [1]}
    try:
        return all(stager.stage(state) == state for _ in range(3))
    except KeyError:
        return False
    finally:
        stager.close()
