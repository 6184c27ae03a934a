"""A rank's share of a plain full that its caller copies unit by unit, under a budget, as it is written (`segments`).

As `fulls` does it: nothing is written while everything can still be copied without waiting. There is one thread that
writes, though, so one share is copied after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from ckptstore.formats.state import FlatState
from ckptstore.host.arenas import Arenas
from ckptstore.segments.staged_units import DescribedTensor, StagedState, StagedUnits, copies_of
from ckptstore.segments.units import UnitPlan

__all__ = ["ArrivingShare"]


class ArrivingShare:
    """One share on its way. Two threads have it: `run` is for the one that trains, all else for the one that writes.

    Attributes:
        state: what is written: its tensors are only described, their bytes arrive.
        told: `run` raises what went wrong, so that nobody else has to be told.
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
            share: in training's own memory.
            plan: of its units.
            digests: state digests that are known already, by name.
            memory: what it is copied to.
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
        """Copy every unit -> seconds waited for memory. When it returns nobody reads the share any more.

        Args:
            begin: has it written. Called once, whatever happens: when memory is short, or all is copied.

        Raises:
            whatever copying, or `begin`, raised.
        """
        assert self._flat is not None
        flat, self._flat = self._flat, None
        waited: list[float] = []
        once = _Once(begin)
        copies = copies_of(self.state.plan, flat.tensors, self._copiers.submit)
        try:
            # If a unit is not wanted any more it has failed, which its saver hears of otherwise.
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
        """It is written, or will not be: its memory is free. May be repeated."""
        self._arrivals.discard()


class _Once:
    """Calls something the first time that it is called."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call

    def call(self) -> None:
        """Call it, unless that was done."""
        call, self._call = self._call, None
        if call is not None:
            call()
