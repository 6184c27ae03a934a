"""The load methods that are compared. A loader returns the tensors by flat name; then every byte is read once.

That reading is the same for all: XXH3-128 of each tensor. It reads everything that a mapping left on disk, and shows
whether the bytes are those that were saved.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tools.bench.storage import raw
from tools.bench.storage.state import empty_like, flatten, parameter_shapes, tensor_digest


@dataclass(frozen=True, slots=True)
class Loaded:
    """Tensors by flat name, and the small state where the format keeps it."""

    tensors: dict[str, Any]
    small: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Origin:
    """The location of the state, and the method that wrote it."""

    folder: Path
    nbytes: int
    seed: int


def _nested(state: dict[str, Any]) -> Loaded:
    return Loaded(flatten(state), state["trainer"])


def _sliced(buffer: Any, origin: Origin) -> Loaded:
    """Cut a raw image into tensors, as `savers` laid them out."""
    image = np.frombuffer(buffer, np.uint8)
    tensors: dict[str, Any] = {}
    offset = 0
    for index, (name, shape) in enumerate(parameter_shapes(origin.nbytes).items()):
        length = 4 * int(np.prod(shape))
        for field, size in ((f"model.{name}", length), ("step", 4), ("exp_avg", length), ("exp_avg_sq", length)):
            key = field if field.startswith("model.") else f"optimizer.state.{index}.{field}"
            tensors[key] = image[offset : offset + size]
            offset += size
    return Loaded(tensors, None)


def raw_buffered(origin: Origin) -> Loaded:
    return _sliced(raw.read_buffered(origin.folder / "image"), origin)


def raw_direct(origin: Origin) -> Loaded:
    return _sliced(raw.read_direct(origin.folder / "image"), origin)


def torch_load(origin: Origin) -> Loaded:
    return _nested(torch.load(origin.folder / "state.pt", weights_only=True))


def torch_load_mapped(origin: Origin) -> Loaded:
    return _nested(torch.load(origin.folder / "state.pt", weights_only=True, mmap=True))


def _safetensors(origin: Origin, backend: str) -> Loaded:
    from safetensors.torch import load_file

    return Loaded(dict(load_file(origin.folder / "state.safetensors", backend=backend)), None)


def safetensors_load(origin: Origin) -> Loaded:
    return _safetensors(origin, "mmap")


def safetensors_pread(origin: Origin) -> Loaded:
    return _safetensors(origin, "pread")


def safetensors_open(origin: Origin) -> Loaded:
    from safetensors import safe_open

    with safe_open(origin.folder / "state.safetensors", framework="pt") as file:
        small = json.loads(file.metadata()["small"])
        return Loaded({name: file.get_tensor(name) for name in file.keys()}, small)  # noqa: SIM118  # it is not a dict


def dcp_load(origin: Origin) -> Loaded:
    from torch.distributed.checkpoint.state_dict_loader import load

    state = empty_like(origin.nbytes, origin.seed)
    load(state, checkpoint_id=origin.folder / "dcp", no_dist=True)
    return _nested(state)


def _ckptstore(origin: Origin, *, verify: bool = True, mmap: bool = False) -> Loaded:
    import ckptstore

    store = ckptstore.open(origin.folder / "store")
    return _nested(store.load("latest", framework="torch", verify=verify, mmap=mmap))


def ckptstore_load(origin: Origin) -> Loaded:
    return _ckptstore(origin)


def ckptstore_unverified(origin: Origin) -> Loaded:
    return _ckptstore(origin, verify=False)


def ckptstore_mapped(origin: Origin) -> Loaded:
    return _ckptstore(origin, mmap=True)


def ckptstore_mapped_unverified(origin: Origin) -> Loaded:
    return _ckptstore(origin, mmap=True, verify=False)


RUN: dict[str, Callable[[Origin], Loaded]] = {
    "raw-buffered": raw_buffered,
    "raw-direct": raw_direct,
    "ckptstore": ckptstore_load,
    "ckptstore-unverified": ckptstore_unverified,
    "ckptstore-mmap": ckptstore_mapped,
    "ckptstore-mmap-unverified": ckptstore_mapped_unverified,
    "safetensors": safetensors_load,
    "safetensors-pread": safetensors_pread,
    "safe-open": safetensors_open,
    "torch": torch_load,
    "torch-mmap": torch_load_mapped,
    "dcp": dcp_load,
}
"""By the names of `compared.LOADS`."""


def touch(tensors: dict[str, Any], threads: int) -> dict[str, str]:
    """Read every byte once: flat name -> XXH3-128 of each tensor."""
    if threads == 1:
        return {name: tensor_digest(tensor) for name, tensor in tensors.items()}
    with ThreadPoolExecutor(threads) as pool:
        return dict(zip(tensors, pool.map(tensor_digest, tensors.values()), strict=True))
