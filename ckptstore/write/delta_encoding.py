"""Writes a state as packed segments: chunks are compressed in parallel and appended in order, through a small window.

Used for deltas against an earlier checkpoint and for compressed fulls: without a base, only codecs that need none are
tried. The codec of a tensor is chosen from samples of the tensor, and is used for several saves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Final, Protocol, TypeAlias

import numpy as np

from ckptstore.formats import checksums, codecs, digest, jsontext
from ckptstore.formats.codecs import Codec, CodecChoice, Policy, Sample
from ckptstore.formats.history.records import CheckpointId, SegmentEntry
from ckptstore.formats.segment_files.layout import TensorSpec, chunk_count, chunk_extents, spec_of, split
from ckptstore.formats.segment_files.segment import Chunk, SegmentDoc, TensorEntry
from ckptstore.formats.sources import place_of
from ckptstore.formats.states.state import FlatState, TensorSource
from ckptstore.host.buffers import Bytes
from ckptstore.host.pages import BLOCK
from ckptstore.host.progress import Advance
from ckptstore.host.threads import Workers
from ckptstore.segments.block_stream import BlockStream
from ckptstore.segments.packed_segments import INDEX_ENTRY, drafts, write_stream
from ckptstore.segments.plain_segments import WrittenState, plain_nbytes
from ckptstore.segments.write_session import SegmentSession
from ckptstore.write.capture.bounded_capture import Feed, Piece, Unit, Window

__all__ = [
    "ArrivingState",
    "Base",
    "Choices",
    "EncodedChunk",
    "Read",
    "TensorPlan",
    "append_tensor",
    "choose_all",
    "code_all",
    "code_group",
    "group_jobs",
    "host_bytes",
    "units_of",
    "write_coded",
    "write_packed",
]

_JOB_BYTES: Final = 1 << 20
_REUSE: Final = 16
"""How many times a choice is used before the tensor is sampled again: training drifts slowly, and sampling costs as
much as compressing a small tensor four times."""
_ELEMENTS: Final = 4096
_Place = tuple[tuple[int, ...], tuple[int, ...] | None, tuple[int, ...] | None]
"""The shape; of a shard, also the global shape and the offset."""


Read: TypeAlias = Callable[[TensorSource, int, int], Bytes]
"""Reads bytes of a tensor of the state: tensor, start, length."""


class Base(Protocol):
    """The checkpoint against which a delta is compressed."""

    @property
    def id(self) -> CheckpointId:
        """Its identity."""

    def spec(self, name: str) -> tuple[str, tuple[int, ...]] | None:
        """The dtype and shape of a tensor; None: the checkpoint has no tensor of that name."""

    def read(self, name: str, start: int, length: int) -> Bytes:
        """Read bytes of one tensor. Several threads may call it."""


@dataclass(frozen=True, slots=True)
class ArrivingState:
    """A state that training copies unit by unit.

    Attributes:
        feed: provides its units.
        room: the memory to which each tensor is copied once it is compressed; None: no such copy.
    """

    feed: Feed
    room: Mapping[str, Bytes] | None


@dataclass(slots=True)
class Choices:
    """The codecs chosen so far, by tensor and by the magnitude of the distance to the base (0: no base)."""

    policy: Policy
    _known: dict[tuple[str, int], tuple[CodecChoice, str | None, int]] = field(default_factory=dict)

    def known(self, name: str, gap: int) -> tuple[CodecChoice, str | None] | None:
        """The choice for a tensor (and its master, for ``derive``); None: the tensor must be sampled."""
        key = (name, gap.bit_length())
        found = self._known.get(key)
        if found is None or found[2] <= 0:
            return None
        self._known[key] = (found[0], found[1], found[2] - 1)
        return found[0], found[1]

    def learn(self, name: str, gap: int, choice: CodecChoice, master: str | None) -> None:
        """Keep a choice for the next `_REUSE` times, staggered so that not all tensors are sampled at once."""
        self._known[name, gap.bit_length()] = (choice, master, _REUSE - hash(name) % (_REUSE // 2))


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """How one tensor is compressed."""

    spec: TensorSpec
    source: TensorSource
    choice: CodecChoice
    based: bool
    master: str | None

    @property
    def chunks(self) -> int:
        """The number of its chunks."""
        return chunk_count(self.spec.nbytes)

    @property
    def params(self) -> Mapping[str, Any]:
        """The codec's parameters as stored in the metadata; one object for all tensors of this codec."""
        known = _params_of(self.choice.codec)
        return known if self.master is None else {**known, "of": self.master}


@lru_cache(maxsize=1 << 10)
def _params_of(codec: Codec) -> Mapping[str, Any]:
    return codec.params


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """A compressed chunk. A raw payload is the state's own memory.

    Attributes:
        payload: the stored bytes.
        logical: the number of decoded bytes.
        decoded_hash: the `chunk_hash` of the decoded bytes.
        digest: their part of the tensor's state digest; None: not computed.
    """

    payload: Bytes
    logical: int
    decoded_hash: str
    digest: int | None = None


def write_packed(
    session: SegmentSession,
    flat: FlatState,
    draft: SegmentDoc,
    *,
    base: Base | None,
    gap: int,
    choices: Choices,
    limit: int | None = None,
    arriving: ArrivingState | None = None,
) -> WrittenState:
    """Compress `flat` against `base` into one or more packed segments and make them durable (COMMIT step 1).

    Args:
        flat: the state; its tensors must not change until this returns.
        draft: the fields that its segments share; see `packed_segments.drafts`.
        base: the checkpoint to compress against; None: only codecs that need no base.
        gap: number of checkpoints between base and state; choices are kept separately by its magnitude.
        choices: the earlier choices of codecs; updated.
        limit: logical bytes per segment; None: the size that the medium prefers.
        arriving: how `flat` is copied unit by unit; None: it is read in place.

    Raises:
        StorageError: the medium failed; the written segments are removed as far as possible.
        UsageError: the budget of `arriving` is too small.
    """
    documents = partial(drafts, draft, flat.tree)
    segments, tensors = write_coded(
        session, flat, documents, base=base, gap=gap, choices=choices, limit=limit, arriving=arriving
    )
    parts = [(tensor.name, tensor.dtype, tensor.shape, tensor.hash) for tensor in tensors]
    state = checksums.state_hash(jsontext.dumps(flat.tree), parts)
    return WrittenState(segments, state, sum(tensor.nbytes for tensor in tensors), len(tensors))


def write_coded(
    session: SegmentSession,
    flat: FlatState,
    documents: Callable[[int], Sequence[SegmentDoc]],
    *,
    base: Base | None,
    gap: int,
    choices: Choices,
    limit: int | None = None,
    arriving: ArrivingState | None = None,
) -> tuple[tuple[SegmentEntry, ...], list[TensorEntry]]:
    """Compress the tensors of `flat`, whole tensors and shards, into packed segments and make them durable.

    Args:
        documents: makes the documents, without tensors, of a given number of segments.
        base: as for `write_packed`; it has the same shards under the same names.
        session, flat, gap, choices, limit, arriving: as for `write_packed`. The tree is not read.

    Returns:
        the segments, and the entries of all tensors.

    Raises:
        as `write_packed`.
    """
    if (bound := session.backend.bound) is not None and bound.active:
        full = plain_nbytes(session.backend, flat, documents, limit)
        # Payloads that do not compress are stored as they are; the index may be longer than a plain header.
        bound.admit(full + INDEX_ENTRY * len(flat.tensors) + BLOCK, full)
    with nullcontext() if arriving is None else arriving.feed.reading():
        plans = {plan.spec.name: plan for plan in choose_all(flat, base, gap, choices, session.workers)}
    written: list[SegmentEntry] = []
    entries: list[TensorEntry] = []
    most = session.backend.segment_bytes if limit is None else limit
    divided = [[plans[spec.name] for spec in part] for part in split([plan.spec for plan in plans.values()], most)]
    windows = None
    if arriving is not None:
        windows = arriving.feed.windows([unit for own in divided for unit in units_of(own, flat, arriving.room)])
    for doc, own in zip(documents(len(divided)), divided, strict=True):
        with closing(code_all(own, flat, base, session.workers, digests=True, windows=windows)) as coded:
            entry, tensors = _write_segment(session, doc, own, coded)
        written.append(entry)
        entries += tensors.values()
    return tuple(written), entries


def _write_segment(
    session: SegmentSession, draft: SegmentDoc, plans: Sequence[TensorPlan], coded: Iterator[EncodedChunk]
) -> tuple[SegmentEntry, dict[str, TensorEntry]]:
    tensors: dict[str, TensorEntry] = {}

    def fill(stream: BlockStream) -> dict[int, dict[str, TensorEntry]]:
        tensors.update((plan.spec.name, append_tensor(stream, plan, coded, session.advance)) for plan in plans)
        return {draft.steps[0]: tensors}

    # Payloads are rarely longer than the bytes that they restore; at the end the file is cut to its length.
    nbytes = sum(plan.spec.nbytes for plan in plans)
    return write_stream(session, draft, nbytes, fill), tensors


def append_tensor(
    stream: BlockStream, plan: TensorPlan, coded: Iterator[EncodedChunk], advance: Advance
) -> TensorEntry:
    """Append the next compressed chunks, which belong to one tensor."""
    chunks = []
    digests: list[int] = []
    for _ in range(plan.chunks):
        piece = next(coded)
        assert piece.digest is not None  # it lets a restore be compared with the state that training had
        digests.append(piece.digest)
        at = stream.position
        stream.append(piece.payload)
        stored = checksums.chunk_hash(piece.payload.data)
        chunks.append(Chunk(at, len(piece.payload), piece.logical, stored, piece.decoded_hash))
        advance(piece.logical)
    spec = plan.spec
    number = digest.combine(*digests, nbytes=spec.nbytes)
    return TensorEntry(
        spec.name,
        spec.dtype,
        spec.shape,
        tuple(chunks),
        plan.choice.name,
        plan.params,
        spec.global_shape,
        spec.offset,
        number,
    )


# -- choosing codecs


def choose_all(
    flat: FlatState,
    base: Base | None,
    gap: int,
    choices: Choices,
    workers: Workers,
    names: Collection[str] | None = None,
) -> list[TensorPlan]:
    """Choose how to compress each tensor of `flat`, or each of `names` -> the plans, in the order of the state."""
    masters = _masters(flat)
    plans: dict[str, TensorPlan | None] = {}
    unknown: list[Callable[[], TensorPlan]] = []
    for name, source in flat.tensors.items():
        if names is not None and name not in names:
            continue
        spec = spec_of(name, source.dtype, tuple(source.shape), *place_of(source))
        based = base is not None and base.spec(name) == (spec.dtype, spec.shape)
        known = choices.known(name, gap if based else 0)
        if known is not None and _still_applies(known[0], known[1], spec, flat):
            plans[name] = TensorPlan(spec, source, known[0], based, known[1])
        else:
            plans[name] = None
            unknown.append(partial(_choose, spec, source, base if based else None, gap, choices, masters, flat))
    with closing(workers.in_order(unknown)) as chosen:
        return [next(chosen) if plan is None else plan for plan in plans.values()]


def _choose(
    spec: TensorSpec,
    source: TensorSource,
    base: Base | None,
    gap: int,
    choices: Choices,
    masters: Mapping[_Place, Sequence[str]],
    flat: FlatState,
) -> TensorPlan:
    apart = gap if base is not None else 0
    master = _master_for(spec, source, masters, flat)
    samples = [
        Sample(
            host_bytes(source, start, stop - start),
            None if base is None else base.read(spec.name, start, stop - start),
            None if master is None else host_bytes(flat.tensors[master], 2 * start, 2 * (stop - start)),
        )
        for start, stop in codecs.sample_ranges(spec.nbytes)
    ]
    policy = choices.policy.for_tensor(spec.name, spec.dtype, spec.shape)
    choice = codecs.choose(spec.dtype, samples, policy)
    derived = master if choice.codec.base_ratio == 2 else None
    choices.learn(spec.name, apart, choice, derived)
    return TensorPlan(spec, source, choice, base is not None, derived)


def _still_applies(choice: CodecChoice, master: str | None, spec: TensorSpec, flat: FlatState) -> bool:
    """Whether a choice made for an earlier checkpoint still fits: tensors change dtype and shape; masters disappear."""
    if master is None:
        return True
    source = flat.tensors.get(master)
    if source is None or source.dtype != "F32" or choice.codec not in codecs.copies_of(spec.dtype):
        return False
    return _place(source) == (spec.shape, spec.global_shape, spec.offset)


def _place(source: TensorSource) -> _Place:
    return (tuple(source.shape), *place_of(source))


def _masters(flat: FlatState) -> dict[_Place, list[str]]:
    """The names of fp32 tensors by shape (and place, for shards), if a half-width tensor has the same."""
    halves = {_place(source) for source in flat.tensors.values() if codecs.copies_of(source.dtype)}
    if not halves:
        return {}
    found: dict[_Place, list[str]] = {}
    for name, source in flat.tensors.items():
        if source.dtype == "F32" and (place := _place(source)) in halves:
            found.setdefault(place, []).append(name)
    return found


def _master_for(
    spec: TensorSpec, source: TensorSource, masters: Mapping[_Place, Sequence[str]], flat: FlatState
) -> str | None:
    """The fp32 tensor whose first numbers, rounded, equal those of `source`; a tensor of zeros proves nothing."""
    tried = codecs.copies_of(spec.dtype)
    if not tried or not spec.nbytes:
        return None
    count = min(_ELEMENTS, spec.nbytes // 2)
    half = host_bytes(source, 0, 2 * count)
    if not half.any():
        return None
    for name in masters.get((spec.shape, spec.global_shape, spec.offset), ()):
        numbers = host_bytes(flat.tensors[name], 0, 4 * count)
        if any(not len(codecs.encode(codec, half, numbers)) for codec in tried):
            return name
    return None


# -- compressing


def code_all(
    plans: Sequence[TensorPlan],
    flat: FlatState,
    base: Base | None,
    workers: Workers,
    *,
    digests: bool = False,
    windows: Iterator[Window] | None = None,
) -> Generator[EncodedChunk]:
    """Compress tensors -> the chunks in order. At most one group more than there are threads is in progress.

    Args:
        windows: the copied units of the state, one for each of `units_of`; None: the state is read in place.
    """
    with closing(workers.in_order(group_jobs(plans, flat, base, digests, windows))) as groups:
        for group in groups:
            yield from group


def group_jobs(
    plans: Sequence[TensorPlan], flat: FlatState, base: Base | None, digests: bool, windows: Iterator[Window] | None
) -> Iterator[Callable[[], list[EncodedChunk]]]:
    """Jobs that compress the tensors of `plans`, one per group of chunks; arguments as for `code_all`."""
    for group in _groups(plans):
        if windows is None:
            yield partial(code_group, group, flat, base, digests)
        else:
            yield partial(_code_window, group, flat, base, digests, next(windows))


def _code_window(
    group: Sequence[tuple[TensorPlan, int, int]], flat: FlatState, base: Base | None, digests: bool, window: Window
) -> list[EncodedChunk]:
    coded = code_group(group, flat, base, digests, window.read)
    window.done()
    return coded


def units_of(plans: Sequence[TensorPlan], flat: FlatState, room: Mapping[str, Bytes] | None) -> Iterator[Unit]:
    """The unit that each group of `code_all` reads.

    Args:
        room: the memory to which each tensor is copied once it is compressed; None: no such copy.
    """
    for group in _groups(plans):
        pieces = []
        for plan, start, length in group:
            place = None if room is None else room[plan.spec.name][start : start + length]
            pieces.append(Piece(plan.source, start, length, place))
            if plan.choice.codec.base_ratio == 2:
                assert plan.master is not None
                pieces.append(Piece(flat.tensors[plan.master], 2 * start, 2 * length))
        yield Unit(group[0][0].spec.name, tuple(pieces))


def _groups(plans: Sequence[TensorPlan]) -> Iterator[list[tuple[TensorPlan, int, int]]]:
    """Group chunks into jobs for a thread -> lists of (tensor, start, length). Small tensors share a job."""
    group: list[tuple[TensorPlan, int, int]] = []
    filled = 0
    for plan in plans:
        for start, length in chunk_extents(plan.spec.nbytes):
            if group and filled + length > _JOB_BYTES:
                yield group
                group, filled = [], 0
            group.append((plan, start, length))
            filled += length
    if group:
        yield group


def code_group(
    group: Sequence[tuple[TensorPlan, int, int]],
    flat: FlatState,
    base: Base | None,
    digests: bool,
    read: Read | None = None,
) -> list[EncodedChunk]:
    """Compress the chunks of one group, (tensor, start, length) each, in one thread.

    Args:
        read: reads the state from memory that is reused later; None: `host_bytes`.
    """
    fleeting, read = read is not None, read or host_bytes
    images: list[Bytes] = []
    jobs: list[codecs.ChunkJob] = []
    for plan, start, length in group:
        image = read(plan.source, start, length)
        codec = plan.choice.codec
        reference: Bytes | None = None
        if codec.base_ratio == 1:
            assert base is not None
            reference = base.read(plan.spec.name, start, length)
        elif codec.base_ratio == 2:
            assert plan.master is not None
            reference = read(flat.tensors[plan.master], 2 * start, 2 * length)
        images.append(image)
        if codec.name != "raw":
            jobs.append(codecs.ChunkJob(codec, image, reference, plan.choice.level))
    encoded = iter(codecs.encode_all(jobs))
    shares: Sequence[int | None] = [None] * len(group)
    if digests:
        shares = digest.partial_of_each(images, [start // 4 for _, start, _ in group])
    coded = []
    for (plan, _, length), image, share in zip(group, images, shares, strict=True):
        payload = (image.copy() if fleeting else image) if plan.choice.name == "raw" else next(encoded)
        coded.append(EncodedChunk(payload, length, checksums.chunk_hash(image.data), share))
    return coded


def host_bytes(source: TensorSource, start: int, length: int) -> Bytes:
    """Bytes of a tensor: a view of its own memory if that is possible, else a copy."""
    view = source.view()
    if view is not None:
        return view[start : start + length]
    out = np.empty(length, np.uint8)
    source.read(start, out)
    return out
