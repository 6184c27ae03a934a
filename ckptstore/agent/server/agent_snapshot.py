"""A snapshot in an agent's memory: the state, its labels, its buffer, and whether it is durable."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from ckptstore.agent.protocol.message_fields import StateLayout, read, whole_number
from ckptstore.agent.server.shared_buffers import SharedBuffer
from ckptstore.errors import AgentError
from ckptstore.formats.states.state import TensorSource, unflatten
from ckptstore.log.checkpoint_info import CheckpointInfo
from ckptstore.segments.aligned_regions import LaidOutState
from ckptstore.write.capture.snapshot import HostTensor
from ckptstore.write.saves.ledger import PendingSave
from ckptstore.write.steps.updates import Update

__all__ = [
    "ALONE",
    "DURABLE",
    "LOST",
    "AgentSnapshot",
    "Durability",
    "FilledBuffer",
    "UnprovenState",
    "UnwrittenState",
    "state_in_buffer",
]

Durability: TypeAlias = Literal["durable", "alone", "lost"]
DURABLE: Final = "durable"
"""It is in the store."""
ALONE: Final = "alone"
"""It is only in memory, and can be written."""
LOST: Final = "lost"
"""Its save failed."""


@dataclass(frozen=True, slots=True)
class FilledBuffer:
    """A buffer that the trainer has filled, as a request describes it.

    Attributes:
        buffer: its number.
        layout: layout of its contents.
        tree: the state's tree.
        metadata, tags: as for `Writer.save`.
        updates: as `update_fields.updates_form` writes them; None: none.
        gradients: number of the buffer that the updates refer to; None: none.
    """

    buffer: int
    layout: StateLayout
    tree: Any
    metadata: Mapping[str, Any] | None = None
    tags: Sequence[str] = ()
    updates: Any = None
    gradients: int | None = None


@dataclass(frozen=True, slots=True)
class UnwrittenState:
    """A state that is only in memory until it is written: the agent computed it (`replica_replay`), or was given it.

    Attributes:
        step: its step.
        filled: its description.
        buffer, flat: its memory.
        updates: what the optimizers did in this step.
    """

    step: int
    filled: FilledBuffer
    buffer: SharedBuffer
    flat: LaidOutState
    updates: Sequence[Update]


@dataclass(frozen=True, slots=True)
class UnprovenState:
    """A computed state some of whose tensors differ from the trainer's. It is never written; the next builds on it.

    Attributes:
        step: its step.
        layout, buffer: its memory.
        unproven: positions of the tensors that differ, and of each whether it was computed from proven tensors (False:
            it differs because a tensor of the step before did).
    """

    step: int
    layout: StateLayout
    buffer: SharedBuffer
    unproven: Mapping[int, bool]


@dataclass(frozen=True, slots=True)
class AgentSnapshot:
    """The newest state, or the one before.

    Attributes:
        step: its step.
        layout, buffer, flat: its memory.
        pending: its save; None: it is only in memory.
        free: releases the memory.
        unwritten: what is needed to write it later; None: the trainer asked for its save with it.
    """

    step: int
    layout: StateLayout
    buffer: SharedBuffer
    flat: LaidOutState
    pending: PendingSave | None
    free: Callable[[], None]
    unwritten: UnwrittenState | None = None

    @property
    def unproven(self) -> Mapping[int, bool]:
        """Empty: see `UnprovenState`."""
        return {}

    @property
    def durable(self) -> CheckpointInfo | None:
        """Its checkpoint; None: it has none, or not yet."""
        if self.pending is None or not self.pending.done() or self.pending.exception() is not None:
            return None
        return self.pending.result()

    @property
    def durability(self) -> Durability:
        """Whether it is durable, or may become so. Valid once its save has ended."""
        if self.durable is not None:
            return DURABLE
        return LOST if self.unwritten is None else ALONE


def state_in_buffer(filled: FilledBuffer, buffer: SharedBuffer) -> LaidOutState:
    """The state in a buffer. Raises `AgentError` if tree, layout and buffer do not match."""
    plan = filled.layout.plan
    if plan.size > buffer.nbytes:
        raise AgentError(f"a state of {plan.size} bytes in a buffer of {buffer.nbytes}")
    origins = {one.name: one.origin for one in filled.layout.tensors}
    found: list[str] = []

    def resolve(name: str, origin: str) -> None:
        if origins.get(name) != origin:
            raise AgentError(f"the tree names a tensor {name!r:.80} of {origin}, which is not in the layout")
        found.append(name)

    read("tree", filled.tree, lambda tree: unflatten(tree, resolve))
    if found != list(origins):
        raise AgentError(f"the tree has {len(found)} tensors, the layout {len(origins)}, or in another order")
    memory = buffer.shared.memory
    tensors: dict[str, TensorSource] = {}
    for form in filled.layout.tensors:
        start = whole_number(plan.offsets[form.name])
        tensors[form.name] = HostTensor(form, memory[start : start + form.nbytes])  # type: ignore[arg-type]
    return LaidOutState(filled.tree, tensors, plan.regions(memory))
