"""Files of other tools: a safetensors file, or ``{"index": ..., "shards": {name: header}}`` as a folder of them."""

from __future__ import annotations

import json
import struct
import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np
import safetensors

from ckptstore.errors import FormatError, StorageError, UnsupportedStateError, UsageError
from ckptstore.exchange.weight_files import open_file
from tools.fuzz.guard import Target, Violation

__all__ = ["WEIGHTFILES"]

_SHARED: Final = Path("/dev/shm")
_LONGEST_SHARD: Final = 1 << 16


def _run(data: bytes) -> bool:
    with tempfile.TemporaryDirectory(dir=_SHARED if _SHARED.is_dir() else None) as folder:
        place = Path(folder)
        given = _json(data)
        if isinstance(given, dict) and isinstance(given.get("shards"), dict):
            for name, header in given["shards"].items():
                if len(name) < 60 and name.isprintable() and Path(name).name == name != "":
                    (place / name).write_bytes(_safetensors(header))
            path = place / "model.safetensors.index.json"
            path.write_text(json.dumps(given.get("index")))
        else:
            if data[:2] == b"PK" or (data[:1] == b"\x80" and data[8:9] != b"{"):
                return False  # torch's own reader would be fuzzed
            path = place / "model.safetensors"
            path.write_bytes(data if given is None else _safetensors(given))
        return _read(path)


def _read(path: Path) -> bool:
    found: dict[str, tuple[str, bytes]] = {}
    with open_file(path) as opened:
        total = 0
        for name, source in opened.flat.tensors.items():
            total += source.nbytes
            if source.nbytes > path.parent.stat().st_size + (1 << 20):
                raise Violation(f"tensor {name!r:.80} has {source.nbytes} bytes, more than any file here")
            image = np.empty(source.nbytes, np.uint8)
            source.read(0, image)
            found[name] = (source.dtype, image.tobytes())
    if path.suffix != ".json":
        _compare(path, found)
    return True


def _compare(path: Path, found: dict[str, tuple[str, bytes]]) -> None:
    """If safetensors also reads the file, it must read the same."""
    try:
        # Bytes by name, checked by the library; offsets are in the header, which it has accepted.
        names = [name for name, _ in safetensors.deserialize(path.read_bytes())]
        theirs = {name: bytes(tensor["data"]) for name, tensor in safetensors.deserialize(path.read_bytes())}
    except Exception:  # noqa: BLE001  # the library's errors are its own; a refusal cannot be compared
        return
    if len(names) == len(found) and set(names) == set(found) and any(theirs[name] != found[name][1] for name in names):
        raise Violation("safetensors reads other bytes")


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _safetensors(header: Any) -> bytes:
    text = json.dumps(header).encode()
    ends = [
        entry["data_offsets"][1]
        for entry in (header.values() if isinstance(header, dict) else ())
        if isinstance(entry, dict)
        and isinstance(entry.get("data_offsets"), list)
        and len(entry["data_offsets"]) == 2
        and type(entry["data_offsets"][1]) is int
    ]
    size = max([0, *(end for end in ends if end <= _LONGEST_SHARD)])
    return struct.pack("<Q", len(text)) + text + bytes(place * 7 % 256 for place in range(size))


def _seeds() -> list[bytes]:
    plain = {
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b.c": {"dtype": "I64", "shape": [], "data_offsets": [24, 32]},
        "empty": {"dtype": "U8", "shape": [0, 5], "data_offsets": [32, 32]},
        "f4": {"dtype": "F4", "shape": [4, 2], "data_offsets": [32, 36]},
    }
    tree = {"model": {"w": {"$t": "w"}}, "step": 3, "z": {"$t": "z"}}
    restored = {
        "__metadata__": {
            "format": "pt",
            "ckptstore.state": json.dumps(tree),
            "ckptstore.dtypes": json.dumps({"z": "C64"}),
            "ckptstore.checkpoint": "3@1",
        },
        "w": {"dtype": "BF16", "shape": [5], "data_offsets": [0, 10]},
        "z": {"dtype": "F32", "shape": [2, 2], "data_offsets": [10, 26]},
    }
    sharded = {
        "index": {"metadata": {"total_size": 32}, "weight_map": {"x": "one.safetensors", "y": "two.safetensors"}},
        "shards": {
            "one.safetensors": {"x": {"dtype": "F64", "shape": [2], "data_offsets": [0, 16]}},
            "two.safetensors": {"y": {"dtype": "F16", "shape": [4, 2], "data_offsets": [0, 16]}},
        },
    }
    texts = [json.dumps(value).encode() for value in (plain, restored, sharded)]
    return [*texts, _safetensors(plain), _safetensors(restored)]


WEIGHTFILES: Final = Target(
    "weightfile", _run, _seeds, refusals=(FormatError, UnsupportedStateError, UsageError, StorageError)
)
