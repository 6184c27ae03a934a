"""Imports files of ``torch.save``: a file's bytes, or ``{"entries": {name: text}}`` as a zip archive of these.

The archive's contents matter, and random changes of bytes rarely pass the archive's own checks: so each record is a
text here, one character a byte, and checksums are right. No code of a pickle may run.
"""

from __future__ import annotations

import functools
import io
import json
import tempfile
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch  # imported here, so that the import's cost does not count for the first file

from ckptstore.errors import CorruptionError, FormatError, StorageError, UnsupportedStateError, UsageError
from ckptstore.exchange.torch_archive import TensorReference, TorchObject, write_archive
from ckptstore.exchange.weight_files import open_file
from tools.fuzz.guard import Target, Violation

__all__ = ["TORCHFILES"]

_SHARED: Final = Path("/dev/shm")
_READ: Final = 1 << 20
"""A few numbers may declare a large tensor, over and over: such a tensor is read up to this size."""


def _run(data: bytes) -> bool:
    given = _json(data)
    if isinstance(given, dict) and isinstance(given.get("entries"), dict):
        data = _archive(given["entries"])
    if not (data[:2] == b"PK" or (data[:1] == b"\x80" and data[8:9] != b"{")):
        return False  # another target's file
    with tempfile.TemporaryDirectory(dir=_SHARED if _SHARED.is_dir() else None) as folder:
        path = Path(folder) / "model.pt"
        path.write_bytes(data)
        with open_file(path) as opened:
            for name, source in opened.flat.tensors.items():
                image = np.empty(min(source.nbytes, _READ), np.uint8)
                source.read(0, image)
                if image.nbytes and source.nbytes > _READ:
                    source.read(source.nbytes - image.nbytes, image)
                again = np.empty(image.nbytes, np.uint8)
                source.read(source.nbytes - image.nbytes, again)
                if source.nbytes <= _READ and image.tobytes() != again.tobytes():
                    raise Violation(f"tensor {name!r:.80} is read as two things")
    return True


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _archive(entries: dict[str, Any]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, text in entries.items():
            if isinstance(text, str) and name and name.isprintable():
                archive.writestr(name[:200], text.encode("latin-1", "replace"))
    return out.getvalue()


def _apart(data: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return json.dumps(
            {"entries": {name: archive.read(name).decode("latin-1") for name in archive.namelist()}}
        ).encode()


@functools.cache
def _seeds() -> list[bytes]:
    """Files that torch writes, in both its formats, and files that `ckpt export` writes."""
    weight = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    state = {
        "model": OrderedDict(
            weight=weight, tied=weight, part=weight[:, 1:3], bias=torch.zeros(2, dtype=torch.bfloat16)
        ),
        "step": 7,
        "flags": [True, None, 1.5, "text", (1, 2)],
        "parameter": torch.nn.Parameter(torch.ones(2, dtype=torch.float64)),
        "empty": torch.empty(0, 3),
        "complex": torch.ones(2, dtype=torch.complex64),
    }
    files = []
    for zipped in (True, False):
        for what in (state, {"w": weight}, [1, 2, "three"], torch.Size([1, 2])):
            out = io.BytesIO()
            torch.save(what, out, _use_new_zipfile_serialization=zipped)
            files.append(out.getvalue())
    ours = io.BytesIO()
    tensors = {"a": TensorReference("a", "F32", (2, 3), 24), "b": TensorReference("b", "U16", (5,), 10)}
    more = {"again": tensors["a"], "dtype": TorchObject("float32"), "size": TorchObject("Size", ([1, 2],))}
    write_archive(
        ours,
        {**tensors, **more, "set": {1, 2}, "bytes": b"\0x"},
        lambda name: [memoryview(bytes(tensors[name].nbytes))],
    )
    files.append(ours.getvalue())
    return [*files, *(_apart(data) for data in files if data[:2] == b"PK")]


TORCHFILES: Final = Target(
    "torchfile", _run, _seeds, refusals=(FormatError, CorruptionError, UnsupportedStateError, UsageError, StorageError)
)
