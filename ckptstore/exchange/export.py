"""Export a checkpoint to ``.safetensors`` files (one, or shards with an index as in Hugging Face) or to a ``.pt`` file.

The files appear under their names complete and durable, or not at all. Memory use is a few chunks. For a tensor stored
in shards, it is one chunk of each shard at the current position.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from ckptstore.errors import CkptError, FormatError, TensorNotFoundError, UsageError
from ckptstore.exchange.atomic_files import OutputFile, Outputs, outputs, refuse_missing_folder, refuse_store
from ckptstore.exchange.safetensors_files import DTYPES_MEMBER, read_safetensors
from ckptstore.exchange.torch_archive import PlainParts, TensorReference, TorchObject, is_archive, write_archive
from ckptstore.exchange.weight_files import CHECKPOINT_MEMBER, STATE_MEMBER, exported_ref
from ckptstore.formats import dtypes, jsontext
from ckptstore.formats.segment_files.layout import TensorSpec, order
from ckptstore.formats.segment_files.segment import TensorEntry
from ckptstore.formats.states.names import bare_name
from ckptstore.formats.states.state import (
    FlatState,
    TensorSource,
    check_size,
    places,
    select_places,
    tensor_names,
    unflatten,
)
from ckptstore.formats.states.tree import member, only_tensors
from ckptstore.host.buffers import BLOCK_BYTES
from ckptstore.host.progress import Progress, Tally
from ckptstore.restore.load import restore_with
from ckptstore.restore.open_checkpoint import OpenCheckpoint
from ckptstore.restore.restore_source import RestoreSource
from ckptstore.restore.selection import TensorSelection, select_from
from ckptstore.restore.tensor_streams import streams

if TYPE_CHECKING:
    from ckptstore.log.journal import Journal

__all__ = [
    "ExportResult",
    "PrefixSelection",
    "chosen_tensors",
    "export",
    "export_resident",
    "file_metadata",
    "is_export",
    "shards",
    "with_references",
    "write_export",
]

_HEADER_ALIGN: Final = 128

Chunks = Callable[[str], Iterator[memoryview]]


@dataclass(frozen=True, slots=True)
class PrefixSelection:
    """A selection of tensors by prefix. They are written without the prefix, as `load_state_dict` needs them.

    Attributes:
        prefix: the prefix (``model.``). Tensors without it are left out.
        select: globs. The whole name of a tensor must match one of them, too. None: no further condition.
    """

    prefix: str
    select: str | Sequence[str] | None = None


@dataclass(frozen=True, slots=True)
class ExportResult:
    """The result of an export.

    Attributes:
        ref: the checkpoint.
        format: ``safetensors`` or ``pt``.
        paths: the files with tensors, in order.
        index: the ``.index.json`` of a sharded export, or None.
        nbytes: bytes of tensors.
        tensors: number of distinct tensors.
        converted: places of values that were converted, because a ``.pt`` file without pickled code cannot have them:
            numpy arrays became tensors, numpy scalars became Python numbers, frozensets became sets.
        lossy: whether the checkpoint differs from the trained state (it was stored lossily on request).
        tied: a safetensors file has each tensor once. For every further selected place of a tensor: (name of that
            place, name in the file). A reader that uses the state's tree finds all of them.
    """

    ref: str
    format: str
    paths: tuple[Path, ...]
    index: Path | None
    nbytes: int
    tensors: int
    converted: tuple[str, ...] = ()
    lossy: bool = False
    tied: tuple[tuple[str, str], ...] = ()


def export(
    journal: Journal,
    ref: str | int,
    out: str | Path,
    format: Literal["safetensors", "pt"] = "safetensors",
    select: str | Sequence[str] | PrefixSelection | None = None,
    overwrite: bool = False,
    max_shard_bytes: int | None = None,
    progress: Progress | None = None,
) -> ExportResult:
    """Write a checkpoint to `out`, verifying every byte that is read.

    A safetensors file has the rest of the state in its metadata (`STATE_MEMBER`). ``torch.load(weights_only=True)``
    loads a ``.pt`` file as the nested state that was saved. Writing it does not need torch.

    Args:
        journal: the journal of the store.
        ref: the checkpoint.
        out: the file. With shards, the names of the shards and of the index are derived from it.
        format: the file format.
        select: only tensors at places that match one of these globs (as in `Store.load`). A tensor's name in the file
            is the name of its first matching place, without the ``_orig_mod`` of compiled modules. With a
            `PrefixSelection`, the file is a flat dict of tensors, without the rest of the state. Exception: if the part
            below the prefix has more than tensors, a ``.pt`` file has that part as it was saved.
        overwrite: replace existing files.
        max_shard_bytes: start another safetensors file before one exceeds this size. A larger tensor gets its own file.
        progress: called with the number of tensor bytes written.

    Raises:
        UsageError: `out` exists, is inside a store, or is not a regular file; its folder does not exist; shards of a
            ``.pt`` file were requested; or a tensor's name without the prefix is not valid in a file.
        StorageError: the output cannot be written. No file is left behind.
        UnsupportedStateError: such a file cannot have the state.
        CheckpointNotFoundError: there is no such checkpoint.
        TensorNotFoundError: no tensor matches the selection.
        CorruptionError: the checkpoint is damaged.
    """
    out = Path(out)
    if format == "pt" and max_shard_bytes is not None:
        raise UsageError("a .pt file has no shards; --max-shard-size is for safetensors")
    if out.is_dir():
        raise UsageError(f"{out} is a folder: name the file to write")
    refuse_store(out)
    refuse_missing_folder(out)

    def written(found: OpenCheckpoint) -> ExportResult:
        return write_export(found, out, format, select, overwrite, max_shard_bytes, progress)

    return restore_with(journal, ref, written)


def export_resident(
    found: RestoreSource,
    out: str | Path,
    format: Literal["safetensors", "pt"] | None = None,
    select: str | Sequence[str] | None = None,
) -> ExportResult:
    """Export a checkpoint that is in memory. An existing file at `out` is replaced. Raises as `export`."""
    out = Path(out)
    refuse_store(out)
    refuse_missing_folder(out)
    pickled = out.suffix.lower() in (".pt", ".pth", ".bin", ".ckpt")
    return write_export(found, out, format or ("pt" if pickled else "safetensors"), select, overwrite=True)


def export_state(flat: FlatState, out: Path, format: Literal["safetensors", "pt"]) -> list[str]:
    """Write a state that is in no store. An existing file at `out` is replaced.

    Returns:
        as `ExportResult.converted`.

    Raises:
        as `export`.
    """
    refuse_store(out)
    refuse_missing_folder(out)
    entries = {name: TensorEntry(name, one.dtype, tuple(one.shape), ()) for name, one in flat.tensors.items()}
    content = _Content("", flat.tree, entries, lambda name: _chunks_of(flat.tensors[name]))
    converted: list[str] = []
    with outputs(overwrite=True) as files:
        file = files.create(out, content.nbytes)
        if format == "pt":
            converted = _write_pt(file, content)
        else:
            members = list(entries.values())
            _write_safetensors(file, members, file_metadata("", [flat.tree], members), content.chunks)
        files.publish()
    return converted


def _chunks_of(source: TensorSource) -> Iterator[memoryview]:
    image = source.view()
    space = np.empty(min(source.nbytes, BLOCK_BYTES), np.uint8) if image is None else image[:0]
    for begin in range(0, source.nbytes, BLOCK_BYTES):
        end = min(source.nbytes, begin + BLOCK_BYTES)
        if image is not None:
            yield image[begin:end].data
            continue
        part = space[: end - begin]
        source.read(begin, part)
        yield part.data


def is_export(path: Path) -> bool:
    """Whether a file is marked as exported from a store."""
    try:
        if is_archive(path):
            return True
        with ExitStack() as stack:
            return exported_ref(read_safetensors(path, stack)[1]) is not None
    except (CkptError, OSError):
        return False


def write_export(
    found: RestoreSource,
    out: Path,
    format: Literal["safetensors", "pt"],
    select: str | Sequence[str] | PrefixSelection | None,
    overwrite: bool,
    max_shard_bytes: int | None = None,
    progress: Progress | None = None,
) -> ExportResult:
    """Write an open checkpoint to `out`, as `export` does. Its folder exists and is not in a store."""
    with outputs(overwrite) as files:
        if format == "pt" and isinstance(select, PrefixSelection) and (part := _part(found, select)) is not None:
            names, tree = {name: name for name in tensor_names(part)}, part
            tied: tuple[tuple[str, str], ...] = ()
        else:
            names, tree, tied = chosen_tensors(found, select)
        chosen = {name: replace(found.tensors[tensor], name=name) for tensor, name in names.items()}
        content = _Content(found.ref, tree, chosen, _counted(found, names, progress))
        made = ExportResult(found.ref, format, (out,), None, content.nbytes, len(chosen), lossy=found.lossy)
        if format == "pt":
            converted = _write_pt(files.create(out, content.nbytes), content)
            made = replace(made, converted=tuple(converted))
        else:
            paths, index = _write_shards(files, out, content, max_shard_bytes)
            made = replace(made, paths=paths, index=index, tied=tied)
        files.publish()
        return made


@dataclass(frozen=True, slots=True)
class _Content:
    """The content of the files.

    Attributes:
        ref: the checkpoint; empty: the state is in no store.
        tree: the typed JSON tree of the selection, with the tensors' names in the files.
        entries: the tensors, by name in the files.
        chunks: yields a tensor's bytes.
    """

    ref: str
    tree: Any
    entries: Mapping[str, TensorEntry]
    chunks: Chunks

    @property
    def nbytes(self) -> int:
        """Bytes of tensors."""
        return sum(entry.nbytes for entry in self.entries.values())


def _counted(found: RestoreSource, names: Mapping[str, str], progress: Progress | None) -> Chunks:
    """Make the function that yields a tensor's bytes, chunk by chunk, and reports progress. Thread-safe.

    Args:
        found: the checkpoint.
        names: name in the checkpoint -> name in the file.
        progress: receives the reports.
    """
    stream = streams(found)
    stored = {name: tensor for tensor, name in names.items()}
    tally = Tally(progress, sum(found.tensors[tensor].nbytes for tensor in names))

    def chunks(name: str) -> Iterator[memoryview]:
        for data in stream(stored[name]):
            yield data.data
            tally.advance(len(data))

    return chunks


_Chosen = tuple[dict[str, str], Any, tuple[tuple[str, str], ...]]
"""Tensor -> its name in the file; the tree with these names; `ExportResult.tied`."""


def chosen_tensors(found: RestoreSource, select: str | Sequence[str] | PrefixSelection | None) -> _Chosen:
    """The tensors of a selection, their names in a safetensors file, the tree with these names, and the tied places.

    Raises `UsageError` or `TensorNotFoundError`, as `export`.
    """
    return _flat(found, select) if isinstance(select, PrefixSelection) else _picked(found, select or None)


def _picked(found: RestoreSource, select: str | Sequence[str] | None) -> _Chosen:
    picked = select_from(found.tree, select, found.ref)
    names = picked.tensors
    short = _bare(names)
    if short == names:
        return names, picked.tree(names), _tied(found, picked)
    kept = dict(enumerate(places(found.tree))) if picked.all else picked.kept
    tree = select_places(found.tree, {position: short[place.tensor] for position, place in kept.items()})
    tied = tuple((bare_name(name), bare_name(there)) for name, there in _tied(found, picked))
    return short, tree, tied


def _bare(names: Mapping[str, str]) -> dict[str, str]:
    """Remove the parts that `torch.compile` adds to names. If two names would become equal, all stay unchanged."""
    found = {tensor: bare_name(name) for tensor, name in names.items()}
    # Prevents: a lost tensor, because two tensors have the same name in the file.
    return found if len(set(found.values())) == len(set(names.values())) else dict(names)


def _part(found: RestoreSource, below: PrefixSelection) -> Any:
    """The part of the tree below a prefix, if it has more than tensors and no further selection applies; or None.

    An optimizer's state, for example, is nested and has numbers and groups. ``load_state_dict`` cannot use its tensors
    alone.
    """
    prefix = below.prefix
    if below.select is not None or not isinstance(prefix, str) or not prefix.endswith("."):
        return None
    part = member(found.tree, prefix[:-1])
    return None if part is None or only_tensors(part) else part


def _flat(found: RestoreSource, below: PrefixSelection) -> _Chosen:
    prefix = below.prefix
    if not isinstance(prefix, str) or not prefix:
        raise UsageError(f"strip={prefix!r:.80}: pass a prefix of tensor names, such as 'model.'")
    picked = select_from(found.tree, below.select or None, found.ref)
    every = places(found.tree) if picked.all else list(picked.kept.values())
    kept = [place for place in every if place.name.startswith(prefix)]
    if not kept:
        there = ", ".join(list(dict.fromkeys(repr(place.name.split(".")[0] + ".") for place in every))[:5])
        raise TensorNotFoundError(f"checkpoint {found.ref}: no tensor's name begins with {prefix!r}; there are {there}")
    shorts = _bare({place.name: place.name[len(prefix) :] for place in kept})
    names: dict[str, str] = {}
    origins: dict[str, str] = {}
    unflatten(found.tree, origins.setdefault)
    tree: dict[str, dict[str, str]] = {}
    tied = []
    for place in kept:  # names are distinct, so they are distinct without their common prefix
        short = shorts[place.name]
        if not short or short[0] in ".$" or short == "__metadata__" or short.startswith("ckptstore/"):
            raise UsageError(
                f"without {prefix!r} a tensor would be named {short!r}, which is invalid in a file; "
                "end the prefix with its dot"
            )
        if names.setdefault(place.tensor, short) != short:
            tied.append((short, names[place.tensor]))
        tree[short] = {"$t" if origins[place.tensor] == "torch" else "$a": names[place.tensor]}
    return names, tree, tuple(tied)


def _tied(found: RestoreSource, picked: TensorSelection) -> tuple[tuple[str, str], ...]:
    """See `ExportResult.tied`."""
    names = picked.tensors
    taken = places(found.tree) if picked.all else picked.kept.values()
    return tuple((place.name, names[place.tensor]) for place in taken if place.name != names[place.tensor])


# safetensors


def _write_shards(
    files: Outputs, out: Path, content: _Content, limit: int | None
) -> tuple[tuple[Path, ...], Path | None]:
    entries = content.entries
    groups = shards(entries, limit)
    if len(groups) == 1:
        paths = [out]
    else:
        count = len(groups)
        paths = [out.with_name(f"{out.stem}-{n:05d}-of-{count:05d}{out.suffix}") for n in range(1, count + 1)]
    index = out.with_name(f"{out.name}.index.json") if len(groups) > 1 else None
    if index is not None:
        files.refuse_existing(index)
    for number, (path, names) in enumerate(zip(paths, groups, strict=True)):
        members = [entries[name] for name in names]
        metadata = file_metadata(content.ref, [] if number else [content.tree], members)
        file = files.create(path, sum(entry.nbytes for entry in members))
        _write_safetensors(file, members, metadata, content.chunks)
    if index is not None:
        where = {name: path.name for path, names in zip(paths, groups, strict=True) for name in names}
        text = json.dumps({"metadata": {"total_size": content.nbytes}, "weight_map": where}, indent=2) + "\n"
        files.create(index, len(text)).write(text.encode())  # published last: readers find the shards by it
    return tuple(paths), index


def shards(entries: Mapping[str, TensorEntry], limit: int | None) -> list[list[str]]:
    """The names of the tensors of each file, in order: another file begins before one exceeds `limit` bytes."""
    found: list[list[str]] = [[]]
    size = 0
    for name, entry in entries.items():
        if limit is not None and found[-1] and size + entry.nbytes > limit:
            found.append([])
            size = 0
        found[-1].append(name)
        size += entry.nbytes
    return found


def file_metadata(ref: str, trees: Sequence[Any], entries: Sequence[TensorEntry]) -> dict[str, str]:
    """The ``__metadata__`` of a file, with the state's tree if `trees` has it: the tree of the state None is None."""
    metadata = {"format": "pt"}  # transformers refuses files without it
    if ref:
        metadata[CHECKPOINT_MEMBER] = ref
    foreign = {entry.name: entry.dtype for entry in entries if dtypes.get(entry.dtype).storage != entry.dtype}
    if foreign:
        metadata[DTYPES_MEMBER] = json.dumps(foreign)
    for tree in trees:
        check_size(tree)
        metadata[STATE_MEMBER] = jsontext.dumps(tree).decode()
    return metadata


def _write_safetensors(
    file: OutputFile, entries: Sequence[TensorEntry], metadata: Mapping[str, str], chunks: Chunks
) -> None:
    header: dict[str, Any] = {"__metadata__": metadata}
    specs = order([TensorSpec(entry.name, entry.dtype, tuple(entry.shape)) for entry in entries])
    end = 0
    for spec in specs:
        dtype = dtypes.get(spec.dtype)
        header[spec.name] = {
            "dtype": dtype.storage,
            "shape": list(dtypes.storage_shape(dtype, spec.shape)),
            "data_offsets": [end, end + spec.nbytes],
        }
        end += spec.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _HEADER_ALIGN)
    file.write(struct.pack("<Q", len(text)) + text)
    for spec in specs:
        for part in chunks(spec.name):
            file.write(part)


# .pt


def _write_pt(file: OutputFile, content: _Content) -> list[str]:
    state, arrays = with_references(content.tree, content.entries)
    return arrays + write_archive(file, state, content.chunks)


def with_references(tree: Any, entries: Mapping[str, TensorEntry]) -> tuple[Any, list[str]]:
    """A state as `write_archive` takes it, and the names of its numpy arrays, which become tensors.

    Args:
        tree: the tree of the state.
        entries: its tensors.
    """
    arrays: list[str] = []

    def reference(name: str, origin: Literal["torch", "numpy"]) -> TensorReference:
        if origin == "numpy":
            arrays.append(name)
        entry = entries[name]
        return TensorReference(name, entry.dtype, tuple(entry.shape), entry.nbytes)

    return unflatten(tree, reference, _REVIVE, lambda _kind, value, _name: PlainParts(value)), arrays


def _dtype(name: str) -> TorchObject:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise FormatError(f"torch has no dtype {name!r:.80}")  # the name would be written into a pickle
    return TorchObject(name)


_REVIVE: Final[Mapping[str, Callable[[Any], Any]]] = {
    "$size": lambda sizes: TorchObject("Size", (tuple(sizes),)),
    "$dtype": _dtype,
    "$device": lambda value: TorchObject("device", (value,)),
}
