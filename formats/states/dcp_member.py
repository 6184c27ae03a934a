"""The member of a state that was saved through ``torch.distributed.checkpoint``, which says what DCP knew of it.

It is a dict of

- ``planner``: name -> its path in the nested state, as DCP's planner data.
- ``bytes``: name -> True: the tensor of bytes is what DCP's planner made of a value.
- ``parts``: name of a value -> the names of the tensors in it.
- ``pieces``: name of a tensor -> name of each piece -> its offset, and the shape of the whole. Only of a tensor of
  which some rank has several boxes that are not one box together: each is a tensor of its own.

It is a dict of dicts, because those of all ranks are united key by key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

__all__ = ["ABOUT", "piece_name"]

ABOUT: Final = "ckptstore.dcp"
"""The member's key in the flat state."""


def piece_name(name: str, offset: Sequence[int]) -> str:
    """The name of a piece of a tensor."""
    return f"{name}[{','.join(map(str, offset))}]"
