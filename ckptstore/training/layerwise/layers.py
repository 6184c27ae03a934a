"""The layers of a model: tensors that its optimizers update together.

A layer is what one module owns: the parameters, and the optimizers' slots for them. Small neighbors are packed
together, so that a model of a thousand small modules does not have a thousand gates.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from ckptstore.errors import UsageError
from ckptstore.formats.states.state import FlatState
from ckptstore.frameworks.torch_tensors import TorchSource

__all__ = ["PACKED", "ModelLayer", "layers_of", "local", "members_of", "place"]

PACKED: Final = 1 << 20
"""Neighboring layers are packed up to this many bytes of parameters: for less, a gate costs more than the copy."""


@dataclass(frozen=True, slots=True)
class ModelLayer:
    """Parameters that are copied together and have one gate.

    Attributes:
        name: the path of the module that owns them; of packed ones, the paths of the first and the last.
        parameters: in the order of the model.
        optimizers: which optimizers update them, by number.
    """

    name: str
    parameters: tuple[torch.Tensor, ...]
    optimizers: frozenset[int]

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters."""
        return sum(_nbytes(parameter) for parameter in self.parameters)


def layers_of(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    packed: int = PACKED,
) -> list[ModelLayer]:
    """The layers that the optimizers update, in the order of the model.

    Parameters without an optimizer (frozen ones) are in no layer: no hook tells when they change. Neither are
    parameters that share memory with another layer, because two gates would not protect them.

    Args:
        model: modules whose parameters give layers their names.
        packed: see `PACKED`.

    Raises:
        UsageError: the optimizers have no parameter.
    """
    users: dict[int, set[int]] = {}
    owned: dict[int, torch.Tensor] = {}
    for number, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                users.setdefault(id(parameter), set()).add(number)
                owned[id(parameter)] = parameter
    if not owned:
        raise UsageError("the optimizers have no parameters")
    modules = [model] if isinstance(model, torch.nn.Module) else list(model)
    layers: list[ModelLayer] = []
    for path, module in _named_modules(modules):
        mine = [owned.pop(id(one)) for one in module.parameters(recurse=False) if id(one) in owned]
        layers += _of_one_module(path, mine, users)
    layers += _of_one_module("(parameters of no module)", list(owned.values()), users)
    return _packed(_unshared(layers), packed)


def _named_modules(modules: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Module]]:
    for number, model in enumerate(modules):
        prefix = f"{number}." if len(modules) > 1 else ""
        for path, module in model.named_modules():
            yield f"{prefix}{path}".rstrip(".") or type(module).__name__, module


def _of_one_module(path: str, parameters: Sequence[torch.Tensor], users: Mapping[int, set[int]]) -> list[ModelLayer]:
    return (
        [ModelLayer(path, tuple(parameters), frozenset().union(*(users[id(one)] for one in parameters)))]
        if parameters
        else []
    )


def _unshared(layers: Sequence[ModelLayer]) -> list[ModelLayer]:
    """The layers without parameters whose memory overlaps that of another layer."""
    spans: list[tuple[str, int, int, int, int]] = []  # device, begin, end, layer, parameter
    for number, layer in enumerate(layers):
        for parameter in layer.parameters:
            data = local(parameter)
            if data.numel():
                begin = data.data_ptr()
                reach = 1 + sum((size - 1) * step for size, step in zip(data.shape, data.stride(), strict=True))
                spans.append((str(data.device), begin, begin + reach * data.element_size(), number, id(parameter)))
    spans.sort()
    shared: set[int] = set()
    furthest = ("", 0, 0, 0, 0)
    for span in spans:
        if span[0] != furthest[0]:
            furthest = span  # another device
        if span[1] < furthest[2] and span[3] != furthest[3]:
            shared |= {span[4], furthest[4]}
        furthest = max(furthest, span, key=_end)
    kept = [
        ModelLayer(layer.name, tuple(one for one in layer.parameters if id(one) not in shared), layer.optimizers)
        for layer in layers
    ]
    return [layer for layer in kept if layer.parameters]


def _end(span: tuple[str, int, int, int, int]) -> int:
    return span[2]


def _packed(layers: Sequence[ModelLayer], most: int) -> list[ModelLayer]:
    """Pack small neighbors, if that makes no layer wait for another optimizer's step."""
    counts: dict[int, int] = {}
    for layer in layers:
        for number in layer.optimizers:
            counts[number] = counts.get(number, 0) + 1
    groups: list[list[ModelLayer]] = []
    for layer in layers:
        last = groups[-1] if groups else []
        small = last and sum(one.nbytes for one in last) + layer.nbytes <= most
        if small and all(_together(one, layer, counts) for one in last):
            last.append(layer)
        else:
            groups.append([layer])
    named: dict[str, ModelLayer] = {}
    for group in groups:
        name = group[0].name if len(group) == 1 else f"{group[0].name} to {group[-1].name}"
        while name in named:  # such as a path that is in two models
            name += "'"
        parameters = tuple(parameter for layer in group for parameter in layer.parameters)
        named[name] = ModelLayer(name, parameters, frozenset().union(*(layer.optimizers for layer in group)))
    return list(named.values())


def _together(one: ModelLayer, other: ModelLayer, counts: Mapping[int, int]) -> bool:
    """Whether they have the same optimizers, or one separate optimizer each, as with the optimizer in backward."""
    if one.optimizers == other.optimizers:
        return True
    return all(counts[number] == 1 for number in one.optimizers | other.optimizers)


def members_of(
    layers: Sequence[ModelLayer], optimizers: Sequence[torch.optim.Optimizer], flat: FlatState
) -> dict[str, dict[str, TorchSource]]:
    """Which tensors of a state each layer has: those that are its parameters, or kept by its optimizers for them.

    They are found by their memory, whatever they are called. Copies and partial views are in no layer, and neither is
    what two layers claim.

    Returns:
        name of the layer -> name of the tensor -> the tensor, in the order of the state.
    """
    owners: dict[Hashable, str | None] = {}
    for layer in layers:
        for tensor in _tensors(layer, optimizers):
            key = place(tensor)
            if key is not None:
                owners[key] = layer.name if owners.get(key, layer.name) == layer.name else None
    found: dict[str, dict[str, TorchSource]] = {layer.name: {} for layer in layers}
    for name, source in flat.tensors.items():
        if isinstance(source, TorchSource) and (owner := owners.get(place(source.tensor))) is not None:
            found[owner][name] = source
    return found


def _tensors(layer: ModelLayer, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[torch.Tensor]:
    for parameter in layer.parameters:
        yield parameter
        for number in layer.optimizers:
            yield from _nested(optimizers[number].state.get(parameter))


def _nested(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for member in value.values():
            yield from _nested(member)
    elif isinstance(value, list | tuple):
        for member in value:
            yield from _nested(member)


def place(tensor: torch.Tensor) -> Hashable | None:
    """Equal for tensors that are the same memory in the same form; None: it has no memory."""
    data = local(tensor)
    if data.layout is not torch.strided or not data.numel():
        return None
    return data.device, data.data_ptr(), data.dtype, data.shape, data.stride(), data.is_conj(), data.is_neg()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; any other tensor itself."""
    if type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter:
        return tensor
    to_local: Callable[[], torch.Tensor] | None = getattr(tensor, "to_local", None)
    if to_local is None:
        return tensor
    with torch.no_grad():
        return to_local()


def _nbytes(tensor: torch.Tensor) -> int:
    data = local(tensor)
    return data.numel() * data.element_size()
