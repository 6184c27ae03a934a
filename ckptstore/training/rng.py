"""The states of random generators: Python's, numpy's, torch's (CPU and every CUDA device), and single generators.

States are tensors, not lists of Python numbers: they are in every checkpoint, and to write 625 numbers as JSON takes
longer than to copy a layer.
"""

from __future__ import annotations

import array
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ckptstore.errors import FormatError

__all__ = ["Generator", "equal", "first_moved", "global_states", "restore", "set_state", "state_of"]

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
"""A generator that is a separate object."""


def global_states() -> dict[str, Any]:
    """The state of every global generator of this process, copied.

    CUDA devices are asked only once this process uses CUDA: before that they have drawn nothing.
    """
    found: dict[str, Any] = {
        "python": _python_state(random.getstate()),
        "numpy": _numpy_state(np.random.get_state(legacy=True)),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["cuda"] = torch.cuda.get_rng_state_all()
    return found


def first_moved(since: Mapping[str, Any]) -> str | None:
    """The name of the first global generator whose state differs from what `global_states` found; None: none differs.

    It runs before each batch that follows a save, so it compares without conversions where it can. It leaves out CUDA
    devices that were not in use then.
    """
    if not torch.equal(torch.get_rng_state(), since["torch"]):
        return "torch"
    now = random.getstate()
    before = since["python"]
    if now[2] != before["spare"] or array.array("I", now[1]).tobytes() != before["words"].tobytes():
        return "python"
    name, keys, *rest = np.random.get_state(legacy=True)  # this call takes as long as all the rest
    before = since["numpy"]
    if [name, *rest] != [before[part] for part in ("name", "position", "has_gauss", "cached")]:
        return "numpy"
    if np.asarray(keys).tobytes() != before["keys"].tobytes():
        return "numpy"
    if "cuda" in since and not equal(torch.cuda.get_rng_state_all(), since["cuda"]):
        return "cuda"
    return None


def restore(state: Mapping[str, Any]) -> None:
    """Restore the generators to what `global_states` found.

    Raises:
        FormatError: it is no such state.
    """
    try:
        random.setstate(_python_arguments(state["python"]))
        np.random.set_state(_numpy_arguments(state["numpy"]))
        torch.set_rng_state(torch.as_tensor(state["torch"]).cpu())
        devices = state.get("cuda", [])
        if devices and torch.cuda.is_available():
            for number, one in enumerate(devices[: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(torch.as_tensor(one).cpu(), number)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise FormatError(f"the checkpoint's random generators cannot be restored: {error!r:.200}") from error


def state_of(generator: Generator) -> Any:
    """The state of one generator, copied: tensors, arrays and numbers."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return _numpy_state(generator.get_state(legacy=True))
    return _python_state(generator.getstate())


def set_state(generator: Generator, state: Any) -> None:
    """Set one generator to the state that `state_of` found.

    Raises:
        FormatError: it is the state of another kind of generator.
    """
    try:
        if isinstance(generator, torch.Generator):
            generator.set_state(torch.as_tensor(state).cpu())
        elif isinstance(generator, np.random.Generator):
            generator.bit_generator.state = state
        elif isinstance(generator, np.random.RandomState):
            generator.set_state(_numpy_arguments(state))
        else:
            generator.setstate(_python_arguments(state))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise FormatError(f"the checkpoint holds no state of a {type(generator).__name__}: {error!r:.200}") from error


def equal(one: Any, other: Any) -> bool:
    """Whether two states of generators are equal."""
    if isinstance(one, Mapping):
        return isinstance(other, Mapping) and one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and np.array_equal(one, other)
    return bool(one == other)


def _python_state(state: Any) -> dict[str, Any]:
    version, words, spare = state
    return {"version": version, "words": np.array(array.array("I", words), np.uint32), "spare": spare}


def _python_arguments(state: Any) -> tuple[Any, ...]:
    return (state["version"], tuple(int(word) for word in state["words"]), state["spare"])


def _numpy_state(state: Any) -> dict[str, Any]:
    name, keys, position, has_gauss, cached = state
    return {
        "name": name,
        "keys": np.array(keys),
        "position": int(position),
        "has_gauss": int(has_gauss),
        "cached": float(cached),
    }


def _numpy_arguments(state: Any) -> tuple[Any, ...]:
    return (state["name"], np.asarray(state["keys"]), state["position"], state["has_gauss"], state["cached"])
