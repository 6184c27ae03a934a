"""How a writer stores checkpoints as deltas."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ckptstore.errors import UsageError
from ckptstore.formats.codecs import FAST_POLICY, Policy
from ckptstore.host.option_checks import whole
from ckptstore.write.policy.delta_interval import Form, RestoreBound, Schedule

__all__ = ["DeltaOptions"]


@dataclass(frozen=True, slots=True)
class DeltaOptions:
    """How a writer makes deltas.

    Attributes:
        interval: checkpoints that share one base (T), or ``auto``: chosen from measured sizes, within the bound.
        form: ``anchor`` (one state in memory) or ``paper`` (each checkpoint against the one T before; T states).
        bound: the limit on the cost of restoring any checkpoint; `RestoreBound.parse` reads a text (``3x,30s``).
        policy: which codecs may be chosen, and by which criteria.
        compress_fulls: compress fulls, too. They are smaller, but other tools cannot load them.
        memory: bytes of host memory for bases, on each rank; a base that does not fit is read back from the store.
            None: no limit.
    """

    interval: int | Literal["auto"] = "auto"
    form: Form = "anchor"
    bound: RestoreBound = field(default_factory=RestoreBound)
    policy: Policy = FAST_POLICY
    compress_fulls: bool = False
    memory: int | None = None

    def __post_init__(self) -> None:
        if self.memory is not None:
            whole("memory (bytes for bases)", self.memory, 0)
        bound: object = self.bound
        if isinstance(bound, str):
            object.__setattr__(self, "bound", RestoreBound.parse(bound))
        elif not isinstance(bound, RestoreBound):
            raise UsageError(f"bound: {bound!r:.80}; a RestoreBound is needed, or a text as '3x,30s'")
        if not isinstance(self.policy, Policy):
            raise UsageError(f"policy: {self.policy!r:.80}; a Policy of ckptstore.formats.codecs is needed")
        Schedule(self.interval, self.form, self.bound)  # raises if one of them is invalid
