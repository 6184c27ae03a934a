"""torch.distributed.checkpoint: `save`, and `async_save` as its documentation advises."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from tools.baselines import medium
from tools.baselines.strategy import Ledger, Options, Strategy
from tools.baselines.torch_save import STEP, newest
from tools.bench.dcp_stagers import Stagers
from tools.bench.storage.pagecache import fsync
from tools.bench.training.training_loop import Trainer

__all__ = ["DcpAsync", "DcpSync"]


class DcpAsync(Strategy):
    """DCP's async_save with a stager that keeps its buffers, one save at a time, as its documentation advises.

    If the stager stages in the background, the optimizer's step waits until the state is staged.
    """

    label = "DCP async_save"

    def __init__(self, folder: Path, trainer: Trainer, options: Options, ledger: Ledger) -> None:
        super().__init__(folder, trainer, options, ledger)
        self._stagers = self.stagers()
        self._staged: Future[Any] | None = None
        self._under_way: tuple[Future[Any], threading.Event] | None = None

    def stagers(self) -> Any:
        """An object whose `next` returns the stager of the next save, and whose `close` frees its memory."""
        return Stagers(pinned=self.trainer.device.type == "cuda")

    def save(self, step: int) -> None:
        from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save

        self.settle()
        path = self.folder / STEP.format(step)
        begun = async_save(self.trainer.state(), checkpoint_id=path, async_stager=self._stagers.next(), no_dist=True)
        if isinstance(begun, AsyncSaveResponse):
            self._staged, uploaded = begun.staging_completion, begun.upload_completion
        else:
            uploaded = begun
        synced = threading.Event()

        def finish(done: Future[Any]) -> None:
            if done.exception() is None:  # DCP's writer syncs its files
                medium.written(path)
                fsync(path)
                fsync(self.folder)
                self.ledger.done(step)
            synced.set()

        uploaded.add_done_callback(finish)
        self._under_way = uploaded, synced

    def before_update(self) -> None:
        if self._staged is not None:
            self._staged.result()
            self._staged = None

    def settle(self) -> None:
        self.before_update()
        if self._under_way is not None:
            uploaded, synced = self._under_way
            uploaded.result()
            synced.wait()
            self._under_way = None

    def close(self) -> None:
        super().close()
        self._stagers.close()

    @staticmethod
    def restore(folder: Path, trainer: Trainer) -> int | None:
        from torch.distributed.checkpoint.state_dict_loader import load

        for step, path in newest(folder, "step-*"):
            if (path / ".metadata").exists():  # written last, by a rename
                state = trainer.state()
                load(state, checkpoint_id=path, no_dist=True)
                trainer.load(state)
                return step
        return None


class DcpSync(Strategy):
    """DCP's save: training waits until every file is durable."""

    label = "DCP save"

    def save(self, step: int) -> None:
        from torch.distributed.checkpoint.state_dict_saver import save

        path = self.folder / STEP.format(step)
        save(self.trainer.state(), checkpoint_id=path, no_dist=True)  # its writer syncs its files
        medium.written(path)
        fsync(path)
        fsync(self.folder)
        self.ledger.done(step)

    @staticmethod
    def restore(folder: Path, trainer: Trainer) -> int | None:
        return DcpAsync.restore(folder, trainer)
