"""Which tensors an agent has computed wrongly, and which of them the next step has to send whole.

The trainer learns of a mismatch one or two steps later. Steps that it sent meanwhile were computed from the wrong
tensors. They are unproven for the same reason, which does not count as another mistake.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Final

from ckptstore.agent.client.replica_client import Mismatch
from ckptstore.agent.protocol.replica_recipe import Recipe

__all__ = ["UnprovenTensors"]

_OFTEN: Final = 2
"""Wrong results after which the agent does not compute a tensor any more: it is sent."""


class UnprovenTensors:
    """Positions are those of one layout, until `forget`."""

    def __init__(self) -> None:
        self._times: Counter[str] = Counter()
        self._wrong: dict[int, int] = {}  # by position, the newest step known to have it wrong
        self._sent: dict[int, int] = {}  # by position, the newest step that sent it whole
        self._newest: int | None = None

    @property
    def refused(self) -> set[str]:
        """Names of the tensors that the agent computed wrongly too often."""
        return {name for name, times in self._times.items() if times >= _OFTEN}

    def heard(self, found: Mismatch, recipe: Recipe) -> list[str]:
        """Note an answer of the agent -> names of the tensors that were computed wrongly from proven ones."""
        if found.newer:
            self._newest = found.step
            self._wrong.update(dict.fromkeys(found.unproven, found.step))
        names = [recipe.layout.tensors[number].name for number, fresh in found.unproven.items() if fresh]
        self._times.update(names)
        return names

    def lacks(self, step: int) -> bool:
        """Whether the agent is known not to have this step."""
        return self._newest == step

    def due(self, recipe: Recipe) -> list[int]:
        """Positions of the tensors that the next step has to send whole, ascending."""
        wrong = {number for number, step in self._wrong.items() if self._sent.get(number, -1) < step}
        if not wrong:
            return []
        found = set(wrong)
        for row in recipe.rows_of(wrong):
            found.update(number for _, number in recipe.rows[row].slots)  # the optimizer computes each from all
        return sorted(found & set(recipe.made))

    def sent(self, positions: Collection[int], step: int) -> None:
        """These tensors are sent whole with a step."""
        self._sent.update(dict.fromkeys(positions, step))

    def forget(self) -> None:
        """A whole state was handed over: all its tensors are proven."""
        self._wrong.clear()
        self._sent.clear()
        self._newest = None
