"""The documents of a place of published weights: the pointer, and a manifest for each version.

::

    latest.json                          the pointer: which version is the newest, and the hash of its manifest
    weight_v000007/claim.json            written first: a publisher of ckptstore owns this folder
    weight_v000007/*.safetensors         the tensors
    weight_v000007/model.safetensors.index.json
    weight_v000007/config.json ...       only of a full
    weight_v000007/manifest.json         written last: the version is complete

A version counts once the pointer, or the manifest of a later version, names the SHA-256 of its manifest.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from ckptstore.errors import FormatError
from ckptstore.formats import jsontext

__all__ = [
    "CLAIM",
    "LIMIT",
    "MANIFEST",
    "POINTER",
    "Encoding",
    "Manifest",
    "Pointer",
    "PublishedTensor",
    "folder_of",
    "sha256",
    "version_of",
]

POINTER: Final = "latest.json"
MANIFEST: Final = "manifest.json"
CLAIM: Final = "claim.json"
LIMIT: Final = 256 << 20
"""Largest manifest, in bytes."""
_FORMAT: Final = "ckptstore-published/1"
_FOLDER: Final = re.compile(r"weight_v(\d{6,})")

Encoding = Literal["raw", "xor", "base"]
"""``raw``: the file has the tensor's bytes. ``xor``: a zstd frame of its bytes XOR those in the base version. ``base``:
the bytes are those in the base version."""


def folder_of(version: int) -> str:
    """The folder of a version, as slime names it."""
    return f"weight_v{version:06d}"


def version_of(folder: str) -> int | None:
    """The version that a folder is named after; None: it has another name."""
    found = _FOLDER.fullmatch(folder)
    return int(found[1]) if found is not None and folder_of(int(found[1])) == folder else None


def sha256(data: bytes | memoryview) -> str:
    """SHA-256 in hex digits."""
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True, slots=True)
class PublishedTensor:
    """A tensor of a version.

    Attributes:
        name: its name for ``load_state_dict``.
        dtype, shape: as in the header of a safetensors file.
        nbytes: length of its bytes.
        encoding: where its bytes are.
        xxh3: XXH3-128 of all its bytes, 32 hex digits.
        file: the file in the version's folder that has a member of this name; None with ``base``.
        sha256: SHA-256 of all its bytes, if it was requested.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    encoding: Encoding
    xxh3: str
    file: str | None = None
    sha256: str | None = None

    @property
    def kind(self) -> tuple[str, str, tuple[int, ...]]:
        """What cannot change in a delta."""
        return self.name, self.dtype, self.shape


@dataclass(frozen=True, slots=True)
class Manifest:
    """A version.

    Attributes:
        version: its number.
        base, base_manifest: the version that a delta builds on, and the SHA-256 of that manifest; None: a full.
        layout: ``hf`` or ``slime``.
        selection: the prefix and the globs by which the tensors were chosen.
        run, ref, step, term, state, time: the checkpoint; `state` is the hash of its whole state.
        lossy: whether the checkpoint was stored lossily, on request.
        tensors: every tensor of the model.
        tied: (a further name, the tensor's name) of tied weights.
        files: the other files of the model, by name: SHA-256. Those of a delta are in the folder of its full.
    """

    version: int
    base: int | None
    base_manifest: str | None
    layout: str
    selection: tuple[str, ...]
    run: str
    ref: str
    step: int
    term: int
    state: str
    time: float
    lossy: bool
    tensors: tuple[PublishedTensor, ...]
    tied: tuple[tuple[str, str], ...]
    files: Mapping[str, str]

    @property
    def kinds(self) -> tuple[Any, ...]:
        """What cannot change in a delta: names, dtypes and shapes of the tensors, ties, other files."""
        return sorted(tensor.kind for tensor in self.tensors), self.tied, sorted(self.files.items())

    def encoded(self) -> bytes:
        """The bytes of the file."""
        total = sum(tensor.nbytes for tensor in self.tensors)
        members = {"format": _FORMAT, "kind": "full" if self.base is None else "delta", "total_size": total}
        return (json.dumps({**members, **asdict(self)}, separators=(",", ":")) + "\n").encode()

    @classmethod
    def decoded(cls, data: bytes, what: str) -> Manifest:
        """The manifest in a file. Raises `FormatError` naming `what`."""
        members = _members(data, what)
        try:
            tensors = tuple(_tensor(one) for one in members.pop("tensors"))
            tied = tuple((str(name), str(there)) for name, there in members.pop("tied"))
            selection = tuple(map(str, members.pop("selection")))
            del members["kind"], members["total_size"]
            return cls(**members, tensors=tensors, tied=tied, selection=selection)
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"{what}: not a manifest of published weights ({error})") from error


def _tensor(members: dict[str, Any]) -> PublishedTensor:
    return PublishedTensor(**{**members, "shape": tuple(members["shape"])})


@dataclass(frozen=True, slots=True)
class Pointer:
    """The pointer.

    Attributes:
        version: the newest version.
        manifest: SHA-256 of its manifest.
        ref, step: the checkpoint.
        chain: the folders to read, in order: a full, and the deltas on it.
    """

    version: int
    manifest: str
    ref: str
    step: int
    chain: tuple[str, ...]

    def encoded(self) -> bytes:
        """The bytes of the file."""
        members = {"format": _FORMAT, **asdict(self), "folder": folder_of(self.version)}
        return (json.dumps(members, indent=2) + "\n").encode()

    @classmethod
    def decoded(cls, data: bytes, what: str) -> Pointer:
        """The pointer in a file. Raises `FormatError` naming `what`."""
        members = _members(data, what)
        try:
            version, chain = members["version"], members["chain"]
            if type(version) is not int or not isinstance(chain, list) or folder_of(version) not in chain[-1:]:
                raise ValueError("version and chain")
            if any(not isinstance(folder, str) or version_of(folder) is None for folder in chain):
                raise ValueError("chain")
            return cls(version, members["manifest"], members["ref"], members["step"], tuple(chain))
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"{what}: not a pointer to published weights ({error})") from error


def _members(data: bytes, what: str) -> dict[str, Any]:
    members = jsontext.loads(data, what=what, max_bytes=LIMIT)
    if not isinstance(members, dict) or members.pop("format", None) != _FORMAT:
        raise FormatError(f"{what}: not written by `ckpt publish`, or by a later version of it")
    return members
