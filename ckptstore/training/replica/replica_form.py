"""The form of a state that an agent computes: which tensors a step sends, and which the agent computes and proves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ckptstore.agent.client.agent_writer import AgentWriter
from ckptstore.agent.client.buffer_client import BorrowedBuffer
from ckptstore.agent.client.replica_client import WholeTensors
from ckptstore.agent.protocol.replica_recipe import Digests, Proof
from ckptstore.formats.byte_text import size
from ckptstore.formats.states.state import FlatState, TensorSource
from ckptstore.frameworks.torch_offload import copy_queue
from ckptstore.frameworks.torch_tensors import TorchSource
from ckptstore.host.batched_copies import BatchedCopies
from ckptstore.host.buffers import Bytes
from ckptstore.host.threads import run_all
from ckptstore.training.capture.capture_plan import StatePlan
from ckptstore.training.replica.replicable_state import Replicable
from ckptstore.write.capture.snapshot import copy_queued

__all__ = ["FilledStep", "ReplicaForm"]


@dataclass(frozen=True, slots=True)
class FilledStep:
    """A step that can be sent once devices have copied.

    Attributes:
        arriving: functions that wait for the devices, and complete the area.
        whole: tensors that are sent whole: none, or one buffer.
    """

    arriving: list[Callable[[], None]]
    whole: list[WholeTensors]

    def copied(
        self, copies: Mapping[str, tuple[TensorSource, Bytes]], buffer: BorrowedBuffer, agent: AgentWriter, pool: Any
    ) -> None:
        """Copy tensors to a buffer; those of devices are only queued once its memory is registered."""
        if copies:
            arrive = copy_queued(copies, buffer.memory, partial(run_all, pool), partial(agent.register, buffer.memory))
            self.arriving.extend([] if arrive is None else [arrive])

    @property
    def arrive(self) -> Callable[[], None] | None:
        """Wait for all of it. None: everything is there. Raises the error of a copy."""
        if not self.arriving:
            return None

        def wait() -> None:
            for one in self.arriving:
                one()

        return wait

    def drop(self) -> None:
        """It is not sent: give back what only this step uses."""
        for one in self.arriving:
            with contextlib.suppress(Exception):  # a failed device copies no more
                one()
        for found in self.whole:
            found.buffer.give_back()


class ReplicaForm:
    """A form of the state: which tensors are sent, and which are proven.

    Attributes:
        replicable: what the agent computes of it.
        refused: names of tensors that the agent does not compute any more.
    """

    def __init__(self, replicable: Replicable, refused: set[str]) -> None:
        self.replicable = replicable
        self.refused = refused
        self._recipe = replicable.recipe
        self._names = [one.name for one in self._recipe.layout.tensors]
        made, summed = self._recipe.made, set(self._recipe.summed)
        images = [None if number in summed else replicable.sources[number].view() for number in made]
        self._proof = Proof(images, {place for place, number in enumerate(made) if number in summed})
        slots = zip(made, self._proof.slots, strict=True)
        self._away = {self._names[number]: slot for number, slot in slots if number in summed}
        self._plan: StatePlan | None = None
        self._copies: dict[int, tuple[BatchedCopies, list[int]]] = {}

    def __repr__(self) -> str:
        forms, made = self._recipe.layout.tensors, self._recipe.made
        nbytes = sum(forms[number].nbytes for number in made)
        return f"{len(made)} of {len(forms)} tensors are made by the agent, {size(nbytes)}"

    def fits(self, flat: FlatState, plan: StatePlan | None) -> bool:
        """Whether a state has this form. A state of the same plan as the last one has."""
        if plan is not None and plan is self._plan:
            return True
        if not self.replicable.fits(flat):
            return False
        self._plan = plan
        self._copies.clear()
        return True

    def fill(self, area: BorrowedBuffer, flat: FlatState, filled: FilledStep, agent: AgentWriter, pool: Any) -> None:
        """Copy to an area what is sent, and the digests of what is not. Devices do their part later.

        Raises:
            MemoryError: a device has no memory to compute digests.
        """
        out = self._recipe.digests_in(area.memory)
        if self._away:
            filled.arriving.append(self._digested(flat, out))
        copies, others = self._planned_copies(area)
        copies.run(pool)
        queued: dict[str, tuple[TensorSource, Bytes]] = {}
        for number in others:
            start, source = self._recipe.places[number], flat.tensors[self._names[number]]
            target = area.memory[start : start + source.nbytes]
            if isinstance(source, TorchSource) and source.stream is not None:
                queued[self._names[number]] = source, target
            else:
                source.read(0, target)
        self._proof.into(out, pool)
        filled.copied(queued, area, agent, pool)

    def _digested(self, flat: FlatState, out: Digests) -> Callable[[], None]:
        """Queue the digests of what the agent computes -> a function that waits for them, and puts them in the area."""
        queue = copy_queue({name: flat.tensors[name] for name in self._away})
        assert queue is not None
        try:
            digests = queue.digests(small=True)
        finally:
            queue.gate()
        if len(digests) < len(self._away):
            raise MemoryError("a device has no memory to compute digests")

        def arrive() -> None:
            for name, slot in self._away.items():
                out[slot] = digests[name]

        return arrive

    def whole(
        self, positions: Sequence[int], flat: FlatState, filled: FilledStep, agent: AgentWriter, pool: Any
    ) -> None:
        """Copy tensors that the agent computes, by position, to a buffer of their own. Raises as `lend_beside`."""
        starts, nbytes = self._recipe.packed(positions)
        buffer = agent.lend_beside(nbytes)
        filled.whole.append(WholeTensors(buffer, starts))
        sources = [(self._names[number], flat.tensors[self._names[number]], starts[number]) for number in positions]
        copies = {name: (one, buffer.memory[start : start + one.nbytes]) for name, one, start in sources}
        filled.copied(copies, buffer, agent, pool)

    def _planned_copies(self, area: BorrowedBuffer) -> tuple[BatchedCopies, list[int]]:
        """The copies of tensors that stay the same objects, and the positions of all others that are sent."""
        found = self._copies.get(area.number)
        if found is not None:
            return found
        base = _address(area.memory)
        whole: list[tuple[int, int, int]] = []
        others: list[int] = []
        planned = {} if self._plan is None else self._plan.planned
        for number, start in self._recipe.places.items():
            source = planned.get(self._names[number])
            if isinstance(source, TorchSource) and _lies_there(source):
                whole.append((base + start, source.tensor.data_ptr(), source.nbytes))
            else:
                others.append(number)
        found = self._copies[area.number] = BatchedCopies(whole), others
        return found


def _lies_there(source: TorchSource) -> bool:
    """Whether a tensor's memory holds its bytes in order: not if it is strided, or lazily conjugated or negated."""
    view = source.view()
    return view is not None and _address(view) == source.tensor.data_ptr()


def _address(memory: Bytes) -> int:
    address: int = memory.__array_interface__["data"][0]
    return address
