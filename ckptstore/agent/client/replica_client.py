"""The trainer's side of a replica: fills areas with gradients, sends steps, and receives the agent's answers.

The agent answers after it has repeated the step, so the trainer learns a little later whether the results were equal.
Those that were not (`Mismatch`) have to be sent whole. If anything else failed, `ReplicaClient.lost` says why, and the
next state has to be sent whole.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from typing import Any, Final, Self, TypeAlias

from ckptstore.agent.client.agent_link import AgentLink
from ckptstore.agent.client.buffer_client import BorrowedBuffer, BufferClient
from ckptstore.agent.protocol.frames import Message
from ckptstore.agent.protocol.message_fields import labels_form
from ckptstore.agent.protocol.replica_recipe import Recipe
from ckptstore.errors import AgentError, AgentLostError
from ckptstore.formats.states.state import FlatState
from ckptstore.write.saves.ledger import Labels, PendingSave

__all__ = ["AREAS", "Arrive", "Failed", "InTurn", "Mismatch", "Promise", "ReplicaClient", "ReplicaStep", "WholeTensors"]

AREAS: Final = 3
"""One that is being filled, and two for an agent that is behind."""

Failed: TypeAlias = Callable[[BaseException], None]
Promise: TypeAlias = Callable[[FlatState, int, float], tuple[PendingSave, Failed]]
"""Takes a state, its step, and when training began to wait -> the save, and a callback for its failure."""
Arrive: TypeAlias = Callable[[], None]
"""Waits until devices have copied something to the area of a step, and completes the area. Raises their error."""
InTurn: TypeAlias = Callable[[Arrive | None, Callable[[], None], Failed], None]
"""Calls a function when earlier requests were sent, and devices have copied (`StateTransfer.in_turn`)."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The tensors of a step that the agent computed, and that differ from the trainer's.

    Attributes:
        step: the step. It is not saved.
        unproven: positions of the tensors, and of each whether it was computed from proven tensors (False: it differs
            because a tensor of the step before did).
        newer: no whole state was handed over since.
    """

    step: int
    unproven: Mapping[int, bool]
    newer: bool


class _Mismatches:
    """The mismatches that were not taken yet, of a replica and those before it."""

    def __init__(self) -> None:
        self._found: list[Mismatch] = []
        self._lock = threading.Lock()

    def add(self, found: Mismatch) -> None:
        with self._lock:
            self._found.append(found)

    def take(self) -> list[Mismatch]:
        with self._lock:
            found, self._found = self._found, []
        return found

    def older(self) -> None:
        """A whole state was handed over."""
        with self._lock:
            self._found = [replace(one, newer=False) for one in self._found]


@dataclass(frozen=True, slots=True)
class WholeTensors:
    """Tensors that are sent whole once.

    Attributes:
        buffer: where they are.
        starts: the first byte of each, by position in the layout.
    """

    buffer: BorrowedBuffer
    starts: Mapping[int, int]


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
        whole: tensors that the agent computed wrongly before.
        arrive: waits for devices that still fill the area. The step is sent after that, by a thread. None: it is full.
    """

    step: int
    after: int
    calls: Sequence[Any]
    threads: int
    flat: FlatState
    labels: Labels
    persist: bool
    began: float
    whole: Sequence[WholeTensors] = ()
    arrive: Arrive | None = None


class ReplicaClient:
    """A replica, as the trainer sees it. The training thread calls it; another thread receives the answers.

    Attributes:
        recipe: how the agent computes it.
        lost: why the next state has to be sent whole; None: the agent follows.
    """

    def __init__(
        self,
        link: AgentLink,
        number: int,
        recipe: Recipe,
        areas: Sequence[BorrowedBuffer],
        calls: tuple[Promise, InTurn],
        mismatches: _Mismatches,
    ) -> None:
        """Use `begun`."""
        self.recipe = recipe
        self.lost: str | None = None
        self._link = link
        self._number = number
        self._free = list(areas)
        self._promise, self._in_turn = calls
        self._mismatches = mismatches
        self._epoch = 0
        self._closed = False
        self._changed = threading.Condition()

    @classmethod
    def begun(
        cls,
        link: AgentLink,
        buffers: BufferClient,
        recipe: Recipe,
        areas: int,
        calls: tuple[Promise, InTurn],
        before: ReplicaClient | None,
    ) -> Self:
        """Begin a replica at the agent.

        Args:
            before: the replica that this one replaces. Answers to its steps may still come: `mismatches` has them, too.

        Raises:
            AgentError, MemoryError: the agent cannot.
        """
        known = buffers.number_of(link, recipe.layout)
        lent: list[BorrowedBuffer] = []
        try:
            lent.extend(buffers.lend_beside(link, recipe.nbytes) for _ in range(areas))
            numbers = [one.number for one in lent]
            answer = link.call("replica", layout=known, recipe=recipe.form(), areas=numbers)
            mismatches = _Mismatches() if before is None else before._mismatches
            return cls(link, answer["replica"], recipe, lent, calls, mismatches)
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
        self._mismatches.older()

    def mismatches(self) -> list[Mismatch]:
        """The mismatches that were found since the last call, in the order of the steps."""
        return self._mismatches.take()

    def area(self, *, wait: bool) -> BorrowedBuffer | None:
        """Take an area to fill. None: none is free, or with `wait` none will be."""
        with self._changed:
            while wait and not self._free and self.lost is None:
                self._changed.wait()
            return self._free.pop() if self._free else None

    def leave(self, area: BorrowedBuffer, settle: Callable[[], None] | None = None) -> None:
        """Return an area that is not sent.

        Args:
            settle: waits for devices that still copy to it, and raises nothing: the area is returned later then, by a
                thread. None: none does.
        """

        def left() -> None:
            with self._changed:
                if not self._closed:
                    self._free.append(area)
                    self._changed.notify_all()
                    return
            area.give_back()

        if settle is None:
            left()
            return
        try:
            self._in_turn(settle, left, lambda _: None)
        except RuntimeError:  # the writer was closed
            settle()
            left()

    def advance(self, area: BorrowedBuffer, told: ReplicaStep) -> PendingSave | None:
        """Send a step whose area is filled, or will be -> its save; None: the state stays in memory.

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
        body["whole"] = [[one.buffer.number, list(one.starts.items())] for one in told.whole]
        self._ask("advance", body | labels_form(told.labels), failed, (area, told.whole, told.arrive))
        return pending

    def persist(self, flat: FlatState, step: int, labels: Labels, began: float) -> PendingSave:
        """Write the newest state, which was only in memory.

        Raises:
            as `Writer.save_async`.
        """
        pending, failed = self._promise(flat, step, began)
        self._ask("persist", {"step": step} | labels_form(labels), failed, (None, (), None))
        return pending

    def _ask(
        self,
        do: str,
        body: Mapping[str, Any],
        failed: Failed | None,
        filled: tuple[BorrowedBuffer | None, Sequence[WholeTensors], Arrive | None],
    ) -> None:
        epoch = self._epoch
        area, whole, arrive = filled

        def over(error: BaseException | None, found: Mismatch | None) -> None:
            with self._changed:
                if found is not None:
                    self._mismatches.add(found)
                elif error is not None and epoch == self._epoch and self.lost is None:
                    self.lost = str(error)
                if area is not None and not self._closed:
                    self._free.append(area)
                self._changed.notify_all()
            if area is not None and self._closed:
                area.give_back()
            for one in whole:
                one.buffer.give_back()
            if error is not None and failed is not None:
                lost = isinstance(error, AgentLostError)
                failed(error if lost else CancelledError(f"the agent could not repeat the step: {error}"))

        def answered(answer: Future[Message]) -> None:
            error = answer.exception()
            found: Mismatch | None = None
            if error is None:
                message = answer.result()
                message.close()
                if names := message.body.get("differs", ()):
                    error = AgentError(f"{names[0]} is not what training has")
                    unproven = {int(number): bool(fresh) for number, fresh in message.body["unproven"]}
                    found = Mismatch(body["step"], unproven, epoch == self._epoch)
            over(error, found)

        def send() -> None:
            self._link.ask(do, **body).add_done_callback(answered)

        try:
            self._in_turn(arrive, send, lambda error: over(error, None))
        except BaseException as error:
            if failed is not None:
                failed(error)
            raise

    def close(self) -> None:
        """Give the areas back. Areas that the agent still reads follow when it has answered."""
        with self._changed:
            self._closed = True
            self.lost = self.lost or "it was given up"
            free, self._free = self._free, []
            self._changed.notify_all()
        for area in free:
            area.give_back()
