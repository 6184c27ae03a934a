"""Private parts of exports that the tests of this room use; each function states why."""

from __future__ import annotations

from typing import Any

import pytest

from ckptstore.exchange import export, torch_archive

__all__ = ["revived_dtype", "shorten_zip"]


def revived_dtype(name: str) -> Any:
    """The dtype that an export makes from a name in a state's tree: `exporting._REVIVE`.

    No public function writes such a name into a store: that takes a hostile store, whose tree is checked first, too.
    """
    return export._REVIVE["$dtype"](name)


def shorten_zip(patch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Make archives need ZIP64 from so many bytes on, not from 4 GiB: `torch_archive._ZIP64_FROM`."""
    patch.setattr(torch_archive, "_ZIP64_FROM", nbytes)
