"""The whole of what a training loop needs of ckptstore: where to continue, and what to keep."""

from __future__ import annotations

import time
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ckptstore
from tools.demo.config import Mode
from tools.demo.events import emit

State = dict[str, Any]


class StoreKeeper:
    """Checkpoints every step into a store, and knows where a killed run continues.

    In mode ``save`` a checkpoint is durable when `keep` returns. In mode ``save_async`` it becomes durable while the
    next step computes; at most one is on its way, and its error, if any, surfaces at the next `keep` or at the end.
    """

    def __init__(self, folder: Path, mode: Mode) -> None:
        self._store = ckptstore.open(folder)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ckptstore.DeterminismWarning)
            self._writer = self._store.writer(parent="latest")
        for warning in caught:
            emit("warning", text=str(warning.message))
        alternating: Mode = "save" if self._writer.term % 2 else "save_async"
        self.mode = alternating if mode == "both" else mode
        self._waiter = ThreadPoolExecutor(1, thread_name_prefix="demo-ack")
        self._on_its_way: Future[None] | None = None

    @property
    def term(self) -> int:
        """The term that this process writes."""
        return self._writer.term

    def last_state(self) -> State | None:
        """What to continue from, or None at the very beginning."""
        if self._writer.parent is None:
            return None
        state: State = self._store.load(self._writer.parent.ref)
        return state

    def keep(self, state: State, step: int) -> None:
        """Make `state` the checkpoint of `step`, and tell the supervisor when the store has acknowledged it."""
        began = time.monotonic()
        if self.mode == "save":
            self._acknowledge(self._writer.save(state, step=step), began)
            return
        self._settle()
        handle = self._writer.save_async(state, step=step)
        self._on_its_way = self._waiter.submit(lambda: self._acknowledge(handle.result(), began))

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
        self._writer.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._settle()
        finally:
            self._waiter.shutdown()
            self._writer.__exit__(kind, error, trace)
