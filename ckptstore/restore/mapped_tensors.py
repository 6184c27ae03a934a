"""Tensors that are mapped from the medium, each verified when it is first asked for."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from ckptstore.errors import UsageError
from ckptstore.formats import dtypes
from ckptstore.formats.segment_files.segment import TensorEntry
from ckptstore.formats.states.state import places
from ckptstore.frameworks import bridge
from ckptstore.host.buffers import Bytes
from ckptstore.host.threads import default_threads, run_all, workers
from ckptstore.log.journal import Journal
from ckptstore.restore.load import mappable, restore_with
from ckptstore.restore.open_checkpoint import OpenCheckpoint
from ckptstore.restore.selection import one_of, select_from
from ckptstore.segments.segment_reader import MappedTensor, map_segment

__all__ = ["MappedTensors", "map_tensors"]


class MappedTensors(Mapping[str, Any]):
    """The tensors of a checkpoint by name, as private copy-on-write views of its file (`Store.map_tensors`).

    A tensor is compared with its hashes when it is first asked for. Several threads may ask. The file stays as long as
    this object or one of its tensors exists.

    Attributes:
        ref: the checkpoint, as ``STEP@TERM``.
    """

    def __init__(
        self, ref: str, named: Mapping[str, str], mapped: Mapping[str, MappedTensor], *, to_torch: bool
    ) -> None:
        """
        Args:
            named: name of a place -> tensor.
            mapped: tensor -> its entry and its bytes, not verified.
            to_torch: return torch tensors.
        """
        self.ref = ref
        self._named = named
        self._mapped = mapped
        self._to_torch = to_torch
        self._made: dict[str, Any] = {}
        self._lock = threading.Lock()

    def __getitem__(self, name: str) -> Any:
        """A tensor, verified. Every call returns the same object.

        Raises:
            TensorNotFoundError: there is no tensor of that name; suggests names that are close.
            CorruptSegmentError: its bytes are not those that were written. Every call raises it.
        """
        tensor = self._named[one_of(self._named, name, self.ref)]
        if (made := self._made.get(tensor)) is None:
            mapped = self._mapped[tensor]
            mapped.check()
            with self._lock:
                made = self._made.setdefault(tensor, self._tensor(mapped.entry, mapped.image))
        return made

    def __contains__(self, name: object) -> bool:
        return name in self._named

    def __iter__(self) -> Iterator[str]:
        return iter(self._named)

    def __len__(self) -> int:
        return len(self._named)

    def get(self, name: str, default: Any = None) -> Any:
        """The tensor of a name, verified; `default` if there is none."""
        if name not in self:
            return default
        return self[name]

    def verify(self, names: Iterable[str] | None = None) -> None:
        """Verify tensors that were not asked for yet, in parallel.

        Args:
            names: their names; None: all.

        Raises:
            TensorNotFoundError, CorruptSegmentError: as for a single one.
        """
        asked = [one_of(self._named, name, self.ref) for name in (self if names is None else names)]
        with workers(default_threads(), "verify") as readers:
            run_all(readers.pool, [partial(self.__getitem__, name) for name in asked])

    def _tensor(self, entry: TensorEntry, image: Bytes) -> Any:
        if self._to_torch:
            return bridge.tensors().from_buffer(entry.dtype, entry.shape, image)
        return image.view(dtypes.get(entry.dtype).numpy).reshape(entry.shape)


def map_tensors(
    journal: Journal, ref: str | int, select: str | Sequence[str] | None, framework: str | None
) -> MappedTensors:
    """See `Store.map_tensors`."""
    if framework not in (None, "torch", "numpy"):
        raise UsageError(f"framework={framework!r}: 'torch' or 'numpy'")
    to_torch = bridge.torch_in_use() if framework is None else framework == "torch"
    return restore_with(journal, ref, lambda found: _mapped(found, select, to_torch))


def _mapped(found: OpenCheckpoint, select: str | Sequence[str] | None, to_torch: bool) -> MappedTensors:
    picked = select_from(found.tree, select, found.ref)
    there = places(picked.whole) if picked.all else list(picked.kept.values())
    wanted = dict.fromkeys(place.tensor for place in there)
    if sharded := [name for name in wanted if found.sharded(name)]:
        raise UsageError(
            f"checkpoint {found.ref}: tensor {sharded[0]!r} is stored in shards, which are not one range of a file: "
            "read it with load() or read_boxes()"
        )
    mapped: dict[str, MappedTensor] = {}
    for reader, members in mappable({name: found.chains[name] for name in wanted}):
        mapped |= map_segment(reader, members)
    return MappedTensors(found.ref, {place.name: place.tensor for place in there}, mapped, to_torch=to_torch)
