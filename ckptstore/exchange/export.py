"""A checkpoint as ordinary files: ``.safetensors`` (one, or shards with an index as Hugging Face has) or ``.pt``.

The files appear under their names complete and durable, or not at all. Memory in use is a few chunks; of a tensor in
shards, a chunk of each shard at the present place.
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

from ckptstore.errors import CkptError, FormatError, TensorNotFoundError, UsageError
from ckptstore.exchange.atomic_files import OutputFile, Outputs, outputs, refuse_missing_folder, refuse_store
from ckptstore.exchange.safetensors_files import DTYPES_MEMBER, read_safetensors
from ckptstore.exchange.torch_archive import TensorReference, TorchObject, is_archive, write_archive
from ckptstore.exchange.weight_files import CHECKPOINT_MEMBER, STATE_MEMBER
from ckptstore.formats import dtypes, jsontext
from ckptstore.formats.layout import TensorSpec, order
from ckptstore.formats.names import bare_name
from ckptstore.formats.segment import TensorEntry
from ckptstore.formats.state import check_size, places, select_places, tensor_names, unflatten
from ckptstore.formats.tree import member, only_tensors
from ckptstore.host.progress import Progress, Tally
from ckptstore.restore.load import restore_with
from ckptstore.restore.open_checkpoint import OpenCheckpoint
from ckptstore.restore.restore_source import RestoreSource
from ckptstore.restore.selection import TensorSelection, select_from
from ckptstore.restore.tensor_streams import streams

if TYPE_CHECKING:
    from ckptstore.log.journal import Journal

__all__ = ["Below", "ExportResult", "export", "export_held", "is_export"]

_HEADER_ALIGN: Final = 128

Chunks = Callable[[str], Iterator[memoryview]]


@dataclass(frozen=True, slots=True)
class Below:
    """A selection whose tensors are written without what their names begin with, as `load_state_dict` takes them.

    Attributes:
        prefix: the beginning (``model.``); tensors without it are left out.
        select: globs that a tensor's whole name matches besides; None: any.
    """

    prefix: str
    select: str | Sequence[str] | None = None


@dataclass(frozen=True, slots=True)
class ExportResult:
    """What was written.

    Attributes:
        ref: the checkpoint.
        format: ``safetensors`` or ``pt``.
        paths: the files that hold tensors, in order.
        index: the ``.index.json`` of a sharded export, or None.
        nbytes: bytes of tensors.
        tensors: number of distinct tensors.
        converted: what could not be written as it was, because a ``.pt`` that needs no trust has no form for it: numpy
            arrays became tensors, numpy scalars Python numbers, frozensets sets.
        lossy: the checkpoint is not what training had, bit for bit (it was stored so on request).
        tied: of a safetensors file, which has each tensor once: (name of another of its places that was asked for, the
            name under which the file has it). A reader that takes the tree of the state has them all.
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
    select: str | Sequence[str] | Below | None = None,
    overwrite: bool = False,
    max_shard_bytes: int | None = None,
    progress: Progress | None = None,
) -> ExportResult:
    """Write a checkpoint to `out`, verifying every byte that is read.

    A safetensors file carries the rest of the state in its metadata (`STATE_MEMBER`). A ``.pt`` file loads with
    ``torch.load(weights_only=True)`` as the nested state that was saved; torch is not needed to write it.

    Args:
        journal: the store's.
        ref: the checkpoint.
        out: the file; with shards, the name they and the index are derived from.
        format: the file format.
        select: only tensors at places that match one of these patterns (globs, as in `Store.load`). A tensor's name in
            the file is that of the first such place, without the ``_orig_mod`` of compiled modules. `Below`: the file
            is a flat dict of tensors, without the rest of the state; a ``.pt`` file of a part that holds more than
            tensors has that part as it was saved.
        overwrite: replace files that exist.
        max_shard_bytes: start another safetensors file before one grows beyond this; a larger tensor stands alone.
        progress: told how many bytes of tensors are written.

    Raises:
        UsageError: `out` exists, is inside a store or no regular file, its folder does not exist, or shards of a
            ``.pt`` file are asked for; without what `Below` drops a tensor had no name that a file can have.
        StorageError: the output cannot be written. Nothing is left behind then.
        UnsupportedStateError: a state that has no place in such a file.
        CheckpointNotFoundError, TensorNotFoundError, CorruptionError.
    """
    out = Path(out)
    if format == "pt" and max_shard_bytes is not None:
        raise UsageError("a .pt file has no shards; --max-shard-size is for safetensors")
    if out.is_dir():
        raise UsageError(f"{out} is a folder: name the file to write")
    refuse_store(out)
    refuse_missing_folder(out)

    def written(found: OpenCheckpoint) -> ExportResult:
        return _written(found, out, format, select, overwrite, max_shard_bytes, progress)

    return restore_with(journal, ref, written)


def export_held(
    found: RestoreSource,
    out: str | Path,
    format: Literal["safetensors", "pt"] | None = None,
    select: str | Sequence[str] | None = None,
) -> ExportResult:
    """Likewise, of a checkpoint that is held in memory; what is at `out` is replaced. Raises as `export`."""
    out = Path(out)
    refuse_store(out)
    refuse_missing_folder(out)
    pickled = out.suffix.lower() in (".pt", ".pth", ".bin", ".ckpt")
    return _written(found, out, format or ("pt" if pickled else "safetensors"), select, overwrite=True)


def is_export(path: Path) -> bool:
    """Whether a file says of itself that it was exported from a store."""
    try:
        if is_archive(path):
            return True
        with ExitStack() as stack:
            return CHECKPOINT_MEMBER in read_safetensors(path, stack)[1]
    except (CkptError, OSError):
        return False


def _written(
    found: RestoreSource,
    out: Path,
    format: Literal["safetensors", "pt"],
    select: str | Sequence[str] | Below | None,
    overwrite: bool,
    max_shard_bytes: int | None = None,
    progress: Progress | None = None,
) -> ExportResult:
    with outputs(overwrite) as files:
        if not isinstance(select, Below):
            names, tree, tied = _picked(found, select or None)
        elif format == "pt" and (part := _part(found, select)) is not None:
            names, tree, tied = {name: name for name in tensor_names(part)}, part, ()
        else:
            names, tree, tied = _flat(found, select)
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
    """What goes into the files.

    Attributes:
        ref: the checkpoint.
        tree: the typed JSON tree of what was selected, with the names that tensors have in the files.
        entries: the tensors, by these names.
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
    """The bytes of a tensor, chunk by chunk; tells `progress`. Called from several threads.

    Args:
        found: the checkpoint.
        names: name in the checkpoint -> name in the file.
        progress: who is told.
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
"""tensor -> its name in the file; the tree with these names; `ExportResult.tied`."""


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
    """The names without what `torch.compile` put into them; as they are, if two would be one without it."""
    found = {tensor: bare_name(name) for tensor, name in names.items()}
    # Prevents: one of two tensors lost, in a file that has one name for both.
    return found if len(set(found.values())) == len(set(names.values())) else dict(names)


def _part(found: RestoreSource, below: Below) -> Any:
    """What is below a prefix as it was saved, if it holds more than tensors; None: it does not, or is selected from.

    An optimizer's state is nested, has numbers and groups: of its tensors alone no ``load_state_dict`` makes anything.
    """
    prefix = below.prefix
    if below.select is not None or not isinstance(prefix, str) or not prefix.endswith("."):
        return None
    part = member(found.tree, prefix[:-1])
    return None if part is None or only_tensors(part) else part


def _flat(found: RestoreSource, below: Below) -> _Chosen:
    prefix = below.prefix
    if not isinstance(prefix, str) or not prefix:
        raise UsageError(f"strip={prefix!r:.80}: it takes what names begin with, as 'model.'")
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
    for place in kept:  # names are distinct, and so they are without what all begin with
        short = shorts[place.name]
        if not short or short[0] in ".$" or short == "__metadata__" or short.startswith("ckptstore/"):
            raise UsageError(
                f"without {prefix!r} a tensor would be named {short!r}, which no file has; a prefix ends with its dot"
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
    shards = _split(entries, limit)
    if len(shards) == 1:
        paths = [out]
    else:
        count = len(shards)
        paths = [out.with_name(f"{out.stem}-{n:05d}-of-{count:05d}{out.suffix}") for n in range(1, count + 1)]
    index = out.with_name(f"{out.name}.index.json") if len(shards) > 1 else None
    if index is not None:
        files.refuse_existing(index)
    for number, (path, names) in enumerate(zip(paths, shards, strict=True)):
        members = [entries[name] for name in names]
        metadata = _metadata(content.ref, content.tree if number == 0 else None, members)
        file = files.create(path, sum(entry.nbytes for entry in members))
        _write_safetensors(file, members, metadata, content.chunks)
    if index is not None:
        where = {name: path.name for path, names in zip(paths, shards, strict=True) for name in names}
        text = json.dumps({"metadata": {"total_size": content.nbytes}, "weight_map": where}, indent=2) + "\n"
        files.create(index, len(text)).write(text.encode())  # published last: it makes the shards a model
    return tuple(paths), index


def _split(entries: Mapping[str, TensorEntry], limit: int | None) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name, entry in entries.items():
        if limit is not None and shards[-1] and size + entry.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += entry.nbytes
    return shards


def _metadata(ref: str, tree: Any, entries: Sequence[TensorEntry]) -> dict[str, str]:
    metadata = {"format": "pt", CHECKPOINT_MEMBER: ref}  # transformers refuses a file that does not say "pt"
    foreign = {entry.name: entry.dtype for entry in entries if dtypes.get(entry.dtype).storage != entry.dtype}
    if foreign:
        metadata[DTYPES_MEMBER] = json.dumps(foreign)
    if tree is not None:
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
    arrays: list[str] = []

    def reference(name: str, origin: Literal["torch", "numpy"]) -> TensorReference:
        if origin == "numpy":
            arrays.append(name)
        entry = content.entries[name]
        return TensorReference(name, entry.dtype, tuple(entry.shape), entry.nbytes)

    state = unflatten(content.tree, reference, _REVIVE)
    return arrays + write_archive(file, state, content.chunks)


def _dtype(name: str) -> TorchObject:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise FormatError(f"torch has no dtype {name!r:.80}")  # and it would end up in a pickle
    return TorchObject(name)


_REVIVE: Final[Mapping[str, Callable[[Any], Any]]] = {
    "$size": lambda sizes: TorchObject("Size", (tuple(sizes),)),
    "$dtype": _dtype,
    "$device": lambda value: TorchObject("device", (value,)),
}
