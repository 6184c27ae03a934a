"""Open checkpoints of DeepSpeed and Megatron-LM that any number of ranks wrote and that are whole in one folder.

====================================  ==============================================================================
DeepSpeed's universal form            ``zero/NAME/fp32.pt``, ``exp_avg.pt``, ``exp_avg_sq.pt``, ``step.pt`` ... for each
                                      parameter, ``zero/optimizer_state.pt``, ``*_model_states.pt``
Megatron-LM's ``iter_0001000``,       ``mp_rank_00/model_optim_rng.pt`` and other ``.pt`` files beside it
written with one model-parallel rank
====================================  ==============================================================================

The first becomes ``model`` (the weights in fp32), ``optimizer`` (``state``: name -> its tensors), ``optimizer_state``
and ``model_states``. The second becomes the dict in its file, with the others by their names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from ckptstore.errors import FormatError, StorageError, UnsupportedStateError, UsageError
from ckptstore.exchange.weight_files import OpenedFile, flattened, load_file
from ckptstore.frameworks.inert_pickles import KeyChoice

__all__ = ["is_rank_folder", "open_rank_folder"]

_WEIGHT: Final = "fp32.pt"
_MODEL_STATES: Final = "_model_states.pt"
_RANK: Final = re.compile(r"mp_rank_\d+(_\d+)*")
_STEP: Final = re.compile(r"iter_\d{7,}|release")
_MAIN: Final = "model_optim_rng.pt"


def is_rank_folder(folder: Path) -> bool:
    """Whether it is one of these folders."""
    return _is_universal(folder) or _only_rank(folder) is not None


def open_rank_folder(folder: Path, leave_out: Sequence[str] = (), choice: KeyChoice | None = None) -> OpenedFile:
    """Open one of these folders.

    Args:
        folder: the folder.
        leave_out: globs of names of files (for a parameter: of its folder) that are left out.
        choice: parts of the files that are left out or taken as values.

    Raises:
        UnsupportedStateError: files need pickled code and are not left out. It names the keys.
        FormatError: a file is damaged or missing, or its tensor has another shape than the parameter.
        UsageError: nothing is left; another file is in the folder.
        MissingDependencyError: torch is not installed.
        StorageError: it cannot be read.
    """
    opened = ExitStack()
    files = _Files(folder, leave_out, choice, opened)
    try:
        rank = _only_rank(folder)
        state = _universal(files) if rank is None else _megatron(files, rank)
        if files.refused:
            raise _refusal(folder, files.refused)
        left_out = (*files.left_out, *(choice.left_out if choice else ()))
        return OpenedFile(folder, flattened(folder, state), tuple(files.taken), opened, left_out)
    except BaseException as error:
        opened.close()
        if isinstance(error, OSError) and error.errno is not None and not isinstance(error, StorageError):
            raise StorageError(error.errno, error.strerror, error.filename or str(folder)) from error
        raise


class _Files:
    """The files of a folder, each of which is taken, left out or refused."""

    def __init__(self, folder: Path, leave_out: Sequence[str], choice: KeyChoice | None, opened: ExitStack) -> None:
        self.folder = folder
        self.taken: list[Path] = []
        self.left_out: list[str] = []
        self.refused: dict[str, UnsupportedStateError] = {}
        self._globs = [glob.rstrip("/") for glob in leave_out]
        self._choice = choice
        self._opened = opened

    def within(self, folder: Path) -> list[Path]:
        """What is in a folder, in order, and not left out."""
        entries = sorted(folder.iterdir())
        out = [one for one in entries if any(fnmatchcase(one.name, glob) for glob in self._globs)]
        self.left_out += [str(one.relative_to(self.folder)) for one in out]
        return [one for one in entries if one not in out]

    def load(self, file: Path, key: str) -> Any:
        """The contents of a torch file, at `key` of the state; None if it is refused."""
        self.taken.append(file)
        choice = self._choice or KeyChoice()
        try:
            return load_file(file, self._opened, choice.below(key) if key else choice, nested=True)
        except UnsupportedStateError as error:
            self.refused[str(file.relative_to(self.folder))] = error
            return None


def _refusal(folder: Path, refused: Mapping[str, UnsupportedStateError]) -> UnsupportedStateError:
    each = "; ".join(str(error).removeprefix(f"{folder}/") for error in refused.values())
    found = UnsupportedStateError(f"{folder}: {each}")
    files = " ".join(f"--leave-out {Path(name).name!r}" for name in refused)
    notes = dict.fromkeys(note for error in refused.values() for note in getattr(error, "__notes__", ()))
    found.add_note("; ".join([*notes, f"to leave out whole files: {files}"]))
    return found


# DeepSpeed


def _is_universal(folder: Path) -> bool:
    try:
        return any((one / _WEIGHT).is_file() for one in (folder / "zero").iterdir())
    except OSError:
        return False


def _universal(files: _Files) -> dict[str, Any]:
    weights: dict[str, Any] = {}
    states: dict[str, Any] = {}
    more: dict[str, Any] = {}
    state: dict[str, Any] = {"model": weights, "optimizer": {"state": states}}
    for entry in files.within(files.folder / "zero"):
        if entry.is_dir():
            _parameter(files, entry, weights, states, more)
        elif entry.suffix == ".pt" and entry.stem not in ("universal", "model_states", *state):
            state[entry.stem] = files.load(entry, entry.stem)
        else:
            raise UsageError(f"{entry} is not a file of a universal checkpoint: --leave-out {entry.name}")
    if not weights:
        raise UsageError(f"{files.folder}: nothing is left to import")
    if more:
        state["universal"] = more
    ranks: dict[str, Any] = {}
    for entry in files.within(files.folder):
        if entry.name.endswith(_MODEL_STATES):
            name = entry.name.removesuffix(_MODEL_STATES)
            ranks[name] = files.load(entry, f"model_states.{name}")
        elif entry.name != "zero":
            raise UsageError(f"{entry} is not part of a universal checkpoint: --leave-out {entry.name}")
    if ranks:
        state["model_states"] = ranks
        _reshape(files, state, ranks)
    return state


def _reshape(files: _Files, state: dict[str, Any], ranks: Mapping[str, Any]) -> None:
    """Give each tensor its shape: of ZeRO stage 3, the folder has the elements in one dimension.

    Raises `FormatError`: a parameter of the ranks has no folder, or no shape of theirs has as many elements.
    """
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for rank in ranks.values():
        said = rank.get("param_shapes") if isinstance(rank, dict) else None
        for group in said if isinstance(said, list) else [said]:
            for name, shape in group.items() if isinstance(group, dict) else ():
                if isinstance(shape, tuple):
                    shapes.setdefault(str(name), set()).add(tuple(shape))
    for name, known in shapes.items():
        # Prevents: a model without a weight, because the conversion was interrupted.
        if name not in state["model"]:
            if f"zero/{name}" in files.left_out:
                continue
            raise FormatError(
                f"{files.folder / 'zero' / name} is missing, and param_shapes names it: convert it again, or leave "
                "the ranks' files out: --leave-out '*_model_states.pt'"
            )
        states = state["optimizer"]["state"].get(name, {})
        for tensors, keys in ((state["model"], [name]), (states, [key for key in states if key != "step"])):
            for key in keys:
                tensors[key] = _shaped(files.folder / "zero" / name, tensors[key], known)


def _shaped(folder: Path, tensor: Any, known: set[tuple[int, ...]]) -> Any:
    """The tensor in a shape that the ranks know, if it is flat and theirs is not."""
    whole = tuple(getattr(tensor, "shape", ()))
    # Ranks of a tensor-parallel model know the shape of their part. Such a tensor is not flat in the folder.
    if len(whole) != 1 or any(len(shape) == 1 for shape in known):
        return tensor
    fitting = [shape for shape in known if math.prod(shape) == whole[0]]
    if len(fitting) != 1:
        raise FormatError(f"{folder}: a tensor has {whole[0]} elements, and param_shapes has {sorted(known)!s:.80}")
    return tensor.reshape(fitting[0])


def _parameter(
    files: _Files, folder: Path, weights: dict[str, Any], states: dict[str, Any], more: dict[str, Any]
) -> None:
    """Add a parameter: its weight, the state of the optimizer, and what else is said of it."""
    name = folder.name
    kept = files.within(folder)
    if folder / _WEIGHT not in kept:
        raise FormatError(f"{folder} has no {_WEIGHT}: the weight of this parameter is missing")
    weight, said = _tensor(files, folder / _WEIGHT, f"model.{name}")
    weights[name] = weight
    if said:
        more[name] = said
    found: dict[str, Any] = {}
    for file in kept:
        if file.suffix != ".pt" or not file.is_file():
            raise UsageError(f"{file} is not a file of a universal checkpoint: --leave-out {file.name}")
        if file.name == _WEIGHT:
            continue
        key = f"optimizer.state.{name}.{file.stem}"
        if file.stem == "step":
            found["step"] = files.load(file, key)
            continue
        found[file.stem], _ = _tensor(files, file, key)
        if weight is None or found[file.stem] is None:
            continue  # refused
        whole, shape = list(weight.shape), list(found[file.stem].shape)
        if whole != shape:
            raise FormatError(f"{file}: its tensor is {shape}, and the parameter {name} is {whole}")
    if found:
        states[name] = found


def _tensor(files: _Files, file: Path, key: str) -> tuple[Any, dict[str, Any]]:
    """The tensor of a file, and what else it has. (None, {}) if it is refused."""
    loaded = files.load(file, key)
    if loaded is None:
        return None, {}
    said = dict(loaded) if isinstance(loaded, dict) else {"param": loaded}
    tensor = said.pop("param", None)
    if not hasattr(tensor, "shape"):
        raise FormatError(f"{file}: no tensor at the key 'param', so it is not a file of a universal checkpoint")
    return tensor, said


# Megatron-LM


def _only_rank(folder: Path) -> Path | None:
    """The folder of the only rank of an iteration; None: it is no such folder, or has several."""
    if not _STEP.fullmatch(folder.name):
        return None
    try:
        ranks = [one for one in folder.iterdir() if _RANK.fullmatch(one.name) and one.is_dir()]
    except OSError:
        return None
    return ranks[0] if len(ranks) == 1 and (ranks[0] / _MAIN).is_file() else None


def _megatron(files: _Files, rank: Path) -> dict[str, Any]:
    for entry in files.within(files.folder):
        if entry != rank:
            raise UsageError(f"{entry} is not part of the checkpoint in {rank}: --leave-out {entry.name}")
    kept = files.within(rank)
    if rank / _MAIN not in kept:
        raise UsageError(f"{files.folder}: nothing is left to import")
    state = files.load(rank / _MAIN, "")
    if not isinstance(state, dict):
        if files.refused:
            return {}
        raise FormatError(f"{rank / _MAIN} is not a dict, which Megatron-LM would write")
    for file in kept:
        if file.name != _MAIN:
            if file.suffix != ".pt" or file.stem in state:
                raise UsageError(f"{file} is not part of Megatron-LM's checkpoint: --leave-out {file.name}")
            state[file.stem] = files.load(file, file.stem)
    return state
