"""Save a state as one torch or safetensors file, and load such a file, without a store: for `ckptstore.save`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np

from ckptstore.errors import UsageError
from ckptstore.exchange.export import export_state
from ckptstore.exchange.weight_files import is_torch, open_file
from ckptstore.formats import dtypes
from ckptstore.formats.states.state import Origin, unflatten
from ckptstore.frameworks import bridge
from ckptstore.host.caller_warnings import warn

__all__ = ["load_file", "save_file"]


def save_file(obj: Any, path: Path) -> None:
    """Write a state to a file, whose name says the format. The file appears complete and durable, or not at all.

    Raises:
        UnsupportedStateError: such a file cannot have the state. Nothing was written.
        UsageError: `path` is in a store, or no regular file; its folder does not exist.
        StorageError: the file cannot be written. An existing one is unchanged.
    """
    kind: Literal["safetensors", "pt"] = "safetensors" if path.suffix.lower() == ".safetensors" else "pt"
    if converted := export_state(bridge.flattened(obj), path, kind):
        warn(
            f"{path}: numpy arrays became tensors, numpy numbers became Python's, frozensets became sets, because "
            f"torch.load(weights_only=True) refuses them (a store keeps them): {', '.join(converted[:3])}"
        )


def load_file(path: Path, *, map_location: Any, framework: Literal["torch", "numpy"] | None, mmap: bool) -> Any:
    """Load the state in a torch or safetensors file; the contents say which. Pickled code is never run.

    Args:
        map_location, mmap: as for ``torch.load``; for a safetensors file, only the device matters.
        framework: as for `Store.load`.

    Raises:
        UsageError: an option is invalid for this format.
        as `weight_files.open_file`.
    """
    if framework not in (None, "torch", "numpy"):
        raise UsageError(f"framework={framework!r}: expected 'torch' or 'numpy'")
    try:
        torch_file = is_torch(path)
    except OSError:
        torch_file = False  # opening it reports the error
    if torch_file:
        if framework == "numpy":
            raise UsageError(f"framework='numpy': {path} is a torch file, whose tensors are torch's")
        bridge.tensors()  # its error says how to install torch
        from ckptstore.frameworks.torch_files import load_as_saved

        return load_as_saved(path, map_location=map_location, mmap=mmap)
    return _load_tensors(path, map_location, framework)


def _load_tensors(path: Path, device: Any, framework: str | None) -> Any:
    to_torch = bridge.torch_in_use() if framework is None else framework == "torch"
    if device is not None:
        if not to_torch:
            raise UsageError("map_location= needs framework='torch'")
        bridge.tensors().check_device(device)
    with open_file(path) as opened:
        made: dict[str, Any] = {}

        def resolve(name: str, origin: Origin) -> Any:
            if name in made:
                return made[name]  # tied tensors are one object
            source = opened.flat.tensors[name]
            image = np.empty(source.nbytes, np.uint8)
            source.read(0, image)
            if to_torch and origin == "torch":
                tensor = bridge.tensors().from_buffer(source.dtype, source.shape, image)
                made[name] = tensor if device is None else tensor.to(device)
            else:
                made[name] = image.view(dtypes.get(source.dtype).numpy).reshape(source.shape)
            return made[name]

        return unflatten(opened.flat.tree, resolve, bridge.tensors().revive if to_torch else None)
