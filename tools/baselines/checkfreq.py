"""CheckFreq's mechanism, as its paper describes it: one snapshot and one persist in flight."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from tools.baselines.strategy import Ledger, Options, Strategy
from tools.baselines.torch_save import STEP, TorchSave, write_file
from tools.bench.training.training_loop import State, Trainer, mapped, tensors

__all__ = ["CheckFreqLike"]


class CheckFreqLike(Strategy):
    """CheckFreq's mechanism: the snapshot overlaps the next forward and backward, and the next update waits for it; the
    next snapshot waits until the one before is durable.
    """

    label = "CheckFreq-like"

    def __init__(self, folder: Path, trainer: Trainer, options: Options, ledger: Ledger) -> None:
        super().__init__(folder, trainer, options, ledger)
        self._pool = ThreadPoolExecutor(1)
        self._pinned = trainer.device.type == "cuda"
        self._stream = torch.cuda.Stream(trainer.device) if self._pinned else None
        self._buffers: State | None = None
        self._copied: Future[None] | None = None
        self._persisted: Future[None] | None = None

    def _host(self, _name: str, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._pinned)

    def save(self, step: int) -> None:
        self.settle()
        state = self.trainer.state()
        if self._buffers is None:
            self._buffers = mapped(state, self._host)
        copies = dict(tensors(self._buffers))
        whole = mapped(state, lambda name, _tensor: copies[name])
        sources = [(copies[name], tensor) for name, tensor in tensors(state)]
        ready = torch.cuda.current_stream(self.trainer.device).record_event() if self._stream is not None else None
        self._copied = self._pool.submit(self.copy_all, sources, ready)
        self._persisted = self._pool.submit(self._persist, step, whole)

    def copy_all(self, sources: list[tuple[torch.Tensor, torch.Tensor]], ready: Any) -> None:
        if self._stream is None:
            for copy, source in sources:
                copy.copy_(source)
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            for copy, source in sources:
                copy.copy_(source, non_blocking=True)
            self._stream.synchronize()

    def _persist(self, step: int, whole: State) -> None:
        self.persist(step, whole)
        self.ledger.done(step)

    def persist(self, step: int, whole: State) -> None:
        """Make a snapshot survive this process."""
        write_file(self.folder / f"{STEP.format(step)}.pt", whole)

    def before_update(self) -> None:
        if self._copied is not None:
            self._copied.result()
            self._copied = None

    def settle(self) -> None:
        if self._persisted is not None:
            self._persisted.result()
            self._persisted = None

    def close(self) -> None:
        super().close()
        self._pool.shutdown()

    restore = staticmethod(TorchSave.restore)
