"""The step in memory, and how the next one is compressed against it.

A writer of one process has the whole state of the last step here, a rank its share of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckptstore.formats import digest
from ckptstore.formats.codecs import Policy
from ckptstore.formats.records import CheckpointId
from ckptstore.formats.state import FlatState, TensorSource
from ckptstore.host.buffers import Bytes
from ckptstore.host.threads import Workers
from ckptstore.write.capture.bounded_capture import Feed
from ckptstore.write.capture.snapshot import Snapshot
from ckptstore.write.delta_encoding import Base, Choices
from ckptstore.write.resident_bases import MemoryBase
from ckptstore.write.steps.bounded_step import FedStep, digest_of, plan_fed
from ckptstore.write.steps.step_encoding import EncodedStep, StepChoices, encode_step
from ckptstore.write.steps.unexplained_bytes import Unexplained
from ckptstore.write.steps.updates import Update

__all__ = ["ResidentStep"]


class ResidentStep:
    """The state of the last step, in host memory. One thread calls it.

    Attributes:
        base: the step; None: there is none.
        unexplained: warns of steps that updates do not explain.
    """

    def __init__(self, codecs: Policy, workers: Workers) -> None:
        """
        Args:
            codecs: which codecs tensors get that no optimizer moves.
            workers: threads that compress.
        """
        self.base: MemoryBase | None = None
        self.unexplained = Unexplained()
        self._workers = workers
        self._choices = Choices(codecs)
        self._step_choices = StepChoices()

    @property
    def here(self) -> MemoryBase:
        """`base`, which is there."""
        assert self.base is not None
        return self.base

    def encode(self, flat: FlatState, updates: Sequence[Update], step: int, *, lossy: bool = False) -> EncodedStep:
        """Compress `flat` against the step in memory, which stays."""
        return self._encoded(flat, updates, self.here, step, lossy=lossy)

    def encode_alone(self, flat: FlatState, base: CheckpointId, step: int) -> EncodedStep:
        """Compress `flat` as a step diff against `base` that uses nothing of it: longer, but always possible."""
        return self._encoded(flat, (), _Nothing(base), step, lossy=False)

    def _encoded(
        self, flat: FlatState, updates: Sequence[Update], base: Base, step: int, *, lossy: bool
    ) -> EncodedStep:
        return encode_step(
            flat,
            updates,
            base,
            step,
            choices=self._choices,
            step_choices=self._step_choices,
            workers=self._workers,
            lossy=lossy,
        )

    def plan(self, feed: Feed, updates: Sequence[Update], step: int) -> FedStep:
        """Say how a state is compressed that is copied unit by unit. Reads samples of it."""
        with feed.reading():
            return plan_fed(
                feed.flat,
                updates,
                self.here,
                step,
                choices=self._choices,
                step_choices=self._step_choices,
                workers=self._workers,
            )

    def turn(self, flat: FlatState, room: Mapping[str, Bytes]) -> Snapshot:
        """Give the memory of the step to `flat`, which takes its place unit by unit.

        From here on there is no step in memory, until `advance`: part of it is the next one.
        """
        before, self.base = self.here, None
        return before.snapshot.turned(flat, room)

    def advance(self, identity: CheckpointId, snapshot: Snapshot) -> None:
        """This is the step in memory from now on. Takes `snapshot` over."""
        self.clear()
        self.base = MemoryBase(identity, snapshot)

    def clear(self) -> None:
        """Give the memory back: there is no step in memory any more."""
        before, self.base = self.base, None
        if before is not None:
            before.forget()

    def digests(self, last: EncodedStep) -> dict[str, int]:
        """State digests by name of the tensors of `last`, the last step that was compressed."""
        found = {tensor.spec.name: digest_of(tensor) for unit in last.units for tensor in unit}
        known = {name: number for name, number in found.items() if number is not None}
        if len(known) == len(found):
            return known  # it was copied unit by unit, and what is in memory may be torn by now
        tensors = self.here.tensors
        return dict(zip(tensors, self._workers.pool.map(_digest, tensors.values()), strict=True))


class _Nothing:
    """A base that has no tensor."""

    def __init__(self, identity: CheckpointId) -> None:
        self.id = identity

    def spec(self, name: str) -> None:  # as every base has it
        """None: there is none of that name."""

    def read(self, name: str, start: int, length: int) -> Bytes:
        """Nobody reads a tensor that has no spec."""
        raise AssertionError(f"{length} bytes from {start} of {name!r}: it has no tensor")


def _digest(source: TensorSource) -> int:
    image = source.view()
    assert image is not None  # snapshots are host memory
    return digest.digest(image)
