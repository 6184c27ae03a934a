"""Steps of devices that the host computes again, so that the new state need not cross the bus.

The host has the state of the save before. Of each parameter a device sends the gradient that its optimizer consumed, a
remainder of each weight (`formats.remainders`), and the state digests of weight and moments. The host takes the step in
the exact arithmetic of `formats.optim`, moves weights that were rounded otherwise to the neighbour that the remainder
names, and compares the digests. A tensor whose digest differs is read from the device: its optimizer takes no step
until then. So the state is that of training, bit for bit, whatever the device computes, and keeps nothing there.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Final, TypeGuard

import numpy as np
import numpy.typing as npt

from ckptstore.errors import CkptError, StorageError
from ckptstore.formats import digest, optim, remainders
from ckptstore.formats.states.state import FlatState, TensorSource
from ckptstore.frameworks import bridge
from ckptstore.host.buffers import Bytes
from ckptstore.host.caller_warnings import UnexplainedStepWarning, warn
from ckptstore.host.threads import Workers
from ckptstore.write.steps.updates import LateGradient, Update, arrived

__all__ = ["Recomputing", "Sent"]

_LOG: Final = logging.getLogger("ckptstore")
_PIECE: Final = remainders.PER_BYTE << 17
"""Numbers that a thread computes at once."""
_SMALL: Final = 1 << 18
"""Weights of fewer numbers are sent together: a device needs a dozen launches for each pack of remainders."""
_TOGETHER: Final = 1 << 22
_MOST_WRONG: Final = 3
"""Steps in which a parameter was computed otherwise than training did. After that it is sent whole."""
_WIDE_AGAIN: Final = 32
"""Steps for which a gradient that was not bf16 after all is sent in fp32; twice as many each time."""
_ROOTS: Final = "roots"
"""A variant beside those of the rules: with the square roots of torch on this machine, which are not always rounded to
nearest. Optimizers that are not fused compute so on the CPU."""
_TILE: Final = 1 << 15
"""Numbers of which torch computes roots in the thread that asks."""

_Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class _Marks:
    """Remainders of one slot of a parameter: in the tensor of this name, from this number on."""

    name: str
    first: int


@dataclass(slots=True)
class _Row:
    """A parameter whose step is computed again.

    Attributes:
        place: of its update among those of the step.
        slots: those that are computed; the others are copied, because the host computed them otherwise before.
        count: numbers of each slot.
        carried: the name of its gradient among what is sent; None: the update has it, or needs none.
        marks: its remainders, by slot.
    """

    place: int
    update: Update
    slots: tuple[int, ...]
    count: int
    carried: str | None
    marks: dict[int, _Marks] = field(default_factory=dict)

    @property
    def leader(self) -> str:
        return self.update.slots[0]


@dataclass(frozen=True, slots=True)
class Sent:
    """What devices send of a step instead of the slots of some parameters.

    Attributes:
        tensors: gradients and remainders, which have to be copied, by name.
        names: the slots, which need not be copied.
        digests: of the slots, by name. Reading one waits for the device.
    """

    rows: tuple[_Row, ...]
    tensors: Mapping[str, TensorSource]
    names: frozenset[str]
    digests: Mapping[str, int]
    sources: Mapping[str, TensorSource]


class Recomputing:
    """What a writer has learned of the arithmetic of its devices.

    One thread calls `sent`, another one `computed`.

    Attributes:
        why: why the last state was sent whole; None: it was not.
    """

    def __init__(self, workers: Workers) -> None:
        """
        Args:
            workers: threads that compute.
        """
        self.why: str | None = None
        self._workers = workers
        self._lock = threading.Lock()
        self._variants: dict[str, str] = {}
        self._marked: dict[str, frozenset[int]] = {}
        self._wrong: dict[str, int] = defaultdict(int)  # by the name of the slot
        self._narrow: set[str] = set()  # parameters whose last gradient was bf16
        self._wide: dict[str, tuple[int, int]] = {}  # steps until that is asked again, and for how many it was not
        self._said = False

    # -- the caller's side

    def sent(self, flat: FlatState, updates: Sequence[Update], base: FlatState | None) -> Sent | None:
        """Queue what devices send of a step -> what that is; None: the whole state has to be copied (`why`).

        Args:
            base: the state of the save before, in host memory; None: there is none.
        """
        self.why = None
        if base is None:
            self.why = "there is no earlier state in memory"
            return None
        rows, tensors, left = self._rows(flat, updates, base)
        if not rows:
            self.why = left
            return None
        try:
            tensors |= self._marks(rows, flat)
            names = [row.update.slots[slot] for row in rows for slot in row.slots]
            sources = {name: flat.tensors[name] for name in names}
            digests = bridge.device_digests(sources, small=True)
        except MemoryError as error:
            self.why = f"a device has no memory to prepare it: {error}"
            return None
        if len(digests) < len(sources):
            self.why = "a device has no memory to compute digests"
            return None
        return Sent(tuple(rows), tensors, frozenset(sources), digests, sources)

    def _rows(
        self, flat: FlatState, updates: Sequence[Update], base: FlatState
    ) -> tuple[list[_Row], dict[str, TensorSource], str]:
        """The parameters that are computed again, their gradients, and why others are not."""
        rows: list[_Row] = []
        tensors: dict[str, TensorSource] = {}
        taken: set[str] = set()
        left = "no optimizer's step is known"
        for place, update in enumerate(updates):
            why = self._unfit(update, flat, base)
            if why is not None or not taken.isdisjoint(update.slots):
                left = why or left
                continue
            count = flat.tensors[update.slots[0]].nbytes // 4
            row = _Row(place, update, self._right(update), count, None)
            if update.gradient is None and update.carried is not None and not update.stays:
                row.carried = f"gradient {place}"
                tensors[row.carried] = self._narrowed(row.leader, update.carried)
            taken.update(update.slots)
            rows.append(row)
        return rows, tensors, left

    def _unfit(self, update: Update, flat: FlatState, base: FlatState) -> str | None:
        """Why the step of a parameter cannot be computed again; None: it can."""
        right = self._right(update)
        if not right:
            return "the host computes other values than the device"
        sources = [flat.tensors.get(name) for name in update.slots]
        if any(one is None or not one.nbytes or one.dtype != "F32" or not bridge.away(one) for one in sources):
            return "tensors are not on a device, or not fp32"
        forms = {(one.dtype, tuple(one.shape)) for one in sources if one is not None}
        olds = [base.tensors.get(name) for name in update.slots]
        if len(forms) > 1 or any(one is None or (one.dtype, tuple(one.shape)) not in forms for one in olds):
            return "tensors are new, or have another form than before"
        if len(_rule(update, update.optimizer.variants[0]).slots) != len(set(update.slots)):
            return "tensors of the optimizer are missing"
        if update.stays:
            return None
        gradient = update.gradient if update.gradient is not None else update.carried
        if gradient is None:
            return "the gradient is not there any more, or has changed since the optimizer's step"
        if _is_dense(gradient):
            assert sources[0] is not None
            if optim.ITEMSIZES.get(gradient.dtype, 0) * sources[0].nbytes != 4 * gradient.nbytes:
                return "a gradient has another dtype or size than its parameter"
            if update.gradient is None and gradient.nbytes >= len(right) * sources[0].nbytes:
                return "the gradient is as large as what the host can compute from it"
        return None

    def _right(self, update: Update) -> tuple[int, ...]:
        """The slots that the host has computed as training did."""
        return tuple(slot for slot, name in enumerate(update.slots) if self._wrong.get(name, 0) < _MOST_WRONG)

    def _narrowed(self, leader: str, gradient: TensorSource) -> TensorSource:
        """A gradient as it is sent: in bf16 if that of the step before was bf16."""
        narrow = gradient.dtype == "F32" and leader in self._narrow
        return bridge.as_bf16(gradient) if narrow else gradient

    def _marks(self, rows: Iterable[_Row], flat: FlatState) -> dict[str, TensorSource]:
        """Queue the remainders of `rows`, and note in each where they are."""
        found: dict[str, TensorSource] = {}
        packs: dict[Any, list[tuple[_Row, int]]] = {}

        def pack(members: Sequence[tuple[_Row, int]]) -> None:
            name, first = f"remainders {len(found)}", 0
            for row, slot in members:
                row.marks[slot] = _Marks(name, first)
                first += row.count
            found[name] = bridge.remainders([flat.tensors[row.update.slots[slot]] for row, slot in members])

        for row in rows:
            if row.update.stays:
                continue
            for slot in sorted(self._marked.get(row.leader, frozenset((0,))).intersection(row.slots)):
                if row.count >= _SMALL:
                    pack([(row, slot)])
                    continue
                key = bridge.place_of_device(flat.tensors[row.leader])
                members = packs.setdefault(key, [])
                members.append((row, slot))
                if sum(one.count for one, _ in members) >= _TOGETHER:
                    pack(packs.pop(key))
        for members in packs.values():
            pack(members)
        return found

    # -- the thread that computes

    def computed(
        self,
        sent: Sent,
        base: FlatState | None,
        state: FlatState,
        updates: Sequence[Update],
        arrived_tensors: Mapping[str, TensorSource],
    ) -> int:
        """Compute a step into `state`, and read what differs from the device -> the bytes that were read.

        Args:
            base: as for `sent`, complete; None: its copy has failed, and everything is read.
            state: the memory of the new state. Everything but the slots of `sent` is there.
            updates: those of the step, with copies of their gradients.
            arrived_tensors: copies of `Sent.tensors`.

        Raises:
            StorageError: a tensor was changed by something else before it was read.
        """
        work = [_Work(row, base, state, updates[row.place], arrived_tensors) for row in sent.rows]
        wrong = {one.row.leader: list(one.row.slots) for one in work} if base is None else {}
        if base is not None:
            begun = [(one, self._variant(one)) for one in work]
            for (one, variant), found in zip(begun, self._taken(begun), strict=True):
                different = one.different(found, sent.digests)
                if different and (different := self._retried(one, variant, sent.digests, different)):
                    wrong[one.row.leader] = different
        nbytes = 0
        for one in work:
            if one.row.leader in wrong:
                nbytes += self._read(one, wrong[one.row.leader], sent, blame=base is not None)
            elif one.row.carried is not None:
                self._look_at(one)
        return nbytes

    def _variant(self, one: _Work) -> str:
        with self._lock:
            kind = type(one.row.update.optimizer).__name__
            known = self._variants.get(one.row.leader) or self._variants.get(kind)
        variants = _variants(one.row.update)
        return known if known in variants else variants[0]

    def _retried(self, one: _Work, tried: str, digests: Mapping[str, int], first: list[int]) -> list[int]:
        """Compute a step in the other variants -> the slots that still differ. The best one's state stays."""
        best, different, last = tried, first, tried
        for variant in _variants(one.row.update):
            if variant == tried:
                continue
            (found,) = self._taken([(one, variant)])
            last = variant
            now = one.different(found, digests)
            if len(now) < len(different):
                best, different = variant, now
            if not now:
                break
        if best != last:
            self._taken([(one, best)])
        if not different or best != tried:
            with self._lock:
                self._variants[one.row.leader] = self._variants[type(one.row.update.optimizer).__name__] = best
        return different

    def _taken(self, work: Sequence[tuple[_Work, str]]) -> list[list[int]]:
        """Take the steps, in parallel -> the sums of the digest of each slot."""
        sums = [[0] * len(one.row.update.slots) for one, _ in work]
        jobs: list[list[tuple[int, int, int]]] = [[]]
        filled = 0
        for number, (one, _) in enumerate(work):
            for start in range(0, one.row.count, _PIECE):
                stop = min(start + _PIECE, one.row.count)
                if filled + stop - start > _PIECE and jobs[-1]:
                    jobs.append([])
                    filled = 0
                jobs[-1].append((number, start, stop))
                filled += stop - start

        def run(pieces: Sequence[tuple[int, int, int]]) -> list[tuple[int, list[int]]]:
            return [(number, work[number][0].take(work[number][1], start, stop)) for number, start, stop in pieces]

        with closing(self._workers.in_order(partial(run, one) for one in jobs)) as results:
            for number, shares in chain.from_iterable(results):
                sums[number] = [total + share for total, share in zip(sums[number], shares, strict=True)]
        return sums

    def _read(self, one: _Work, slots: Sequence[int], sent: Sent, *, blame: bool) -> int:
        """Read the slots that differ from the device, and learn from it -> their bytes."""
        nbytes, near = 0, True
        for slot in slots:
            name = one.row.update.slots[slot]
            guess = one.new(slot).copy()
            sent.sources[name].read(0, one.new(slot))
            nbytes += guess.nbytes
            if digest.digest(one.new(slot)) != sent.digests[name]:
                raise StorageError(
                    f"{name!r} was changed after its step was given to be saved, and before the next optimizer's step: "
                    "this step is not saved. Call wait() before you change a state that an optimizer owns"
                )
            near = near and one.is_near(guess, slot)
        if blame:
            self._blame(one, slots, near=near)
        return nbytes

    def _blame(self, one: _Work, slots: Sequence[int], *, near: bool) -> None:
        """A step was computed otherwise than training did: try something else the next time."""
        leader = one.row.leader
        with self._lock:
            if leader in self._narrow and one.is_narrow:
                self._narrow.discard(leader)
                wide = 2 * self._wide.get(leader, (0, _WIDE_AGAIN // 2))[1]
                self._wide[leader] = wide, wide
                return
            marked = self._marked.get(leader, frozenset((0,)))
            if near and not marked.issuperset(slots):
                self._marked[leader] = marked.union(slots)
                _LOG.info("devices round %s in a way of their own: their remainders are sent, too", slots)
                return
            for slot in slots:
                self._wrong[one.row.update.slots[slot]] += 1
            said, self._said = self._said, True
        if not said:
            warn(
                f"the host computed other values than training for {leader!r}: it is sent whole from its device "
                "(weights are changed outside the optimizer, or a gradient after its step). After "
                f"{_MOST_WRONG} such steps a tensor is sent whole at once",
                UnexplainedStepWarning,
            )

    def _look_at(self, one: _Work) -> None:
        """Learn whether a gradient can be sent as bf16."""
        leader = one.row.leader
        with self._lock:
            if leader in self._narrow:
                return
            left, wide = self._wide.get(leader, (0, 0))
            if left:
                self._wide[leader] = left - 1, wide
                return
        if one.could_be_narrow:
            with self._lock:
                self._narrow.add(leader)


class _Work:
    """One parameter's step, and the memory that it is computed in."""

    def __init__(
        self,
        row: _Row,
        base: FlatState | None,
        state: FlatState,
        update: Update,
        arrived_tensors: Mapping[str, TensorSource],
    ) -> None:
        self.row = row
        self._old = [] if base is None else [_bytes(base.tensors[name]) for name in update.slots]
        self._new = [_bytes(state.tensors[name]) for name in update.slots]
        self._copied = [slot for slot in range(len(update.slots)) if slot not in row.slots]
        self._marks = {slot: (_bytes(arrived_tensors[one.name]), one.first) for slot, one in row.marks.items()}
        self._update = update
        self._carried = None if row.carried is None else arrived_tensors[row.carried]

    def new(self, slot: int) -> Bytes:
        """The memory of a slot."""
        return self._new[slot]

    def take(self, variant: str, start: int, stop: int) -> list[int]:
        """Compute the numbers from `start` to `stop` -> the shares of the slots' digests."""
        before = [old[4 * start : 4 * stop].view("<u4") for old in self._old]
        parts = [new[4 * start : 4 * stop].view("<u4") for new in self._new]
        for slot in self._copied:  # it is there already
            parts[slot] = np.empty_like(parts[slot])
        for old, new in zip(before, parts, strict=True):
            new[:] = old
        if not self._update.stays:
            gradient = self._gradient(start, stop)
            if gradient is not None:
                with contextlib.suppress(CkptError):  # the digests tell
                    _advance(self._update, variant, parts, before[0], gradient)
            for slot, (packed, first) in self._marks.items():
                digits = remainders.unpack(packed, first + start, first + stop)
                remainders.settle(parts[slot], digits, *_parts_of_sum(self._update, variant, slot, before[slot], parts))
        return [digest.partial(part, start) for part in parts]

    def _gradient(self, start: int, stop: int) -> _Array | None:
        gradient = self._carried if self._carried is not None else arrived(self._update.gradient)
        if gradient is None:
            return None
        if isinstance(gradient, optim.SparseGradient):
            return gradient.part(start, stop).dense()
        item = optim.ITEMSIZES[gradient.dtype]
        return optim.numbers_of_image(gradient.dtype, _bytes(gradient)[item * start : item * stop])

    def different(self, sums: Sequence[int], digests: Mapping[str, int]) -> list[int]:
        """The slots whose digests differ from those that the device computed."""
        nbytes = 4 * self.row.count
        return [
            slot
            for slot in self.row.slots
            if digest.combine(sums[slot], nbytes=nbytes) != digests[self._update.slots[slot]]
        ]

    def is_near(self, guess: Bytes, slot: int) -> bool:
        """Whether each pattern of `guess` is that of the slot or next to it."""
        words = self._new[slot].view("<i4").astype(np.int64) - guess.view("<i4")
        return bool((np.abs(words) <= 1).all())

    @property
    def is_narrow(self) -> bool:
        """Whether the gradient was sent as bf16."""
        return self._carried is not None and self._carried.dtype == "BF16"

    @property
    def could_be_narrow(self) -> bool:
        """Whether the gradient, which was sent in fp32, is bf16."""
        if self._carried is None or self._carried.dtype != "F32":
            return False
        words = _bytes(self._carried).view("<u4")
        return not (words[:1024] & 0xFFFF).any() and not (words & 0xFFFF).any()


def _bytes(source: TensorSource) -> Bytes:
    view = source.view()
    assert view is not None  # snapshots are host memory
    return view


def _variants(update: Update) -> tuple[str, ...]:
    found = update.optimizer.variants
    return (*found, _ROOTS) if isinstance(_rule(update, found[0]), optim.AdamRule) else found


def _advance(update: Update, variant: str, state: Sequence[_Array], weight: _Array, gradient: _Array) -> None:
    """Take a step in place.

    Args:
        weight: the old one.
    """
    if variant != _ROOTS:
        optim.advance(_rule(update, variant), state, gradient)
        return
    rule = _rule(update, update.optimizer.variants[0])
    assert isinstance(rule, optim.AdamRule)
    optim.advance(rule, state, gradient)
    for start in range(0, len(weight), _TILE):
        tile = slice(start, start + _TILE)
        new, first, second = (state[slot][tile].view("<f4") for slot in (0, 1, -1))
        state[0][tile] = weight[tile]
        optim.move_by_roots(rule, new, first, bridge.roots(second))


def _parts_of_sum(
    update: Update, variant: str, slot: int, old: _Array, new: Sequence[_Array]
) -> tuple[_Array, remainders.Changes | None]:
    """What a step adds up to a slot: the bit patterns of what is exact, and what returns the changes, if it is known.

    Args:
        old: the old slot. `new`: the new slots.
    """
    rule = _rule(update, update.optimizer.variants[0] if variant == _ROOTS else variant)
    if slot or not isinstance(rule, optim.AdamRule):
        return old, None
    adam, addend = rule, old
    if adam.shrink != 1.0:
        with np.errstate(all="ignore"):
            addend = (old.view("<f4") * np.float32(adam.shrink)).view("<u4")

    def changes(indices: npt.NDArray[np.intp]) -> npt.NDArray[np.float32]:
        first, second = new[1][indices].view("<f4"), new[-1][indices].view("<f4")
        with np.errstate(all="ignore"):
            roots = bridge.roots(second) if variant == _ROOTS else np.sqrt(second)
            return optim.changes(adam, first, roots)

    return addend, changes


def _rule(update: Update, variant: str) -> optim.Rule:
    return update.optimizer.rule(update.step, variant)


def _is_dense(gradient: object) -> TypeGuard[TensorSource]:
    return gradient is not None and not isinstance(gradient, optim.SparseGradient | LateGradient)
