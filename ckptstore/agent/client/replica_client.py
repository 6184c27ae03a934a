"""The trainer's side of a replica: fills areas with gradients, sends steps, and receives the agent's answers.

The agent answers after it has repeated the step, so the trainer learns a little later whether the results were equal.
If they were not, or anything else failed, `ReplicaClient.lost` says why, and the next state has to be sent whole.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any, Final, Self, TypeAlias

from ckptstore.agent.client.agent_link import AgentLink
from ckptstore.agent.client.buffer_client import BorrowedBuffer, BufferClient
from ckptstore.agent.protocol.frames import Message
from ckptstore.agent.protocol.message_fields import labels_form
from ckptstore.agent.protocol.replica_recipe import Recipe
from ckptstore.errors import AgentError, AgentLostError
from ckptstore.formats.states.state import FlatState
from ckptstore.write.saves.ledger import Labels, PendingSave

__all__ = ["AREAS", "Failed", "Promise", "ReplicaClient", "ReplicaStep"]

AREAS: Final = 3
"""One that is being filled, and two for an agent that is behind."""

Failed: TypeAlias = Callable[[BaseException], None]
Promise: TypeAlias = Callable[[FlatState, int, float], tuple[PendingSave, Failed]]
"""Takes a state, its step, and when training began to wait -> the save, and a callback for its failure."""


@dataclass(frozen=True, slots=True)
class ReplicaStep:
    """The data of a step that the trainer sends to the agent, besides its area.

    Attributes:
        step, after: its number, and the step that it builds on.
        calls: for each optimizer's step: optimizer, settings of its groups, rows updated (None: all), scaling.
        threads: how many threads the optimizers' kernels used.
        flat: the state, for its tree.
        labels: its metadata and tags.
        persist: write it now. False: keep it in memory, and write it on `close` if it is the newest then.
        began: when training began to wait (``time.monotonic()``).
    """

    step: int
    after: int
    calls: Sequence[Any]
    threads: int
    flat: FlatState
    labels: Labels
    persist: bool
    began: float


class ReplicaClient:
    """A replica, as the trainer sees it. The training thread calls it; another thread receives the answers.

    Attributes:
        recipe: how the agent computes it.
        lost: why the next state has to be sent whole; None: the agent follows.
    """

    def __init__(
        self, link: AgentLink, number: int, recipe: Recipe, areas: Sequence[BorrowedBuffer], promise: Promise
    ) -> None:
        """Use `begun`."""
        self.recipe = recipe
        self.lost: str | None = None
        self._link = link
        self._number = number
        self._free = list(areas)
        self._promise = promise
        self._differing: list[str] = []
        self._epoch = 0
        self._closed = False
        self._changed = threading.Condition()

    @classmethod
    def begun(cls, link: AgentLink, buffers: BufferClient, recipe: Recipe, areas: int, promise: Promise) -> Self:
        """Begin a replica at the agent.

        Raises:
            AgentError, MemoryError: the agent cannot.
        """
        known = buffers.number_of(link, recipe.layout)
        lent: list[BorrowedBuffer] = []
        try:
            lent.extend(buffers.lend_beside(link, recipe.nbytes) for _ in range(areas))
            numbers = [one.number for one in lent]
            answer = link.call("replica", layout=known, recipe=recipe.form(), areas=numbers)
            return cls(link, answer["replica"], recipe, lent, promise)
        except BaseException:
            for one in lent:
                one.give_back()
            raise

    @property
    def alive(self) -> bool:
        """Whether the agent is still there."""
        return self._link.lost is None

    @property
    def closed(self) -> bool:
        """Whether `close` was called: the agent repeats no more steps."""
        return self._closed

    def again(self) -> None:
        """A whole state was handed over: the agent continues from it. Answers to earlier steps no longer count."""
        with self._changed:
            self._epoch += 1
            self.lost = "it was given up" if self._closed else None

    def differing(self) -> list[str]:
        """Names of the tensors found to differ since the last call."""
        with self._changed:
            found, self._differing = self._differing, []
        return found

    def area(self, *, wait: bool) -> BorrowedBuffer | None:
        """Take an area to fill. None: none is free, or with `wait` none will be."""
        with self._changed:
            while wait and not self._free and self.lost is None:
                self._changed.wait()
            return self._free.pop() if self._free else None

    def leave(self, area: BorrowedBuffer) -> None:
        """Return an area that was not used."""
        with self._changed:
            if not self._closed:
                self._free.append(area)
                self._changed.notify_all()
                return
        area.give_back()

    def advance(self, area: BorrowedBuffer, told: ReplicaStep) -> PendingSave | None:
        """Send a step whose area is filled -> its save; None: the state stays in memory.

        Raises:
            as `Writer.save_async`, for a step that is to be written.
        """
        pending: PendingSave | None = None
        failed: Failed | None = None
        if told.persist:
            pending, failed = self._promise(told.flat, told.step, told.began)
        body = {"step": told.step, "after": told.after, "calls": told.calls, "threads": told.threads}
        body |= {"tree": told.flat.tree, "persist": told.persist}
        body |= {"area": area.number, "replica": self._number}
        self._ask("advance", body | labels_form(told.labels), failed, area)
        return pending

    def persist(self, flat: FlatState, step: int, labels: Labels, began: float) -> PendingSave:
        """Write the newest state, which was only in memory.

        Raises:
            as `Writer.save_async`.
        """
        pending, failed = self._promise(flat, step, began)
        self._ask("persist", {"step": step} | labels_form(labels), failed, None)
        return pending

    def _ask(self, do: str, body: Mapping[str, Any], failed: Failed | None, area: BorrowedBuffer | None) -> None:
        epoch = self._epoch

        def answered(answer: Future[Message]) -> None:
            error = answer.exception()
            names: list[str] = []
            if error is None:
                message = answer.result()
                message.close()
                names = [str(name) for name in message.body.get("differs", ())]
                if names:
                    error = AgentError(f"{names[0]} is not what training has")
            with self._changed:
                self._differing += names
                if error is not None and epoch == self._epoch and self.lost is None:
                    self.lost = str(error)
                if area is not None and not self._closed:
                    self._free.append(area)
                self._changed.notify_all()
            if area is not None and self._closed:
                area.give_back()
            if error is not None and failed is not None:
                lost = isinstance(error, AgentLostError)
                failed(error if lost else CancelledError(f"the agent could not take the step again: {error}"))

        try:
            asked = self._link.ask(do, **body)
        except BaseException as error:
            if failed is not None:
                failed(error)
            raise
        asked.add_done_callback(answered)

    def close(self) -> None:
        """Give the areas back. Areas that the agent still reads follow when it has answered."""
        with self._changed:
            self._closed = True
            self.lost = self.lost or "it was given up"
            free, self._free = self._free, []
            self._changed.notify_all()
        for area in free:
            area.give_back()
