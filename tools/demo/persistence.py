"""All the calls that a training loop needs from ckptstore: where to continue, and what to save."""

from __future__ import annotations

import time
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import ckptstore
from ckptstore.training import Checkpointer
from tools.demo.config import DemoConfig, Mode
from tools.demo.events import emit

if TYPE_CHECKING:
    from tools.demo.training import Training


class StoreKeeper:
    """Saves every step into a store as step diffs, and finds where a killed run continues.

    In mode ``save`` a checkpoint is durable when `keep` returns. In mode ``save_async`` it becomes durable while the
    next step computes; at most one is in flight, and its error, if any, surfaces at the next `keep` or at the end.
    """

    def __init__(self, folder: Path, config: DemoConfig, training: Training) -> None:
        self._training = training
        self._mode = config.mode
        self._checkpointer = Checkpointer(
            folder,
            model=training.model,
            optimizer=training.optimizer,
            scheduler=training.schedule,
            loader=training.loader,
            extra={"run": training.notes},
            strategy="gradient",
            full_every=config.full_every,
        )
        self._waiter = ThreadPoolExecutor(1, thread_name_prefix="demo-ack")
        self._on_its_way: Future[None] | None = None

    def resume(self) -> dict[str, Any]:
        """Restore the state to continue from, if there is any -> the event for the supervisor."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ckptstore.DeterminismWarning)
            self._training.step = self._checkpointer.resume()
        for warning in caught:
            emit("warning", text=str(warning.message))
        term = self._checkpointer.term
        assert term is not None  # it is open
        alternating: Mode = "save" if term % 2 else "save_async"
        self._mode = alternating if self._mode == "both" else self._mode
        return {"term": term, "mode": self._mode}

    def keep(self, step: int) -> None:
        """Save the state as the checkpoint of `step`, and tell the supervisor when the store has acknowledged it."""
        began = time.monotonic()
        self._settle()
        pending = self._checkpointer.step(metrics={"loss": self._training.notes.losses[-1]})
        assert pending is not None, f"step {step} is not saved"
        if self._mode == "save":
            self._acknowledge(pending.result(), began)
            return
        self._on_its_way = self._waiter.submit(lambda: self._acknowledge(pending.result(), began))

    def _acknowledge(self, info: ckptstore.CheckpointInfo, began: float) -> None:
        emit(
            "durable",
            step=info.step,
            ref=info.ref,
            seconds=time.monotonic() - began,
            nbytes=info.nbytes,
            stored=info.stored,
        )

    def _settle(self) -> None:
        if self._on_its_way is not None:
            self._on_its_way.result()
            self._on_its_way = None

    def __enter__(self) -> Self:
        self._checkpointer.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._settle()
        finally:
            self._waiter.shutdown()
            self._checkpointer.__exit__(kind, error, trace)
