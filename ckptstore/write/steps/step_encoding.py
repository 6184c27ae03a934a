"""Compresses one step against the previous one: tensors that an optimizer updated as steps, all others as deltas."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from ckptstore.formats import checksums, digest, jsontext, optim
from ckptstore.formats.history.records import CheckpointId
from ckptstore.formats.segment_files.layout import CHUNK, TensorSpec, chunk_extents, spec_of
from ckptstore.formats.segment_files.step_codec import STEP, StepGroup, follower_params
from ckptstore.formats.sources import place_of
from ckptstore.formats.states.state import FlatState
from ckptstore.host.buffers import Bytes
from ckptstore.host.threads import Workers
from ckptstore.write.delta_encoding import (
    Base,
    Choices,
    EncodedChunk,
    Read,
    TensorPlan,
    choose_all,
    code_all,
    host_bytes,
)
from ckptstore.write.steps.joined_parameters import WITHOUT_GRADIENT, Joined, fitting_updates, gradient_kind, join
from ckptstore.write.steps.unexplained_bytes import Excess
from ckptstore.write.steps.updates import Update

__all__ = [
    "CodedChunk",
    "EncodedStep",
    "EncodedTensor",
    "Rules",
    "StepChoices",
    "choose_rules",
    "code_chunk",
    "encode_step",
    "rest_tensor",
    "unit_of",
    "will_fit",
]

_REUSE: Final = 32
"""Number of steps after which an encoding is chosen again."""
_SURELY: Final = 0.8
"""If by its samples a payload takes less than this share of a chunk, it counts as fitting."""

_Array: TypeAlias = npt.NDArray[Any]
Rules: TypeAlias = tuple[optim.Encoding, optim.Rule]
"""How parameters are compressed: the encoding, and the arithmetic of the step."""


@dataclass(frozen=True, slots=True)
class EncodedTensor:
    """A compressed tensor, which owns the memory of its payloads.

    Attributes:
        stored: the bytes of its payloads.
    """

    spec: TensorSpec
    codec: str
    params: Mapping[str, Any]
    chunks: tuple[EncodedChunk, ...]
    stored: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stored", sum(len(chunk.payload) for chunk in self.chunks))

    @property
    def hash(self) -> str:
        """See `TensorEntry.hash`."""
        return checksums.tensor_hash([chunk.decoded_hash for chunk in self.chunks])


@dataclass(frozen=True, slots=True)
class EncodedStep:
    """A checkpoint in memory, compressed against the previous one.

    Attributes:
        step: its step.
        base: the checkpoint that it is compressed against.
        tree: typed JSON of the state.
        units: groups of tensors that must be together in one segment.
        state: the state hash.
        nbytes: logical bytes.
        lossy: whether it differs from the state of training.
        excess: parameters that changed in another way than their updates say.
        stored: bytes of all payloads.
    """

    step: int
    base: CheckpointId
    tree: Any
    units: tuple[tuple[EncodedTensor, ...], ...]
    state: str
    nbytes: int
    lossy: bool = False
    excess: tuple[Excess, ...] = ()
    stored: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stored", sum(tensor.stored for unit in self.units for tensor in unit))

    @classmethod
    def of(
        cls,
        flat: FlatState,
        base: CheckpointId,
        step: int,
        units: Sequence[tuple[EncodedTensor, ...]],
        excess: Sequence[Excess],
        *,
        lossy: bool = False,
    ) -> EncodedStep:
        """The compressed `flat`. Its state hash is computed from the hashes of `units`."""
        parts = [(one.spec.name, one.spec.dtype, one.spec.shape, one.hash) for unit in units for one in unit]
        state = checksums.state_hash(jsontext.dumps(flat.tree), parts)
        return cls(step, base, flat.tree, tuple(units), state, flat.nbytes, lossy, tuple(excess))

    @property
    def tensors(self) -> int:
        """The number of tensors in the state."""
        return sum(len(unit) for unit in self.units)


@dataclass(slots=True)
class StepChoices:
    """How groups were stored so far. Training drifts slowly, on the same machine, so choices are reused.

    Attributes:
        small: whether the fewest bytes are wanted, at half the speed, and from readers that know these encodings.
    """

    small: bool = False
    _known: dict[tuple[str, int, str], tuple[optim.Encoding, str, int]] = field(default_factory=dict)
    _fits: dict[str, tuple[bool, int]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def known(self, leader: str, size: int, gradient: str) -> tuple[optim.Encoding, str] | None:
        """Encoding and variant ("" for a plain difference); None: choose again."""
        with self._lock:
            found = self._known.get((leader, size, gradient))
            if found is None or found[2] <= 0:
                return None
            self._known[leader, size, gradient] = (found[0], found[1], found[2] - 1)
        return found[0], found[1]

    def variant(self, leader: str, size: int, gradient: str) -> str | None:
        """The variant of the last choice, which depends on the machine that trains."""
        with self._lock:
            found = self._known.get((leader, size, gradient))
        return found[1] or None if found is not None else None

    def learn(self, leader: str, size: int, gradient: str, choice: optim.StepChoice) -> None:
        """Keep a choice for the next `_REUSE` steps."""
        with self._lock:
            self._known[leader, size, gradient] = (choice.encoding, choice.variant, _REUSE)
            if choice.bits * optim.CHUNK_NUMBERS < 8 * _SURELY * CHUNK:
                self._fits[leader] = True, _REUSE

    def fits(self, leader: str) -> bool | None:
        """Whether the payloads of a parameter will fit into a chunk; None: check again."""
        with self._lock:
            fits, left = self._fits.get(leader, (False, 0))
            if left <= 0:
                return None
            self._fits[leader] = fits, left - 1
            return fits

    def learn_fit(self, leader: str, fits: bool) -> None:
        """Keep for the next `_REUSE` steps whether they fit."""
        with self._lock:
            self._fits[leader] = fits, _REUSE


def encode_step(
    flat: FlatState,
    updates: Sequence[Update],
    base: Base,
    step: int,
    *,
    choices: Choices,
    step_choices: StepChoices,
    workers: Workers,
    lossy: bool = False,
) -> EncodedStep:
    """Compress `flat` against the previous step.

    `bounded_step` uses the same parts in a loop of its own, because it has to decide everything beforehand. Here,
    parameters whose payload turns out too large become deltas: which tensors are deltas is known when all parameters
    are compressed. There, all units are requested at once, in one order, and each replaces the base when it is
    compressed: a parameter that turns out too large can no longer become a delta, and the whole step becomes a full.
    One loop for both would choose between these two at each of its steps.

    Args:
        flat: the state, in host memory; must not change until this returns.
        updates: what the optimizers did. Updates that do not fit state and base are ignored.
        base: the state of the previous step.
        choices: codecs chosen before for tensors that no optimizer updates; updated. `step_choices`: the same for
            steps.
        workers: threads that compress.
        lossy: whether `flat` differs from the state of training.
    """
    joined = list(join(fitting_updates(updates, flat, base), flat, base))
    coded = list(_code_joined(joined, step_choices, workers))
    units = [unit for unit in coded if unit is not None]
    found = (one.excess(_stored(unit)) for one, unit in zip(joined, coded, strict=True))
    excess = () if lossy else tuple(one for one in found if one is not None)
    moved = {tensor.spec.name for unit in units for tensor in unit}
    rest = flat.tensors.keys() - moved
    plans = choose_all(flat, base, 1, choices, workers, rest)
    with closing(code_all(plans, flat, base, workers)) as chunks:
        units += [(rest_tensor(plan, chunks),) for plan in plans]
    return EncodedStep.of(flat, base.id, step, units, excess, lossy=lossy)


def _stored(unit: tuple[EncodedTensor, ...] | None) -> int | None:
    return None if unit is None else sum(tensor.stored for tensor in unit)


def _code_joined(
    joined: Sequence[Joined], choices: StepChoices, workers: Workers
) -> Iterator[tuple[EncodedTensor, ...] | None]:
    """One unit for each of `joined`, in order; None if a payload would be larger than the bytes that it restores."""
    rules = choose_rules(joined, choices, workers)
    jobs = (
        partial(code_chunk, one, rule, extent)
        for one, rule in zip(joined, rules, strict=True)
        for extent in one.extents
    )
    with closing(workers.in_order(jobs)) as results:
        for one, (encoding, rule) in zip(joined, rules, strict=True):
            yield unit_of(one, encoding, rule, [next(results) for _ in one.extents])


def choose_rules(joined: Sequence[Joined], choices: StepChoices, workers: Workers) -> list[Rules]:
    """Choose how each of `joined` is compressed."""
    with closing(workers.in_order(partial(_choose_rule, one, choices) for one in joined)) as rules:
        return list(rules)


def _choose_rule(one: Joined, choices: StepChoices) -> Rules:
    update = one.updates[0]
    key = (one.leader, sum(length for _, length in one.extents), gradient_kind(update))
    variants = update.optimizer.variants
    found = choices.known(*key)
    if found is not None and found[1] in ("", *variants):  # another optimizer may have taken over
        encoding, variant = found
        rule = update.optimizer.rule(update.step, variant or variants[0])
        if update.step.skipped:
            return "predicted", rule  # a way that was chosen for other steps may need their arithmetic
        return encoding, rule if variant else optim.Skip(rule.slots)
    start, length = one.extents[0]
    old = [_joined_array(one.old(slot, start, length)) for slot in range(one.width)]
    new = [_joined_array(one.new(slot, start, length)) for slot in range(one.width)]
    gradient = one.gradient(start, length)
    before = choices.variant(*key)
    choice = optim.choose(
        update.optimizer, update.step, old, new, gradient, before if before in variants else None, small=choices.small
    )
    if not update.step.skipped:
        choices.learn(*key, choice)
    return choice.encoding, choice.rule


def _joined_array(parts: Sequence[Bytes]) -> _Array:
    return (parts[0] if len(parts) == 1 else np.concatenate(parts)).view("<f4")


def will_fit(one: Joined, rule: Rules, choices: StepChoices) -> bool:
    """Predict whether all payloads of parameters will fit into a chunk: from their first chunk, or an earlier result.

    It is rarely wrong: chunks of one tensor are alike.
    """
    start, length = one.extents[0]
    if optim.bound(*rule, length // 4) <= CHUNK:
        return True
    known = choices.fits(one.leader)
    if known is None:
        known = code_chunk(one, rule, (start, length)) is not None
        choices.learn_fit(one.leader, known)
    return known


_scratch = threading.local()


def _space(size: int) -> Bytes:
    """This thread's memory for a payload: fresh pages for each payload would cost as much as the compression."""
    space: Bytes | None = getattr(_scratch, "space", None)
    if space is None or len(space) < size:
        space = _scratch.space = np.empty(size, np.uint8)
    return space


@dataclass(frozen=True, slots=True)
class CodedChunk:
    """A chunk of parameters that are compressed as one.

    Attributes:
        payload: the stored bytes, in memory of their own.
        hashes: for each parameter, the hashes of the new bytes of its slots.
        digests: for each parameter, its slots' parts of their state digests; empty if not requested.
    """

    payload: Bytes
    hashes: list[list[str]]
    digests: list[list[int]]

    def of(self, number: int, slot: int, payload: Bytes, length: int) -> EncodedChunk:
        """The chunk of one slot of one parameter: `length` bytes, restored by `payload`."""
        share = self.digests[number][slot] if self.digests else None
        return EncodedChunk(payload, length, self.hashes[number][slot], share)


def code_chunk(
    one: Joined,
    rule: Rules,
    extent: tuple[int, int],
    read: Read = host_bytes,
    digests: bool = False,
) -> CodedChunk | None:
    """Compress one chunk; None: its payload would be larger than a chunk may be."""
    encoding, arithmetic = rule
    start, length = extent
    parts = [one.new(slot, start, length, read) for slot in range(one.width)]
    old = [_joined_array(one.old(slot, start, length)) for slot in range(one.width)]
    new = [_joined_array(slot) for slot in parts]
    gradient = None if encoding in WITHOUT_GRADIENT else one.gradient(start, length, read)
    space = _space(optim.bound(encoding, arithmetic, length // 4))
    payload = optim.encode(encoding, arithmetic, old, new, gradient, space)
    if len(payload) > CHUNK:
        return None
    numbers = range(len(one.updates))
    hashes = [[checksums.chunk_hash(slot[number].data) for slot in parts] for number in numbers]
    shares = [[digest.partial(slot[number], start // 4) for slot in parts] for number in numbers] if digests else []
    return CodedChunk(payload.copy(), hashes, shares)


def unit_of(
    one: Joined,
    encoding: optim.Encoding,
    rule: optim.Rule,
    results: Sequence[CodedChunk | None],
) -> tuple[EncodedTensor, ...] | None:
    """The tensors of parameters whose chunks are compressed; None: a chunk did not fit."""
    coded = [result for result in results if result is not None]
    if len(coded) < len(results):
        return None
    group = StepGroup(encoding, rule, tuple(update.slots for update in one.updates))
    nothing = np.empty(0, np.uint8)
    unit = []
    for number, update in enumerate(one.updates):
        for slot, name in enumerate(update.slots):
            source = one.flat.tensors[name]
            leads = name == group.leader
            chunks = tuple(
                chunk.of(number, slot, chunk.payload if leads else nothing, length)
                for chunk, (_, length) in zip(coded, chunk_extents(source.nbytes), strict=True)
            )
            params = group.params if leads else follower_params(group.leader)
            spec = spec_of(name, source.dtype, tuple(source.shape), *place_of(source))
            unit.append(EncodedTensor(spec, STEP, params, chunks))
    return tuple(unit)


def rest_tensor(plan: TensorPlan, coded: Iterator[EncodedChunk]) -> EncodedTensor:
    """A tensor that no optimizer updates, from the next of the compressed chunks."""
    # A raw payload is the state's own memory, which may change before the batch is written; any other payload is the
    # beginning of a larger region.
    chunks = tuple(replace(piece, payload=piece.payload.copy()) for piece in islice(coded, plan.chunks))
    return EncodedTensor(plan.spec, plan.choice.name, plan.params, chunks)
