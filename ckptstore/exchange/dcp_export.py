"""Export a checkpoint as a folder that ``torch.distributed.checkpoint.load`` reads.

Tensors that are stored in shards are written as shards: a rank that loads its part reads no other. Every byte that is
read is verified. The tensors of one file are in memory at a time; values and arrays of numpy all are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ckptstore.errors import FormatError, MissingDependencyError, TensorNotFoundError, UsageError
from ckptstore.exchange.atomic_files import output_folder
from ckptstore.exchange.export import ExportResult, PrefixSelection
from ckptstore.formats import dtypes
from ckptstore.formats.segment_files.boxes import Box
from ckptstore.formats.states.dcp_member import ABOUT, piece_name
from ckptstore.formats.states.registered_types import Foreign
from ckptstore.formats.states.tree import tag_of, tensor_names, unflatten
from ckptstore.frameworks import bridge
from ckptstore.frameworks.dcp_items import SuppliedBytes, SuppliedTensor
from ckptstore.host.buffers import Bytes, Staging
from ckptstore.host.progress import Progress, Tally
from ckptstore.host.threads import Workers, default_threads, workers
from ckptstore.restore.box_reads import BoxRead, fill, jobs_of, new_sinks
from ckptstore.restore.load import restore_with
from ckptstore.restore.selection import choose

if TYPE_CHECKING:
    from ckptstore.log.journal import Journal
    from ckptstore.restore.restore_source import RestoreSource

__all__ = ["export_dcp"]

_FILE_BYTES: Final = 500_000_000
"""Bytes of tensors in a file, unless the caller says it. torch's writer keeps the tensors of a file until it is
complete, so that much is in memory."""


def export_dcp(
    journal: Journal,
    ref: str | int,
    out: str | Path,
    select: str | Sequence[str] | PrefixSelection | None = None,
    max_shard_bytes: int | None = None,
    progress: Progress | None = None,
) -> ExportResult:
    """Write a checkpoint into a new folder. It appears complete and durable, or not at all.

    Args:
        journal: the journal of the store.
        ref: the checkpoint.
        out: the folder. It must not exist.
        select: as for `export`; names are those that DCP gives.
        max_shard_bytes: bytes of tensors in one file, and so in memory.
        progress: called with the number of tensor bytes written.

    Raises:
        UsageError: `out` exists or is inside a store; the state is not a dict.
        MissingDependencyError: torch is not installed.
        UnsupportedStateError: such a folder cannot have the state.
        StorageError: the output cannot be written. Nothing is left behind.
        CheckpointNotFoundError, CorruptionError, TensorNotFoundError: as `export`.
    """
    torch_side = _torch_side(out)
    out = Path(out)
    with output_folder(out) as folder, workers(default_threads(), "read") as readers:

        def written(found: RestoreSource) -> ExportResult:
            content = _chosen(_content(found, torch_side, _Reads(found, readers, progress)), select, found.ref)
            tensors = [one for one in content.flat.values() if isinstance(one, SuppliedTensor)]
            torch_side.write_folder(folder.empty(), content.flat, content.paths, max_shard_bytes or _FILE_BYTES)
            nbytes = sum(dtypes.nbytes(dtypes.get(one.dtype), one.shape) for one in tensors)
            return ExportResult(
                found.ref, "dcp", (), None, nbytes, len(tensors), tuple(content.converted), lossy=found.lossy
            )

        result = restore_with(journal, ref, written)
        folder.publish()
    files = tuple(sorted(out.glob("*.distcp")))
    return ExportResult(
        result.ref, "dcp", files, None, result.nbytes, result.tensors, result.converted, lossy=result.lossy
    )


def _torch_side(out: str | Path) -> ModuleType:
    try:
        from ckptstore.frameworks import torch_dcp_writer
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"{out}: torch itself writes the folders of torch.distributed.checkpoint: pip install 'ckptstore[torch]'"
        ) from error
    return torch_dcp_writer


class _Reads:
    """Reads of an open checkpoint."""

    def __init__(self, found: RestoreSource, readers: Workers, progress: Progress | None) -> None:
        self._found = found
        self._readers = readers
        self._staging = Staging.for_chunks(2 * readers.threads)
        self.tally = Tally(progress)

    def box(self, name: str, box: Box) -> Bytes:
        """The image of a box."""
        parts = self._found.stored(name)
        (sink,) = new_sinks([(parts, box)])
        fill(jobs_of([BoxRead(parts, sink)]), self._readers, self._staging, advance=self.tally.advance)
        return sink.image

    def array(self, name: str) -> Any:
        """A tensor as an array."""
        entry = self._found.tensors[name]
        image = self.box(name, Box.whole(entry.shape))
        return image.view(dtypes.get(entry.dtype).numpy).reshape(entry.shape)

    def tensor(self, name: str) -> Any:
        """A tensor in memory, as torch's."""
        entry = self._found.tensors[name]
        return bridge.tensors().from_buffer(entry.dtype, entry.shape, self.box(name, Box.whole(entry.shape)))

    def raw(self, name: str) -> bytes:
        """The bytes of a tensor."""
        return bytes(self.box(name, Box.whole(self._found.tensors[name].shape)))

    def supplied(self, name: str) -> SuppliedTensor:
        """A tensor that is read later, in the boxes in which it is stored."""
        entry = self._found.tensors[name]
        self.tally.total += entry.nbytes
        boxes = _without_empty([box for _, box in self._found.stored(name)])
        return SuppliedTensor(entry.dtype, tuple(entry.shape), boxes, lambda box: self.box(name, box))

    def pieced(self, pieces: Mapping[str, Mapping[str, Any]]) -> SuppliedTensor:
        """A tensor whose pieces are tensors of their own in the store (`dcp_member`)."""
        places: dict[Box, str] = {}
        whole: tuple[int, ...] = ()
        dtype = ""
        for piece, said in pieces.items():
            entry = self._found.tensors[piece]
            self.tally.total += entry.nbytes
            places[Box(tuple(said["offset"]), tuple(entry.shape))] = piece
            dtype, whole = entry.dtype, tuple(said["whole"])
        return SuppliedTensor(
            dtype, whole, _without_empty(list(places)), lambda box: self.box(places[box], Box.whole(box.shape))
        )


def _without_empty(boxes: list[Box]) -> tuple[Box, ...]:
    return tuple(box for box in boxes if box.size) or tuple(boxes[:1])


@dataclass(slots=True)
class _Content:
    """What is written: by DCP's names; DCP's paths; the names of values that were converted."""

    flat: dict[str, Any]
    paths: Mapping[str, tuple[str | int, ...]]
    converted: list[str]


def _content(found: RestoreSource, torch_side: ModuleType, reads: _Reads) -> _Content:
    tree = found.tree
    if not isinstance(tree, dict) or tag_of(tree) not in (None, "$odict", "$dict"):
        raise UsageError(f"checkpoint {found.ref}: a DCP folder holds a dict, and this state is not one")
    about = _about(tree, found.tensors)
    tensors = about.get("bytes", {}) | {one: True for two in about.get("pieces", {}).values() for one in two}
    in_memory = set(_inside_values(tree)) | {name for names in about.get("parts", {}).values() for name in names}

    def resolve(name: str, origin: str) -> Any:
        if name in tensors:
            return None  # below
        if origin == "numpy":
            return reads.array(name)
        return reads.tensor(name) if name in in_memory else reads.supplied(name)

    make = bridge.object_maker(to_torch=True, keep_foreign=True)
    state = unflatten(tree, resolve, bridge.tensors().revive, make)
    converted: list[str] = []
    if not about:
        flat, paths = torch_side.flattened_as_dcp(state)
        return _Content({name: _without_foreign(name, one, converted) for name, one in flat.items()}, paths, converted)
    flat = {name: one for name, one in state.items() if name != ABOUT and name not in tensors}
    flat |= {name: SuppliedBytes(partial(reads.raw, name)) for name in about.get("bytes", {})}
    flat |= {name: reads.pieced(pieces) for name, pieces in about.get("pieces", {}).items()}
    paths = {name: tuple(path) for name, path in about.get("planner", {}).items()}
    return _Content({name: _without_foreign(name, one, converted) for name, one in flat.items()}, paths, converted)


def _about(tree: dict[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    """What a save through DCP says of itself (`dcp_member`); empty: it was another save. Raises `FormatError`."""
    if ABOUT not in tree:
        return {}
    about = unflatten(tree[ABOUT], lambda name, _: name)
    if not isinstance(about, dict) or not all(isinstance(one, dict) for one in about.values()):
        raise _made_up("it is not a dict of dicts")
    pieces = about.get("pieces", {})
    names = [*about.get("bytes", {})]
    for name, found in pieces.items():
        if not isinstance(found, dict) or not found or not all(map(_is_place, found.values())):
            raise _made_up(f"the pieces of {name!r:.80} are {found!r:.80}")
        if [piece_name(name, said["offset"]) for said in found.values()] != list(found):
            raise _made_up(f"the pieces of {name!r:.80} are not named after their places")
        names += found
    for found in about.get("parts", {}).values():
        names += found if isinstance(found, list) else [found]
    if missing := [name for name in names if name not in tensors]:
        raise _made_up(f"it names the tensor {missing[0]!r:.80}, which is not there")
    for name, path in about.get("planner", {}).items():
        if not isinstance(path, list) or not path or not all(type(key) in (str, int) for key in path):
            raise _made_up(f"the path of {name!r:.80} is {path!r:.80}")
    return about


def _is_place(said: Any) -> bool:
    """Whether it says where a piece is: offset and whole shape."""
    if not isinstance(said, dict) or said.keys() != {"offset", "whole"}:
        return False
    numbers = [one for two in said.values() for one in (two if isinstance(two, list) else [None])]
    return all(type(one) is int and one >= 0 for one in numbers)


def _made_up(why: str) -> FormatError:
    return FormatError(f"{ABOUT} is not what a save through torch.distributed.checkpoint has: {why}")


def _inside_values(tree: Any, inside: bool = False) -> Iterator[str]:
    """Names of the tensors in objects, tuples and sets, which DCP pickles as one value."""
    if isinstance(tree, list):
        for one in tree:
            yield from _inside_values(one, inside)
        return
    if not isinstance(tree, dict):
        return
    tag = tag_of(tree)
    if inside or tag in ("$tuple", "$object"):
        yield from tensor_names(tree)
        return
    for one in tree.values():
        if tag in ("$dict", "$odict", "$counter") and isinstance(one, list):
            yield from _inside_values([value for _, value in one])  # pairs
        else:
            yield from _inside_values(one)


def _without_foreign(name: str, value: Any, converted: list[str]) -> Any:
    """The value with the parts of objects that only ckptstore knows in their place: they would need it to be loaded."""
    if isinstance(value, Foreign) or type(value).__module__.startswith("ckptstore."):
        if isinstance(value, SuppliedTensor | SuppliedBytes):
            return value
        converted.append(name)
        return _without_foreign(name, value.value if isinstance(value, Foreign) else tuple(value), [])
    if type(value) is dict:
        return {key: _without_foreign(name, one, converted) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)([_without_foreign(name, one, converted) for one in value])
    return value


def _chosen(content: _Content, select: str | Sequence[str] | PrefixSelection | None, ref: str) -> _Content:
    """The part that a selection names."""
    prefix, globs = (select.prefix, select.select) if isinstance(select, PrefixSelection) else ("", select)
    tensors = [name for name, one in content.flat.items() if isinstance(one, SuppliedTensor | np.ndarray)]
    kept = set(choose(tensors, globs or None, ref))
    flat = {name: one for name, one in content.flat.items() if name in kept or name not in set(tensors)}
    if not isinstance(select, PrefixSelection):
        return _Content(flat, content.paths, content.converted)
    if not isinstance(prefix, str) or not prefix.endswith("."):
        raise UsageError(f"strip={prefix!r:.80}: pass a prefix that ends with its dot, such as 'model.'")
    cut = {name[len(prefix) :]: one for name, one in flat.items() if name.startswith(prefix) and name != prefix}
    if not any(isinstance(one, SuppliedTensor) for one in cut.values()):
        raise TensorNotFoundError(f"checkpoint {ref}: no tensor's name begins with {prefix!r}")
    return _Content(cut, {name: (name,) for name in cut}, content.converted)
