"""Compares an optimizer with its state in a checkpoint, and restores it. See `part_fit`, `parameter_match`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from ckptstore.formats.optim import KINDS
from ckptstore.frameworks.torch_optimizers import kind_of
from ckptstore.training.resume.parameter_match import ParameterMatch, matched
from ckptstore.training.resume.part_fit import Undo, described_form, form_of, uncastable

__all__ = ["OptimizerFit", "described", "names_of"]

_ALIKE: Final = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg", "acc_delta", "sum"}
    | {"exp_inf", "ax", "mu_product", "prev", "step_size"}
)
"""Slots that torch's optimizers keep in the parameter's shape; other optimizers may keep rows and columns."""


def names_of(optimizer: torch.optim.Optimizer, paths: Mapping[int, Sequence[str]]) -> list[list[str]]:
    """For each group, the names of its parameters.

    A name is the parameter's first path in a model, else its name in ``param_names``, else the empty string.

    Args:
        paths: the paths of each parameter, by its ``id``.
    """
    found = []
    for group in optimizer.param_groups:
        given = group.get("param_names") or [""] * len(group["params"])
        pairs = zip(group["params"], given, strict=True)
        found.append([paths[id(one)][0] if id(one) in paths else str(name) for one, name in pairs])
    return found


def described(optimizer: torch.optim.Optimizer, paths: Mapping[int, Sequence[str]]) -> dict[str, Any]:
    """What a checkpoint records of an optimizer besides its state: its class, its parameters' names by number."""
    names = [name or None for group in names_of(optimizer, paths) for name in group]
    return {"class": type(optimizer).__qualname__, "parameters": names}


class OptimizerFit:
    """See `Fit`.

    Attributes:
        optimizer, state: what is compared.
        match: the matched parameters; None: its state has a custom form.
        pairs: (number in the checkpoint, parameter) of the matched parameters.
    """

    def __init__(
        self,
        path: str,
        optimizer: torch.optim.Optimizer,
        state: Any,
        about: Any,
        paths: Mapping[int, Sequence[str]],
        weights: Mapping[str, Any],
        part: str = "optimizer",
    ) -> None:
        """Compare. Nothing is changed.

        Args:
            about: the result of `described`; None: an old checkpoint.
            paths: the paths of the script's parameters, by `id`.
            weights: the checkpoint's parameters by path.
            part: the part of the state.
        """
        self.part = part
        self.path = path
        self.differences: list[str] = []
        self.casts: list[tuple[str, torch.dtype, torch.dtype]] = []
        self.foreign = not _is_torch(optimizer)
        self.match: ParameterMatch | None = None
        self.pairs: list[tuple[Any, torch.Tensor]] = []
        self.optimizer = optimizer
        self.state = state
        self._about: Mapping[str, Any] = about if isinstance(about, Mapping) else {}
        self._parameters = [one for group in optimizer.param_groups for one in group["params"]]
        self._names = names_of(optimizer, paths)
        self._paths = paths
        self._weights = weights
        self._unfit: set[int] = set()  # positions whose state does not fit
        self._cast: set[int] = set()  # positions whose dtype changes
        self._other_class = False
        self._compare()

    @property
    def groups(self) -> list[int | None] | None:
        """For each group of the script, its number in the checkpoint (`ParameterMatch`); None: unchanged."""
        if self.match is None or self._other_class or self.match.in_place:
            return None
        return self.match.groups

    def remember(self) -> Undo:
        """See `Fit`. Loading replaces an optimizer's tensors, so its current ones are kept, not copied."""
        optimizer = self.optimizer
        if self.foreign:
            before = _copied(optimizer.state_dict())
            return lambda: optimizer.load_state_dict(before)
        state, groups = optimizer.state, optimizer.param_groups
        members = [dict(group) for group in groups]

        def undo() -> None:
            for group, before in zip(groups, members, strict=True):
                group.clear()
                group.update(before)
            optimizer.state, optimizer.param_groups = state, groups

        return undo

    def put(self) -> None:
        """See `Fit`.

        Slots keep their saved dtype: torch would cast the fp32 moments of a bf16 parameter to bf16. If the parameter's
        own dtype has changed, its moments are cast to that, as torch does.
        """
        if self._other_class:
            return
        if self.match is None:
            self.optimizer.load_state_dict(self.state)
            return
        if not self.match.parameters and self.differences:
            return
        state = self._arranged(self.match)
        self.optimizer.load_state_dict(state)
        for position, parameter in enumerate(self._parameters):
            if position in self._cast:
                continue
            slots = self.optimizer.state.get(parameter, {})
            for key, saved in (state["state"].get(position) or {}).items():
                now = slots.get(key)
                if isinstance(saved, torch.Tensor) and isinstance(now, torch.Tensor) and saved.dtype != now.dtype:
                    slots[key] = saved.to(now.device)

    def _compare(self) -> None:
        said, mine = self._about.get("class"), type(self.optimizer).__qualname__
        if said is not None and said != mine:
            self.differences.append(f"{self.path}: {said} in the checkpoint, {mine} in the script")
            self._other_class = not (_is_kind(self.optimizer, said) and _is_torch(self.optimizer))
        state = self.state
        if not isinstance(state, Mapping) or not isinstance(state.get("param_groups"), Sequence):
            if not self.foreign:
                self.differences.append(f"{self.path}: the checkpoint has no optimizer's state there")
                self._other_class = True
            return
        self.match = match = self._matched(state["param_groups"])
        if not self._about and self._reordered():
            self.differences.append(
                f"{self.path}: the script makes its modules in another order, and this checkpoint, of an older "
                "version, does not say which parameter was which"
            )
            self._other_class = True
        self.differences += [f"{self.path}: {one}" for one in match.differences]
        if self._other_class:
            return
        if isinstance(self.optimizer, torch.optim.LBFGS) and not match.in_place:
            self.differences.append(f"{self.path}: LBFGS keeps all parameters in one vector, in another order")
            self._other_class = True
            return
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        self.pairs = [(numbers[its], self._parameters[mine]) for mine, its in match.parameters.items()]
        names = [name for group in self._names for name in group]
        for position, its in match.parameters.items():
            slots = (state.get("state") or {}).get(numbers[its])
            if isinstance(slots, Mapping):
                self._compare_slots(position, names[position] or f"parameter {position}", slots)

    def _reordered(self) -> bool:
        """Whether the parameters of both the script and the checkpoint come in a different order."""
        mine = [name for names in self._paths.values() for name in names if name in self._weights]
        return mine != [name for name in self._weights if name in set(mine)]

    def _matched(self, groups: Sequence[Mapping[str, Any]]) -> ParameterMatch:
        flat: list[str | None] = list(self._about.get("parameters") or ())
        lengths = [len(group["params"]) for group in groups]
        if len(flat) != sum(lengths):
            given = [group.get("param_names") or [None] * len(group["params"]) for group in groups]
            flat = [name for each in given for name in each]
        rest = iter(flat)
        saved = [[next(rest) for _ in range(length)] for length in lengths]
        known: dict[str, int] = {}
        for position, (parameter, name) in enumerate(
            zip(self._parameters, (one for group in self._names for one in group), strict=True)
        ):
            known |= dict.fromkeys([*([name] if name else []), *self._paths.get(id(parameter), ())], position)
            if own := self._given(position):
                known.setdefault(own, position)
        return matched(saved, self._names, known)

    def _given(self, position: int) -> str | None:
        """The name of the parameter at `position` in the optimizer's ``param_names``; None: it has none."""
        for group in self.optimizer.param_groups:
            if position < len(group["params"]):
                names = group.get("param_names")
                return None if not names else str(names[position])
            position -= len(group["params"])
        return None

    def _compare_slots(self, position: int, name: str, slots: Mapping[Any, Any]) -> None:
        parameter = self._parameters[position]
        weight = next((self._weights[one] for one in self._paths.get(id(parameter), ()) if one in self._weights), None)
        was = form_of(weight)
        if was is not None and was[0] != parameter.dtype:
            self._cast.add(position)
        for key, slot in slots.items():
            its = form_of(slot)
            if its is None or key == "step" or torch.nn.parameter.is_lazy(parameter):
                continue
            shape = tuple(parameter.shape)
            # Prevents: restoring the moments of another layer, if two scripts differ only in shapes.
            if (key in _ALIKE and its[1] not in ((), shape)) or (was is not None and was[1] == its[1] != shape):
                self._unfit.add(position)
                self.differences.append(
                    f"{self.path}: {key} of {name}: {described_form(its)} in the checkpoint, the parameter is "
                    f"{described_form(form_of(parameter))}"
                )
            elif position in self._cast and (lost := uncastable(slot, parameter.dtype)):
                self._unfit.add(position)
                self.differences.append(f"{self.path}: {key} of {name}: {lost}")
            elif position in self._cast and its[0] != parameter.dtype and its[1] == shape:
                self.casts.append((f"{self.path}: {key} of {name}", its[0], parameter.dtype))

    def _arranged(self, match: ParameterMatch) -> dict[str, Any]:
        """The checkpoint's state, renumbered as the script numbers its parameters."""
        saved = self.state["param_groups"]
        numbers = [number for group in saved for number in group["params"]]
        groups: list[dict[str, Any]] = []
        position = 0
        for mine, its in zip(self.optimizer.param_groups, match.groups, strict=True):
            here = range(position, position + len(mine["params"]))
            position += len(mine["params"])
            members = {key: one for key, one in (mine if its is None else saved[its]).items() if key != "param_names"}
            if mine.get("param_names"):
                members["param_names"] = list(mine["param_names"])
            groups.append({**members, "params": list(here)})
        states = self.state.get("state") or {}
        state = {key: one for key, one in states.items() if key not in set(numbers)}
        for mine_at, its_at in match.parameters.items():
            if numbers[its_at] in states and mine_at not in self._unfit:
                state[mine_at] = states[numbers[its_at]]
        return {**self.state, "state": state, "param_groups": groups}


def _is_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Whether torch's own code loads its state."""
    return type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict


def _is_kind(optimizer: torch.optim.Optimizer, name: str) -> bool:
    """Whether a class of that name keeps the same slots, as Adam and AdamW do."""
    other = getattr(torch.optim, name, None)
    if not isinstance(other, type) or other is _BASE:
        return False
    pairs: list[tuple[type, type]] = [(type(optimizer), other)]
    if (mine := kind_of(optimizer)) is not None and name in KINDS:
        pairs.append((KINDS[mine].settings, KINDS[name].settings))  # AdamW is not an Adam in every torch
    return any(issubclass(one, its) or issubclass(its, one) for one, its in pairs)


_BASE: Final = torch.optim.Optimizer


def _copied(value: Any) -> Any:
    """A state whose tensors are copies."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(one) for key, one in value.items()}
    return type(value)(map(_copied, value)) if type(value) in (list, tuple) else value
