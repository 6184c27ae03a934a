"""A state in an agent's memory: what was said of it, what made it, where it lies, and what became of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from ckptstore.agent.protocol.message_fields import StateLayout, read, whole_number
from ckptstore.agent.server.shared_buffers import SharedBuffer
from ckptstore.errors import AgentError
from ckptstore.formats.state import TensorSource, unflatten
from ckptstore.log.checkpoint_info import CheckpointInfo
from ckptstore.segments.aligned_regions import LaidOutState
from ckptstore.write.ledger import PendingSave
from ckptstore.write.snapshot import HostTensor
from ckptstore.write.steps.updates import Update

__all__ = [
    "ALONE",
    "DURABLE",
    "LOST",
    "AgentSnapshot",
    "Durability",
    "FilledBuffer",
    "UnwrittenState",
    "state_in_buffer",
]

Durability: TypeAlias = Literal["durable", "alone", "lost"]
DURABLE: Final = "durable"
"""It is in the store."""
ALONE: Final = "alone"
"""It is in memory alone, and can be written."""
LOST: Final = "lost"
"""It was to be written, and that failed."""


@dataclass(frozen=True, slots=True)
class FilledBuffer:
    """What the trainer says of a buffer that it has filled.

    Attributes:
        buffer: its number.
        layout: of what is in it.
        tree: of the state.
        metadata, tags: as `Writer.save` takes them.
        updates: as `changes.updates_form` makes it; None: none.
        gradients: the buffer that those refer to; None: none.
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
    """A state that is in memory alone until it is written: the agent has made it (`replica_replay`), or was given it.

    Attributes:
        step: its step.
        filled: what is said of it.
        buffer, flat: where it is.
        updates: what the optimizers did in this step.
    """

    step: int
    filled: FilledBuffer
    buffer: SharedBuffer
    flat: LaidOutState
    updates: Sequence[Update]


@dataclass(frozen=True, slots=True)
class AgentSnapshot:
    """The newest state, or the one before.

    Attributes:
        step: its step.
        layout, buffer, flat: where it is.
        pending: its save; None: it is in memory alone.
        free: lets go of the memory.
        made: by which it may be written later; None: the trainer has handed it over to be written.
    """

    step: int
    layout: StateLayout
    buffer: SharedBuffer
    flat: LaidOutState
    pending: PendingSave | None
    free: Callable[[], None]
    made: UnwrittenState | None = None

    @property
    def durable(self) -> CheckpointInfo | None:
        """The checkpoint that it became; None: none, or none yet."""
        if self.pending is None or not self.pending.done() or self.pending.exception() is not None:
            return None
        return self.pending.result()

    @property
    def standing(self) -> Durability:
        """What may become of it, once its save has ended."""
        if self.durable is not None:
            return DURABLE
        return LOST if self.made is None else ALONE


def state_in_buffer(filled: FilledBuffer, buffer: SharedBuffer) -> LaidOutState:
    """The state in a buffer. Raises `AgentError` if tree, layout and buffer do not fit together."""
    plan = filled.layout.plan
    if plan.size > buffer.nbytes:
        raise AgentError(f"a state of {plan.size} bytes in a buffer of {buffer.nbytes}")
    origins = {one.name: one.origin for one in filled.layout.tensors}
    found: list[str] = []

    def resolve(name: str, origin: str) -> None:
        if origins.get(name) != origin:
            raise AgentError(f"the tree names a tensor {name!r:.80} of {origin}, which the layout has not")
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
