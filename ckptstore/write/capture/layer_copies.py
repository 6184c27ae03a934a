"""Copies layers into the memory of a snapshot with several threads; each layer can be waited for separately."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from ckptstore.formats.states.state import TensorSource
from ckptstore.host.buffers import Bytes
from ckptstore.host.threads import cancel_and_wait
from ckptstore.write.capture.snapshot import Snapshot, copy_jobs

__all__ = ["Filling", "Layer", "LayerCopy", "memory"]


@dataclass(frozen=True, slots=True)
class LayerCopy:
    """How one layer was copied.

    Attributes:
        layer: the name of the layer.
        nbytes: the size of its tensors.
        began: when its copy was requested, by `time.monotonic`.
        ended: when the last byte was copied; None: not yet, or the copy failed.
    """

    layer: str
    nbytes: int
    began: float
    ended: float | None


@dataclass(slots=True)
class Layer:
    """The tensors of a layer, their sources, and the progress of their copy."""

    names: tuple[str, ...]
    nbytes: int
    sources: dict[str, TensorSource]
    started: bool = False  # every job of its copy is submitted to the threads
    began: float = 0.0
    ended: float | None = None
    jobs: list[Future[None]] = field(default_factory=list)


class Filling:
    """Copies layers into the memory of one snapshot with a thread pool. Any thread may wait for the copies."""

    def __init__(self, snapshot: Snapshot, layers: Mapping[str, Layer], pool: ThreadPoolExecutor) -> None:
        self._snapshot = snapshot
        self._layers = layers
        self._pool = pool
        self._process = os.getpid()

    def start(self, name: str, copied: Callable[[], None] | None) -> None:
        """Begin to copy a layer from its sources. Waits for an earlier copy of it that is in progress."""
        layer = self._layers[name]
        wait(layer.jobs)  # Prevents: two copies into the same memory.
        layer.started, layer.ended, layer.jobs, layer.began = False, None, [], time.monotonic()
        tensors = self._snapshot.flat.tensors
        jobs = copy_jobs([(layer.sources[one], memory(tensors[one])) for one in layer.names])
        left, lock = len(jobs), threading.Lock()

        def run(job: Callable[[], None]) -> None:
            nonlocal left
            job()
            with lock:
                left -= 1
                last = left == 0
            if last:
                if copied is not None:
                    copied()
                layer.ended = time.monotonic()

        if not jobs:
            layer.ended = layer.began
        for job in jobs:
            layer.jobs.append(self._pool.submit(run, job))
        layer.started = True

    def busy(self) -> bool:
        """Whether a thread copies, or will copy."""
        return any(not job.done() for layer in self._layers.values() for job in layer.jobs)

    def wait(self, name: str | None = None) -> float:
        """Wait until no thread reads the layer (None: any layer) -> the seconds waited. Raises no error of a copy.

        In a fork of the process no thread copies, so this does not wait.
        """
        layers = self._layers.values() if name is None else (self._layers[name],)
        jobs = [job for layer in layers for job in layer.jobs if not job.done()]
        if not jobs or os.getpid() != self._process:
            return 0.0
        began = time.monotonic()
        wait(jobs)
        return time.monotonic() - began

    def check(self) -> None:
        """Wait for every layer. Raises the error of a failed copy; `CancelledError`: `stop` was called."""
        self.wait()
        for name, layer in self._layers.items():
            for job in layer.jobs:
                if (error := job.exception()) is not None:
                    error.add_note(f"while layer {name!r} was copied for its snapshot")
                    raise error
            assert layer.started, name

    def stop(self) -> None:
        """Cancel copies that have not begun, and wait for those in progress."""
        if os.getpid() != self._process:
            return  # a fork: the threads belong to the parent process
        cancel_and_wait([job for layer in self._layers.values() for job in layer.jobs])

    def copies(self) -> list[LayerCopy]:
        """The copies of all layers that were requested."""
        return [
            LayerCopy(name, layer.nbytes, layer.began, layer.ended)
            for name, layer in self._layers.items()
            if layer.began
        ]


def memory(tensor: TensorSource) -> Bytes:
    """The memory of a tensor of a snapshot."""
    found = tensor.view()
    assert found is not None  # snapshots are host memory
    return found
