"""Open a series of checkpoints for analysis: files of other tools, folders and globs of them, or a store.

No code here holds a tensor in memory: a checkpoint is open while it is measured, and ranges of its tensors are read.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np

from ckptstore.errors import UsageError
from ckptstore.exchange.checkpoint_folders import is_companion, survey
from ckptstore.exchange.import_files import step_of
from ckptstore.exchange.weight_files import open_file
from ckptstore.formats.history.checkpoint_ref import node_of
from ckptstore.formats.segment_files.shards import ShardedEntry
from ckptstore.formats.states.state import TensorSource
from ckptstore.host.buffers import Bytes
from ckptstore.host.progress import Progress, phase
from ckptstore.log.checkpoint_info import CheckpointInfo
from ckptstore.restore.stored_base import open_base
from ckptstore.store import Store
from ckptstore.store import open as open_store

__all__ = ["Checkpoint", "Read", "Skipped", "TensorType", "open_series", "shared_tensors"]

Read: TypeAlias = Callable[[str, int, int], Bytes]
"""(tensor, first byte, length) -> those bytes (1-D uint8); callable from any thread."""

_WEIGHTS: Final = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
_BESIDE: Final = ("optimizer.pt", "optimizer.bin", "optimizer.safetensors")
_DIGITS: Final = re.compile(r"\d{1,15}")


@dataclass(frozen=True, slots=True)
class TensorType:
    """Logical dtype and shape of a tensor, and its bytes."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One checkpoint of a series.

    Attributes:
        label: file name or REF, for people.
        step: the step in its name, or its position in the series.
        open: returns a context manager that gives a read function.
        describe: finds its tensors. For a store this takes as long as reading its chain, so it is called only if
            needed.
    """

    label: str
    step: int
    open: Callable[[], AbstractContextManager[Read]]
    describe: Callable[[], Mapping[str, TensorType]]
    _found: list[Mapping[str, TensorType]] = field(default_factory=list, compare=False, repr=False)

    @property
    def described(self) -> bool:
        """Whether its tensors have been looked up."""
        return bool(self._found)

    @property
    def tensors(self) -> Mapping[str, TensorType]:
        """Name -> type, in access order. Raises as `open_series`."""
        if not self._found:
            self._found.append(self.describe())
        return self._found[0]

    @property
    def nbytes(self) -> int:
        """Logical bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def open_series(inputs: Sequence[str], refs: Sequence[str] = (), progress: Progress | None = None) -> list[Checkpoint]:
    """Open the checkpoints that the arguments of ``ckpt analyze`` name, sorted by step.

    Args:
        inputs: one store (path or URL); or ``.safetensors`` and ``.pt`` files, ``.index.json`` of shards, folders that
            hold one of these or a series of them, globs. An ``optimizer.pt`` beside a model belongs to its checkpoint.
        refs: checkpoints of a store; empty: all that lead to the latest.
        progress: called with the number of opened files (`ckptstore.host.progress.phase`).

    Returns:
        At least two, ascending by the steps in their names. If a name states no step, or two state the same, they keep
        the given order and are numbered from 0.

    Raises:
        UsageError: fewer than two, an argument that matches nothing, or a store among other arguments.
        FormatError, UnsupportedStateError, MissingDependencyError, StorageError: a file cannot be opened.
    """
    stores = [text for text in inputs if _is_store(text)]
    if stores and len(inputs) > 1:
        raise UsageError(f"{stores[0]} is a store: analyze one store, or files, at a time")
    if refs and not stores:
        raise UsageError("--ref names checkpoints of a store, and none was given")
    found = _of_store(open_store(stores[0], create=False), refs) if stores else _of_files(inputs, progress)
    if len(found) < 2:
        what = f"only {found[0].label}" if found else "none"
        error = UsageError(f"at least two checkpoints are needed to compare, found {what}")
        error.add_note("give several files of one run, a glob ('step_*.pt'), a folder of checkpoints, or a store")
        raise error
    return found


def _is_store(text: str) -> bool:
    return "://" in text or (Path(text) / "FORMAT").is_file()


# stores


def _of_store(store: Store, refs: Sequence[str]) -> list[Checkpoint]:
    infos = _line(store) if not refs else [store.checkpoint(ref) for ref in dict.fromkeys(refs)]
    infos = sorted({(info.term, info.step): info for info in infos}.values(), key=lambda info: (info.step, info.term))
    return _numbered(
        [Checkpoint(info.ref, info.step, _store_opener(store, info), partial(_types, store, info)) for info in infos]
    )


def _types(store: Store, info: CheckpointInfo) -> dict[str, TensorType]:
    tensors = store.tensors(info.ref)
    if cut := [name for name, entry in tensors.items() if isinstance(entry, ShardedEntry)]:
        raise UsageError(
            f"checkpoint {info.ref} is stored in shards ({cut[0]!r} and {len(cut) - 1} others): write it to a file "
            "with `ckpt restore` and analyze that"
        )
    return {name: TensorType(entry.dtype, tuple(entry.shape), entry.nbytes) for name, entry in tensors.items()}


def _line(store: Store) -> list[CheckpointInfo]:
    """The checkpoints that lead to the latest; other forks belong to other runs."""
    infos = store.checkpoints()
    if not infos:
        return []
    latest = store.checkpoint("latest")
    parents = {term.term: term.parent for term in store.terms()}
    step, term, line = latest.step, latest.term, []
    while True:
        line += [info for info in infos if info.term == term and info.step <= step]
        parent = parents.get(term)
        if parent is None:
            return line
        term, step = node_of(parent)


def _store_opener(store: Store, info: CheckpointInfo) -> Callable[[], AbstractContextManager[Read]]:
    @contextmanager
    def opened() -> Iterator[Read]:
        base = open_base(store.journal, info.id)
        try:
            yield base.read
        finally:
            base.forget()

    return opened


# files


def _of_files(inputs: Sequence[str], progress: Progress | None) -> list[Checkpoint]:
    groups: dict[tuple[Path, ...], None] = {}
    for text in inputs:
        for paths in _expand(text):
            groups[paths] = None
    members = list(groups)
    steps = [_step(paths[0]) for paths in members]
    joined: dict[tuple[Path, int], list[Path]] = {}
    if all(step is not None for step in steps):
        # model.safetensors and optimizer.pt of one folder, passed as two arguments, are one checkpoint.
        for paths, step in zip(members, steps, strict=True):
            assert step is not None
            joined.setdefault((paths[0].parent, step), []).extend(paths)
        if len(joined) > 1 or len(members) == 1:
            members = [tuple(dict.fromkeys(paths)) for paths in joined.values()]
            steps = [step for _, step in joined]
    labels = _labels(members)
    numbered: list[Checkpoint] = []
    for label, step, paths in zip(labels, steps, members, strict=True):
        phase(progress, "opening", len(numbered), len(members))
        numbered.append(_file_checkpoint(label, -1 if step is None else step, paths))
    return _numbered(numbered)


def _numbered(found: list[Checkpoint]) -> list[Checkpoint]:
    """Sort by step if every step is known and none occurs twice; else keep the given order."""
    steps = [one.step for one in found]
    if -1 not in steps and len(set(steps)) == len(steps):
        return sorted(found, key=lambda one: one.step)
    return [replace(one, step=number) for number, one in enumerate(found)]


def _expand(text: str) -> list[tuple[Path, ...]]:
    """The checkpoints that one argument names, each as its files."""
    path = Path(text)
    if path.exists() or not glob.has_magic(text):
        if not path.exists():
            raise UsageError(f"{path} does not exist")
        return _series_in(path) if path.is_dir() else [(path,)]
    matches = sorted(glob.glob(text, recursive=True))  # noqa: PTH207 - supports absolute patterns
    if not matches:
        raise UsageError(f"{text!r} matches no file")
    return [paths for match in matches for paths in _expand(glob.escape(match) if glob.has_magic(match) else match)]


def _series_in(folder: Path) -> list[tuple[Path, ...]]:
    """The contents of a folder: one checkpoint (with its optimizer), a series of files, or a series of folders."""
    if indexes := sorted(folder.glob("*.index.json")):
        return [_with_optimizer((indexes[0],))] if len(indexes) == 1 else [(index,) for index in indexes]
    files = [file for file in sorted(folder.iterdir()) if file.is_file() and file.suffix.lower() in _WEIGHTS]
    models = [file for file in files if not is_companion(file)]
    if len(models) == 1:
        return [_with_optimizer((models[0],))]
    if len(models) > 1:
        stepped = [file for file in models if _step(file) is not None]
        return [(file,) for file in (stepped if len(stepped) > 1 else models)]
    found = []
    for inner in sorted(folder.iterdir()):
        if inner.is_dir() and _step(inner / "model.pt") is not None and _holds_weights(inner):
            found += _series_in(inner)
    return found or [(survey(folder).weights,)]  # raises an error that explains what is wrong


def _holds_weights(folder: Path) -> bool:
    return any(file.suffix.lower() in _WEIGHTS for file in folder.iterdir() if file.is_file())


def _with_optimizer(paths: tuple[Path, ...]) -> tuple[Path, ...]:
    beside = [paths[0].parent / name for name in _BESIDE]
    return (*paths, *[path for path in beside if path.is_file()][:1])


def _step(path: Path) -> int | None:
    """The step in a file name, as an import finds it; also of a name that is only a number."""
    stem = path.name.split(".", 1)[0]
    return int(stem) if _DIGITS.fullmatch(stem) else step_of(path, series=True)


def _labels(members: Sequence[tuple[Path, ...]]) -> list[str]:
    """File names if they are distinct, else with their folders."""
    names = [paths[0].name for paths in members]
    if len(set(names)) == len(names):
        return names
    return [str(Path(paths[0].parent.name) / paths[0].name) for paths in members]


def _file_checkpoint(label: str, step: int, paths: tuple[Path, ...]) -> Checkpoint:
    with _sources(paths) as found:
        types = {name: TensorType(one.dtype, tuple(one.shape), one.nbytes) for name, one in found.items()}

    @contextmanager
    def opened() -> Iterator[Read]:
        with _sources(paths) as sources:

            def read(name: str, start: int, length: int) -> Bytes:
                out = np.empty(length, np.uint8)
                sources[name].read(start, out)
                return out

            yield read

    return Checkpoint(label, step, opened, lambda: types, [types])


@contextmanager
def _sources(paths: Sequence[Path]) -> Iterator[dict[str, TensorSource]]:
    """The tensors of one checkpoint's files; those of the second and later files get the file's name as a prefix."""
    found: dict[str, TensorSource] = {}
    with ExitStack() as stack:
        for number, path in enumerate(paths):
            flat = stack.enter_context(open_file(path)).flat
            before = f"{path.stem}." if number else ""
            found |= {before + name: source for name, source in flat.tensors.items()}
        yield found


# what can be compared


@dataclass(frozen=True, slots=True)
class Skipped:
    """A tensor that was left out, and the reason."""

    name: str
    reason: str


def shared_tensors(
    series: Sequence[Checkpoint], progress: Progress | None = None
) -> tuple[dict[str, TensorType], list[Skipped]]:
    """The tensors that every checkpoint has with the same dtype and shape, and the others.

    Args:
        series: the checkpoints.
        progress: called with the number of planned checkpoints.

    Raises:
        UsageError: they have none in common.
    """
    names: dict[str, None] = {}
    for number, checkpoint in enumerate(reversed(series)):
        phase(progress, "planning", number, len(series))
        names |= dict.fromkeys(checkpoint.tensors)
    shared: dict[str, TensorType] = {}
    skipped: list[Skipped] = []
    for name in names:
        having = [checkpoint for checkpoint in series if name in checkpoint.tensors]
        last = having[-1].tensors[name]
        other = next((one for one in having if one.tensors[name] != last), None)
        if len(having) < len(series):
            skipped.append(Skipped(name, f"in {len(having)} of {len(series)} checkpoints only"))
        elif other is not None:
            skipped.append(Skipped(name, f"{_type(other, name)} but {_type(having[-1], name)}"))
        elif last.nbytes:
            shared[name] = last
    if not shared:
        error = UsageError(f"the {len(series)} checkpoints have no tensor in common")
        examples = [f"{one.label} has {next(iter(one.tensors), 'no tensor')}" for one in (series[0], series[-1])]
        error.add_note(f"names, dtypes and shapes must be equal; {', '.join(examples)}")
        raise error
    return shared, skipped


def _type(checkpoint: Checkpoint, name: str) -> str:
    tensor = checkpoint.tensors[name]
    return f"{tensor.dtype} {list(tensor.shape)} in {checkpoint.label}"
