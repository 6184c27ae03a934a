"""Writing a state as packed segments: every chunk coded in parallel, appended in order, nothing held but a window.

Serves deltas against an earlier checkpoint and compressed fulls alike: without a base, only codecs that need none are
tried. Which codec a tensor gets is chosen from samples of it, and kept for a while.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol

import numpy as np

from ckptstore.formats import codecs, digest, hashing, jsontext
from ckptstore.formats.codecs import CodecChoice, Policy, Sample
from ckptstore.formats.layout import HEADER_LIMIT, SEGMENT_LIMIT, TensorSpec, chunk_extents, split
from ckptstore.formats.records import CheckpointId, SegmentEntry
from ckptstore.formats.segment import Chunk, SegmentDoc, TensorEntry
from ckptstore.formats.state import FlatState, TensorSource
from ckptstore.host.buffers import Bytes
from ckptstore.host.progress import Advance
from ckptstore.host.threads import Workers, let_go
from ckptstore.segments.packed import drafts, write_stream
from ckptstore.segments.plain import WrittenState
from ckptstore.segments.session import SegmentSession
from ckptstore.segments.stream import BlockStream

__all__ = [
    "Base",
    "Choices",
    "Coded",
    "TensorPlan",
    "choose_all",
    "code_all",
    "host_bytes",
    "write_packed",
]

_JOB_BYTES: Final = 1 << 20
_REUSE: Final = 16
"""How many times a choice is used before the tensor is sampled again: training drifts slowly, sampling costs as much as
coding a small tensor four times."""
_ELEMENTS: Final = 4096


class Base(Protocol):
    """The checkpoint that a delta is made against."""

    @property
    def id(self) -> CheckpointId:
        """Its identity."""

    def spec(self, name: str) -> tuple[str, tuple[int, ...]] | None:
        """dtype and shape of one of its tensors, or None if it has none of that name."""

    def read(self, name: str, start: int, length: int) -> Bytes:
        """Bytes of one tensor. May run in several threads."""


@dataclass(slots=True)
class Choices:
    """Codecs chosen so far, by tensor and by whether there is a base how far away."""

    policy: Policy
    _known: dict[tuple[str, int], tuple[CodecChoice, str | None, int]] = field(default_factory=dict)

    def known(self, name: str, gap: int) -> tuple[CodecChoice, str | None] | None:
        """The choice for a tensor (and its master, for ``derive``), unless it is time to look again."""
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
    """How one tensor is coded."""

    spec: TensorSpec
    source: TensorSource
    choice: CodecChoice
    based: bool
    master: str | None

    @property
    def params(self) -> dict[str, Any]:
        """The codec's parameters as metadata has them."""
        return dict(self.choice.params) if self.master is None else {**self.choice.params, "of": self.master}


@dataclass(frozen=True, slots=True)
class Coded:
    """A coded chunk. A raw payload is the state's own memory.

    Attributes:
        payload: stored bytes.
        logical: decoded bytes.
        decoded_hash: their `chunk_hash`.
        digest: their share of the tensor's state digest, or None.
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
    limit: int = SEGMENT_LIMIT - HEADER_LIMIT,
) -> WrittenState:
    """Code `flat` against `base` into one or more packed segments and make them durable (COMMIT step 1).

    Args:
        flat: the state; its tensors must not change until this returns.
        draft: what its segments say of themselves; see `packed.drafts`.
        base: what deltas are made against; None: codecs without a base only.
        gap: checkpoints between base and state; choices are kept apart by its magnitude.
        choices: what was chosen before; updated.
        limit: logical bytes per segment.

    Raises:
        StorageError: the medium failed; what was written is removed as far as possible.
    """
    plans = {plan.spec.name: plan for plan in choose_all(flat, base, gap, choices, session.workers)}
    written: list[SegmentEntry] = []
    parts: list[tuple[str, str, Sequence[int], str]] = []
    divided = split([plan.spec for plan in plans.values()], limit)
    for doc, members in zip(drafts(draft, flat.tree, len(divided)), divided, strict=True):
        own = [plans[spec.name] for spec in members]
        with closing(code_all(own, flat, base, session.workers, digests=True)) as coded:
            entry, tensors = _write_segment(session, doc, own, coded)
        written.append(entry)
        parts += [(name, tensor.dtype, tensor.shape, tensor.hash) for name, tensor in tensors.items()]
    state = hashing.state_hash(jsontext.dumps(flat.tree), parts)
    return WrittenState(tuple(written), state, sum(plan.spec.nbytes for plan in plans.values()), len(plans))


def _write_segment(
    session: SegmentSession, draft: SegmentDoc, plans: Sequence[TensorPlan], coded: Iterator[Coded]
) -> tuple[SegmentEntry, dict[str, TensorEntry]]:
    tensors: dict[str, TensorEntry] = {}

    def fill(stream: BlockStream) -> dict[int, dict[str, TensorEntry]]:
        tensors.update((plan.spec.name, _append(stream, plan, coded, session.advance)) for plan in plans)
        return {draft.steps[0]: tensors}

    # Payloads are rarely longer than what they restore; the file is cut to its length in the end.
    nbytes = sum(plan.spec.nbytes for plan in plans)
    return write_stream(session, draft, nbytes, fill), tensors


def _append(stream: BlockStream, plan: TensorPlan, coded: Iterator[Coded], advance: Advance) -> TensorEntry:
    """Append the next coded chunks, which are those of one tensor."""
    chunks = []
    digests: list[int] = []
    for _ in chunk_extents(plan.spec.nbytes):
        piece = next(coded)
        assert piece.digest is not None  # without it nothing would be compared with what training had
        digests.append(piece.digest)
        at = stream.position
        stream.append(piece.payload)
        stored = hashing.chunk_hash(piece.payload.data)
        chunks.append(Chunk(at, len(piece.payload), piece.logical, stored, piece.decoded_hash))
        advance(piece.logical)
    spec = plan.spec
    number = digest.combine(*digests, nbytes=spec.nbytes)
    return TensorEntry(spec.name, spec.dtype, spec.shape, tuple(chunks), plan.choice.name, plan.params, digest=number)


# -- choosing


def choose_all(
    flat: FlatState,
    base: Base | None,
    gap: int,
    choices: Choices,
    workers: Workers,
    names: Collection[str] | None = None,
) -> list[TensorPlan]:
    """How each tensor of `flat`, or each of `names`, will be coded, in the order of the state."""
    masters = _masters(flat)
    waiting: list[Future[TensorPlan]] = []
    for name, source in flat.tensors.items():
        if names is not None and name not in names:
            continue
        spec = TensorSpec(name, source.dtype, tuple(source.shape))
        based = base is not None and base.spec(name) == (spec.dtype, spec.shape)
        waiting.append(workers.pool.submit(_choose, spec, source, base if based else None, gap, choices, masters, flat))
    try:
        return [future.result() for future in waiting]
    finally:
        let_go(waiting)


def _choose(
    spec: TensorSpec,
    source: TensorSource,
    base: Base | None,
    gap: int,
    choices: Choices,
    masters: Mapping[tuple[int, ...], Sequence[str]],
    flat: FlatState,
) -> TensorPlan:
    apart = gap if base is not None else 0
    known = choices.known(spec.name, apart)
    if known is not None and _still_applies(known[0], known[1], spec, flat):
        return TensorPlan(spec, source, known[0], base is not None, known[1])
    master = _master_for(spec, source, masters, flat)
    samples = [
        Sample(
            host_bytes(source, start, stop - start),
            None if base is None else base.read(spec.name, start, stop - start),
            None if master is None else host_bytes(flat.tensors[master], 2 * start, 2 * (stop - start)),
        )
        for start, stop in codecs.sample_ranges(spec.nbytes)
    ]
    choice = codecs.choose(spec.dtype, samples, choices.policy)
    derived = master if choice.name == "derive" else None
    choices.learn(spec.name, apart, choice, derived)
    return TensorPlan(spec, source, choice, base is not None, derived)


def _still_applies(choice: CodecChoice, master: str | None, spec: TensorSpec, flat: FlatState) -> bool:
    """Whether a choice made for an earlier checkpoint fits: tensors change dtype and shape, and masters go away."""
    if master is None:
        return True
    source = flat.tensors.get(master)
    wanted = ("F32", spec.shape)
    return source is not None and (source.dtype, tuple(source.shape)) == wanted and choice.params["to"] == spec.dtype


def _masters(flat: FlatState) -> dict[tuple[int, ...], list[str]]:
    """Names of fp32 tensors by shape, where some half-width tensor has that shape, too."""
    halves = {tuple(source.shape) for source in flat.tensors.values() if source.dtype in ("BF16", "F16")}
    found: dict[tuple[int, ...], list[str]] = {}
    for name, source in flat.tensors.items():
        if source.dtype == "F32" and tuple(source.shape) in halves:
            found.setdefault(tuple(source.shape), []).append(name)
    return found


def _master_for(
    spec: TensorSpec, source: TensorSource, masters: Mapping[tuple[int, ...], Sequence[str]], flat: FlatState
) -> str | None:
    """The fp32 tensor whose first numbers, rounded, are those of `source`; a zero tensor proves nothing."""
    if spec.dtype not in ("BF16", "F16") or not spec.nbytes:
        return None
    count = min(_ELEMENTS, spec.nbytes // 2)
    half = host_bytes(source, 0, 2 * count)
    if not half.any():
        return None
    codec = codecs.codec("derive", {"to": spec.dtype})
    for name in masters.get(spec.shape, ()):
        if not len(codecs.encode(codec, half, host_bytes(flat.tensors[name], 0, 4 * count))):
            return name
    return None


# -- coding


def code_all(
    plans: Sequence[TensorPlan],
    flat: FlatState,
    base: Base | None,
    workers: Workers,
    *,
    digests: bool = False,
) -> Generator[Coded]:
    """Coded chunks in order; at most one group of chunks more than there are threads is under way."""
    with closing(workers.in_order(partial(_code, group, flat, base, digests) for group in _groups(plans))) as groups:
        for group in groups:
            yield from group


def _groups(plans: Sequence[TensorPlan]) -> Iterator[list[tuple[TensorPlan, int, int]]]:
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


def _code(
    group: Sequence[tuple[TensorPlan, int, int]], flat: FlatState, base: Base | None, digests: bool
) -> list[Coded]:
    coded = []
    for plan, start, length in group:
        image = host_bytes(plan.source, start, length)
        codec = plan.choice.codec
        reference: Bytes | None = None
        if codec.base_ratio == 1:
            assert base is not None
            reference = base.read(plan.spec.name, start, length)
        elif codec.base_ratio == 2:
            assert plan.master is not None
            reference = host_bytes(flat.tensors[plan.master], 2 * start, 2 * length)
        payload = image if codec.name == "raw" else codecs.encode(codec, image, reference, level=plan.choice.level)
        share = digest.partial(image, start // 4) if digests else None
        coded.append(Coded(payload, length, hashing.chunk_hash(image.data), share))
    return coded


def host_bytes(source: TensorSource, start: int, length: int) -> Bytes:
    """Bytes of a tensor: its own memory where that is possible."""
    view = source.view()
    if view is not None:
        return view[start : start + length]
    out = np.empty(length, np.uint8)
    source.read(start, out)
    return out
