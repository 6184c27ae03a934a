"""The recipe by which an agent computes a step's state from the state before, and the digests that prove it.

Trainer and agent compute the same layout of an *area*, the shared memory of one step. It holds gradients, then the
tensors that are sent whole, then digests of the tensors that the agent computes itself. In the place of a gradient may
be only its entries: int32 indices, then fp32 values.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from ckptstore.agent.protocol.message_fields import StateLayout, whole_number
from ckptstore.errors import AgentError
from ckptstore.formats import digest
from ckptstore.formats.checksums import xxh3_64
from ckptstore.formats.optim import SparseGradient
from ckptstore.host.batched_copies import run_shared
from ckptstore.host.buffers import Bytes

__all__ = ["Digests", "Proof", "Recipe", "Row", "read_entries", "read_recipe", "write_entries"]

Digests: TypeAlias = npt.NDArray[np.uint64]

_LINE: Final = 128
_PIECE: Final = 4 << 20
"""Bytes that one digest covers: enough work for a thread."""
_MOST_INDICES: Final = 1 << 31
_MOST_SLOTS: Final = 16
_TEXT: Final = 64


@dataclass(frozen=True, slots=True)
class Row:
    """One parameter that an optimizer updates.

    Attributes:
        optimizer, group: positions of its optimizer and group.
        slots: positions in the layout, by the optimizer's names. The parameter comes first, as ``weight``.
        made: the agent updates it, and gets its gradient. False: all its tensors are sent.
    """

    optimizer: int
    group: int
    slots: tuple[tuple[str, int], ...]
    made: bool

    @property
    def weight(self) -> int:
        """The parameter's position in the layout."""
        return self.slots[0][1]


@dataclass(frozen=True)
class Recipe:
    """The recipe for states of one layout.

    Attributes:
        layout: the tensors.
        kinds: kinds of the optimizers.
        groups: number of groups of each optimizer.
        rows: the parameters that they update.
        made: positions of the tensors that the agent computes or leaves unchanged; digests prove them. All others are
            sent.
        summed: those in `made` that are proven by their state digest (`formats.digest`), which a device computes.
        variants: for each group of each optimizer the variant of its arithmetic (`replica_arithmetic`); None: torch's
            kernels on the agent's CPU. Empty: None for all.
    """

    layout: StateLayout
    kinds: tuple[str, ...]
    groups: tuple[int, ...]
    rows: tuple[Row, ...]
    made: tuple[int, ...]
    summed: tuple[int, ...] = ()
    variants: tuple[tuple[str | None, ...], ...] = ()

    def variant(self, optimizer: int, group: int) -> str | None:
        """The variant of a group."""
        return self.variants[optimizer][group] if self.variants else None

    def rows_of(self, positions: Set[int]) -> set[int]:
        """The rows that have one of these tensors."""
        return {
            number
            for number, row in enumerate(self.rows)
            if not positions.isdisjoint(position for _, position in row.slots)
        }

    @cached_property
    def sent(self) -> tuple[int, ...]:
        """Positions of the tensors that are sent."""
        made = set(self.made)
        return tuple(number for number in range(len(self.layout.tensors)) if number not in made)

    @cached_property
    def gradients(self) -> dict[int, int]:
        """First byte in an area of the gradient of each row that the agent updates."""
        return self._plan[0]

    @cached_property
    def places(self) -> dict[int, int]:
        """First byte in an area of each tensor that is sent."""
        return self._plan[1]

    @cached_property
    def digests(self) -> tuple[int, int]:
        """First byte of the digests in an area, and their number."""
        return self._plan[2]

    @property
    def nbytes(self) -> int:
        """Bytes of an area."""
        start, count = self.digests
        return start + 8 * count

    @cached_property
    def _plan(self) -> tuple[dict[int, int], dict[int, int], tuple[int, int]]:
        rows = {number: row.weight for number, row in enumerate(self.rows) if row.made}
        starts, at = self._placed([*rows.values(), *self.sent])
        gradients = dict(zip(rows, starts, strict=False))
        places = dict(zip(self.sent, starts[len(rows) :], strict=True))
        summed = set(self.summed)
        count = sum(1 if one in summed else len(_cut(self.layout.tensors[one].nbytes)) for one in self.made)
        return gradients, places, (at, count)

    def packed(self, positions: Sequence[int]) -> tuple[dict[int, int], int]:
        """The first byte of each of some tensors, one after the other in a buffer, and the bytes of all."""
        starts, nbytes = self._placed(positions)
        return dict(zip(positions, starts, strict=True)), nbytes

    def _placed(self, positions: Sequence[int]) -> tuple[list[int], int]:
        starts, at = [], 0
        for number in positions:
            starts.append(at)
            at = -(-(at + self.layout.tensors[number].nbytes) // _LINE) * _LINE
        return starts, at

    def digests_in(self, memory: Bytes) -> Digests:
        """The digests in an area."""
        start, count = self.digests
        return memory[start : start + 8 * count].view(np.uint64)

    def form(self) -> dict[str, Any]:
        """Its form as JSON, without the layout."""
        return {
            "kinds": list(self.kinds),
            "groups": list(self.groups),
            "rows": [[row.optimizer, row.group, [list(slot) for slot in row.slots], row.made] for row in self.rows],
            "made": list(self.made),
            "summed": list(self.summed),
            "variants": [list(one) for one in self.variants],
        }


def read_recipe(form: Any, layout: StateLayout) -> Recipe:
    """Read a recipe.

    Raises:
        AgentError, ValueError, TypeError, LookupError: the form is invalid.
    """
    kinds = tuple(_text(kind) for kind in form["kinds"])
    groups = tuple(whole_number(count, 1 << 20) for count in form["groups"])
    if len(kinds) != len(groups):
        raise AgentError(f"{len(kinds)} optimizers with groups for {len(groups)}")
    last = len(layout.tensors) - 1
    rows = []
    for optimizer, group, slots, made in form["rows"]:
        named = tuple((_text(name), whole_number(number, last)) for name, number in slots)
        if not 0 < len(named) <= _MOST_SLOTS or named[0][0] != "weight" or len(dict(named)) != len(named):
            raise AgentError(f"slots {slots!r:.80}")
        if type(made) is not bool:
            raise AgentError(f"{made!r:.80} in place of true or false")
        owner = whole_number(optimizer, len(kinds) - 1)
        rows.append(Row(owner, whole_number(group, groups[owner] - 1), named, made))
    _check_made(rows, layout)
    numbers = tuple(whole_number(number, last) for number in form["made"])
    if len(set(numbers)) != len(numbers):
        raise AgentError("a position occurs twice in 'made'")
    summed = tuple(whole_number(number, last) for number in form.get("summed", ()))
    if not set(summed) <= set(numbers) or len(set(summed)) != len(summed):
        raise AgentError("a position in 'summed' is not in 'made', or occurs twice")
    variants = tuple(tuple(None if one is None else _text(one) for one in found) for found in form.get("variants", ()))
    if variants and tuple(map(len, variants)) != groups:
        raise AgentError(f"variants of {variants!r:.80} for {groups} groups")
    return Recipe(layout, kinds, groups, tuple(rows), numbers, summed, variants)


def _text(value: Any) -> str:
    if type(value) is not str or len(value) > _TEXT:
        raise AgentError(f"{value!r:.80} in place of a name")
    return value


def _check_made(rows: Sequence[Row], layout: StateLayout) -> None:
    """Raise `AgentError` if a kernel could write outside the tensors of a parameter, or if two share one."""
    used: set[int] = set()
    for row in rows:
        if not row.made:
            continue
        weight = layout.tensors[row.weight]
        for name, number in row.slots:
            shape = layout.tensors[number].shape
            # Prevents: memory that a fused kernel overwrites, because it goes only by the size of the parameter.
            if shape != weight.shape and math.prod(shape) != 1:
                raise AgentError(f"{name} of {weight.name!r:.80} is {list(shape)}, not {list(weight.shape)}")
            if number in used:
                raise AgentError(f"tensor {number} belongs to two parameters, or twice to one")
            used.add(number)


def write_entries(gradient: SparseGradient, place: Bytes) -> bool:
    """Write the entries of a gradient into its place of an area -> False: they do not fit, and nothing is written.

    At most half of at most 2**31 numbers fit.

    Args:
        gradient: int indices and fp32 values.
        place: uint8, the bytes of the dense fp32 gradient.
    """
    count = len(gradient.indices)
    if 8 * count > len(place) or gradient.size > _MOST_INDICES:
        return False
    place[: 4 * count].view(np.int32)[:] = gradient.indices
    place[4 * count : 8 * count].view(np.float32)[:] = gradient.values
    return True


def read_entries(place: Bytes, count: int) -> SparseGradient:
    """Read the entries in a gradient's place, and put the dense fp32 gradient there -> a copy of the entries.

    Args:
        place: uint8, in an area.
        count: the number of entries.

    Raises:
        AgentError: they are not entries of this gradient. The place is unchanged then.
    """
    if 8 * count > len(place):
        raise AgentError(f"{count} entries in a gradient of {len(place)} bytes")
    indices = place[: 4 * count].view(np.int32).copy()
    values = place[4 * count : 8 * count].view(np.float32).copy()
    try:
        found = SparseGradient(indices, values, len(place) // 4)
    except ValueError as error:
        raise AgentError(str(error)) from error
    place[:] = 0
    place.view(np.float32)[indices] = values
    return found


def _cut(nbytes: int) -> list[tuple[int, int]]:
    """The pieces of a tensor that have a digest each; an empty tensor has none."""
    return [(start, min(start + _PIECE, nbytes)) for start in range(0, nbytes, _PIECE)]


class Proof:
    """Computes the digests of tensors in memory, as often as wanted.

    Attributes:
        slots: position of the first digest of each tensor.
    """

    def __init__(self, images: Sequence[Bytes | None], summed: Collection[int] = ()) -> None:
        """
        Args:
            images: bytes of each tensor; they must stay where they are. None: its digest is computed elsewhere.
            summed: which of them have one digest, of `formats.digest`; the others have one for each piece.
        """
        self.slots: list[int] = []
        self._owners: list[int] = []
        self._pieces: list[tuple[int, Bytes]] = []
        self._sums: list[tuple[int, int, Bytes]] = []  # slot, first word, bytes
        self._lengths: dict[int, int] = {}  # of those in `summed`, by slot
        for number, image in enumerate(images):
            slot = len(self._owners)
            self.slots.append(slot)
            pieces = [] if image is None else [(start, image[start:end]) for start, end in _cut(len(image))]
            if number in summed:
                self._owners.append(number)
                if image is not None:
                    self._lengths[slot] = len(image)
                    self._sums += [(slot, start // 4, piece) for start, piece in pieces]
                continue
            assert image is not None  # only devices digest elsewhere
            self._owners += [number] * len(pieces)
            self._pieces += [(slot + at, piece) for at, (_, piece) in enumerate(pieces)]
        self._jobs = _parted([len(piece) for _, piece in self._pieces])
        self._sum_jobs = _parted([len(piece) for *_, piece in self._sums])

    def __len__(self) -> int:
        return len(self._owners)

    def into(self, out: Digests, pool: ThreadPoolExecutor) -> None:
        """Compute the digests into `out`, in this thread and those of `pool`. Those computed elsewhere stay."""
        parts = [0] * len(self._sums)

        def hashed(part: range) -> None:
            for slot, piece in self._pieces[part.start : part.stop]:
                out[slot] = xxh3_64(piece.data)

        def added(part: range) -> None:
            for number in part:
                _, word, piece = self._sums[number]
                parts[number] = digest.partial(piece, word)

        run_shared(
            pool, [partial(hashed, part) for part in self._jobs] + [partial(added, one) for one in self._sum_jobs]
        )
        totals = dict.fromkeys(self._lengths, 0)
        for (slot, *_), found in zip(self._sums, parts, strict=True):
            totals[slot] += found
        for slot, total in totals.items():
            out[slot] = digest.combine(total, nbytes=self._lengths[slot])

    def differs(self, wanted: Digests, pool: ThreadPoolExecutor) -> list[int]:
        """Positions of the tensors whose digests differ from `wanted`, ascending."""
        found = np.empty(len(self), np.uint64)
        self.into(found, pool)
        return sorted({self._owners[piece] for piece in np.flatnonzero(found != wanted).tolist()})


def _parted(lengths: Sequence[int]) -> list[range]:
    """Ranges of about `_PIECE` bytes each."""
    parts: list[range] = []
    begin, size = 0, 0
    for number, length in enumerate(lengths):
        if size and size + length > _PIECE:
            parts.append(range(begin, number))
            begin, size = number, 0
        size += length
    if begin < len(lengths):
        parts.append(range(begin, len(lengths)))
    return parts
