"""Readers of published weights that share no code with the publisher: the examples' and one of slime's deltas."""

from __future__ import annotations

import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import numpy as np
import numpy.typing as npt
import xxhash
import zstandard
from safetensors import deserialize

EXAMPLES = Path(__file__).parents[2] / "examples" / "serving"
Tensors = dict[str, npt.NDArray[np.uint8]]


def example(name: str) -> ModuleType:
    """An example as a module."""
    spec = spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def tensors_in(folder: Path) -> Tensors:
    """The bytes of the tensors in a folder's files."""
    found: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= {name: np.frombuffer(one["data"], np.uint8) for name, one in deserialize(file.read_bytes())}
    return found


def pull_as_slime(place: Path, target: int) -> Tensors:
    """The weights of version `target`, as slime's documentation says that they are pulled.

    Walk down to the newest full, then apply each delta: XOR its frames, and compare the new bytes with the checksum in
    the file's metadata. The walk meets every number between the two. A folder without metadata in its index is a full.
    """
    start = target
    while True:
        index = place / f"weight_v{start:06d}" / "model.safetensors.index.json"
        assert index.parent.is_dir(), f"version {start} is missing"
        if "delta_encoding" not in (json.loads(index.read_text())["metadata"] if index.exists() else {}):
            break
        start -= 1
    found = tensors_in(place / f"weight_v{start:06d}")
    for version in range(start + 1, target + 1):
        folder = place / f"weight_v{version:06d}"
        said = json.loads((folder / "model.safetensors.index.json").read_text())["metadata"]
        assert (int(said["version"]), int(said["base_version"])) == (version, version - 1)
        assert (said["delta_encoding"], said["compression_format"]) == ("xor", "zstd")
        assert said["checksum_format"] == "xxh3-128"
        for file in sorted(folder.glob("*.safetensors")):
            data = file.read_bytes()
            wanted = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
            for name, member in deserialize(data):
                assert member["dtype"] == "U8"
                frame = zstandard.ZstdDecompressor().decompress(bytes(member["data"]))
                found[name] = found[name] ^ np.frombuffer(frame, np.uint8)
                assert xxhash.xxh3_128_hexdigest(found[name]) == wanted[name]
    return found
