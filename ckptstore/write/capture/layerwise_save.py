"""A snapshot that is filled layer by layer while training goes on (LightCheck, section III-B).

Whoever trains says which layer will not change until it is asked for: `LayeredSave.ready`. Threads copy it meanwhile,
and before it changes again, `LayeredSave.wait` waits for that layer's copy alone. What belongs to no layer is copied
while `LayeredSave.finish` runs, at once. From there on it is a save as any other.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Final

from ckptstore.errors import UsageError
from ckptstore.formats.state import FlatState, TensorSource
from ckptstore.frameworks import bridge
from ckptstore.host.caller_warnings import warns_last
from ckptstore.host.threads import run_all
from ckptstore.write.capture.layer_copies import Filling, Layer, LayerCopy, memory
from ckptstore.write.capture.snapshot import Snapshot, copy_jobs
from ckptstore.write.saves.ledger import Labels, PendingSave

__all__ = ["Awaited", "Begun", "LayeredSave", "Owner", "checked_layers"]

_MOST_NAMED: Final = 3


class Awaited:
    """A tensor of which only the form is known: its bytes come with `LayeredSave.ready` or `finish` (a `TensorSource`).

    It keeps no memory of the tensor alive.
    """

    __slots__ = ("dtype", "identity", "nbytes", "origin", "shape")

    def __init__(self, source: TensorSource) -> None:
        self.dtype = source.dtype
        self.shape = source.shape
        self.nbytes = source.nbytes
        self.origin = source.origin
        self.identity = id(self)

    def view(self) -> None:
        """There is nothing to be seen."""

    def read(self, offset: int, out: object) -> None:  # noqa: ARG002  # as every source has it
        """Raise `UsageError`: nobody has said where its bytes are."""
        raise UsageError(f"a tensor of {self.dtype} {list(self.shape)} was to be copied before it was given")


@dataclass(frozen=True, slots=True)
class Owner:
    """What a layer-wise save needs of its writer.

    Attributes:
        hand_over: makes the snapshot durable: the state as it is now, what is said of it, updates, what to wait for.
            Whatever happens, the memory is given back then.
        give_up: gives memory and step back.
        check_open: raises what ended the writer.
    """

    hand_over: Callable[[FlatState, Labels, Any, Filling], PendingSave]
    give_up: Callable[[], None]
    check_open: Callable[[], None]


class Lease:
    """The memory and the step that a save has until it is finished or abandoned.

    Attributes:
        step: the one that was given.
        end: how it ended; empty: it has not.
    """

    def __init__(self, step: int, filling: Filling, owner: Owner) -> None:
        self.step = step
        self.end = ""
        self._filling = filling
        self._owner = owner
        self._lock = threading.Lock()

    def check(self) -> None:
        """Raise `UsageError` if it has ended."""
        if self.end:
            raise UsageError(f"the layer-wise save of step {self.step} was {self.end} already")

    def claim(self) -> None:
        """It is being finished, by whoever calls this and nobody else. Raises as `check`."""
        with self._lock:
            self.check()
            self.end = "finished"

    def abandon(self) -> None:
        """Give it back, once nobody reads the layers any more. Does nothing where it has ended."""
        with self._lock:
            if self.end:
                return
            self.end = "abandoned"
        self.give_back()

    def give_back(self) -> None:
        """Nothing will be saved. Whoever has claimed it calls this if that failed."""
        self._filling.stop()
        self._owner.give_up()


class Begun:
    """The save that a writer has begun last."""

    def __init__(self, save: LayeredSave) -> None:
        self._save = weakref.ref(save)
        self._lease = save._lease

    def settle(self) -> None:
        """Another save begins. One that was lost is abandoned: the next would wait for its memory for ever.

        Raises:
            UsageError: it is not over.
        """
        if self._lease.end:
            return
        if self._save() is not None:
            raise UsageError(
                f"the layer-wise save of step {self._lease.step} is not over: finish or abandon it before the next save"
            )
        self._lease.abandon()

    def abandon(self) -> None:
        """No save begins any more."""
        self._lease.abandon()


class LayeredSave:
    """A save whose snapshot is filled layer by layer, as `Writer.begin` returns it.

    Either `finish` or `abandon` ends it; a ``with`` abandons what was not finished. Any thread may call it.

    Attributes:
        step: the one that was given.
    """

    def __init__(
        self,
        step: int,
        flat: FlatState,
        layers: Mapping[str, Sequence[str]],
        snapshot: Snapshot,
        pool: ThreadPoolExecutor,
        owner: Owner,
    ) -> None:
        """
        Args:
            flat: the state, or one of its form; see `Awaited`.
            layers: the names of each layer's tensors; each at most once (see `checked_layers`).
            snapshot: memory for it, not filled.
            pool: threads that copy layers and do nothing else.
        """
        self.step = step
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
        self._pool = pool
        self._owner = owner
        self._lock = threading.RLock()
        self._now: FlatState | None = None  # as it was when `rest` was called
        self._lease = Lease(step, self._filling, owner)

    @property
    def is_open(self) -> bool:
        """Whether it was neither finished nor abandoned."""
        return not self._lease.end

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
        """Begin to copy a layer: it does not change before `wait` for it has returned.

        A layer that was copied already is copied again: it has changed since.

        Args:
            layer: its name.
            sources: where its tensors are, by name; of those that are missing, where they were.
            copied: called by the thread that copied the last of it, before `wait` returns; what it raises fails the
                save.

        Raises:
            UsageError: there is no such layer; it was finished or abandoned; a source has another dtype or shape.
            FencedError, CommitUnknownError, WriterClosedError: the writer is finished.
        """
        with self._lock:
            self._lease.check()
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
        """Return once nobody reads the layer any more, so that it may change (None: any layer).

        An error of its copy is not raised here: training may go on, and the save fails.

        Returns:
            seconds waited; 0.0 if there was nothing to wait for, as for a layer that is unknown or not `ready`.
        """
        if layer is not None and layer not in self._layers:
            return 0.0
        return self._filling.wait(layer)

    def copies(self) -> list[LayerCopy]:
        """How the layers were copied whose copy was asked for so far."""
        return self._filling.copies()

    def rest(self, state: Any = None) -> None:
        """Copy what belongs to no layer, as it is now; it may change when this returns.

        `finish` does it, unless it was done; of two calls the later one counts.

        Args:
            state: as it is now, with tensors of the same names, dtypes and shapes; None: as it was given to `begin`.
                Layers that are not `ready` yet will be copied from it.

        Raises:
            UsageError: it is not open; or `state` has other tensors than it was begun with.
            UnsupportedStateError: as `Writer.save`.
            WriterClosedError: the writer was closed.
        """
        with self._lock:
            self._lease.check()
            flat = self._flat
            if state is not None:
                flat = state if isinstance(state, FlatState) else bridge.flattened(state)
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
        metadata: Mapping[str, Any] | None = None,
        tags: str | Sequence[str] = (),
        updates: Any = None,
    ) -> PendingSave:
        """Call `rest`, begin with every layer that is not `ready` yet, and hand the save on.

        Layers are waited for in the background: `wait` still has to be called before they change.

        Args:
            state: as for `rest`; None: as it was when `rest` was called, or else as it was given to `begin`.
            metadata, tags, updates: as for `Writer.save_async`.

        Raises:
            as `rest`; the save stays open, and may be abandoned.
            FencedError, CommitUnknownError, WriterClosedError: the writer is finished, and the save abandoned.
        """
        labels = Labels.of(metadata, tags)
        with self._lock:
            self._lease.check()
            if state is not None or self._now is None:
                self.rest(state)
            assert self._now is not None
            self._lease.claim()
            try:
                for name, layer in self._layers.items():
                    if not layer.started:
                        self._start(name, None)
                self._snapshot.flat = replace(self._snapshot.flat, tree=self._now.tree)
            except BaseException:
                self._lease.give_back()
                raise
            return self._owner.hand_over(self._now, labels, updates, self._filling)

    def abandon(self) -> None:
        """Save nothing. Returns when nobody reads the layers; does nothing to one that is not open any more."""
        self._lease.abandon()

    def __enter__(self) -> LayeredSave:
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()

    def _copy_rest(self, flat: FlatState) -> None:
        """What is in no layer may change as soon as `finish` returns."""
        layered = {name for layer in self._layers.values() for name in layer.names}
        into = self._snapshot.flat.tensors
        rest = [(source, memory(into[name])) for name, source in flat.tensors.items() if name not in layered]
        jobs = copy_jobs(rest)
        if self._filling.busy():  # behind the layers in the queue, this would wait for all of them
            for job in jobs:
                job()
            return
        try:
            run_all(self._pool, jobs)
        except RuntimeError:
            self._owner.check_open()  # closed by another thread, and its pool with it
            raise

    def _start(self, name: str, copied: Callable[[], None] | None) -> None:
        self._owner.check_open()
        try:
            self._filling.start(name, copied)
        except RuntimeError:
            self._owner.check_open()
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
