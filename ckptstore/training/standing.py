"""Whether a script's modules and optimizers are as they were, so that what was learnt of their state holds.

Answered without their ``state_dict``, which for thousands of parameters takes longer than the copy of the state. Every
tensor is looked at, every time: the same object under the same name, at the same address, of the same type, shape and
strides. What this cannot vouch for, `is_plain_module` and `is_plain_optimizer` refuse: modules and optimizers that make
their state in a way of their own, with hooks or with ``get_extra_state``, and optimizers that keep more than tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, repeat
from operator import attrgetter, contains, is_, itemgetter
from typing import Any, Final

import torch

__all__ = ["Tensors", "WatchedModule", "WatchedOptimizer", "is_plain_module", "is_plain_optimizer"]

_MEMBERS: Final = ("_parameters", "_buffers", "_modules")
_HOOKS: Final = ("_state_dict_hooks", "_state_dict_pre_hooks")
_SETS: Final = "_non_persistent_buffers_set"
_METHODS: Final = ("state_dict", "_save_to_state_dict", "get_extra_state")
_OPTIMIZER_HOOKS: Final = ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")


def is_plain_module(module: torch.nn.Module) -> bool:
    """Whether its state is its parameters and buffers, and those of the modules in it, and nothing else."""
    return all(
        all(getattr(type(one), name) is getattr(torch.nn.Module, name) for name in _METHODS)
        and not any(name in vars(one) for name in _METHODS)
        and not any(vars(one).get(name) for name in _HOOKS)
        for one in module.modules()
    )


def is_plain_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its state is tensors (or None) by parameter, in dicts."""
    return (
        type(optimizer).state_dict is torch.optim.Optimizer.state_dict
        and "state_dict" not in vars(optimizer)
        and not any(getattr(optimizer, name, None) for name in _OPTIMIZER_HOOKS)
        and all(
            isinstance(parameter, torch.Tensor)
            and type(slots) is dict
            and all(one is None or isinstance(one, torch.Tensor) for one in slots.values())
            for parameter, slots in optimizer.state.items()
        )
    )


class _Members:
    """What stands in dicts, by name. The dicts are asked; nothing is built for each of them."""

    def __init__(self, dicts: Sequence[dict[Any, Any]]) -> None:
        self.dicts = list(dicts)
        self._views = [one.values() for one in dicts]
        self._lengths = list(map(len, self.dicts))
        self._names = list(chain.from_iterable(self.dicts))
        self.values = list(chain.from_iterable(self._views))

    def unchanged(self) -> bool:
        """Whether the same objects, by identity, have the same names in the same dicts."""
        return (
            list(map(len, self.dicts)) == self._lengths
            and list(chain.from_iterable(self.dicts)) == self._names
            and all(map(is_, chain.from_iterable(self._views), self.values))
        )


class WatchedModule:
    """A plain module as it is now.

    Attributes:
        tensors: all parameters and buffers that it has.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._modules = list(module.modules())
        self._attributes = list(map(vars, self._modules))
        self._types = list(map(type, self._modules))
        self._kinds = list(dict.fromkeys(self._types))
        self._methods = self._methods_now()
        self._containers = self._containers_now()
        self._members = _Members([each[name] for each in self._attributes for name in _MEMBERS])
        self._hooks = [each[name] for each in self._attributes for name in _HOOKS]
        self._left_out = [set(each[_SETS]) for each in self._attributes]
        self.tensors = [one for one in self._members.values if isinstance(one, torch.Tensor)]

    def unchanged(self) -> bool:
        """Whether the same tensors, by identity, stand in its state under the same names."""
        return (
            all(map(is_, map(vars, self._modules), self._attributes))
            and self._methods_now() == self._methods
            and list(map(type, self._modules)) == self._types
            and not any(map(contains, self._attributes, repeat(_METHODS[0])))
            and _same(self._containers_now(), self._containers)
            and not any(self._hooks)
            and list(map(itemgetter(_SETS), self._attributes)) == self._left_out
            and self._members.unchanged()
        )

    def _methods_now(self) -> list[Any]:
        return [getattr(kind, name) for kind in self._kinds for name in _METHODS]

    def _containers_now(self) -> list[Any]:
        return list(chain.from_iterable(map(_containers_of, self._attributes)))


_containers_of: Final = itemgetter(*_MEMBERS, *_HOOKS)


class WatchedOptimizer:
    """A plain optimizer as it is now; its groups' numbers may change, not their parameters.

    Attributes:
        tensors: all that it keeps for parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._parameters = self._parameters_now()
        self._lengths = self._lengths_now()
        self._state = optimizer.state
        self._keys = list(optimizer.state)
        self._slots = list(optimizer.state.values())
        self._members = _Members(self._slots)
        self.tensors = [one for one in self._members.values if one is not None]

    def unchanged(self) -> bool:
        """Whether it keeps the same tensors, by identity, for the same parameters in the same groups."""
        optimizer = self._optimizer
        return (
            not any(getattr(optimizer, name, None) for name in _OPTIMIZER_HOOKS)
            and "state_dict" not in vars(optimizer)
            and optimizer.state is self._state
            and self._lengths_now() == self._lengths
            and _same(self._parameters_now(), self._parameters)
            and _same(list(self._state), self._keys)
            and _same(list(self._state.values()), self._slots)
            and self._members.unchanged()
        )

    def _parameters_now(self) -> list[Any]:
        return list(chain.from_iterable(group["params"] for group in self._optimizer.param_groups))

    def _lengths_now(self) -> list[int]:
        return [len(group["params"]) for group in self._optimizer.param_groups]


def _same(now: Sequence[Any], before: Sequence[Any]) -> bool:
    """The same objects: tensors must not be asked whether they are equal."""
    return len(now) == len(before) and all(map(is_, now, before))


class Tensors:
    """Tensors as they are now: where they lie, and of which type, shape and strides they are.

    Each tensor is asked, with what torch promises: about 1 ms a thousand tensors, whichever of them has changed.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self.tensors = list({id(one): one for one in tensors}.values())
        self._before = [ask(self.tensors) for ask in _ASKED]

    def unchanged(self) -> bool:
        """Whether all of them are as they were when this was made."""
        return all(ask(self.tensors) == before for ask, before in zip(_ASKED, self._before, strict=True))


def _each(ask: Callable[[Any], Any]) -> Callable[[Sequence[torch.Tensor]], list[Any]]:
    return lambda tensors: list(map(ask, tensors))


# Those that change most often first: `unchanged` stops at the first that differs.
_ASKED: Final = (
    _each(torch.Tensor.data_ptr),
    _each(attrgetter("shape")),
    _each(torch.Tensor.stride),
    _each(attrgetter("dtype")),
    _each(attrgetter("device")),
    _each(attrgetter("layout")),
    _each(torch.Tensor.is_conj),
    _each(torch.Tensor.is_neg),
    _each(type),
)
