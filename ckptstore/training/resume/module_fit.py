"""Compares a module with its state in a checkpoint, and restores it. See `part_fit`."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from ckptstore.restore.load_targets import distinct_elements
from ckptstore.training import frozen_weights
from ckptstore.training.parameter_names import bare, bare_names, bare_state
from ckptstore.training.resume.part_fit import Undo, described_form, form_of, some, uncastable

__all__ = ["ModuleFit", "described", "otherwise_trained"]

_LOADING: Final = ("load_state_dict", "_load_from_state_dict", "state_dict", "_save_to_state_dict")
_HOOKS: Final = "_load_state_dict_pre_hooks"


def described(module: torch.nn.Module) -> dict[str, Any]:
    """What a checkpoint records of a module besides its state: the frozen or the trained parameters, whichever list is
    shorter."""
    kinds = _trained(module)
    frozen, trained = ([name for name, one in kinds.items() if one is wanted] for wanted in (False, True))
    return {"frozen": frozen} if len(frozen) <= len(trained) else {"trained": trained}


def otherwise_trained(path: str, module: torch.nn.Module, about: Any, saved: Any) -> list[str]:
    """Parameters that are frozen now and were trained when the checkpoint was saved, or the reverse.

    The script's choice stays.

    Args:
        about: the result of `described`; anything else: an old checkpoint without this record.
        saved: the module's state in the checkpoint. Parameters that only one side has are reported elsewhere.
    """
    if not isinstance(about, Mapping) or not isinstance(saved, Mapping):
        return []
    member, was = ("frozen", False) if "frozen" in about else ("trained", True)
    listed = about.get(member)
    if not isinstance(listed, list | tuple):
        return []
    names = set(bare_state(saved))
    before = {name: was if name in set(listed) else not was for name in names}
    now = {name: one for name, one in _trained(module).items() if name in names}
    told = []
    for wanted in (True, False):
        mine, its = ("trained", "frozen") if wanted else ("frozen", "trained")
        differ = [f"{path}.{name}" for name, one in now.items() if one is wanted is not before[name]]
        if differ:
            is_or_are = "parameter is" if len(differ) == 1 else "parameters are"
            told.append(
                f"{len(differ)} {is_or_are} {mine} in the script, and {its} in the checkpoint (requires_grad): "
                f"{some(differ, 3)}"
            )
    return told


def _trained(module: torch.nn.Module) -> dict[str, bool]:
    """Name -> whether the parameter has a gradient."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    names = bare_names(parameters)
    return {names[name]: one.requires_grad for name, one in parameters.items()}


class ModuleFit:
    """See `Fit`.

    Attributes:
        fitting: the part of the checkpoint's state that is restored, by the module's names.
    """

    def __init__(self, path: str, module: torch.nn.Module, state: Any, left_out: Any = None) -> None:
        """Compare. Nothing is changed.

        Args:
            left_out: the checkpoint's record of frozen weights that it does not hold; None: it holds all.
        """
        self.part = path.partition("[")[0].partition(".")[0]
        self.path = path
        self.differences: list[str] = []
        self.casts: list[tuple[str, torch.dtype, torch.dtype]] = []
        self._module = module
        self._state = state
        self._left_out = frozen_weights.rows_of(left_out)
        if self._left_out and isinstance(state, Mapping):
            self.differences += frozen_weights.differences(path, module, left_out, bare_state(state))
        self._own = list(_own_ways(module))
        self.foreign = bool(self._own)
        self.fitting: dict[str, Any] = {}
        self._repeated: dict[str, torch.Tensor] = {}  # several elements share memory
        self._already_equal: set[str] = set()  # has the checkpoint's bits already
        self._whole = "" in self._own
        if not self._whole:
            self._compare()
        elif isinstance(state, Mapping):
            self.fitting = dict(state)

    @property
    def live(self) -> dict[str, Any]:
        """The module's own tensors, by its names."""
        state = self._module.state_dict() if self._whole else _flat_state(self._module)
        return {name: one.detach() if isinstance(one, torch.Tensor) else one for name, one in state.items()}

    def remember(self) -> Undo:
        """See `Fit`. It copies the module's tensors."""
        tensors = [one for one in (*self._module.parameters(), *self._module.buffers()) if form_of(one) is not None]
        found = [(one, one.data, one.detach().clone()) for one in tensors if not _repeats(one)]
        views = [(one, one.data) for one in tensors if _repeats(one)]
        own = [one for one in self._module.modules() if _keeps_more(one)]
        more = [(one, copy.deepcopy(one.get_extra_state())) for one in own]

        def undo() -> None:
            with torch.no_grad():
                for tensor, data, before in found:
                    tensor.data = data
                    tensor.copy_(before)
                for tensor, data in views:
                    tensor.data = data
            for module, state in more:
                module.set_extra_state(state)

        return undo

    def put(self) -> None:
        """See `Fit`."""
        if self._whole:
            if not self._left_out:
                self._module.load_state_dict(self._state)
                return
            answer = self._module.load_state_dict(self._state, strict=False)
            self._check_restored([name for name in answer.missing_keys if not self._is_left_out(name)], answer)
            return
        partial = bool(self.differences)
        apart = self._repeated.keys() | self._already_equal
        fitting = {name: one for name, one in self.fitting.items() if name not in apart}
        strict = not partial and not apart and not self._left_out
        answer = self._module.load_state_dict(fitting, strict=strict)
        missing = [name for name in answer.missing_keys if name not in apart and not self._is_left_out(name)]
        if not partial:
            self._check_restored(missing, answer)
        for name, tensor in self._repeated.items():  # their base may have been restored above
            saved = self.fitting[name]
            if not torch.equal(tensor.detach(), saved.to(tensor.device, tensor.dtype)):
                tensor.data = saved.to(tensor.device, tensor.dtype, copy=True)

    def _check_restored(self, missing: Sequence[str], answer: Any) -> None:
        # Prevents: a tensor that the module's own loading code silently did not restore.
        if missing or answer.unexpected_keys:
            raise RuntimeError(f"{self.path}: not restored: {', '.join([*missing, *answer.unexpected_keys][:8])}")

    def _compare(self) -> None:
        live = _flat_state(self._module)
        if not isinstance(self._state, Mapping):
            self.differences.append(f"{self.path}: a {type(self._state).__name__} in the checkpoint, not a module's")
            return
        saved = bare_state(self._state)
        names = bare_names(live)
        first: dict[Any, str] = {}
        for name, tensor in live.items():
            self._compare_one(name, names[name], tensor, saved, first)
        known = set(names.values())
        for name, value in saved.items():
            if name in known:
                continue
            if self._is_own(name):
                self.fitting[name] = value  # the module's own loading code understands it
            else:
                self.differences.append(f"{self.path}.{name}: the script's has none (checkpoint: {_form(value)})")
        for prefix in self._own:
            self._already_equal |= self._frozen_alike(prefix, live, names)

    def _frozen_alike(self, prefix: str, live: Mapping[str, Any], names: Mapping[str, str]) -> set[str]:
        """The names in a module with its own loading code, if it is frozen and has the checkpoint's bits; else none.

        Some layers cannot load what they have saved: those with quantized weights (bitsandbytes) have to be made from
        the original weights. The script does that; here it is enough that they are the same.
        """
        mine = {names[name]: one for name, one in live.items() if names[name].startswith(prefix)}
        its = {name: one for name, one in self.fitting.items() if bare(name).startswith(prefix)}
        if any(isinstance(one, torch.Tensor) and one.requires_grad for one in mine.values()):
            return set()
        there = {bare(name): one for name, one in its.items()}
        stored = {name: one for name, one in mine.items() if not self._is_left_out(name)}
        if stored.keys() != there.keys() or not all(_equal(one, there[name]) for name, one in stored.items()):
            return set()
        return set(its) | {name for name in live if names[name].startswith(prefix)}

    def _compare_one(self, name: str, plain: str, live: Any, saved: Mapping[str, Any], first: dict[Any, str]) -> None:
        path = f"{self.path}.{plain}"
        if plain not in saved:
            if not self._is_own(plain) and not self._is_left_out(plain):
                self.differences.append(f"{path}: the checkpoint has none (script: {_form(live)})")
            return
        value = saved[plain]
        if self._is_own(plain) or not isinstance(live, torch.Tensor) or torch.nn.parameter.is_lazy(live):
            self.fitting[name] = value
            return
        mine, its = form_of(live), form_of(value)
        if mine is None or its is None or mine[1] != its[1]:
            self.differences.append(f"{path}: {_form(value)} in the checkpoint, {_form(live)} in the script")
        elif live.is_meta:
            self.differences.append(f"{path}: on the meta device, without memory: call to_empty(device=...) first")
        elif lost := uncastable(value, mine[0]):
            self.differences.append(f"{path}: {lost}")
        elif (other := first.setdefault(_identity(live), plain)) != plain and not _alike(saved[other], value):
            self.differences.append(
                f"{path}: one tensor with {self.path}.{other} in the script, two of other values in the checkpoint"
            )
        else:
            self.fitting[name] = value
            if mine[0] != its[0]:
                self.casts.append((path, its[0], mine[0]))
            if _repeats(live):
                self._repeated[name] = live

    def _is_left_out(self, name: str) -> bool:
        return frozen_weights.leaves_out(bare(name), self._left_out)

    def _is_own(self, name: str) -> bool:
        return any(name.startswith(prefix) for prefix in self._own)


def _flat_state(module: torch.nn.Module) -> Mapping[str, Any]:
    """The module's own tensors by the names of its ``load_state_dict``."""
    return module.state_dict(keep_vars=True)


def _own_ways(module: torch.nn.Module) -> Iterator[str]:
    """Prefixes of names that modules save or load by their own code: only they know what fits there."""
    for name, one in module.named_modules(remove_duplicate=False):
        kinds = type(one)
        own = any(
            not getattr(kinds, method).__module__.startswith("torch.nn.modules.") or method in vars(one)
            for method in _LOADING
            if not kinds.__module__.startswith("torch.")
        )
        if own or vars(one).get(_HOOKS):
            yield f"{bare(name)}." if bare(name) else ""


def _repeats(tensor: Any) -> bool:
    """Whether several of its elements share memory, so that nothing can be copied into it."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or hasattr(tensor, "placements"):
        return False
    return not distinct_elements(tensor.stride(), tensor.shape)


def _identity(tensor: torch.Tensor) -> Any:
    """A key that is equal for two names of one tensor."""
    if not tensor.numel() or tensor.layout != torch.strided or hasattr(tensor, "placements"):
        return id(tensor)
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


def _alike(one: Any, other: Any) -> bool:
    """Whether two tensors of a checkpoint are equal; of entries, whether their digests or names are."""
    if one is other:
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        # Bits, not numbers: NaN is equal to itself here.
        return form_of(one) == form_of(other) and torch.equal(_bytes(one), _bytes(other))
    return not isinstance(one, torch.Tensor) and bool(one.name == other.name or one.digest in (None, other.digest))


def _equal(mine: Any, its: Any) -> bool:
    """Whether a module's tensor or other value has the checkpoint's bits."""
    if isinstance(mine, torch.Tensor) and isinstance(its, torch.Tensor):
        return form_of(mine) is not None and _alike(mine.detach(), its.to(mine.device))
    try:
        return type(mine) is type(its) and bool(mine == its)
    except Exception:  # noqa: BLE001  # a value of any type: what cannot be compared is loaded
        return False


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def _keeps_more(module: torch.nn.Module) -> bool:
    """Whether its state has more than tensors."""
    return type(module).get_extra_state is not torch.nn.Module.get_extra_state


def _form(value: Any) -> str:
    return described_form(form_of(value))
