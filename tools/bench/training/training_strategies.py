"""Ways to checkpoint a training loop: torch.save, DCP, those of the papers, and ckptstore's.

The peers are used as a careful user would use them: files are written under another name, synced, renamed, and the
folder is synced, so that a file under its final name is complete and durable. A strategy's `restore` finds the newest
complete checkpoint.

CheckFreq and difference checkpointing are implemented as the papers describe their mechanism (one snapshot and one
persist in flight; the compressed difference of two states): they are not products, and none of their code is used.
"""

from __future__ import annotations

import importlib
import threading
import time
from abc import ABC, abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final, get_args

import numpy as np
import torch
import zstandard

from tools.bench.dcp_stagers import Stagers
from tools.bench.storage.pagecache import fsync
from tools.bench.training.training_loop import State, Trainer, mapped, tensors

_STEP: Final = "step-{:08}"


class AbsentError(Exception):
    """The strategy needs something that this build of ckptstore, or this device, lacks."""


@dataclass(slots=True)
class Ledger:
    """When saves began and when they were durable, reported from any thread; seconds of the monotonic clock."""

    began: dict[int, float] = field(default_factory=dict)
    durable: dict[int, float] = field(default_factory=dict)

    def begin(self, step: int) -> None:
        self.began[step] = time.perf_counter()

    def done(self, step: int) -> None:
        self.durable[step] = time.perf_counter()

    def seconds(self, after: int) -> list[float]:
        """Seconds until durable, of every durable save after step `after`."""
        return [self.durable[step] - self.began[step] for step in sorted(self.durable) if step > after]


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of strategies beside the trainer.

    Attributes:
        interval: iterations from one save to the next.
        full_every: checkpoints from one full to the next, of strategies with differences.
        batch: step diffs in one write; None: as many as `interval`.
    """

    interval: int = 1
    full_every: int = 100
    batch: int | None = None


class Strategy(ABC):
    """One way to checkpoint, in one loop.

    Attributes:
        label: for tables.
        every_step: `save` is called after every step, not only at the interval: it includes the steps in between.
    """

    label: ClassVar[str]
    every_step: ClassVar[bool] = False

    def __init__(self, folder: Path, trainer: Trainer, options: Options, ledger: Ledger) -> None:
        self.folder = folder
        self.trainer = trainer
        self.options = options
        self.ledger = ledger

    def before_update(self) -> None:  # noqa: B027  # most have nothing to wait for
        """Called right before the optimizer's step: tensors that are being copied must not change."""

    @abstractmethod
    def save(self, step: int) -> None:
        """Save the trainer's present state; the ledger has noted the begin."""

    def settle(self) -> None:  # noqa: B027  # synchronous saves are already settled
        """Return when everything is durable. Raises the error of a failed save."""

    def close(self) -> None:
        """Settle, and stop threads."""
        self.settle()

    def hidden_wait(self) -> float:
        """Seconds that training has waited so far within the optimizer's step (hooks)."""
        return 0.0

    @staticmethod
    @abstractmethod
    def restore(folder: Path, trainer: Trainer) -> int | None:
        """Load the newest complete checkpoint into a trainer that has taken a step -> its step, if any."""


class Nothing(Strategy):
    label = "none"

    def save(self, step: int) -> None:
        self.ledger.began.pop(step, None)

    @staticmethod
    def restore(folder: Path, trainer: Trainer) -> int | None:  # noqa: ARG004  # there is nothing
        return None


# -- files


def write_file(path: Path, state: Any) -> None:
    """torch.save under another name, then sync, rename, sync the folder."""
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    fsync(partial)
    partial.rename(path)
    fsync(path.parent)


def newest(folder: Path, pattern: str) -> list[tuple[int, Path]]:
    """(step, path) of the files and folders that match a pattern, newest first."""
    return sorted(((int(path.stem.split("-")[1]), path) for path in folder.glob(pattern)), reverse=True)


class TorchSave(Strategy):
    """Training waits until the file is durable: nothing else would sync it."""

    label = "torch.save + fsync"

    def save(self, step: int) -> None:
        write_file(self.folder / f"{_STEP.format(step)}.pt", self.trainer.state())
        self.ledger.done(step)

    @staticmethod
    def restore(folder: Path, trainer: Trainer) -> int | None:
        for step, path in newest(folder, "step-*.pt"):
            trainer.load(torch.load(path, weights_only=True))
            return step
        return None


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
        path = self.folder / _STEP.format(step)
        begun = async_save(self.trainer.state(), checkpoint_id=path, async_stager=self._stagers.next(), no_dist=True)
        if isinstance(begun, AsyncSaveResponse):
            self._staged, uploaded = begun.staging_completion, begun.upload_completion
        else:
            uploaded = begun
        synced = threading.Event()

        def finish(done: Future[Any]) -> None:
            if done.exception() is None:  # DCP's writer syncs its files
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
        write_file(self.folder / f"{_STEP.format(step)}.pt", whole)
        self.ledger.done(step)

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


class NaiveDifferences(Strategy):
    """Check-N-Run's mechanism, without its loss: the exclusive or of two states, byte planes, zstd; fulls in between.

    The state is copied while training waits; the difference is computed and written beside training, one at a time.
    """

    label = "naive differences"

    def __init__(self, folder: Path, trainer: Trainer, options: Options, ledger: Ledger) -> None:
        super().__init__(folder, trainer, options, ledger)
        self._pool = ThreadPoolExecutor(1)
        self._buffers: list[State] = []
        self._saves = 0
        self._last: int | None = None
        self._under_way: Future[None] | None = None

    def save(self, step: int) -> None:
        self.settle()
        state = self.trainer.state()
        if len(self._buffers) < 2:
            self._buffers.append(mapped(state, lambda _name, tensor: torch.empty_like(tensor, device="cpu")))
        before, now = self._buffers[0], self._buffers[-1]
        copies = dict(tensors(now))
        for name, tensor in tensors(state):
            copies[name].copy_(tensor)
        whole = mapped(state, lambda name, _tensor: copies[name])
        full = self._last is None or self._saves % self.options.full_every == 0
        self._under_way = self._pool.submit(self._persist, step, whole, None if full else self._last, before)
        self._saves, self._last = self._saves + 1, step
        self._buffers.reverse()  # the next one overwrites the older of the two

    def _persist(self, step: int, whole: State, base: int | None, before: State) -> None:
        if base is None:
            write_file(self.folder / f"{_STEP.format(step)}.full", whole)
        else:
            older = dict(tensors(before))
            document = mapped(whole, lambda name, tensor: _packed(tensor, older[name]))
            write_file(self.folder / f"{_STEP.format(step)}.diff", {"base": base, "state": document})
        self.ledger.done(step)

    def settle(self) -> None:
        if self._under_way is not None:
            self._under_way.result()
            self._under_way = None

    def close(self) -> None:
        super().close()
        self._pool.shutdown()

    @staticmethod
    def restore(folder: Path, trainer: Trainer) -> int | None:
        wanted = newest(folder, "step-*.full") + newest(folder, "step-*.diff")
        if not wanted:
            return None
        step, path = max(wanted)
        diffs: list[State] = []
        while path.suffix == ".diff":
            document = torch.load(path, weights_only=True)
            diffs.append(document["state"])
            base = folder / _STEP.format(document["base"])
            path = base.with_suffix(".full") if base.with_suffix(".full").exists() else base.with_suffix(".diff")
        state = torch.load(path, weights_only=True)
        for diff in reversed(diffs):
            older = dict(tensors(state))
            state = mapped(diff, lambda name, packed, older=older: _unpacked(packed, older[name]))
        trainer.load(state)
        return step


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def _packed(now: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    planes = np.ascontiguousarray((_bytes(now) ^ _bytes(before)).reshape(-1, now.element_size()).T)
    return torch.frombuffer(bytearray(zstandard.compress(planes.tobytes(), 1)), dtype=torch.uint8)


def _unpacked(packed: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    planes = np.frombuffer(zstandard.decompress(packed.numpy().tobytes()), np.uint8)
    changed = planes.reshape(before.element_size(), -1).T.reshape(-1) ^ _bytes(before)
    return torch.from_numpy(changed).view(before.dtype).reshape(before.shape)


# -- ckptstore


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
