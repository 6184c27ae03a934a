"""Flat states: tensors by the names that a caller chooses, and data; for code that has no nested state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ckptstore.errors import UnsupportedStateError, UsageError
from ckptstore.formats.states.names import is_name
from ckptstore.formats.states.shard import Shard, Shards
from ckptstore.frameworks import bridge

__all__ = ["DATA_KEY", "flat_state", "tensors_and_data"]

DATA_KEY: Final = "ckptstore/data"
"""The key of the data in a flat state. No tensor can have this name."""


def flat_state(tensors: Mapping[str, Any], data: Any = None) -> dict[str, Any]:
    """Make a state of tensors and data, for `Writer.save`, `RankWriter.save` and ``into=`` of `Store.load`.

    The names of the tensors in the store are the given ones. Names of one memory are one tensor, named after the first.
    ``Store.load(layout="flat")`` returns both parts.

    Args:
        tensors: name -> torch tensor, numpy array, DTensor, `Shard`, `Shards` or list of `Shard`.
        data: everything else: any values and containers that a state may have, without tensors. None: there is none.

    Returns:
        a dict with the tensors and, under a key that no tensor can have, the data. It refers to the tensors.

    Raises:
        UsageError: a name that no tensor can have, no tensor at a name, a tensor in `data`.
        UnsupportedStateError: a tensor, or a value in `data`, that cannot be stored.

    Example:
        >>> import numpy
        >>> state = flat_state({"layers.0.weight": numpy.ones(2)}, {"step": 3})
        >>> sorted(state)
        ['ckptstore/data', 'layers.0.weight']
    """
    state: dict[str, Any] = {}
    for name, value in tensors.items():
        if not isinstance(name, str) or not is_name(name):
            raise UsageError(
                f"{name!r:.80} cannot be the name of a tensor: it is empty, reserved (ckptstore/...) or not text"
            )
        shards = isinstance(value, Sequence) and value and all(type(one) is Shard for one in value)
        state[name] = Shards(value) if shards else value
        try:
            source = bridge.source_of(state[name], sharded=True)
        except UnsupportedStateError as error:
            raise UnsupportedStateError(f"tensor {name!r}: {error}") from error
        if source is None:
            kind = type(value)
            raise UsageError(f"tensor {name!r} is a {kind.__module__}.{kind.__qualname__}: put it into data=")
    if data is not None:
        if found := bridge.flattened(data, sharded=True).tensors:
            raise UsageError(f"data= has a tensor at {next(iter(found))!r}: give it in tensors=, by its name")
        state[DATA_KEY] = data
    return state


def tensors_and_data(state: Any, tensors: Mapping[str, Any], rest: Any) -> tuple[dict[str, Any], Any]:
    """The two parts of a state that was loaded.

    Args:
        state: the state.
        tensors: its tensors, by the names of their places.
        rest: the state without its tensors.
    """
    if type(state) is dict:
        found = {name: one for name, one in state.items() if name != DATA_KEY}
        made = {id(one) for one in tensors.values()}
        if all(type(name) is str and id(one) in made for name, one in found.items()):
            return found, state.get(DATA_KEY)  # a rank's own tensor has its plain name here
    return dict(tensors), rest
