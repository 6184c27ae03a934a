"""A save whose snapshot is filled layer by layer while training continues (LightCheck, section III-B).

The training loop declares that a layer will not change for now: `LayeredSave.ready`. Threads then copy it. Before the
layer changes again, `LayeredSave.wait` waits only for the copy of that layer. Tensors of no layer are copied during
`LayeredSave.finish`. Its snapshot arrives when the last layer is copied, as one arrives that a device copies: it is
stored like any other.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Final

from ckptstore.errors import UsageError
from ckptstore.formats.states.state import FlatState, TensorSource
from ckptstore.frameworks import bridge
from ckptstore.host.caller_warnings import warns_last
from ckptstore.host.threads import run_all
from ckptstore.write.capture.layer_copies import Filling, Layer, LayerCopy, memory
from ckptstore.write.capture.snapshot import Snapshot, copy_jobs
from ckptstore.write.saves.job import SaveJob
from ckptstore.write.saves.ledger import Labels, Metadata, PendingSave

__all__ = ["Awaited", "LayeredSave", "OpenSave", "checked_layers"]

_MOST_NAMED: Final = 3


class Awaited:
    """A tensor whose bytes `LayeredSave.ready` or `finish` will provide; until then only dtype and shape are known.

    A `TensorSource`. It keeps no memory of the tensor alive.
    """

    __slots__ = ("dtype", "identity", "nbytes", "origin", "shape")

    def __init__(self, source: TensorSource) -> None:
        self.dtype = source.dtype
        self.shape = source.shape
        self.nbytes = source.nbytes
        self.origin = source.origin
        self.identity = id(self)

    def view(self) -> None:
        """Return None: there is no memory yet."""

    def read(self, offset: int, out: object) -> None:  # noqa: ARG002  # the signature of every source
        """Raise `UsageError`: its bytes have not been provided."""
        raise UsageError(f"a tensor of {self.dtype} {list(self.shape)} was to be copied before it was given")


class OpenSave:
    """What a writer keeps of the layer-wise save that it began last, until it is finished or abandoned.

    Attributes:
        job: the save. Giving it up frees the memory.
        end: how it ended; empty: it has not ended.
    """

    def __init__(self, save: LayeredSave, job: SaveJob, lock: threading.RLock) -> None:
        """
        Args:
            lock: held by each call that reads layers or begins to copy them.
        """
        self.job = job
        self.end = ""
        self._save = weakref.ref(save)
        self._lock = lock

    def check(self) -> None:
        """Raise `UsageError` if it has ended."""
        if self.end:
            raise UsageError(f"the layer-wise save of step {self.job.step} was {self.end} already")

    def claim(self) -> None:
        """Claim the right to finish it; only one caller can. Raises as `check`."""
        with self._lock:
            self.check()
            self.end = "finished"

    def abandon(self) -> None:
        """Abandon it, and free memory and step once nothing reads the layers. Does nothing if it has ended."""
        with self._lock:  # Prevents: freeing memory to which a call in another thread begins a copy.
            if self.end:
                return
            self.end = "abandoned"
        self.job.give_up(CancelledError(f"the layer-wise save of step {self.job.step} was abandoned"))

    def settle(self) -> None:
        """Prepare for another save. A lost layer-wise save is abandoned, as the next would wait forever for its memory.

        Raises:
            UsageError: it is neither finished nor abandoned.
        """
        if self.end:
            return
        if self._save() is not None:
            raise UsageError(
                f"the layer-wise save of step {self.job.step} has not ended: finish or abandon it before the next save"
            )
        self.abandon()


class LayeredSave:
    """A save whose snapshot is filled layer by layer, as `Writer.begin` returns it.

    Either `finish` or `abandon` ends it; leaving a ``with`` abandons a save that was not finished. Any thread may call
    it.

    Attributes:
        step: the step that is saved.
        opened: what its writer keeps of it.
    """

    def __init__(
        self,
        job: SaveJob,
        flat: FlatState,
        layers: Mapping[str, Sequence[str]],
        snapshot: Snapshot,
        pool: ThreadPoolExecutor,
        *,
        submit: Callable[[FlatState, Labels, Any], PendingSave],
        check_open: Callable[[], None],
    ) -> None:
        """
        Args:
            job: the save. Giving it up frees the snapshot.
            flat: the state, or a state with the same dtypes and shapes; see `Awaited`.
            layers: the names of each layer's tensors; each tensor at most once (see `checked_layers`).
            snapshot: memory for the state, not filled yet.
            pool: threads that copy layers and do nothing else.
            submit: submits the snapshot, which arrives when its last layer is copied. Arguments: the state as it is
                now, its labels, and the updates. If it raises, it has given the job up, or another thread ends it.
            check_open: raises the error that ended the writer, if it has ended.
        """
        self.step = job.step
        self._flat = flat
        self._snapshot = snapshot
        self._layers = {
            name: Layer(
                tuple(members),
                sum(flat.tensors[one].nbytes for one in members),
                {one: flat.tensors[one] for one in members},
            )
            for name, members in layers.items()
        }
        self._filling = Filling(snapshot, self._layers, pool)
        snapshot.arrives(self._filling.check, self._filling.stop)
        self._pool = pool
        self._submit = submit
        self._check_open = check_open
        self._lock = threading.RLock()
        self._now: FlatState | None = None  # the state when `rest` was called
        self.opened = OpenSave(self, job, self._lock)

    @property
    def is_open(self) -> bool:
        """Whether it is neither finished nor abandoned."""
        return not self.opened.end

    @property
    def copying(self) -> bool:
        """Whether a layer is being copied, so that `wait` would wait."""
        return self._filling.busy()

    def ready(
        self,
        layer: str,
        sources: Mapping[str, TensorSource] | None = None,
        copied: Callable[[], None] | None = None,
    ) -> None:
        """Begin to copy a layer. The layer must not change until `wait` for it has returned.

        A layer that was copied already is copied again, because it has changed.

        Args:
            layer: the name of the layer.
            sources: the sources of its tensors, by name; for missing ones the earlier source is used.
            copied: called by the thread that copies the last part of the layer, before `wait` returns; an exception in
                it fails the save.

        Raises:
            UsageError: there is no such layer; the save is finished or abandoned; a source has another dtype or shape.
            FencedError, CommitUnknownError, WriterClosedError: the writer can save no more.
        """
        with self._lock:
            self.opened.check()
            found = self._layers.get(layer)
            if found is None:
                raise UsageError(f"step {self.step} has no layer {layer!r}; its layers: {_some(list(self._layers))}")
            for name, source in (sources or {}).items():
                if name not in found.sources:
                    raise UsageError(f"tensor {name!r} is not in layer {layer!r}")
                _check_form(name, self._flat.tensors[name], source)
            found.sources.update(sources or {})
            self._start(layer, copied)

    def wait(self, layer: str | None = None) -> float:
        """Wait until nothing reads the layer any more, so that it may change (None: any layer).

        An error of its copy is not raised here: training may continue, and the save fails.

        Returns:
            the seconds waited; 0.0 if there was nothing to wait for, as for a layer that is unknown or not `ready`.
        """
        if layer is not None and layer not in self._layers:
            return 0.0
        return self._filling.wait(layer)

    def copies(self) -> list[LayerCopy]:
        """The copies of layers that were requested so far."""
        return self._filling.copies()

    def rest(self, state: Any = None) -> None:
        """Copy the tensors that belong to no layer, as they are now. They may change when this returns.

        `finish` calls this if it was not called yet; a second call copies again.

        Args:
            state: the state now, with tensors of the same names, dtypes and shapes; None: the state passed to `begin`.
                Layers that are not `ready` yet will be copied from it.

        Raises:
            UsageError: the save is not open; or `state` has other tensors than the state passed to `begin`.
            UnsupportedStateError: as `Writer.save`.
            WriterClosedError: the writer was closed.
        """
        with self._lock:
            self.opened.check()
            flat = self._flat
            if state is not None:
                flat = bridge.flattened(state)
                self._check_same(flat)
            self._now = None
            self._copy_rest(flat)
            for layer in self._layers.values():
                if not layer.started:
                    layer.sources = {one: flat.tensors[one] for one in layer.names}
            self._now = flat

    @warns_last
    def finish(
        self,
        state: Any = None,
        *,
        metadata: Metadata | None = None,
        tags: str | Sequence[str] = (),
        updates: Any = None,
    ) -> PendingSave:
        """Call `rest`, begin to copy every layer that is not `ready` yet, and submit the save.

        The writer waits for the layers in the background: still call `wait` before they change.

        Args:
            state: as for `rest`; None: the state when `rest` was called, or else the one passed to `begin`.
            metadata, tags, updates: as for `Writer.save_async`.

        Raises:
            as `rest`; the save stays open, and may be abandoned.
            FencedError, CommitUnknownError, WriterClosedError: the writer can save no more; the save is abandoned.
        """
        labels = Labels.of(metadata, tags)
        with self._lock:
            self.opened.check()
            if state is not None or self._now is None:
                self.rest(state)
            assert self._now is not None
            self.opened.claim()
            try:
                for name, layer in self._layers.items():
                    if not layer.started:
                        self._start(name, None)
                self._snapshot.flat = replace(self._snapshot.flat, tree=self._now.tree)
            except BaseException as error:
                self.opened.job.give_up(error)
                raise
            return self._submit(self._now, labels, updates)

    def abandon(self) -> None:
        """Give the save up. Returns when nothing reads the layers. Does nothing if it is not open any more."""
        self.opened.abandon()

    def __enter__(self) -> LayeredSave:
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()

    def _copy_rest(self, flat: FlatState) -> None:
        """Copy the tensors of no layer now, since they may change as soon as `finish` returns."""
        layered = {name for layer in self._layers.values() for name in layer.names}
        into = self._snapshot.flat.tensors
        rest = [(source, memory(into[name])) for name, source in flat.tensors.items() if name not in layered]
        jobs = copy_jobs(rest)
        if self._filling.busy():  # in the pool's queue these jobs would wait for all layers
            for job in jobs:
                job()
            return
        try:
            run_all(self._pool, jobs)
        except RuntimeError:
            self._check_open()  # closed by another thread, and its pool with it
            raise

    def _start(self, name: str, copied: Callable[[], None] | None) -> None:
        self._check_open()
        try:
            self._filling.start(name, copied)
        except RuntimeError:
            self._check_open()
            raise

    def _check_same(self, flat: FlatState) -> None:
        if list(flat.tensors) != list(self._flat.tensors):
            changed = sorted(set(flat.tensors) ^ set(self._flat.tensors)) or list(flat.tensors)
            raise UsageError(
                f"step {self.step} was begun with other tensors than it has now ({_some(changed)}): "
                "abandon it, and begin with the state as it is"
            )
        for name, source in flat.tensors.items():
            _check_form(name, self._flat.tensors[name], source)


def checked_layers(flat: FlatState, layers: Mapping[str, Sequence[str]]) -> None:
    """Raise `UsageError` if a layer names a tensor that `flat` lacks, or two layers name the same one."""
    owner: dict[str, str] = {}
    for layer, names in layers.items():
        for name in names:
            if name not in flat.tensors:
                raise UsageError(f"layer {layer!r} names a tensor that the state does not have: {name!r}")
            if name in owner:
                raise UsageError(f"tensor {name!r} is in layers {owner[name]!r} and {layer!r}; it may be in one")
            owner[name] = layer


def _check_form(name: str, wanted: TensorSource, found: TensorSource) -> None:
    was, now = (wanted.dtype, tuple(wanted.shape)), (found.dtype, tuple(found.shape))
    if was != now:
        raise UsageError(
            f"tensor {name!r} is {now[0]} {list(now[1])}, and the save was begun with {was[0]} {list(was[1])}"
        )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(map(repr, names[:_MOST_NAMED])) + more
