"""Pools of tiny tensors that are encoded together.

Encoding a tensor of a few hundred numbers takes 70 microseconds alone and 7 as part of a pool. Alone, its code tables
would cost more than they save. A pool is one run of bytes: the images of tensors of one kind, concatenated. It is
encoded like a tensor, with the pool of the same members of the base as its base.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from ckptstore.formats.codecs.block_loops import as_bytes
from ckptstore.formats.codecs.blocks import BLOCK
from ckptstore.formats.codecs.codec import Buffer
from ckptstore.formats.codecs.kernels import Bytes

TINY = 64 << 10
"""Tensors below this many bytes are pooled."""


@dataclass(frozen=True, slots=True)
class PoolMember:
    """A tensor in a pool: its bytes are ``[offset, offset + nbytes)`` of the pool."""

    name: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class TensorPool:
    """Tensors that are encoded as one. ``kind`` is what they have in common."""

    kind: Hashable
    members: tuple[PoolMember, ...]

    @property
    def nbytes(self) -> int:
        """Size of the pool in bytes, at most one block (1 MiB). Reading one member decodes the whole pool."""
        return self.members[-1].offset + self.members[-1].nbytes

    def gather(self, images: Mapping[str, Buffer], out: Bytes | None = None) -> Bytes:
        """Concatenate the members' bytes, given by name. Raises ``ValueError`` if a member has another size."""
        target = np.empty(self.nbytes, np.uint8) if out is None else out
        for member in self.members:
            image = as_bytes(images[member.name])
            if len(image) != member.nbytes:
                raise ValueError(f"{member.name} has {len(image)} bytes, not {member.nbytes}")
            target[member.offset : member.offset + member.nbytes] = image
        return target

    def split(self, data: Bytes) -> dict[str, Bytes]:
        """The members' bytes by name, as views of the pool's bytes."""
        return {member.name: data[member.offset : member.offset + member.nbytes] for member in self.members}


def plan_pools(tensors: Iterable[tuple[str, Hashable, int]], tiny: int = TINY) -> list[TensorPool]:
    """Group the tiny tensors among ``(name, kind, nbytes)`` into pools.

    Only tensors of the same ``kind`` share a pool, because one codec is chosen for all of them. The kind is the dtype
    and the role (weight, moment …). A pool has at least two tensors and at most ``BLOCK`` bytes. Empty tensors are in
    no pool, and neither is a tensor without a partner. The plan depends only on the tensors and their order, so a base
    with the same tensors has the same pools.
    """
    filling: dict[Hashable, list[PoolMember]] = {}
    full: list[TensorPool] = []
    for name, kind, nbytes in tensors:
        if not 0 < nbytes < tiny:
            continue
        members = filling.setdefault(kind, [])
        at = members[-1].offset + members[-1].nbytes if members else 0
        if at + nbytes > BLOCK:
            full.append(TensorPool(kind, tuple(members)))
            members, at = filling.setdefault(kind, []), 0
            members.clear()
        members.append(PoolMember(name, at, nbytes))
    full += [TensorPool(kind, tuple(members)) for kind, members in filling.items()]
    return [pool for pool in full if len(pool.members) > 1]
