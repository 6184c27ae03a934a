"""Holds the last step in memory, and compresses the next one against it.

A writer of one process holds the whole state of the last step, a rank its share.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import chain
from typing import Final

from ckptstore.formats import digest
from ckptstore.formats.codecs import Policy
from ckptstore.formats.history.records import CheckpointId
from ckptstore.formats.states.state import FlatState, TensorSource
from ckptstore.host.buffers import Bytes
from ckptstore.host.threads import Workers
from ckptstore.write.capture.bounded_capture import Feed
from ckptstore.write.capture.snapshot import Snapshot
from ckptstore.write.delta_encoding import Base, Choices
from ckptstore.write.resident_bases import MemoryBase
from ckptstore.write.steps.bounded_step import ArrivingStep, digest_of, plan_arriving
from ckptstore.write.steps.step_encoding import EncodedStep, StepChoices, encode_step
from ckptstore.write.steps.unexplained_bytes import Unexplained
from ckptstore.write.steps.updates import Update

__all__ = ["ResidentStep"]

_JOB_BYTES: Final = 1 << 20
"""Bytes of small tensors whose digests are one job of a thread."""


class ResidentStep:
    """The state of the last step, in host memory. One thread calls it.

    Attributes:
        base: the last step; None: there is none.
        unexplained: warns of steps that their updates do not explain.
    """

    def __init__(self, codecs: Policy, workers: Workers) -> None:
        """
        Args:
            codecs: which codecs are used for tensors that no optimizer updates. With ``context`` steps take the fewest
                bytes, too.
            workers: threads that compress.
        """
        self.base: MemoryBase | None = None
        self.unexplained = Unexplained()
        self._workers = workers
        self._choices = Choices(codecs)
        self._step_choices = StepChoices(small=codecs.context)

    @property
    def here(self) -> MemoryBase:
        """`base`, which must exist."""
        assert self.base is not None
        return self.base

    def encode(self, flat: FlatState, updates: Sequence[Update], step: int, *, lossy: bool = False) -> EncodedStep:
        """Compress `flat` against the step in memory, which stays in memory."""
        return self._encoded(flat, updates, self.here, step, lossy=lossy)

    def encode_alone(self, flat: FlatState, base: CheckpointId, step: int) -> EncodedStep:
        """Compress `flat` as a step diff against `base` without using its bytes: larger, but always possible."""
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

    def plan(self, feed: Feed, updates: Sequence[Update], step: int) -> ArrivingStep:
        """Plan how to compress a state that is copied unit by unit. Reads samples of the state."""
        with feed.reading():
            return plan_arriving(
                feed.flat,
                updates,
                self.here,
                step,
                choices=self._choices,
                step_choices=self._step_choices,
                workers=self._workers,
            )

    def turn(self, flat: FlatState, room: Mapping[str, Bytes]) -> Snapshot:
        """Give the memory of the step to `flat`, which replaces it unit by unit.

        From now on, until `advance`, there is no step in memory: its memory is a mix of two steps.
        """
        before, self.base = self.here, None
        return before.snapshot.turned(flat, room)

    def advance(self, identity: CheckpointId, snapshot: Snapshot) -> None:
        """Make this the step in memory. Takes ownership of `snapshot`."""
        self.clear()
        self.base = MemoryBase(identity, snapshot)

    def clear(self) -> None:
        """Free the memory: then there is no step in memory."""
        before, self.base = self.base, None
        if before is not None:
            before.forget()

    def digests(self, last: EncodedStep) -> dict[str, int]:
        """The state digests, by name, of the tensors of `last`, the last step that was compressed."""
        found = {tensor.spec.name: digest_of(tensor) for unit in last.units for tensor in unit}
        known = {name: number for name, number in found.items() if number is not None}
        if len(known) == len(found):
            return known  # it was copied unit by unit, and the step in memory may be torn by now
        tensors = self.here.tensors
        with closing(self._workers.in_order(partial(_digests, some) for some in _groups(tensors.values()))) as digests:
            return dict(zip(tensors, chain.from_iterable(digests), strict=True))


class _Nothing:
    """A base without tensors."""

    def __init__(self, identity: CheckpointId) -> None:
        self.id = identity

    def spec(self, name: str) -> None:  # the signature of every base
        """Return None: there is no such tensor."""

    def read(self, name: str, start: int, length: int) -> Bytes:
        """Never called, because no tensor has a spec."""
        raise AssertionError(f"{length} bytes from {start} of {name!r}: it has no tensor")


def _groups(tensors: Iterable[TensorSource]) -> Iterator[list[Bytes]]:
    """The images of the tensors, as many together as are worth a job."""
    group: list[Bytes] = []
    filled = 0
    for source in tensors:
        image = source.view()
        assert image is not None  # snapshots are host memory
        group.append(image)
        filled += len(image)
        if filled >= _JOB_BYTES:
            yield group
            group, filled = [], 0
    if group:
        yield group


def _digests(images: Sequence[Bytes]) -> list[int]:
    sums = digest.partial_of_each(images, [0] * len(images))
    return [digest.combine(one, nbytes=len(image)) for one, image in zip(sums, images, strict=True)]
