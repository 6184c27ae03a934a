"""What the tests of this room reach inside exports for; see each function."""

from __future__ import annotations

from typing import Any

import pytest

from ckptstore.exchange import export, torch_archive

__all__ = ["revived_dtype", "shorten_zip"]


def revived_dtype(name: str) -> Any:
    """What an export makes of a dtype's name in a state's tree: `exporting._REVIVE`.

    No public function puts such a name into a store: it takes a hostile one, whose tree is checked before, too.
    """
    return export._REVIVE["$dtype"](name)


def shorten_zip(patch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Have archives need ZIP64 from so many bytes on, not from 4 GiB: `torch_archive._ZIP64_FROM`."""
    patch.setattr(torch_archive, "_ZIP64_FROM", nbytes)
