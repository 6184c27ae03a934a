"""Steps of devices that the host computes again, so that the new state need not cross the bus.

The host has the state of the save before. Of each parameter a device sends the gradient that its optimizer consumed, a
remainder of each weight (`formats.remainders`), and the state digests of weight and moments. The host takes the step in
the exact arithmetic of `formats.optim`, moves weights that were rounded otherwise to the neighbour that the remainder
names, and compares the digests. A tensor whose digest differs is read from the device: its optimizer takes no step
until then. So the state is that of training, bit for bit, whatever the device computes, and keeps nothing there.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Final

from ckptstore.errors import StorageError
from ckptstore.formats import digest, optim, remainders
from ckptstore.formats.states.state import FlatState, TensorSource
from ckptstore.frameworks import bridge
from ckptstore.host.caller_warnings import UnexplainedStepWarning, warn
from ckptstore.host.threads import Workers
from ckptstore.write.steps.recomputed_parameters import (
    Marks,
    ParameterStep,
    SentParameter,
    is_dense,
    rule_of,
    variants_of,
)
from ckptstore.write.steps.updates import Update

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


@dataclass(frozen=True, slots=True)
class Sent:
    """What devices send of a step instead of the slots of some parameters.

    Attributes:
        tensors: gradients and remainders, which have to be copied, by name.
        names: the slots, which need not be copied.
        digests: of the slots, by name. Reading one waits for the device.
    """

    rows: tuple[SentParameter, ...]
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
    ) -> tuple[list[SentParameter], dict[str, TensorSource], str]:
        """The parameters that are computed again, their gradients, and why others are not."""
        rows: list[SentParameter] = []
        tensors: dict[str, TensorSource] = {}
        taken: set[str] = set()
        left = "no optimizer's step is known"
        for place, update in enumerate(updates):
            why = self._unfit(update, flat, base)
            if why is not None or not taken.isdisjoint(update.slots):
                left = why or left
                continue
            count = flat.tensors[update.slots[0]].nbytes // 4
            row = SentParameter(place, update, self._right(update), count, None)
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
        if len(rule_of(update, update.optimizer.variants[0]).slots) != len(set(update.slots)):
            return "tensors of the optimizer are missing"
        if update.stays:
            return None
        gradient = update.gradient if update.gradient is not None else update.carried
        if gradient is None:
            return "the gradient is not there any more, or has changed since the optimizer's step"
        if is_dense(gradient):
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

    def _marks(self, rows: Iterable[SentParameter], flat: FlatState) -> dict[str, TensorSource]:
        """Queue the remainders of `rows`, and note in each where they are."""
        found: dict[str, TensorSource] = {}
        packs: dict[Any, list[tuple[SentParameter, int]]] = {}

        def pack(members: Sequence[tuple[SentParameter, int]]) -> None:
            name, first = f"remainders {len(found)}", 0
            for row, slot in members:
                row.marks[slot] = Marks(name, first)
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
        work = [ParameterStep(row, base, state, updates[row.place], arrived_tensors) for row in sent.rows]
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

    def _variant(self, one: ParameterStep) -> str:
        with self._lock:
            kind = type(one.row.update.optimizer).__name__
            known = self._variants.get(one.row.leader) or self._variants.get(kind)
        variants = variants_of(one.row.update)
        return known if known in variants else variants[0]

    def _retried(self, one: ParameterStep, tried: str, digests: Mapping[str, int], first: list[int]) -> list[int]:
        """Compute a step in the other variants -> the slots that still differ. The best one's state stays."""
        best, different, last = tried, first, tried
        for variant in variants_of(one.row.update):
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

    def _taken(self, work: Sequence[tuple[ParameterStep, str]]) -> list[list[int]]:
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

    def _read(self, one: ParameterStep, slots: Sequence[int], sent: Sent, *, blame: bool) -> int:
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

    def _blame(self, one: ParameterStep, slots: Sequence[int], *, near: bool) -> None:
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

    def _look_at(self, one: ParameterStep) -> None:
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
