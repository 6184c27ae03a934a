"""The demo's training text: sources of Python's own standard library, which every machine has."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

_NOT_THE_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests"}


class CorpusError(Exception):
    """This machine has no such corpus, or it is not the one that a checkpoint was trained on."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """`text` as bytes (shape ``(n,)``, uint8) and the SHA-256 that names it."""

    text: npt.NDArray[np.uint8]
    sha256: str
    files: int

    def identity(self) -> dict[str, str | int]:
        """The record of the data in a checkpoint."""
        return {"sha256": self.sha256, "bytes": int(self.text.size)}

    def require(self, recorded: dict[str, str | int]) -> None:
        """Refuse to continue on other data: the result would match neither run. Raises `CorpusError`."""
        if recorded != self.identity():
            raise CorpusError(
                f"the checkpoint was trained on {recorded['bytes']} bytes of text with SHA-256 {recorded['sha256']}, "
                f"this machine has {self.text.size} bytes with {self.sha256}: refusing to resume on other data"
            )


def read_corpus(size: int, folder: Path | None = None) -> Corpus:
    """The first `size` bytes of the ``.py`` files below `folder` (default: the standard library).

    Files come in the order of their names, a folder's own files before those of its subfolders. Raises
    `CorpusError` if the sources are not there or are too short.
    """
    root = folder or Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    files = 0
    for path in _sources(root):
        if len(text) >= size:
            break
        text += path.read_bytes()
        files += 1
    if len(text) < size:
        raise CorpusError(f"the Python sources below {root} are only {len(text)} bytes, {size} are needed")
    del text[size:]
    return Corpus(np.frombuffer(bytes(text), np.uint8), hashlib.sha256(text).hexdigest(), files)


def _sources(root: Path) -> Iterator[Path]:
    """Lazy, so that the tens of thousands of files that the corpus does not need cost nothing."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - _NOT_THE_LIBRARY)
        yield from (Path(folder) / name for name in sorted(names) if name.endswith(".py"))
