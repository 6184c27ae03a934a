"""What a `Checkpointer` needs of a writer: the methods of `ckptstore.write.writer.Writer` that it calls.

`Writer` and `RankWriter` offer them; so may anything else that brings states to a store (a process of its own, say).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from ckptstore.log.checkpoints import CheckpointInfo
from ckptstore.write.ledger import PendingSave
from ckptstore.write.steps.updates import Updates

__all__ = ["GoesBack", "Inherits", "PollsRequests", "StateWriter", "TakesUpdates"]


class StateWriter(Protocol):
    """A term that is open for writing.

    Attributes:
        term: its number.
        parent: what it continues from; None: nothing.
    """

    @property
    def term(self) -> int: ...  # noqa: D102 - described above

    @property
    def parent(self) -> CheckpointInfo | None: ...  # noqa: D102 - described above

    def save_async(
        self, state: Any, step: int, *, metadata: Mapping[str, Any] | None = None, tags: str | Sequence[str] = ()
    ) -> PendingSave:
        """Copy `state`, and make it durable in the background."""

    def wait(self) -> None:
        """Return when everything given so far is durable; raise what stopped it."""

    def tag(self, name: str, ref: str | int | CheckpointInfo = "latest") -> CheckpointInfo:
        """Name a checkpoint."""

    def close(self) -> None:
        """Wait for every save, then end."""


class TakesUpdates(Protocol):
    """A writer of step diffs."""

    def save_async(
        self,
        state: Any,
        step: int,
        *,
        metadata: Mapping[str, Any] | None = None,
        tags: str | Sequence[str] = (),
        updates: Updates | None = None,
    ) -> PendingSave:
        """`StateWriter.save_async`, with what the optimizers did since the save before."""


@runtime_checkable
class GoesBack(Protocol):
    """A writer that can begin a new term at an earlier checkpoint."""

    def rollback(self, ref: str | int | CheckpointInfo) -> CheckpointInfo:
        """Go back there -> the checkpoint."""


@runtime_checkable
class Inherits(Protocol):
    """A writer whose agent may have kept what a trainer before had reached (`ckptstore.agent`).

    Attributes:
        inherited: what it has kept; None: nothing.
        step: optimizer steps done in what `load` gives.
    """

    @property
    def inherited(self) -> object: ...  # noqa: D102 - described above

    @property
    def step(self) -> int: ...  # noqa: D102 - described above

    def load(self) -> Any:
        """What the agent has kept, checked, or else the parent from the store; None: nothing."""


@runtime_checkable
class PollsRequests(Protocol):
    """A writer that can be told to look for requests now."""

    def poll(self) -> None:
        """Answer what other processes ask for."""
