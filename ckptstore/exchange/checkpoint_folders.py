"""Open a trainer's folder as one state. Each of its files is taken, left out on request, or refused.

The files of Hugging Face's Trainer and Accelerate become a dict:

====================  ============================================================================================
``model``             the weights: the index of shards, or the file (``model.safetensors``, ``pytorch_model.bin``)
``optimizer`` ...     every other torch or safetensors file, by its name without suffix: ``scheduler``, ``scaler``
``rng``               rank -> random states: ``rng_state.pth`` (rank 0), ``rng_state_3.pth``, ``random_states_3.pkl``
``trainer_state``     ``trainer_state.json``, parsed
``files``             name -> bytes (uint8 array) of every other file: configuration, tokenizer, ``training_args.bin``
====================  ============================================================================================

``training_args.bin`` is a pickled `TrainingArguments`, which only its own code can make. It is kept as bytes, and never
unpickled.

If a folder has weights and no other part, the state is only the weights, without the files of the last row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from ckptstore.errors import FormatError, StorageError, UnsupportedStateError, UsageError
from ckptstore.exchange.dcp_folders import DCP_METADATA, is_dcp_folder, open_dcp_folder
from ckptstore.exchange.rank_folders import is_rank_folder, open_rank_folder
from ckptstore.exchange.safetensors_files import FileTensor
from ckptstore.exchange.weight_files import OpenedFile, flattened, index_shards, load_file, open_file
from ckptstore.frameworks.inert_pickles import KeyChoice

__all__ = ["FolderContents", "is_companion", "open_checkpoint", "survey"]

_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl")
_WEIGHTS: Final = ("model", "pytorch_model", "adapter_model", "pytorch_model_fsdp")
"""File names, without suffix, of a model's weights, by preference."""
_COMPANIONS: Final = re.compile(
    r"(optimizer|scheduler|scaler|sampler|training_args|dl_state_dict|custom_checkpoint)(_\d+)?"
)
_RNG: Final = re.compile(r"(?:rng_state(?:_(?P<rank>\d{1,9}))?\.pth|random_states_(?P<process>\d{1,9})\.pkl)")
_SHARD: Final = re.compile(r"-\d{5}-of-\d{5}$")
_TRAINER_STATE: Final = "trainer_state.json"
_ARGUMENTS: Final = "training_args.bin"
_JSON_LIMIT: Final = 64 << 20
_RESERVED: Final = frozenset({"model", "rng", "trainer_state", "files"})
_FOLDER: Final = "it is a folder"
_DCP_RANK: Final = re.compile(r"__\d+\.metadata")
_DEEPSPEED: Final = re.compile(r"global_step\d+")
_MEGATRON: Final = re.compile(r"mp_rank_\d+(_\d+)*")
_MEGATRON_STEP: Final = re.compile(r"iter_\d{7}|release")
_DEEPSPEED_FILES: Final = ("*_model_states.pt", "*_optim_states.pt")


@dataclass(slots=True)
class FolderContents:
    """The contents of a folder.

    Attributes:
        path: the folder.
        weights: the file or index with the model's weights.
        shards: the files that the index names.
        parts: key in the state -> file.
        rng: rank -> file of random states.
        trainer_state: the file ``trainer_state.json``, or None.
        others: files that have no part of the state.
        refused: name -> why it cannot be taken.
        left_out: names that were left out on request.
    """

    path: Path
    weights: Path
    shards: tuple[Path, ...] = ()
    parts: dict[str, Path] = field(default_factory=dict)
    rng: dict[int, Path] = field(default_factory=dict)
    trainer_state: Path | None = None
    others: list[Path] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        """Whether the folder has more of a training state than the weights."""
        return bool(self.parts or self.rng or self.trainer_state)

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that are taken."""
        state = [] if self.trainer_state is None else [self.trainer_state]
        return (self.weights, *self.shards, *self.parts.values(), *self.rng.values(), *state, *self.others)


def survey(folder: Path, leave_out: Sequence[str] = ()) -> FolderContents:
    """List and classify the contents of a folder, including the shards that an index names.

    Args:
        folder: the folder.
        leave_out: globs of names to leave out.

    Raises:
        UsageError: it has no weights, or several candidates without an index; or it is not such a folder.
        FormatError: its index is damaged.
        StorageError: it cannot be read.
    """
    try:
        entries = sorted(folder.iterdir())
        _refuse_foreign(folder, {entry.name for entry in entries})
        globs = [glob.rstrip("/") for glob in leave_out]
        left_out = [one.name for one in entries if any(fnmatchcase(one.name, glob) for glob in globs)]
        kept = [entry for entry in entries if entry.name not in left_out]
        files = [entry for entry in kept if entry.is_file()]
        folders = [entry for entry in kept if entry.is_dir()]
        weights = _weights(folder, files, folders)
        shards = [folder / name for name in index_shards(weights)] if weights.suffix == ".json" else []
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(error.errno, error.strerror, error.filename) from error
    found = FolderContents(folder, weights, tuple(shards), left_out=left_out)
    found.refused |= {entry.name: _refusal_reason(entry) for entry in kept if entry not in files}
    for file in files:
        if file != weights and file not in shards:
            _sort(found, file)
    return found


def _sort(found: FolderContents, file: Path) -> None:
    """Classify one file."""
    stem = file.stem
    if file.name == _TRAINER_STATE:
        found.trainer_state = file
    elif match := _RNG.fullmatch(file.name):
        rank = int(match["rank"] or match["process"] or 0)
        if rank in found.rng:
            found.refused[file.name] = f"{found.rng[rank].name} has the random states of rank {rank}, too"
        else:
            found.rng[rank] = file
    elif file.name.endswith(".index.json") or (_is_part(file) and (stem in _WEIGHTS or _SHARD.search(stem))):
        found.refused[file.name] = f"it has weights, like {found.weights.name}"
    elif not _is_part(file) or file.name == _ARGUMENTS:
        found.others.append(file)
    elif stem in found.parts or stem in _RESERVED:
        other = found.parts[stem].name if stem in found.parts else "something else"
        found.refused[file.name] = f"{other} has the same key {stem!r} in the state"
    else:
        found.parts[stem] = file


def _is_part(file: Path) -> bool:
    return file.suffix.lower() in _SUFFIXES


def is_companion(file: Path) -> bool:
    """Whether this is a trainer's name for a file that accompanies the model's weights."""
    return bool(_COMPANIONS.fullmatch(file.stem) or _RNG.fullmatch(file.name))


def _weights(folder: Path, files: Sequence[Path], folders: Sequence[Path]) -> Path:
    """Find the file with the model's weights, or its index. Raises `UsageError` if there is none, or several."""
    indexes = [file for file in files if file.name.endswith((".safetensors.index.json", ".bin.index.json"))]
    models = [file for file in files if _is_part(file) and not is_companion(file)]
    for candidates in (indexes, models):
        named = [file for file in candidates if file.name.split(".")[0] in _WEIGHTS]
        if named:
            return min(named, key=lambda file: (_WEIGHTS.index(file.name.split(".")[0]), file.suffix != ".safetensors"))
        if len(candidates) == 1:
            return candidates[0]
        if candidates:
            some = ", ".join(file.name for file in candidates[:3])
            raise UsageError(
                f"{folder} has {len(candidates)} checkpoint files and no index ({some}): name the one to import"
            )
    where = "; ".join(f"{inner.name}: {why}" for inner in folders if (why := _refusal_reason(inner)) != _FOLDER)
    what = f"{folder} has no .safetensors, .bin or .pt file with a model's weights"
    raise UsageError(f"{what}; {where}" if where else what)


def _refusal_reason(entry: Path) -> str:
    if not entry.is_dir():
        return "it is not a regular file"
    if (entry / ".metadata").exists():
        return "torch.distributed.checkpoint wrote it: import this folder by itself"
    if _MEGATRON.fullmatch(entry.name) or (_MEGATRON_STEP.fullmatch(entry.name) and _has_ranks(entry)):
        return f"Megatron-LM wrote it, a part for each rank; {_MEGATRON_TOOL}"
    if is_rank_folder(entry):
        return "it is a checkpoint by itself: import this folder"
    if _DEEPSPEED.fullmatch(entry.name):
        return f"DeepSpeed wrote it, a part for each rank; {_deepspeed_commands(entry)}"
    return _FOLDER


def _refuse_foreign(folder: Path, names: set[str]) -> None:
    """Raise `UsageError` for a folder of another format. The message has the command that converts it."""
    if "FORMAT" in names:
        raise UsageError(f"{folder} is a checkpoint store; import the files that `ckpt restore` writes from it")
    if DCP_METADATA in names:
        raise UsageError(f"{folder} was written by torch.distributed.checkpoint: `ckpt import` takes it whole")
    if any(_DCP_RANK.fullmatch(name) for name in names):
        raise UsageError(
            f"{folder} was written by torch.distributed.checkpoint with use_collectives=False, a description for each "
            "rank; save it again with collectives"
        )
    if any(fnmatchcase(name, glob) for name in names for glob in _DEEPSPEED_FILES):
        raise UsageError(f"{folder} was written by DeepSpeed, a part for each rank; {_deepspeed_commands(folder)}")
    step = next((name for name in sorted(names) if _MEGATRON_STEP.fullmatch(name) and _has_ranks(folder / name)), "")
    if step and is_rank_folder(folder / step):
        raise UsageError(f"{folder} holds checkpoints of Megatron-LM: import them: {folder}/iter_*")
    if step or any(_MEGATRON.fullmatch(name) and (folder / name).is_dir() for name in names):
        where = f"{folder / step}" if step else f"{folder}"
        raise UsageError(f"{where} was written by Megatron-LM, a part for each rank; {_MEGATRON_TOOL}")


def _has_ranks(folder: Path) -> bool:
    try:
        return folder.is_dir() and any(_MEGATRON.fullmatch(one.name) for one in folder.iterdir())
    except OSError:
        return False


def refuse_part(path: Path) -> None:
    """Raise `UsageError` for a file that is one rank's part of a model of several ranks."""
    beside = [one.name for one in path.parent.iterdir()] if path.parent.is_dir() else []
    for glob in (one for one in _DEEPSPEED_FILES if fnmatchcase(path.name, one)):
        ranks = [name for name in beside if fnmatchcase(name, glob)]
        if len(ranks) > 1:
            what = f"{path} is one of {len(ranks)} parts that DeepSpeed wrote"
            raise UsageError(f"{what}; {_deepspeed_commands(path.parent)}")
    if _MEGATRON.fullmatch(path.parent.name):
        ranks = [one.name for one in path.parent.parent.iterdir() if _MEGATRON.fullmatch(one.name)]
        if len(ranks) > 1:
            raise UsageError(f"{path} is one of {len(ranks)} parts that Megatron-LM wrote; {_MEGATRON_TOOL}")


_MEGATRON_TOOL: Final = (
    "let Megatron-LM write it as torch_dist (its options --ckpt-convert-format torch_dist --ckpt-convert-save DIR), "
    "which is imported with the optimizer; or merge the weights with its tools/checkpoint/convert.py "
    "(--target-tensor-parallel-size 1 --target-pipeline-parallel-size 1), and import the folder iter_*"
)


def _deepspeed_commands(step: Path) -> str:
    """How to convert the folder of a step."""
    above, universal = step.parent, step.with_name(f"{step.name}_universal")
    return (
        f"with its optimizer, import {universal}, which this makes: python -m deepspeed.checkpoint.ds_to_universal "
        f"--input_folder {step} --output_folder {universal}; to convert only the weights: "
        f"python {above}/zero_to_fp32.py {above} {above.name}-fp32 --safe_serialization"
    )


# opening


def open_checkpoint(path: Path, leave_out: Sequence[str] = (), choice: KeyChoice | None = None) -> OpenedFile:
    """Open a checkpoint file, or a whole folder as one state.

    Args:
        path: a file for `weight_files.open_file`, or a folder.
        leave_out: globs of names in a folder to leave out.
        choice: parts of torch files that are left out or taken as values.

    Raises:
        UnsupportedStateError: files in the folder cannot be taken and are not left out. The message names all of them.
        UsageError: as `survey`; or `path` does not exist.
        FormatError, MissingDependencyError, StorageError: as `open_file`.
    """
    if not path.exists():
        raise UsageError(f"{path} does not exist")
    if not path.is_dir():
        refuse_part(path)
        return open_file(path, choice)
    if is_dcp_folder(path):
        return open_dcp_folder(path, leave_out, choice)
    if is_rank_folder(path):
        return open_rank_folder(path, leave_out, choice)
    found = survey(path, leave_out)
    opened = ExitStack()
    try:
        state = _state(found, opened, choice) if found.whole else None
        if found.refused:
            raise _refusal(path, found.refused)
        if state is None:
            opened.close()
            return _weights_alone(found, choice)
        left_out = (*found.left_out, *(choice.left_out if choice else ()))
        return OpenedFile(path, flattened(path, state), found.files, opened, left_out)
    except BaseException as error:
        opened.close()
        if isinstance(error, OSError) and error.errno is not None and not isinstance(error, StorageError):
            raise StorageError(error.errno, error.strerror, error.filename or str(path)) from error
        raise


def _weights_alone(found: FolderContents, choice: KeyChoice | None) -> OpenedFile:
    opened = open_file(found.weights, choice)
    opened.left_out = (*found.left_out, *opened.left_out, *(file.name for file in found.others))
    return opened


def _refusal(folder: Path, refused: Mapping[str, str]) -> UnsupportedStateError:
    each = "; ".join(f"{name}: {why}" for name, why in refused.items())
    error = UnsupportedStateError(f"{folder}: cannot be imported whole: {each}")
    error.add_note("to import the rest: " + " ".join(f"--leave-out {name!r}" for name in refused))
    return error


def _state(found: FolderContents, opened: ExitStack, choice: KeyChoice | None) -> dict[str, Any]:
    """The state of the folder. Files that need pickled code are added to `found.refused`."""

    def part(key: str, file: Path) -> Any:
        try:
            return load_file(file, opened, (choice or KeyChoice()).below(key), nested=True)
        except UnsupportedStateError as error:
            found.refused[file.name] = str(error).removeprefix(f"{file}: ")
            return None

    state: dict[str, Any] = {"model": part("model", found.weights)}
    state |= {key: part(key, file) for key, file in found.parts.items()}
    if found.rng:
        state["rng"] = {rank: part(f"rng.{rank}", file) for rank, file in sorted(found.rng.items())}
    if found.trainer_state is not None:
        state["trainer_state"] = _json(found.trainer_state)
    if found.others:
        state["files"] = dict(_raw(found.others, opened))
    return state


def _json(file: Path) -> Any:
    """Parse JSON as Python writes it, including NaN and Infinity, which a loss may be."""
    if file.stat().st_size > _JSON_LIMIT:
        raise FormatError(f"{file}: too long for the state of a trainer")
    try:
        return json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{file}: not JSON: {error}") from error


def _raw(files: Iterable[Path], opened: ExitStack) -> Iterable[tuple[str, FileTensor]]:
    for file in files:
        descriptor = opened.enter_context(file.open("rb", buffering=0))
        size = file.stat().st_size
        tensor = FileTensor(file, descriptor.fileno(), 0, file.name, "U8", (size,))
        tensor.origin = "numpy"
        yield file.name, tensor
