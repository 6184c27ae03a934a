"""Ways to checkpoint the training benchmark's loop: the peers (`tools.baselines`) and ckptstore's."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, ClassVar, Final, get_args

from tools.baselines.checkfreq import CheckFreqLike
from tools.baselines.dcp import DcpAsync
from tools.baselines.differences import NaiveDifferences
from tools.baselines.strategy import AbsentError, Ledger, Nothing, Options, Strategy
from tools.baselines.torch_save import TorchSave, newest, write_file
from tools.bench.training.training_loop import Trainer

__all__ = [
    "STRATEGIES",
    "AbsentError",
    "CheckFreqLike",
    "DcpAsync",
    "GradientDiffs",
    "LayerWise",
    "Ledger",
    "NaiveDifferences",
    "Nothing",
    "Options",
    "Store",
    "Strategy",
    "TorchSave",
    "newest",
    "write_file",
]


class Store(Strategy):
    """`Writer.save_async` with N in flight."""

    label = "ckptstore"
    in_flight: ClassVar[int] = 1

    def __init__(self, folder: Path, trainer: Trainer, options: Options, ledger: Ledger) -> None:
        super().__init__(folder, trainer, options, ledger)
        import ckptstore

        self.store = ckptstore.open(self.url(folder), create=True)
        self.writer = self.store.writer(max_in_flight=self.in_flight, poll_seconds=None, **self.settings())

    def url(self, folder: Path) -> str:
        """Where the store is written."""
        return str(folder / "store")

    def settings(self) -> dict[str, Any]:
        """Further arguments of `Store.writer`."""
        return {}

    def begin(self, step: int) -> Any:
        """Start a save -> its `PendingSave`."""
        return self.writer.save_async(self.trainer.state(), step)

    def save(self, step: int) -> None:
        self.begin(step).when_done(lambda durable: self.ledger.done(step) if durable else None)

    def settle(self) -> None:
        self.writer.wait()

    def close(self) -> None:
        self.writer.close()
        self.store.close()

    @staticmethod
    def restore(folder: Path, trainer: Trainer) -> int | None:
        import ckptstore

        store = ckptstore.open(folder / "store")  # under whatever URL it was written
        latest = store.latest_step()
        if latest is not None:
            trainer.load(store.load("latest", framework="torch"))
        return latest


class GradientDiffs(Store):
    """Every step is a checkpoint, stored as its gradient; one write has as many as the interval has steps."""

    label = "ckptstore step diffs"
    every_step = True

    def settings(self) -> dict[str, Any]:
        from ckptstore import DiffOptions

        batch = self.options.batch or self.options.interval
        options = DiffOptions(full_every=self.options.full_every, batch=batch, seconds=None, flush_on_sigterm=False)
        return {"diffs": options}

    def begin(self, step: int) -> Any:
        from ckptstore.training import OptimizerStep

        return self.writer.save_async(self.trainer.state(), step, updates=OptimizerStep(self.trainer.optimizer))


class LayerWise(Store):
    """`ckptstore.training.LayerwiseSnapshots`: layers are copied during training, and each is waited for separately."""

    label = "ckptstore layer-wise"
    in_flight = 2
    mode: ClassVar[str] = "host"

    def __init__(self, folder: Path, trainer: Trainer, options: Options, ledger: Ledger) -> None:
        try:
            layerwise = importlib.import_module("ckptstore.training.layerwise.layerwise_snapshots")
        except ImportError as error:
            raise AbsentError("ckptstore.training.layerwise.layerwise_snapshots is not in this build") from error
        if self.mode not in get_args(layerwise.Mode):
            raise AbsentError(f"layer-wise snapshots of this build have no mode {self.mode!r}")
        super().__init__(folder, trainer, options, ledger)
        self._snapshots = layerwise.LayerwiseSnapshots(
            self.writer, trainer.model, trainer.optimizer, state=trainer.state, mode=self.mode
        )

    def url(self, folder: Path) -> str:
        plain = super().url(folder)
        return f"pmem://{Path(plain).resolve()}" if self.mode == "direct" else plain  # it needs memory for the copy

    def begin(self, step: int) -> Any:
        return self._snapshots.save(step)

    def hidden_wait(self) -> float:
        return float(self._snapshots.report().waited_seconds)

    def close(self) -> None:
        self._snapshots.close()
        super().close()


def _variant(base: type[Strategy], name: str, **members: Any) -> type[Strategy]:
    return type(name, (base,), members)


STRATEGIES: Final[dict[str, type[Strategy]]] = {
    "none": Nothing,
    "torch.save": TorchSave,
    "dcp-async": DcpAsync,
    "checkfreq": CheckFreqLike,
    "naive-diff": NaiveDifferences,
    **{
        f"ckptstore-{number}": _variant(
            Store, f"Store{number}", in_flight=number, label=f"ckptstore, {number} in flight"
        )
        for number in (1, 2, 4)
    },
    **{
        f"layer-{mode}": _variant(LayerWise, f"Layer{mode}", mode=mode, label=f"ckptstore layer-wise, {mode}")
        for mode in ("host", "device", "direct")
    },
    "gradient-diffs": GradientDiffs,
}
"""By the names that ``--only`` takes, in the order of the tables."""
