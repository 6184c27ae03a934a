"""Import files of other tools as checkpoints: a single file, or a series of steps."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from ckptstore.errors import CheckpointNotFoundError, CkptError, StepOrderError, StoreNotFoundError, UsageError
from ckptstore.exchange.checkpoint_folders import open_checkpoint, survey
from ckptstore.exchange.dcp_folders import DCP_METADATA, is_dcp_folder
from ckptstore.exchange.rank_folders import is_rank_folder
from ckptstore.formats.history.checkpoint_ref import step_number
from ckptstore.frameworks.inert_pickles import KeyChoice
from ckptstore.host.progress import Progress, phase
from ckptstore.log.checkpoint_info import look_up
from ckptstore.write.writer_opening import open_writer
from ckptstore.write.writer_options import WriterOptions

if TYPE_CHECKING:
    from ckptstore.log.checkpoint_info import CheckpointInfo
    from ckptstore.log.journal import Journal
    from ckptstore.write.policy.delta_options import DeltaOptions

__all__ = ["ImportedFile", "import_files", "step_of"]

_LONGEST: Final = 15  # digits of a step: below 2^53
_WORD: Final = re.compile(
    rf"(?:^|[^a-z])(?:global[-_]?step|checkpoint|ckpt|iteration|iter|step|epoch)[-_=.]?(\d{{1,{_LONGEST}}})(?!\d)", re.I
)
_TRAILING: Final = re.compile(rf"[-_=.](\d{{1,{_LONGEST}}})$")
_SHARD: Final = re.compile(r"-\d{5}-of-\d{5}")


@dataclass(frozen=True, slots=True)
class ImportedFile:
    """A file or folder, and the checkpoint made from it.

    Attributes:
        path: the file or folder.
        nbytes: length of the imported files in bytes (shards and the files of a folder: all together).
        info: the checkpoint.
        left_out: names in the folder, and keys in files, that are not in the checkpoint.
    """

    path: Path
    nbytes: int
    info: CheckpointInfo
    left_out: tuple[str, ...] = ()


def step_of(path: Path, *, series: bool = False) -> int | None:
    """The step in the name of a file, or of one of the two folders above it. None: the names have no step.

    Examples: ``step_1000.pt``, ``checkpoint-500/model.safetensors``, ``global_step12/...``, ``epoch=3-step=1000.ckpt``
    (the last number after such a word counts). In a `series`, a number at the end of the file name, or a folder name
    that is a number, is a step even without such a word (``model_100.pt``, ``100/model.pt``). In the name of a single
    file such a number may mean anything (``llama-7.pt``).
    """
    stem = _SHARD.sub("", path.name.removesuffix(".index.json"))
    stem = stem[: -len(Path(stem).suffix)] if Path(stem).suffix.lower() in _SUFFIXES else stem
    above, further = (folder.name for folder in [*path.absolute().parents, Path(), Path()][:2])
    if named := _WORD.findall(stem):
        return int(named[-1])
    if series and (number := _TRAILING.search(stem)):
        return int(number[1])
    for name in (above, further):
        if named := _WORD.findall(name):
            return int(named[-1])
    return int(above) if series and re.fullmatch(rf"[0-9]{{1,{_LONGEST}}}", above) else None


_SUFFIXES: Final = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")


def import_files(
    journal: Journal,
    files: Sequence[str | Path],
    step: int | Literal["auto"] = "auto",
    *,
    parent: str | None = "latest",
    leave_out: Sequence[str] = (),
    keys: KeyChoice | None = None,
    deltas: DeltaOptions | None = None,
    progress: Progress | None = None,
) -> list[ImportedFile]:
    """Store each file as a checkpoint, in one new term, ascending by step. Memory does not grow with the files.

    Every file is opened and checked before the store is changed.

    Args:
        journal: the store. It is created if it does not exist.
        files: ``.safetensors``, an ``.index.json`` of shards, ``.pt``; or folders (`checkpoint_folders`).
        step: the step of a single file. ``"auto"`` takes it from each name (`step_of`). A single file without a step in
            its name gets the step after the parent's.
        parent: the REF that the new term continues from; None: no parent.
        leave_out: globs of names in a folder to leave out, for files that cannot be imported.
        keys: parts of torch files that are left out or taken as values.
        deltas: store a series as deltas; None: every file becomes a full.
        progress: called with (bytes done, bytes in all).

    Returns:
        The checkpoints, ascending by step.

    Raises:
        UsageError: the step of a file is unknown, or two files have the same step.
        StepOrderError: a step is not above the parent's.
        FormatError, UnsupportedStateError: a file, or a file in a folder, cannot be imported. Nothing was imported.
        StorageError: the medium failed. Files before that one were imported; a note on the error lists them.
    """
    if not files:
        raise UsageError("no file to import")
    paths = [Path(file) for file in files]
    base = _parent(journal, parent)
    steps = _steps([(path, _named(path, leave_out)) for path in paths], step, base)
    total = _checked_nbytes(steps, leave_out, keys, progress)
    before = 0  # bytes of the files imported so far

    def advance(done: int, _: int) -> None:
        if progress is not None:
            progress(before + done, total)

    imported: list[ImportedFile] = []
    try:
        with open_writer(journal, base, WriterOptions(poll_seconds=None, deltas=deltas)) as writer:
            for number, path in steps:
                with open_checkpoint(path, leave_out, _fresh(keys)) as opened:
                    info = writer.save(opened.flat, number, progress=advance)
                    before += opened.nbytes
                    imported.append(ImportedFile(opened.path, opened.file_bytes, info, opened.left_out))
    except CkptError as error:
        if imported:
            error.add_note(f"imported before the error: {', '.join(one.info.ref for one in imported)}")
        raise
    return imported


def _checked_nbytes(
    steps: Sequence[tuple[int, Path]], leave_out: Sequence[str], keys: KeyChoice | None, progress: Progress | None
) -> int:
    """Open each file once, to check it. Returns the bytes of all tensors."""
    total = 0
    for number, (_, path) in enumerate(steps):
        phase(progress, "checking", number, len(steps), "files")
        with open_checkpoint(path, leave_out, _fresh(keys)) as opened:
            total += opened.nbytes
    return total


def _fresh(keys: KeyChoice | None) -> KeyChoice | None:
    """The choice for one file: it notes what is left out there."""
    return KeyChoice(keys.leave_out, keys.objects) if keys else None


def _named(path: Path, leave_out: Sequence[str]) -> Path:
    """The file whose name and folders give the step."""
    if not path.exists():
        raise UsageError(f"{path} does not exist")
    if path.is_dir() and is_dcp_folder(path):
        return path / DCP_METADATA
    if path.is_dir() and is_rank_folder(path):
        return path
    return survey(path, leave_out).weights if path.is_dir() else path


def _parent(journal: Journal, parent: str | None) -> CheckpointInfo | None:
    if parent is None:
        return None
    try:
        return look_up(journal, parent)
    except (StoreNotFoundError, CheckpointNotFoundError):
        if parent != "latest":
            raise
        return None  # an empty store: the import begins its history


def _steps(
    paths: Sequence[tuple[Path, Path]], step: int | Literal["auto"], base: CheckpointInfo | None
) -> list[tuple[int, Path]]:
    """Find the step of each file. Returns (step, path), ascending.

    Args:
        paths: (file or folder to import, path whose name gives the step).
        step: as in `import_files`.
        base: the parent.
    """
    if step != "auto":
        if len(paths) > 1:
            raise UsageError(
                f"one step was given for {len(paths)} files: import them one by one, or leave the step out "
                "to use the names"
            )
        found: list[tuple[int, Path]] = [(step_number(step), paths[0][0])]
    else:
        found = []
        for path, name in paths:
            number = step_of(name, series=len(paths) > 1)
            if number is None and len(paths) > 1:
                raise UsageError(f"{path}: its name has no step (step_1000, checkpoint-1000 ...); import it alone")
            if number is None:
                number = 0 if base is None else base.step + 1
            found.append((number, path))
        found.sort()
        for (number, path), (other, twin) in pairwise(found):
            if number == other:
                raise UsageError(f"{path} and {twin} both seem to be step {number}")
    lowest, path = found[0]
    if base is not None and lowest <= base.step:
        error = StepOrderError(
            f"{path}: step {lowest} is not above step {base.step} of {base.ref}, which it would follow"
        )
        error.add_note("--parent REF continues from an earlier checkpoint; --parent none starts a new line")
        raise error
    return found
