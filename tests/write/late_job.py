"""A rank of a job whose metadata is known late, as a process that a test may kill.

    python -m tests.write.late_job RANK FOLDER

The ranks meet in FOLDER/mail. Rank 0's metadata is what the test writes to FOLDER/known; FOLDER/asked exists once it is
asked for, when everything else of the checkpoint is durable.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np

import ckptstore
from ckptstore import Group, RankOptions

__all__ = ["FolderMailbox", "state"]


class FolderMailbox:
    """A `ckptstore.Mailbox` among processes: each key is a file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def set(self, key: str, value: bytes) -> None:
        new = self._folder / f".{os.getpid()}-{time.monotonic_ns()}"
        new.write_bytes(value)
        new.replace(self._path(key))

    def set_all(self, values: Mapping[str, bytes]) -> None:
        for key, value in values.items():
            self.set(key, value)

    def get(self, key: str) -> bytes | None:
        try:
            return self._path(key).read_bytes()
        except FileNotFoundError:
            return None

    def get_all(self, keys: list[str]) -> list[bytes] | None:
        found = [value for key in keys if (value := self.get(key)) is not None]
        return found if len(found) == len(keys) else None

    def has(self, keys: list[str]) -> bool:
        return all(self._path(key).exists() for key in keys)

    def delete(self, key: str) -> None:
        self._path(key).unlink(missing_ok=True)

    def clone(self) -> Self:
        return self

    def _path(self, key: str) -> Path:
        return self._folder / key.replace("/", "+")


def state(rank: int) -> dict[str, Any]:
    """What a rank saves."""
    return {"shared": np.arange(6.0), f"own-{rank}": np.full(5, float(rank))}


def main() -> None:
    """Save one step, and end like a process that does not close its writer."""
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])

    def late() -> dict[str, Any]:
        (folder / "asked").touch()
        while not (folder / "known").exists():
            time.sleep(0.01)
        return dict(json.loads((folder / "known").read_text()))

    group = Group(rank, 2, FolderMailbox(folder / "mail"))
    writer = ckptstore.open(folder / "store").writer(group=group, ranks=RankOptions(timeout=100))
    writer.save_async(state(rank), 1, metadata=late).result()
    os._exit(0)


if __name__ == "__main__":
    main()
