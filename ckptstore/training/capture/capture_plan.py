"""What stays the same in a script's state from step to step, learned once: its tree, its tensors, where copies go.

A state of 3,000 parameters has 12,000 tensors. To flatten it, lay it out and copy it tensor by tensor takes the
interpreter half a second. To check that only bits have changed takes some milliseconds. A plan is used only if every
tensor was checked and is unchanged (`identity_guard`). Everything else (numbers, schedules, generators, loaders) is
flattened again in every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Self

import torch

from ckptstore.formats import jsontext
from ckptstore.formats.sources import Bytes, place_of
from ckptstore.formats.states.state import TREE_LIMIT, FlatState, TensorSource
from ckptstore.frameworks import bridge
from ckptstore.frameworks.torch_tensors import TorchSource, on_host
from ckptstore.host.batched_copies import BatchedCopies
from ckptstore.segments.aligned_regions import LaidOutState, SegmentRegion, plan_regions
from ckptstore.training.capture.identity_guard import WatchedTensors
from ckptstore.training.capture.script_state import ScriptState
from ckptstore.write.capture.snapshot import HostTensor

__all__ = ["PlannedState", "StateCopy", "StatePlan"]

_OF_THE_LIMIT: Final = 2
"""A plan's tree has at most 1/2 of the size limit, because the changing part is not measured again."""


class PlannedState(LaidOutState):
    """A state in memory, laid out as in its segments, with a known size."""

    __slots__ = ("_nbytes",)

    def __init__(
        self,
        tree: Any,
        tensors: dict[str, TensorSource],
        regions: tuple[SegmentRegion, ...],
        nbytes: int,
        limit: int | None = None,
    ) -> None:
        super().__init__(tree, tensors, regions, limit=limit)
        object.__setattr__(self, "_nbytes", nbytes)

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return self._nbytes  # type: ignore[attr-defined,no-any-return]


class StatePlan:
    """A state's plan, while it holds.

    Attributes:
        nbytes: of all tensors.
        size: bytes of memory for one copy.
        offsets: the offset of each tensor in it.
        tensors: the state's tensors when the plan was made. Names, types and shapes are the same in every step.
        on_host: whether all of them are in host memory, so that `copies` can copy them.
    """

    def __init__(self, captured: ScriptState, whole: FlatState, light: FlatState, watched: tuple[Any, Any]) -> None:
        """Use `made`."""
        self._captured = captured
        self._left_out = captured.left_out
        self._tree = whole.tree
        self._watched = (*watched[0], *watched[1])
        self.tensors = dict(whole.tensors)
        self.nbytes = whole.nbytes
        self._light = _described(light)
        regions = plan_regions(tuple(_spec(name, one) for name, one in whole.tensors.items()))
        self.offsets, self.size = regions.offsets, regions.size
        self.regions, self.limit = regions.regions, regions.limit
        names = {source.identity: name for name, source in whole.tensors.items()}
        stored = [one for each in self._watched for one in each.tensors if TorchSource(one).identity in names]
        self._tensors = WatchedTensors(stored)
        self._planned = {names[source.identity]: source for source in map(TorchSource, stored)}
        self._identities = {source.identity for source in self._planned.values()}
        away = [one for one in whole.tensors.values() if isinstance(one, TorchSource) and not on_host(one.tensor)]
        self.on_host = not away
        self._away = {name: one.tensor for name, one in self._planned.items() if one.stream}
        self._streams = {one.tensor.device: one.stream for one in away}
        tensors = ((name, one.tensor) for name, one in self._planned.items())
        self._lazy = {name: one for name, one in tensors if one.is_conj() or one.is_neg()}

    @classmethod
    def made(cls, captured: ScriptState, state: dict[str, Any], whole: FlatState, step: int, ranks: int) -> Self | None:
        """Make the plan of a state; None: it cannot be planned.

        Args:
            state, whole: the state, and the same flattened.
        """
        watched = captured.watched()
        if watched is None or len(jsontext.dumps(whole.tree)) * _OF_THE_LIMIT > TREE_LIMIT:
            return None
        moving = captured.state(step, ranks, light=True)
        # With the same objects, so that it can be compared with the whole: generators return a new copy each time.
        light = bridge.flattened(_merged(moving, state))
        plan = cls(captured, whole, light, watched)
        try:
            captured.add_planned(light.tree, whole.tree)
        except (KeyError, TypeError, ValueError):
            return None
        fits = (
            jsontext.dumps(light.tree) == jsontext.dumps(whole.tree)
            and plan._planned.keys() | light.tensors.keys() == whole.tensors.keys()
            and plan._planned.keys().isdisjoint(light.tensors)
        )
        return plan if fits else None

    def taken(self, step: int, ranks: int) -> FlatState | None:
        """The tensors that are flattened in every step, in a complete tree; None: the plan does not hold any more."""
        if not all(one.unchanged() for one in self._watched) or not self._tensors.unchanged():
            return None
        light = bridge.flattened(self._captured.state(step, ranks, light=True))
        if _described(light) != self._light or self._captured.left_out != self._left_out:
            return None
        if any(source.identity in self._identities for source in light.tensors.values()):
            return None  # tied to a planned tensor: its name would be there twice
        try:
            self._captured.add_planned(light.tree, self._tree)
        except (KeyError, TypeError, ValueError):
            return None
        return light

    def whole(self, light: FlatState) -> FlatState:
        """The whole state, not copied, with what `taken` has returned."""
        # Prevents: a tensor that is read in the order of a stream that is not current any more.
        streams = {device: stream and torch.cuda.current_stream(device) for device, stream in self._streams.items()}
        if streams != self._streams:
            self.tensors |= {name: TorchSource(tensor) for name, tensor in self._away.items()}
            self._streams = streams
        # Prevents: bytes of an earlier step. A source resolves a lazy conjugate or negation when it is made.
        self.tensors |= {name: TorchSource(tensor) for name, tensor in self._lazy.items()}
        return FlatState(light.tree, {**self.tensors, **light.tensors})

    def __repr__(self) -> str:
        return f"<StatePlan: {len(self._planned)} of {len(self.tensors)} tensors planned>"

    @property
    def planned(self) -> Mapping[str, TorchSource]:
        """The tensors that stay the same objects at the same addresses as long as the plan holds."""
        return self._planned

    def copies(self, memory: Bytes) -> tuple[BatchedCopies, list[tuple[TorchSource, Bytes]]]:
        """The copies of these tensors: all contiguous ones at once, and strided ones to read one by one."""
        base = memory.__array_interface__["data"][0]
        whole: list[tuple[int, int, int]] = []
        strided: list[tuple[TorchSource, Bytes]] = []
        for name, source in self._planned.items():
            start, tensor = self.offsets[name], source.tensor
            if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
                whole.append((base + start, tensor.data_ptr(), source.nbytes))
            else:
                strided.append((source, memory[start : start + source.nbytes]))
        return BatchedCopies(whole), strided


class StateCopy:
    """Memory for one copy of a plan's state.

    Attributes:
        tensors: the tensors in it.
        memory: all of the memory.
        plan: its plan.
    """

    def __init__(self, plan: StatePlan, memory: Bytes) -> None:
        self.plan = plan
        self.memory = memory
        self.tensors: dict[str, TensorSource] = {
            name: HostTensor(source, memory[plan.offsets[name] : plan.offsets[name] + source.nbytes])
            for name, source in plan.tensors.items()
        }
        self._regions = plan.regions(memory)
        self._gathering, self._strided = plan.copies(memory)

    def filled(self, light: FlatState, pool: Any) -> PlannedState:
        """Copy the state into this memory."""
        self._gathering.run(pool)
        for source, room in self._strided:
            TorchSource(source.tensor).read(0, room)
        for name, one in light.tensors.items():
            start = self.plan.offsets[name]
            one.read(0, self.memory[start : start + one.nbytes])
        return PlannedState(light.tree, self.tensors, self._regions, self.plan.nbytes, self.plan.limit)


def _spec(name: str, source: TensorSource) -> tuple[Any, ...]:
    return (name, source.dtype, tuple(source.shape), *place_of(source))


def _described(flat: FlatState) -> list[tuple[Any, ...]]:
    return [(source.origin, *_spec(name, source)) for name, source in flat.tensors.items()]


def _merged(moving: Any, whole: Mapping[str, Any]) -> dict[str, Any]:
    """`whole` without the parts that `moving` leaves out."""
    found = {**whole, "model": moving["model"]}
    if "optimizer" in moving:
        found["optimizer"] = moving["optimizer"]
    if "extra" in moving:
        found["extra"] = {name: None if one is None else whole["extra"][name] for name, one in moving["extra"].items()}
    return found
