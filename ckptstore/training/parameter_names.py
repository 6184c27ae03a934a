"""Names of a script's parameters: their places in a checkpoint's state, as ``model.0.weight``.

`torch.compile` of a module puts ``_orig_mod`` into the names of everything in it. A checkpoint's names are those of the
model without it, whichever of its modules are compiled.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ckptstore.formats.states.names import bare_name as bare

__all__ = ["bare", "bare_names", "bare_state", "parameter_paths"]


def bare_names(names: Iterable[str]) -> dict[str, str]:
    """The names of a module's members -> the names without what `torch.compile` adds; unchanged if two would be
    equal."""
    found = {name: bare(name) for name in names}
    # Prevents: one of two members lost, or restored to the other, where modules are called as torch calls its own.
    return found if len(set(found.values())) == len(found) else {name: name for name in found}


def bare_state(state: Any) -> Any:
    """A module's state under bare names. A state without compiled modules, and any other object, is unchanged."""
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        return state
    names = bare_names(state)
    if all(name == short for name, short in names.items()):
        return state
    return OrderedDict((names[name], value) for name, value in state.items())


def parameter_paths(modules: Iterable[tuple[str, torch.nn.Module]]) -> dict[str, torch.Tensor]:
    """Every path of a parameter -> the parameter. A tied one has several paths.

    Args:
        modules: each with its place in the state.
    """
    found: dict[str, torch.Tensor] = {}
    for place, module in modules:
        parameters = dict(module.named_parameters(remove_duplicate=False))
        names = bare_names(parameters)
        found |= {f"{place}.{names[name]}": parameter for name, parameter in parameters.items()}
    return found
