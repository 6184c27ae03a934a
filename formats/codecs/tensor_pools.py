"""Tiny tensors coded together.

A tensor of a few hundred numbers costs 70 microseconds to code alone and 7 as part of a pool, and has no space for
code tables. A pool is one run of bytes: the images of tensors of one class, end to end. It is coded like any
tensor's, against the pool of the same members of the base.
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
class Member:
    """A tensor in a pool: its bytes are ``[offset, offset + nbytes)`` of the pool's."""

    name: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Pool:
    """Tensors coded as one. ``kind`` is the class that they share."""

    kind: Hashable
    members: tuple[Member, ...]

    @property
    def nbytes(self) -> int:
        """The size of the pool, at most one block (1 MiB): reading one member decodes them all."""
        return self.members[-1].offset + self.members[-1].nbytes

    def gather(self, images: Mapping[str, Buffer], out: Bytes | None = None) -> Bytes:
        """The pool's bytes, from its members' by name. Raises ``ValueError`` where one has another size."""
        target = np.empty(self.nbytes, np.uint8) if out is None else out
        for member in self.members:
            image = as_bytes(images[member.name])
            if len(image) != member.nbytes:
                raise ValueError(f"{member.name} has {len(image)} bytes, not {member.nbytes}")
            target[member.offset : member.offset + member.nbytes] = image
        return target

    def split(self, data: Bytes) -> dict[str, Bytes]:
        """The members' bytes by name, as views of the pool's."""
        return {member.name: data[member.offset : member.offset + member.nbytes] for member in self.members}


def plan_pools(tensors: Iterable[tuple[str, Hashable, int]], tiny: int = TINY) -> list[Pool]:
    """Pools for the tiny ones among ``(name, kind, nbytes)``.

    ``kind`` says what may share a pool: dtype, and what the tensor is (weight, moment …), because one codec is
    chosen for all. Pools hold at least two tensors and at most ``BLOCK`` bytes; empty tensors and those left alone
    are in none. The plan depends on nothing but the tensors and their order, so a base with the same tensors has
    the same pools.
    """
    filling: dict[Hashable, list[Member]] = {}
    full: list[Pool] = []
    for name, kind, nbytes in tensors:
        if not 0 < nbytes < tiny:
            continue
        members = filling.setdefault(kind, [])
        at = members[-1].offset + members[-1].nbytes if members else 0
        if at + nbytes > BLOCK:
            full.append(Pool(kind, tuple(members)))
            members, at = filling.setdefault(kind, []), 0
            members.clear()
        members.append(Member(name, at, nbytes))
    full += [Pool(kind, tuple(members)) for kind, members in filling.items()]
    return [pool for pool in full if len(pool.members) > 1]
