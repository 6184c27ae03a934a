"""Part ``prune``: retention beside a live writer: its own retirements, a prune that asks it, gc, readers, forks.

The retention rules may keep anything here, with one exception: the newest checkpoint, from which a run continues, is
never retired. It is the newest of the line: for a term that is still empty, the checkpoint that it continues from.

Invariants: those of part ``store``, and: the newest checkpoint is promised.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from tools.protocol.explore import ViolationError
from tools.protocol.store_catalog import Checkpoint, Rec, Request, catalog, needed
from tools.protocol.store_model import Reader, State, StoreModel

__all__ = ["PruneModel"]


@dataclass(frozen=True)
class PruneModel(StoreModel):
    """The store's model, in which the external process prunes, and nobody retires the newest checkpoint.

    Attributes:
        newest: which one that is. ``line``: as in the protocol. Mutants: ``highest``: of all promised checkpoints,
            whatever branch it is on; ``none``: any may go.
    """

    newest: Literal["line", "highest", "none"] = "line"

    def _check(self, state: State) -> None:
        super()._check(state)
        newest = _newest(state.log)
        if newest is not None and newest not in catalog(state.log).promised:
            raise ViolationError(f"the newest checkpoint, {newest}, was let go")

    def _retirable(self, log: tuple[Rec, ...], adding: Sequence[Checkpoint] = ()) -> list[Checkpoint]:
        promised = catalog(log).promised
        if self.newest == "line":
            newest = max(adding) if adding else _newest(log)
        elif self.newest == "highest":
            newest = max((*promised, *adding), default=None)
        else:
            newest = None
        return sorted(promised - {newest})

    def _compact(self, state: State, index: int, compactor: Reader) -> Iterator[tuple[str, State]]:
        """A prune by rules that keep one more, or none: the retired checkpoints, and the segments unneeded then."""
        now = catalog(state.log)
        if compactor.phase != "idle":
            return
        found = self._retirable(state.log)
        for gone in {tuple(found), *((one,) for one in found)} - {()}:
            stay = needed(now.edges, now.promised - set(gone))
            drops = tuple(edge.segment for edge in now.edges if edge.checkpoint not in stay)
            posted = state._replace(requests=state.requests | {Request(now.term, (), drops, gone)})
            processes = (*state.processes[:index], Reader("done"), *state.processes[index + 1 :])
            yield f"K asks: retire {list(gone)}, drop {list(drops)}", posted._replace(processes=processes)


def _newest(log: tuple[Rec, ...]) -> Checkpoint | None:
    """The last checkpoint of the newest term; for an empty term, the one that it continues from."""
    parent: Checkpoint | None = None
    found: Checkpoint | None = None
    for record in log:
        if record.opens:
            parent, found = record.parent, None
        for edge in record.adds:
            if edge.checkpoint[0] == record.term:
                found = edge.checkpoint if found is None else max(found, edge.checkpoint)
    return found or parent
