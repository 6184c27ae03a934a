"""What a ``checkpoint_id`` of DCP names: a store, and a checkpoint in it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ckptstore.errors import UsageError

__all__ = ["CheckpointPlace", "names_store", "place_of"]

_SCHEME: Final = "ckpt://"
_STEP: Final = re.compile(r"(?:[A-Za-z_]+[-_.])?(\d{1,16})")
"""The last part of a path that names a step: ``100``, ``step-100``, ``global_step_100``."""


@dataclass(frozen=True, slots=True)
class CheckpointPlace:
    """A checkpoint of a store.

    Attributes:
        url: the store's path or URL.
        step: None: the next one, or the newest.
    """

    url: str
    step: int | None


def place_of(checkpoint_id: str | os.PathLike[str] | int | None, url: str | None, step: int | None) -> CheckpointPlace:
    """The place that a ``checkpoint_id`` names: ``STORE/STEP``, ``STORE/step-STEP``, only a step, or a store.

    Args:
        checkpoint_id: as DCP passes it on; ``ckpt://`` before it is dropped. None: the place is `url` and `step`.
        url: the store that the writer or reader was made with; None: none.
        step: the step that it was made with.

    Raises:
        UsageError: no store is named, or two different ones are.
    """
    if checkpoint_id is None:
        if url is None:
            raise UsageError(
                "no store was named: use CkptstoreWriter(PATH_OR_URL), or checkpoint_id='PATH_OR_URL/STEP'"
            )
        return CheckpointPlace(url, step)
    text = os.fspath(checkpoint_id) if isinstance(checkpoint_id, os.PathLike) else str(checkpoint_id)
    text = text.removeprefix(_SCHEME).rstrip("/")
    folder, _, last = text.rpartition("/")
    found = None if Path(text, "FORMAT").is_file() else _STEP.fullmatch(last)  # a store may be called runs/2026
    named, number = (folder, int(found[1])) if found else (text, None)
    if not named:
        named = url or ""
    if not named:
        raise UsageError(f"checkpoint_id={checkpoint_id!r:.200} names no store: use 'PATH_OR_URL/STEP'")
    if url is not None and named.rstrip("/") != url.removeprefix(_SCHEME).rstrip("/"):
        raise UsageError(
            f"checkpoint_id={checkpoint_id!r:.200} names another store than {url!r}, which was passed to "
            "the writer or reader"
        )
    return CheckpointPlace(named, step if number is None else number)


def names_store(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Whether a ``checkpoint_id`` names a store by itself."""
    try:
        place_of(checkpoint_id, None, None)
    except UsageError:
        return False
    return True
