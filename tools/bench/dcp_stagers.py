"""Stagers of `torch.distributed.checkpoint.async_save`, as its documentation advises: one that keeps its buffers."""

from __future__ import annotations

from typing import Any

__all__ = ["Stagers"]


class Stagers:
    """The stager of each save: the same one, with its buffers, or a new one where torch lets no stager stage twice.

    torch 2.11's `DefaultStager` frees its buffers and its tables after each stage; its second one raises
    ``KeyError: <class 'type'>`` (pytorch/pytorch#183413).
    """

    def __init__(self, *, pinned: bool) -> None:
        """
        Args:
            pinned: stage into page-locked memory, for tensors of a CUDA device.
        """
        self._pinned = pinned
        self._stager = self._new()
        try:
            self._stager.stage({})
            self._stager.stage({})
            self._warm = True
        except KeyError:
            self._warm = False

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

        return DefaultStager(StagingOptions(self._pinned, False, False, False))
