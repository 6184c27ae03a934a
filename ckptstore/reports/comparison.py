"""Compares two checkpoints: tensors in bits and in numbers, and the rest of the state."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import numpy.typing as npt

from ckptstore.formats import dtypes, jsontext
from ckptstore.formats.dtypes import DType
from ckptstore.formats.html_tables import HtmlTable
from ckptstore.formats.segment_files.segment import TensorEntry
from ckptstore.formats.segment_files.shards import ShardedEntry, shards_hash
from ckptstore.formats.states.rank_trees import of_rank
from ckptstore.formats.states.state import places, select
from ckptstore.host.buffers import Bytes
from ckptstore.host.progress import Progress, Tally
from ckptstore.host.threads import default_threads, run_all, workers
from ckptstore.reports.state_tree import leaves
from ckptstore.reports.tensor_numbers import blocks, doubles, scalars
from ckptstore.restore.load import tree
from ckptstore.restore.open_checkpoint import opened
from ckptstore.restore.selection import choose
from ckptstore.restore.tensor_streams import streams

if TYPE_CHECKING:
    from ckptstore.log.journal import Journal

__all__ = ["StateDifference", "TensorDifference", "compare", "compare_state"]

_BITS_IN_BYTE: Final = np.array([value.bit_count() for value in range(256)], np.uint8)


@dataclass(frozen=True, slots=True)
class TensorDifference(HtmlTable):
    """The difference of one tensor in checkpoints A and B.

    A complex number counts as two values in the norms, and as one element.

    Attributes:
        name: flat name.
        dtype: logical dtype in B (in A, if B has no such tensor).
        shape: logical shape, likewise.
        status: ``same`` (every bit), ``changed``, ``added`` (only in B), ``removed`` (only in A), or ``replaced``
            (another dtype or shape). Only a changed tensor is read and has the numbers below.
        bits: bits of the tensor.
        bits_changed: number of bits that differ.
        elements: elements of the tensor.
        elements_changed: number of elements that differ in any bit.
        norm_a: Euclidean norm of A's finite values.
        norm_b: likewise for B.
        norm_diff: norm of B - A, over the values that are finite in both.
        max_abs: largest |B - A| among those; exact for integers.
        nonfinite: number of changed values that are NaN or infinite in A or B; excluded from norm_diff and max_abs.
        was: dtype and shape in A, of a replaced tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    status: Literal["same", "changed", "added", "removed", "replaced"]
    bits: int
    elements: int
    bits_changed: int | None = None
    elements_changed: int | None = None
    norm_a: float | None = None
    norm_b: float | None = None
    norm_diff: float | None = None
    max_abs: float | int | None = None
    nonfinite: int | None = None
    was: tuple[str, tuple[int, ...]] | None = None

    @property
    def relative(self) -> float | None:
        """norm_diff / norm_a; None if it is undefined."""
        if self.norm_diff is None or not self.norm_a:
            return None
        return self.norm_diff / self.norm_a


@dataclass(frozen=True, slots=True)
class StateDifference(HtmlTable):
    """A difference in the non-tensor state. Values are typed JSON before and after, None if absent.

    `status` distinguishes null from absent: ``changed``, ``added`` (only in B), ``removed`` (only in A). If the path is
    empty, all values are the same, and the order of keys or the type of a container differs.
    """

    path: str
    status: Literal["changed", "added", "removed"]
    before: Any
    after: Any


def compare(
    journal: Journal,
    ref_a: str | int,
    ref_b: str | int,
    select: str | Sequence[str] | None = None,
    progress: Progress | None = None,
    other: Journal | None = None,
) -> list[TensorDifference]:
    """Compare two checkpoints tensor by tensor, in the order of B's state; tensors only in A come last.

    Tensors of equal hash are the same and are not read. The same holds for tensors in shards, if both are sharded alike
    and all shards are the same. The others are read chunk by chunk, with their shards joined, and verified. Memory
    does not grow with the checkpoint. A `select` pattern has to match the name of a tensor in A or B. Tensors that are
    tied in both are compared once, under the first matching name.

    Args:
        progress: called with the number of compared bytes of both.
        other: journal of the store that contains B; None: the same store.

    Raises:
        CheckpointNotFoundError, TensorNotFoundError, CorruptionError.
    """
    with opened(journal, ref_a) as found_a, opened(other or journal, ref_b) as found_b:
        in_a, in_b = found_a.tensors, found_b.tensors
        pairs = _pairs(found_a.tree, found_b.tree, select or None, f"{found_a.ref} or {found_b.ref}")
        sides = {name: (in_a.get(a or ""), in_b.get(b or "")) for name, (a, b) in pairs.items()}
        found = {name: _by_metadata(name, *both) for name, both in sides.items()}
        changed = {name: both for name, both in sides.items() if found[name].status == "changed"}
        tally = Tally(progress, sum(2 * b.nbytes for _, b in changed.values() if b is not None))
        chunks_a, chunks_b = streams(found_a), streams(found_b)

        def job(name: str) -> Callable[[], None]:
            def work() -> None:
                in_one, in_other = changed[name]
                assert in_one is not None  # a tensor in only one of them is not "changed"
                assert in_other is not None
                sums = _DifferenceSums(dtypes.get(in_other.dtype))
                for a, b in zip(chunks_a(in_one.name), chunks_b(in_other.name), strict=True):
                    sums.add(a, b)
                    tally.advance(len(a) + len(b))
                found[name] = sums.result(found[name])

            return work

        with workers(default_threads(), "compare") as threads:
            run_all(threads.pool, [job(name) for name in changed])
        return list(found.values())


def _pairs(
    tree_a: Any, tree_b: Any, chosen: str | Sequence[str] | None, where: str
) -> dict[str, tuple[str | None, str | None]]:
    """Map each reported name to the tensors to compare: (tensor of A, tensor of B), None if absent."""
    there_a, there_b = ({place.name: place.tensor for place in places(tree)} for tree in (tree_a, tree_b))
    names = choose(list(dict.fromkeys([*there_b, *there_a])), chosen, where)
    pairs: dict[tuple[str | None, str | None], str] = {}
    for name in names:
        pairs.setdefault((there_a.get(name), there_b.get(name)), name)
    return {name: pair for pair, name in pairs.items()}


def _by_metadata(name: str, a: TensorEntry | None, b: TensorEntry | None) -> TensorDifference:
    one = b or a
    assert one is not None
    status: Literal["same", "changed", "added", "removed", "replaced"]
    was = None
    if a is None or b is None:
        status = "added" if a is None else "removed"
    elif (a.dtype, tuple(a.shape)) != (b.dtype, tuple(b.shape)):
        status, was = "replaced", (a.dtype, tuple(a.shape))
    else:
        status = "same" if _hash(a) is not None and _hash(a) == _hash(b) else "changed"
    same = 0 if status == "same" else None
    return TensorDifference(
        name=name,
        dtype=one.dtype,
        shape=tuple(one.shape),
        status=status,
        bits=8 * one.nbytes,
        elements=math.prod(one.shape),
        bits_changed=same,
        elements_changed=same,
        norm_diff=None if same is None else 0.0,
        max_abs=same,
        nonfinite=same,
        was=was,
    )


def _hash(tensor: TensorEntry) -> str | None:
    """Return the tensor's hash if its segment stores one (a delta chain may not); for shards, one hash of all."""
    if isinstance(tensor, ShardedEntry):
        return None if any(_hash(shard) is None for shard in tensor.shards) else shards_hash(tensor.shards)
    return tensor.hash if all(chunk.decoded_hash is not None for chunk in tensor.chunks) else None


def compare_state(
    journal: Journal, ref_a: str | int, ref_b: str | int, other: Journal | None = None
) -> list[StateDifference]:
    """Compare everything that is not a tensor (numbers, strings, RNG states ...), in the order of B's state.

    Args:
        other: journal of the store that contains B; None: the same store.

    Raises:
        CheckpointNotFoundError, CorruptionError, FormatError.
    """
    tree_a, tree_b = tree(journal, ref_a), tree(other or journal, ref_b)
    before, after = dict(leaves(tree_a)), dict(leaves(tree_b))
    found: list[StateDifference] = []
    for path in dict.fromkeys([*after, *before]):
        if path not in before:
            found.append(StateDifference(path, "added", None, after[path]))
        elif path not in after:
            found.append(StateDifference(path, "removed", before[path], None))
        elif jsontext.dumps(before[path]) != jsontext.dumps(after[path]):  # as text: True is not 1, 1 is not 1.0
            found.append(StateDifference(path, "changed", before[path], after[path]))
    if not found and _without_tensors(tree_a) != _without_tensors(tree_b):
        found.append(StateDifference("", "changed", None, None))
    return found


def _without_tensors(tree: Any) -> bytes:
    return jsontext.dumps(select(of_rank(tree, None), set()))


class _DifferenceSums:
    """Running sums over a pair of tensors of one dtype."""

    def __init__(self, dtype: DType) -> None:
        self.dtype = dtype
        self.bits = self.elements = self.nonfinite = 0
        self.squares_a = self.squares_b = self.squares_diff = 0.0
        self.max_abs: float | int = 0

    def add(self, a: Bytes, b: Bytes) -> None:
        for part_a, part_b in zip(blocks(self.dtype, a), blocks(self.dtype, b), strict=True):
            self._add_block(part_a, part_b)

    def _add_block(self, a: Bytes, b: Bytes) -> None:
        changed = a ^ b
        self.bits += ones(changed)
        self.elements += int(np.count_nonzero(_any_per_element(changed, self.dtype.itemsize)))
        values_a, values_b = doubles(self.dtype, a), doubles(self.dtype, b)
        # Squares of large doubles overflow to infinity, which is then reported.
        with np.errstate(over="ignore", invalid="ignore"):
            finite_a, finite_b = np.isfinite(values_a), np.isfinite(values_b)
            if not (finite_a.all() and finite_b.all()):
                both = finite_a & finite_b
                self.nonfinite += int(np.count_nonzero(_values_changed(changed, self.dtype, len(both)) & ~both))
                self.squares_a += _squares(values_a[finite_a])
                self.squares_b += _squares(values_b[finite_b])
                values_a, values_b = values_a[both], values_b[both]
            else:
                self.squares_a += _squares(values_a)
                self.squares_b += _squares(values_b)
            difference = values_b - values_a
            self.squares_diff += _squares(difference)
            if len(difference):
                self.max_abs = max(self.max_abs, self._largest(a, b, difference))

    def _largest(self, a: Bytes, b: Bytes, difference: npt.NDArray[np.float64]) -> float | int:
        if not dtypes.is_integer(self.dtype):
            return float(np.abs(difference).max())
        exact_a, exact_b = scalars(self.dtype, a), scalars(self.dtype, b)
        gap = np.maximum(exact_a, exact_b) - np.minimum(exact_a, exact_b)  # wraps in signed types: view as unsigned
        return int(gap.view(f"u{gap.itemsize}").max())

    def result(self, found: TensorDifference) -> TensorDifference:
        return TensorDifference(
            name=found.name,
            dtype=found.dtype,
            shape=found.shape,
            status="changed" if self.bits else "same",
            bits=found.bits,
            elements=found.elements,
            bits_changed=self.bits,
            elements_changed=self.elements,
            norm_a=math.sqrt(self.squares_a),
            norm_b=math.sqrt(self.squares_b),
            norm_diff=math.sqrt(self.squares_diff),
            max_abs=self.max_abs,
            nonfinite=self.nonfinite,
        )


def _squares(values: npt.NDArray[np.float64]) -> float:
    return float(values @ values)


def ones(data: Bytes) -> int:
    """Count the one bits."""
    count: Callable[[Any], Any] | None = getattr(np, "bitwise_count", None)
    if count is None:  # numpy < 2
        return int(_BITS_IN_BYTE[data].sum(dtype=np.int64))
    whole = len(data) // 8 * 8
    return int(count(data[:whole].view(np.uint64)).sum(dtype=np.int64) + count(data[whole:]).sum(dtype=np.int64))


def _any_per_element(changed: Bytes, itemsize: int) -> npt.NDArray[Any]:
    """Return per element a non-zero value if any of its bits is set."""
    if itemsize <= 8:
        return changed.view(f"u{itemsize}")
    return np.asarray(changed.view(np.uint64).reshape(-1, itemsize // 8).any(axis=1))


def _values_changed(changed: Bytes, dtype: DType, values: int) -> npt.NDArray[np.bool_]:
    """Return per value (a complex number has two) whether any of its bits changed."""
    if dtype.name == "F4_E2M1_X2":
        return np.asarray(np.stack([changed & 15, changed >> 4], axis=1).reshape(-1) != 0)
    return np.asarray(changed.view(f"u{len(changed) // values}") != 0)
