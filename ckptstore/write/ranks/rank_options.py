"""Define the options of a writer of many ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ckptstore.errors import UsageError

__all__ = ["RankOptions"]


@dataclass(frozen=True, slots=True)
class RankOptions:
    """How ranks save together. The same on all ranks.

    Attributes:
        timeout: seconds that rank 0 waits for the other ranks, from the moment at which it has written its own part;
            the others wait for its answer twice as long. Then the step fails on every rank that is left.
        diverged: what happens if replicas of a tensor differ between ranks: ``raise`` commits nothing and raises
            `DivergedReplicasError`; ``warn`` warns and commits those of the lowest rank that has them, which then
            writes all replicas; ``ignore`` computes no digests.
        per_rank: names or globs (``rng.*``) of tensors of which each rank has its own, such as the states of random
            generators. A name also means everything below it. Values that are not tensors need no name here: if they
            differ, each rank's value is kept anyway.
    """

    timeout: float = 600.0
    diverged: Literal["raise", "warn", "ignore"] = "raise"
    per_rank: str | Sequence[str] = ()

    def __post_init__(self) -> None:
        if not self.timeout > 0:
            raise UsageError(f"timeout: {self.timeout}, more than 0 seconds are needed")
        if self.diverged not in ("raise", "warn", "ignore"):
            raise UsageError(f"diverged={self.diverged!r}: 'raise', 'warn' or 'ignore'")

    @property
    def globs(self) -> tuple[str, ...]:
        """`per_rank` as a tuple."""
        return (self.per_rank,) if isinstance(self.per_rank, str) else tuple(self.per_rank)
