"""Copy a rank's share of a plain full unit by unit, under a budget, as it is written (`segments`).

As in a plain full of one process, writing does not start while everything can still be copied without waiting. But
there is one write thread, so the shares are copied one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from ckptstore.formats.states.state import FlatState
from ckptstore.host.arenas import Arenas
from ckptstore.segments.staged_units import DescribedTensor, StagedState, StagedUnits, copies_of
from ckptstore.segments.units import UnitPlan

__all__ = ["ArrivingShare"]


class ArrivingShare:
    """One share that is being copied. The training thread calls `run`; the write thread calls all else.

    Attributes:
        state: the state that is written: its tensors are only described, their bytes arrive later.
        told: `run` raises the error, so it need not be reported again.
    """

    def __init__(
        self,
        share: FlatState,
        plan: UnitPlan,
        digests: Mapping[str, int],
        memory: Arenas,
        copiers: ThreadPoolExecutor,
    ) -> None:
        """
        Args:
            share: the share in training's own memory.
            plan: the plan of its units.
            digests: state digests that are known already, by name.
            memory: the memory that it is copied to.
        """
        self.told = False
        self._flat: FlatState | None = share
        self._memory = memory
        self._copiers = copiers
        self._gone: BaseException | None = None
        self._arrivals = StagedUnits(self._check)
        tensors = {name: DescribedTensor(source) for name, source in share.tensors.items()}
        self.state = StagedState(share.tree, dict(tensors), plan, self._arrivals, digests)

    # -- the thread that trains

    def run(self, begin: Callable[[], None]) -> float:
        """Copy every unit -> seconds waited for memory. When it returns, no thread reads the share.

        Args:
            begin: starts writing. Called exactly once, also after an error: when memory is short, or all is copied.

        Raises:
            whatever copying, or `begin`, raised.
        """
        assert self._flat is not None
        flat, self._flat = self._flat, None
        waited: list[float] = []
        once = _Once(begin)
        copies = copies_of(self.state.plan, flat.tensors, self._copiers.submit)
        try:
            # If a unit is no longer wanted, the save has failed, and its caller is told in another way.
            self._arrivals.bring(copies, self._memory, waited.append, short=once.call)
        except BaseException as error:
            self.told = True
            self._gone = error
            self._arrivals.fail(error)
            raise
        finally:
            once.call()
        return sum(waited)

    # -- the thread that writes

    def _check(self) -> None:
        if self._gone is not None:
            raise self._gone

    @property
    def spoiled(self) -> bool:
        """Whether a unit could not be copied, which `run` raises."""
        return self._arrivals.spoiled

    def finish(self) -> None:
        """Free its memory: it is written, or will not be. May be repeated."""
        self._arrivals.discard()


class _Once:
    """Calls a function once: later calls do nothing."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call

    def call(self) -> None:
        """Call the function, unless it was called before."""
        call, self._call = self._call, None
        if call is not None:
            call()
