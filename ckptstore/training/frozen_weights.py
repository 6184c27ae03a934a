"""The frozen weights that ``Checkpointer(only="trainable")`` leaves out, and how a change of them is noticed.

What is left out cannot be restored: the script loads it. So every checkpoint has a record of it, two numbers for each
weight (`record`), and a resumed script is compared with that (`differences`). Every save computes the record again from
the bits: torch's own count of changes misses writes through ``.data``. The record needs one read of the frozen weights
for each save, without a copy: 0.06 to 0.2 s of processor time for each GB in the memory of the CPU.

A weight is left out only as long as it is frozen and has the bits with which the script loaded it. One that was
trained, loaded or written since then is stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ckptstore.errors import UnsupportedStateError, UsageError
from ckptstore.formats.checksums import xxh3_64
from ckptstore.frameworks.torch_digest import digests
from ckptstore.host.caller_warnings import DeterminismWarning, warn
from ckptstore.training.parameter_names import bare_names, bare_state

__all__ = ["FrozenWeights", "Record", "differences", "frozen_names", "leaves_out", "rows_of"]

Record = npt.NDArray[np.uint64]
"""A row for each weight that was left out, ascending: a hash of its name, and one of its type, shape and bits."""


class FrozenWeights:
    """The frozen weights of a script's models.

    Attributes:
        left_out: for each model, the names that the last `compare` found unchanged.
    """

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        """Nothing is read before `note`."""
        self.left_out: tuple[frozenset[str], ...] = ()
        self._models = list(models)
        self._loaded: list[dict[str, int]] | None = None
        self._now: list[dict[str, int]] = []
        self._told: set[str] = set()

    def note(self) -> None:
        """Note the weights as the script loaded them. Only the first call does anything.

        Raises:
            UsageError: a frozen weight has no bytes that could be compared.
        """
        if self._loaded is None:
            self._loaded = [hashes(model) for model in self._models]

    def compare(self) -> None:
        """Compare the weights with those that the script loaded: what has changed is not left out any more.

        Raises:
            as `note`.
        """
        self.note()
        assert self._loaded is not None
        self._now = [hashes(model) for model in self._models]
        pairs = list(zip(self._now, self._loaded, strict=True))
        self.left_out = tuple(frozenset(name for name in now if now[name] == was.get(name)) for now, was in pairs)
        changed = [name for now, was in pairs for name in now if name in was and now[name] != was[name]]
        if new := [name for name in changed if name not in self._told]:
            self._told.update(new)
            warn(
                f"{len(new)} frozen weights have changed since the script loaded them ({', '.join(new[:3])}): from now "
                "on they are stored with each checkpoint, in spite of only='trainable'",
                DeterminismWarning,
            )

    def without(self, module: torch.nn.Module, state: Any) -> Any:
        """The state of one of the models without what is left out."""
        left = self.left_out[self._place(module)]
        if not left or not isinstance(state, Mapping):
            return state
        kept = state.copy() if hasattr(state, "copy") else dict(state)  # an OrderedDict with its metadata
        for name in left:
            del kept[name]
        return kept

    def record(self, module: torch.nn.Module) -> Record:
        """The record of what is left out of one of the models."""
        place = self._place(module)
        rows = sorted((_name_hash(name), self._now[place][name]) for name in self.left_out[place])
        return np.array(rows, np.uint64).reshape(-1, 2)

    def _place(self, module: torch.nn.Module) -> int:
        return next(place for place, one in enumerate(self._models) if one is module)


def frozen_names(module: torch.nn.Module) -> frozenset[str]:
    """The bare names of the parameters that have no gradient."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    names = bare_names(parameters)
    return frozenset(names[name] for name, one in parameters.items() if not one.requires_grad)


def hashes(module: torch.nn.Module) -> dict[str, int]:
    """The hash of each frozen weight by its bare name, and of what a quantized one keeps beside it (its scales).

    Raises:
        UsageError: a frozen weight has no bytes that could be compared.
    """
    return hashes_of(_members(module, frozen_names(module)))


def hashes_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The hash of type, shape and bits of each tensor. Raises as `hashes`."""
    parts = {name: list(_plain(tensor)) for name, tensor in tensors.items()}
    flat = [one for each in parts.values() for one in each]
    try:
        numbers = iter(digests(flat))
    except UnsupportedStateError as error:
        raise UsageError(
            f"only='trainable': frozen weights cannot be compared when a run is resumed: {error}"
        ) from error
    found = {}
    for name, each in parts.items():
        said = [f"{one.dtype} {tuple(one.shape)} {next(numbers):016x}" for one in each]
        found[name] = xxh3_64("\n".join(said).encode())
    return found


def differences(path: str, module: torch.nn.Module, record: object, saved: Mapping[str, Any]) -> list[str]:
    """Why what a checkpoint left out is not what the script has, each naming a path. Empty: it is.

    Args:
        record: the checkpoint's. Anything but a `Record`: nothing was left out.
        saved: what the checkpoint holds of the module.
    """
    rows = rows_of(record)
    if not rows:
        return []
    state = {name: one for name, one in bare_state(module.state_dict()).items() if isinstance(one, torch.Tensor)}
    mine = {name: one for name, one in state.items() if name not in saved and _name_hash(name) in rows}
    found = []
    try:
        now = hashes_of(mine)
    except UsageError as error:
        return [f"{path}: {error}"]
    for name, number in now.items():
        if rows.pop(_name_hash(name)) != number:
            found.append(
                f"{path}.{name}: frozen, and left out of the checkpoint (only='trainable'); the script has other bits, "
                "or another type or shape: load what the run was started with before resume()"
            )
    if rows:
        found.append(
            f"{path}: the checkpoint left out {len(rows)} frozen weights (only='trainable') that the script does not "
            "have: make the same model before resume()"
        )
    return found


def rows_of(record: object) -> dict[int, int]:
    """Hash of the name -> hash of the weight, of a checkpoint's record."""
    array = record.numpy() if isinstance(record, torch.Tensor) else record
    if not isinstance(array, np.ndarray) or array.dtype != np.uint64 or array.ndim != 2 or array.shape[1] != 2:
        return {}
    return {int(name): int(number) for name, number in array}


def leaves_out(name: str, rows: Mapping[int, int]) -> bool:
    """Whether a weight of this name was left out."""
    return _name_hash(name) in rows


def _members(module: torch.nn.Module, frozen: frozenset[str]) -> dict[str, torch.Tensor]:
    """The entries of a module's state that are frozen weights, or belong to one: ``weight.absmax`` to ``weight``."""
    return {
        name: value
        for name, value in bare_state(module.state_dict()).items()
        if isinstance(value, torch.Tensor) and (name in frozen or _belongs(name, frozen))
    }


def _belongs(name: str, frozen: frozenset[str]) -> bool:
    while "." in name:
        name = name.rpartition(".")[0]
        if name in frozen:
            return True
    return False


def _plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors that a tensor consists of, in order."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) and hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _plain(getattr(tensor, name))
    else:
        yield tensor


def _name_hash(name: str) -> int:
    return xxh3_64(name.encode("utf-8", "surrogatepass"))
