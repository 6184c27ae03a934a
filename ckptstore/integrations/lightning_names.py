"""Names: a path of Lightning is a small text file, which names a tag of the store.

Lightning lists folders, asks whether a file exists, compares times, makes links. All of that works on the file. The
tag, which is set in the same commit as the checkpoint, decides which checkpoint it is.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping
from pathlib import PurePath
from typing import Final

from lightning.fabric.utilities.cloud_io import get_filesystem

from ckptstore.errors import FormatError, UsageError
from ckptstore.log import refs
from ckptstore.store import Store

__all__ = ["free_tag", "read_marker", "remove_marker", "write_marker"]

_KEY: Final = "ckptstore"
_MOST: Final = 4096
_LONGEST: Final = 100


def free_tag(path: str, taken: Collection[str]) -> str:
    """A tag for a path: its name without ``.ckpt``, with ``_`` for what tags may not hold, and a number if need be."""
    stem = PurePath(path).name.removesuffix(".ckpt")
    base = re.sub(r"[^A-Za-z0-9_.+-]", "_", stem)[:_LONGEST]
    try:
        refs.check_new_tag(base)
    except UsageError:  # it begins with another sign, or reads like another REF (a step, `latest`)
        base = f"ckpt-{base}"
    name, number = base, 2
    while name in taken:
        name, number = f"{base}-{number}", number + 1
    return name


def read_marker(path: str) -> Mapping[str, str] | None:
    """What the file at a path says: ``store`` (where it was), ``run`` and ``tag``. None: there is no such file.

    Raises:
        FormatError: it begins like such a file and cannot be read.
    """
    fs = get_filesystem(path)
    if not fs.isfile(path):
        return None
    with fs.open(path, "rb") as file:
        text = file.read(_MOST)
    if not text.startswith(b'{"ckptstore"'):
        return None
    try:
        found = json.loads(text)[_KEY]
        return {name: str(found[name]) for name in ("store", "run", "tag")}
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{path}: the name of a checkpoint in a store is damaged: {error}") from error


def write_marker(path: str, store: Store, tag: str) -> None:
    """Replace the file at a path, durably on a local disk."""
    text = json.dumps({_KEY: {"store": store.url, "run": store.run, "tag": tag}}) + "\n"
    fs = get_filesystem(path)
    fs.makedirs(os.path.dirname(path) or ".", exist_ok=True)  # noqa: PTH120  # may be a URL
    if "file" not in fs.protocol:
        fs.pipe_file(path, text.encode())
        return
    fresh = f"{path}.new"
    with open(fresh, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)  # noqa: PTH105
    folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY)  # noqa: PTH120
    try:
        os.fsync(folder)  # Prevents: a name that is lost with the power, and a run that begins again.
    finally:
        os.close(folder)


def remove_marker(path: str) -> None:
    """Remove the file at a path, if it is there."""
    fs = get_filesystem(path)
    if fs.exists(path) or os.path.islink(path):  # noqa: PTH114
        fs.rm_file(path)
