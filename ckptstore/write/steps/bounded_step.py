"""Compresses a step while it is copied unit by unit, as `step_encoding` does. Each unit replaces the previous step's.

A step that does not wait for other steps is written as it is compressed: its payloads, which may be a third of the
state, are never in memory all at once. `step_encoding.encode_step` says why this is a loop of its own.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from typing import Any, Final

import numpy as np

from ckptstore.formats import checksums, digest, jsontext
from ckptstore.formats.history.records import Encoding, SegmentEntry
from ckptstore.formats.segment_files.segment import Chunk, SegmentDoc, TensorEntry
from ckptstore.formats.segment_files.segment_index import MAX_ENTRIES
from ckptstore.formats.segment_files.segment_steps import SegmentPart, StepEncoding
from ckptstore.formats.states.state import FlatState
from ckptstore.host.buffers import Bytes
from ckptstore.host.threads import Workers
from ckptstore.segments.block_stream import BlockStream
from ckptstore.segments.packed_segments import write_stream
from ckptstore.segments.write_session import SegmentSession
from ckptstore.write.capture.bounded_capture import Unit, Window
from ckptstore.write.delta_encoding import (
    ArrivingState,
    Base,
    Choices,
    EncodedChunk,
    TensorPlan,
    choose_all,
    group_jobs,
    units_of,
)
from ckptstore.write.steps.batch_segments import KIND
from ckptstore.write.steps.joined_parameters import Joined, fitting_updates, join
from ckptstore.write.steps.step_encoding import (
    CodedChunk,
    EncodedStep,
    EncodedTensor,
    Rules,
    StepChoices,
    choose_rules,
    code_chunk,
    rest_tensor,
    unit_of,
    will_fit,
)
from ckptstore.write.steps.unexplained_bytes import Excess
from ckptstore.write.steps.updates import Update

__all__ = ["ArrivingStep", "StreamedStep", "TooLongError", "digest_of", "plan_arriving"]

_NOTHING: Final = np.empty(0, np.uint8)
_Place = tuple[int, int, str]
"""The position of a payload, its length and its hash."""


class TooLongError(Exception):
    """A payload is larger than a chunk may be: the step cannot be stored as a step diff.

    When this is raised, the whole state has replaced the previous step in memory.
    """


@dataclass(frozen=True, slots=True)
class StreamedStep:
    """A step that was written as it was compressed.

    Attributes:
        encoding: the encoding record that the COMMIT adds.
        state: the state hash.
        tensors: the number of tensors.
        nbytes: logical bytes.
        excess: see `EncodedStep`.
    """

    segments: tuple[SegmentEntry, ...]
    encoding: Encoding
    state: str
    tensors: int
    nbytes: int
    excess: tuple[Excess, ...] = ()


_Moved = tuple[Joined, Rules]


@dataclass(slots=True)
class _Share:
    """The part of a step in one segment."""

    moved: list[_Moved] = field(default_factory=list)
    rest: list[TensorPlan] = field(default_factory=list)
    nbytes: int = 0
    entries: int = 0


class ArrivingStep:
    """The plan to compress a step that is copied unit by unit."""

    def __init__(
        self,
        step: int,
        flat: FlatState,
        base: Base,
        moved: Sequence[_Moved],
        rest: Sequence[TensorPlan],
        choices: StepChoices,
        excess: Sequence[Excess] = (),
    ) -> None:
        """
        Args:
            flat: the state; only names, types and shapes are read.
            moved: the parameters that an optimizer updated, each with its encoding and rule.
            rest: the other tensors.
            choices: learns which parameters do not fit.
            excess: the excess of parameters that do not fit.
        """
        self._step = step
        self._flat = flat
        self._base = base
        self._moved = moved
        self._rest = rest
        self._choices = choices
        self._excess = list(excess)
        self._overflow = False

    # -- compressing and writing

    def encode(self, arriving: ArrivingState, workers: Workers) -> EncodedStep:
        """Compress the step and keep it in memory. Raises `TooLongError`, and errors of the feed."""
        share = _Share(list(self._moved), list(self._rest))
        units: list[tuple[EncodedTensor, ...]] = []
        with closing(self._results([share], arriving, workers)) as results:
            for one, (encoding, rule) in share.moved:
                unit = unit_of(one, encoding, rule, list(self._chunks(one, results)))
                assert unit is not None
                units.append(unit)
                self._look(one, sum(tensor.stored for tensor in unit))
            coded: Iterator[EncodedChunk] = chain.from_iterable(results)
            units += [(rest_tensor(plan, coded),) for plan in share.rest]
        return EncodedStep.of(self._flat, self._base.id, self._step, units, self._excess)

    def write(
        self,
        arriving: ArrivingState,
        session: SegmentSession,
        draft: SegmentDoc,
        moment: float,
        limit: int | None = None,
    ) -> StreamedStep:
        """Compress the step, write it at the same time, and make it durable (COMMIT step 1).

        Args:
            draft: the fields that its segments share; their uuids and steps are filled in.
            moment: when it was made.
            limit: logical bytes of a segment; None: the size that the medium prefers.

        Raises:
            TooLongError: the written bytes are not part of any checkpoint.
            StorageError: the medium failed.
            and errors of the feed.
        """
        if (bound := session.backend.bound) is not None:
            bound.admit(bound.full or self._flat.nbytes)
        shares = list(self._shares(session.backend.segment_bytes if limit is None else limit))
        ids = [uuid.uuid4().hex for _ in shares]
        parts = [SegmentPart(ids[0], number, len(ids)) if len(ids) > 1 else None for number in range(len(ids))]
        segments: list[SegmentEntry] = []
        entries: list[TensorEntry] = []
        with closing(self._results(shares, arriving, session.workers)) as results:
            for segment, part, share in zip(ids, parts, shares, strict=True):
                described = StepEncoding(draft.term, KIND, self._base.id, moment, False, part)
                trees = {} if segments else {self._step: self._flat.tree}
                doc = replace(draft, segment=segment, encodings={self._step: described}, trees=trees)
                made: list[TensorEntry] = []
                fill = partial(self._fill, share, results, made)
                segments.append(write_stream(session, doc, share.nbytes, fill))
                entries += made
        parts_of_state = [(one.name, one.dtype, one.shape, one.hash) for one in entries]
        state = checksums.state_hash(jsontext.dumps(self._flat.tree), parts_of_state)
        cost = sum(segment.size for segment in segments)
        encoding = Encoding((draft.term, self._step), KIND, self._base.id, tuple(ids), False, cost)
        return StreamedStep(tuple(segments), encoding, state, len(entries), self._flat.nbytes, tuple(self._excess))

    # -- the order of compression

    def _shares(self, limit: int) -> Iterator[_Share]:
        """Divide the step into segments whose payloads fit, however large they become."""
        share = _Share()

        def full(nbytes: int, entries: int) -> bool:
            taken = share.moved or share.rest
            if taken and (share.nbytes + nbytes > limit or share.entries + entries > MAX_ENTRIES // 4):
                return True
            share.nbytes += nbytes
            share.entries += entries
            return False

        for one, rules in self._moved:
            names = [name for update in one.updates for name in update.slots]
            size = sum(self._flat.tensors[name].nbytes for name in names)
            if full(size, len(names)):
                yield share
                share = _Share(nbytes=size, entries=len(names))
            share.moved.append((one, rules))
        for plan in self._rest:
            if full(plan.spec.nbytes, 1):
                yield share
                share = _Share(nbytes=plan.spec.nbytes, entries=1)
            share.rest.append(plan)
        yield share

    def _results(
        self, shares: Sequence[_Share], arriving: ArrivingState, workers: Workers
    ) -> Generator[
        Any
    ]:  # for a chunk that an optimizer updated a `CodedChunk` or None; for others lists of `EncodedChunk`
        assert arriving.room is not None  # the next step is compressed against this one
        units: list[Unit] = []
        for share in shares:
            units += [one.unit(rules[0], extent, arriving.room) for one, rules in share.moved for extent in one.extents]
            units += units_of(share.rest, self._flat, arriving.room)
        windows = arriving.feed.windows(units)
        return workers.in_order(chain.from_iterable(self._jobs(share, windows) for share in shares))

    def _jobs(self, share: _Share, windows: Iterator[Window]) -> Iterator[Callable[[], Any]]:
        for one, rules in share.moved:
            for extent in one.extents:
                yield partial(self._code, one, rules, extent, next(windows))
        yield from group_jobs(share.rest, self._flat, self._base, True, windows)

    def _code(self, one: Joined, rules: Rules, extent: tuple[int, int], window: Window) -> CodedChunk | None:
        coded = None if self._overflow else code_chunk(one, rules, extent, window.read, digests=True)
        window.done()
        return coded

    # -- the results

    def _chunks(self, one: Joined, results: Iterator[CodedChunk | None]) -> Generator[CodedChunk]:
        for _ in one.extents:
            coded = next(results)
            if coded is None:
                self._choices.learn_fit(one.leader, False)
                self._overflow = True  # jobs that have not begun compress nothing
                for _ in results:  # wait for those that have begun: they read memory that the caller reuses
                    pass
                raise TooLongError(f"step {self._step}: {one.leader!r} does not become smaller by encoding")
            yield coded

    def _look(self, one: Joined, stored: int) -> None:
        if (excess := one.excess(stored)) is not None:
            self._excess.append(excess)

    def _fill(
        self, share: _Share, results: Iterator[Any], made: list[TensorEntry], stream: BlockStream
    ) -> Mapping[int, Mapping[str, TensorEntry]]:
        for one, (encoding, rule) in share.moved:
            places: list[_Place] = []
            chunks: list[CodedChunk] = []
            for chunk in self._chunks(one, results):
                places.append(_append(stream, chunk.payload))
                # Prevents: holding all payloads of a tensor in memory, however large it is.
                chunks.append(replace(chunk, payload=_NOTHING))
            unit = unit_of(one, encoding, rule, chunks)
            assert unit is not None
            self._look(one, sum(length for _, length, _ in places))
            made += [_entry(tensor, stream, () if number else places) for number, tensor in enumerate(unit)]
        # Only the results of this segment: the rest of `results` belongs to the next one.
        rest = chain.from_iterable(next(results) for _ in units_of(share.rest, self._flat, None))
        for plan in share.rest:
            places, pieces = [], []
            for coded in islice(rest, plan.chunks):
                places.append(_append(stream, coded.payload))
                pieces.append(replace(coded, payload=_NOTHING))
            made.append(_entry(EncodedTensor(plan.spec, plan.choice.name, plan.params, tuple(pieces)), stream, places))
        return {self._step: {entry.name: entry for entry in made}}


def _append(stream: BlockStream, payload: Bytes) -> _Place:
    at = stream.position
    stream.append(payload)
    return at, len(payload), checksums.chunk_hash(payload.data)


def _entry(tensor: EncodedTensor, stream: BlockStream, places: Sequence[_Place]) -> TensorEntry:
    """The index entry of a tensor whose payloads are at `places`; without places, empty payloads are appended."""
    places = places or [_append(stream, _NOTHING) for _ in tensor.chunks]
    chunks = tuple(
        Chunk(at, length, coded.logical, stored, coded.decoded_hash)
        for (at, length, stored), coded in zip(places, tensor.chunks, strict=True)
    )
    spec = tensor.spec
    number = digest_of(tensor)
    return TensorEntry(spec.name, spec.dtype, spec.shape, chunks, tensor.codec, tensor.params, digest=number)


def digest_of(tensor: EncodedTensor) -> int | None:
    """The state digest of a tensor; None: it was not requested when its chunks were compressed."""
    shares = [coded.digest for coded in tensor.chunks if coded.digest is not None]
    if len(shares) < len(tensor.chunks):
        return None
    return digest.combine(*shares, nbytes=tensor.spec.nbytes)


def plan_arriving(
    flat: FlatState,
    updates: Sequence[Update],
    base: Base,
    step: int,
    *,
    choices: Choices,
    step_choices: StepChoices,
    workers: Workers,
) -> ArrivingStep:
    """Plan how to compress `flat` against the previous step, from samples of it; arguments as for `encode_step`."""
    joined = list(join(fitting_updates(updates, flat, base), flat, base))
    rules = choose_rules(joined, step_choices, workers)
    asked = (partial(will_fit, one, rule, step_choices) for one, rule in zip(joined, rules, strict=True))
    with closing(workers.in_order(asked)) as answers:
        fits = list(answers)
    unfit = (one.excess(None) for one, fit in zip(joined, fits, strict=True) if not fit)
    moved = [(one, rule) for one, rule, fit in zip(joined, rules, fits, strict=True) if fit]
    names = {name for one, _ in moved for update in one.updates for name in update.slots}
    rest = choose_all(flat, base, 1, choices, workers, flat.tensors.keys() - names)
    return ArrivingStep(step, flat, base, moved, rest, step_choices, [one for one in unfit if one is not None])
