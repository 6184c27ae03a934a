"""The ways to save that the table compares: the peers', with warm pinned memory if they have it, and ckptstore's.

They are strategies of the training benchmark (`tools.bench.training.training_strategies`) with settings for a device.
Strategies of that benchmark that have the right settings are used unchanged.
"""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path
from typing import Any, Final

from tools.bench.dcp_stagers import Stagers
from tools.bench.storage.pagecache import fsync
from tools.bench.training import training_strategies
from tools.bench.training.training_checkpointers import Checkpointed
from tools.bench.training.training_loop import Trainer
from tools.bench.training.training_strategies import (
    STRATEGIES,
    AbsentError,
    Ledger,
    Options,
    Store,
    Strategy,
    newest,
)

__all__ = ["DENSITY", "WAYS", "agent_of", "compress", "stored", "tidied"]

DENSITY: Final = 0.01
_LINGER: Final = 5.0
"""Seconds for which an agent outlives a failed case."""


def _threads() -> int:
    """Threads of a writer: half of the cores, at most 8."""
    return max(2, min(8, len(os.sched_getaffinity(0)) // 2))


def settings(_: Strategy) -> dict[str, Any]:
    """Arguments of `Store.writer`. `tidied` deletes the retired checkpoints between two blocks."""
    return {"threads": _threads(), "keep": ["last:1"]}


def tidied(strategy: Strategy) -> None:
    """Delete all checkpoints but the newest, so that a case fits on a tmpfs; nothing is in flight.

    Step diffs are small, and stay: their newest needs those before it.
    """
    if isinstance(strategy, Store):
        strategy.store.gc()
        return
    for _, path in newest(strategy.folder, "step-*")[1:]:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def stored(folder: Path) -> int:
    """Bytes of the newest checkpoint on the medium; for a step diff only its own."""
    if (store := folder / "store").exists():
        import ckptstore

        return ckptstore.open(store).checkpoints()[-1].stored
    _, path = newest(folder, "step-*")[0]
    return sum(one.stat().st_size for one in ([path] if path.is_file() else path.rglob("*")))


def compress(trainer: Trainer) -> Any:
    """Make a trainer compress its gradients -> the hook that does it."""
    from ckptstore.training import TopKHook

    # Residuals change by the dense gradient at each step: with them a checkpoint is as large as without compression.
    trainer.compressor = TopKHook(DENSITY, exact=False)
    return trainer.compressor


def agent_of(strategy: Strategy) -> int | None:
    """The process that saves for a strategy, if it has one."""
    pid: int | None = getattr(strategy, "agent_pid", None)
    return pid


class _Nothing(training_strategies.Nothing):
    """No saves, in a loop that compresses its gradients."""

    compressed = True


# -- DCP


class DcpSave(Strategy):
    """`torch.distributed.checkpoint.save`: training waits until the files are synced."""

    label = "DCP save"

    def save(self, step: int) -> None:
        from torch.distributed.checkpoint.state_dict_saver import save

        path = self.folder / f"step-{step:08}"
        save(self.trainer.state(), checkpoint_id=path, no_dist=True)
        fsync(path)
        fsync(self.folder)
        self.ledger.done(step)

    @staticmethod
    def restore(folder: Path, trainer: Trainer) -> int | None:
        return STRATEGIES["dcp-async"].restore(folder, trainer)


class DcpAsync(training_strategies.DcpAsync):
    """`async_save` with a `DefaultStager`: on a device pinned memory, and copies by a thread on a separate stream."""

    label = "DCP async_save, DefaultStager"

    def stagers(self) -> Any:
        on_device = self.trainer.device.type == "cuda"  # elsewhere torch refuses all of it
        return Stagers(pinned=on_device, background=on_device)


class DcpPinned(training_strategies.DcpAsync):
    """`async_save` with a `BlockingAsyncStager` that keeps its pinned memory: the call returns when everything is
    copied."""

    label = "DCP async_save, warm pinned stager"

    def stagers(self) -> Any:
        if self.trainer.device.type != "cuda":
            raise AbsentError("BlockingAsyncStager pins memory, which takes a CUDA device")
        return _Pinned()


class _Pinned:
    """One `BlockingAsyncStager` for all saves."""

    def __init__(self) -> None:
        from torch.distributed.checkpoint.staging import BlockingAsyncStager

        self._stager = BlockingAsyncStager(cache_staged_state_dict=True)

    def next(self) -> Any:
        return self._stager

    def close(self) -> None:
        self._stager.close()


# -- ckptstore


class Full(Store):
    """`Writer.save_async`, two in flight."""

    label = "ckptstore full, async"
    in_flight = 2

    def settings(self) -> dict[str, Any]:
        return settings(self)


class Delta(Full):
    """`Writer.save_async` of a writer that stores deltas."""

    label = "ckptstore delta"

    def settings(self) -> dict[str, Any]:
        from ckptstore import DeltaOptions

        return super().settings() | {"deltas": DeltaOptions()}


class FullByAgent(Full):
    """`AgentWriter.save_async`, two in flight."""

    label = "ckptstore full, by an agent"

    def __init__(self, folder: Path, trainer: Trainer, options: Options, ledger: Ledger) -> None:
        Strategy.__init__(self, folder, trainer, options, ledger)
        import ckptstore
        from ckptstore import agent

        self.store = ckptstore.open(self.url(folder), create=True)
        writer = agent.writer(
            self.store, linger_seconds=_LINGER, max_in_flight=self.in_flight, poll_seconds=None, **self.settings()
        )
        self.agent_pid = writer.agent_pid
        self.writer: Any = writer


class Steps(Checkpointed):
    """A `Checkpointer` that saves every step."""

    def __init__(self, folder: Path, trainer: Trainer, options: Options, ledger: Ledger) -> None:
        super().__init__(folder, trainer, options, ledger)
        trainer.step = self.checkpointer.steps_done  # it counts from its own first step

    @classmethod
    def opened(cls, folder: Path, trainer: Trainer, options: Options, *, agent: bool) -> Any:
        from ckptstore.errors import UsageError
        from ckptstore.training import Checkpointer

        given: dict[str, Any] = {"compressor": trainer.compressor} if cls.compressed else {}
        if agent:
            given |= {"agent": True, "linger_seconds": _LINGER}
        try:
            checkpointer = Checkpointer(
                folder / "store",
                model=trainer.model,
                optimizer=trainer.optimizer,
                strategy=cls.how,
                full_every=options.full_every,
                threads=_threads(),
                group=None,
                signals=False,
                **given,
            )
            checkpointer.resume()
        except UsageError as error:
            raise AbsentError(str(error)) from error
        return checkpointer

    @staticmethod
    def restore(folder: Path, trainer: Trainer) -> int | None:
        import ckptstore

        store = ckptstore.open(folder / "store")
        if (latest := store.latest_step()) is not None:
            state = store.load("latest", framework="torch")
            trainer.load({"model": state["model"], "optimizer": state["optimizer"], "step": latest})
        return latest


class Replicated(Steps):
    """Steps that an agent repeats. A device whose arithmetic it does not have is reported, and nothing is measured."""

    how = "replica"

    @classmethod
    def opened(cls, folder: Path, trainer: Trainer, options: Options, *, agent: bool) -> Any:
        from ckptstore.host.caller_warnings import UnexplainedStepWarning

        warnings.filterwarnings("error", category=UnexplainedStepWarning)  # `case.measured` says what it says
        return super().opened(folder, trainer, options, agent=agent)


def _kind(base: type[Strategy], label: str, **members: Any) -> type[Strategy]:
    return type(base.__name__, (base,), {"label": label, **members})


WAYS: Final[dict[str, type[Strategy]]] = {
    "none": STRATEGIES["none"],
    "none-topk": _kind(_Nothing, "none, gradients compressed"),
    "torch.save": _kind(STRATEGIES["torch.save"], "torch.save"),
    "checkfreq": STRATEGIES["checkfreq"],
    "dcp-pinned": DcpPinned,
    "dcp-async": DcpAsync,
    "dcp-save": DcpSave,
    "full": Full,
    "full-agent": FullByAgent,
    "layer-host": _kind(STRATEGIES["layer-host"], "ckptstore layer-wise, host", settings=settings),
    "layer-device": _kind(STRATEGIES["layer-device"], "ckptstore layer-wise, device", settings=settings),
    "replica": _kind(Replicated, "ckptstore replica", by_agent=True),
    "topk-agent": _kind(Steps, "ckptstore gradient, top-k, by an agent", compressed=True, by_agent=True),
    "gradient-agent": _kind(Steps, "ckptstore gradient, by an agent", by_agent=True),
    "delta": Delta,
    "topk": _kind(Steps, "ckptstore gradient, top-k", compressed=True),
    "gradient": _kind(Steps, "ckptstore gradient"),
}
"""By the names that ``--only`` takes, the most important first: the time may be up before the last."""
