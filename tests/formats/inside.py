"""Private parts of modules that the tests of this room use; each function states why."""

from __future__ import annotations

import pytest

from ckptstore.formats import jsontext

__all__ = ["without_strings"]


def without_strings(text: bytes, patch: pytest.MonkeyPatch, size: int) -> tuple[bytes, bytes]:
    """A text without its strings, made in pieces of `size` bytes and at once: `jsontext._without_strings`, `_STRING`.

    A public call would take a text of mebibytes for each cut.
    """
    patch.setattr(jsontext, "_PIECE", size)
    return b"".join(jsontext._without_strings(text)), jsontext._STRING.sub(b"", text)
