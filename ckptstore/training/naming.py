"""Names of a script's parameters: their places in a checkpoint's state, as ``model.0.weight``.

`torch.compile` of a module puts ``_orig_mod`` into the names of everything in it. A checkpoint's names are those of the
model without it, whichever of its modules are compiled.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ckptstore.formats.names import bare_name as bare

__all__ = ["bare", "bare_state", "parameter_paths"]


def bare_state(state: Any) -> Any:
    """A module's state under bare names. One without compiled modules is returned as it is, as is any other object."""
    if not isinstance(state, Mapping) or all(name == bare(name) for name in state if isinstance(name, str)):
        return state
    found = OrderedDict((bare(name) if isinstance(name, str) else name, value) for name, value in state.items())
    # Prevents: one of two members lost, where a model has modules that are called alike without what torch put there.
    return found if len(found) == len(state) else state


def parameter_paths(modules: Iterable[tuple[str, torch.nn.Module]]) -> dict[str, torch.Tensor]:
    """Every path at which a parameter is -> the parameter. A tied one has several.

    Args:
        modules: each with its place in the state.
    """
    return {
        f"{place}.{bare(name)}": parameter
        for place, module in modules
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }
