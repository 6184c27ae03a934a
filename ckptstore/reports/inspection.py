"""Describes a checkpoint: its tensors, the chain that restores it, statistics of a tensor's values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ckptstore.errors import CorruptLogError
from ckptstore.formats import dtypes
from ckptstore.formats.byte_text import size
from ckptstore.formats.history.catalog import REMOTE, Catalog
from ckptstore.formats.history.records import Encoding, SegmentEntry, ref_of
from ckptstore.formats.html_tables import HtmlTable, Rows, counted
from ckptstore.formats.segment_files.segment import TensorEntry
from ckptstore.formats.segment_files.step_codec import STEP
from ckptstore.host.progress import Progress, Tally
from ckptstore.log.change_committer import LastWriter, last_writer
from ckptstore.reports.restore_explanation import Explanation, explained
from ckptstore.reports.tensor_numbers import blocks, doubles, scalars
from ckptstore.restore.chains.chain import master_of
from ckptstore.restore.open_checkpoint import OpenCheckpoint, opened
from ckptstore.restore.selection import one_of, select_from
from ckptstore.restore.tensor_streams import streams

if TYPE_CHECKING:
    from ckptstore.log.checkpoint_info import CheckpointInfo
    from ckptstore.log.journal import Journal

__all__ = [
    "ChainLink",
    "CheckpointDescription",
    "TensorDescription",
    "TensorStatistics",
    "inspect",
    "statistics",
]


@dataclass(frozen=True, slots=True)
class TensorDescription(HtmlTable):
    """A tensor of a checkpoint.

    Attributes:
        name: flat name.
        dtype: logical dtype (``"BF16"``).
        shape: logical shape.
        nbytes: logical bytes.
        stored: bytes in the segment that contains its newest encoding.
        codec: codec of that encoding; ``raw`` is uncompressed, ``mixed`` if its shards have different codecs.
        kind: kind of that segment (``full``, ``delta`` ...).
        hash: hash of the logical bytes, 32 hex digits; None if the segment does not store it, or of a tensor in shards.
        segment: key of that segment in the store; of a tensor in shards, that of the first one.
        shards: number of shards that it is stored in; None: it is stored whole.
        stored_with: name of the tensor whose stored bytes also contain this one: an optimizer's step encodes several
            tensors together, and a lower-precision copy is derived from its master; None: it has bytes of its own.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    stored: int
    codec: str
    kind: str
    hash: str | None
    segment: str
    shards: int | None = None
    stored_with: str | None = None


@dataclass(frozen=True, slots=True)
class ChainLink(HtmlTable):
    """One link of the chain that restores a checkpoint.

    Attributes:
        ref: REF of the checkpoint that this link restores.
        kind: ``full``, ``delta`` or ``gradient``.
        base: REF of the checkpoint it builds on, or None.
        segments: keys of its segments.
        stored: their bytes.
        lossy: the link does not restore the saved bits exactly.
    """

    ref: str
    kind: str
    base: str | None
    segments: tuple[str, ...]
    stored: int
    lossy: bool


@dataclass(frozen=True, slots=True)
class CheckpointDescription:
    """A description of a checkpoint: `tensors` in the order of the state, `chain` base first, `tree` as typed JSON.

    `medium` describes in words the medium of the store and how bytes are written to it. `latest`: whether it is the
    newest checkpoint. `writer`: the last writer. `remote`: the second tier that the store remembers. `plan`: how it
    would be restored, if that was requested. A notebook shows a table of the tensors.
    """

    info: CheckpointInfo
    tensors: tuple[TensorDescription, ...]
    chain: tuple[ChainLink, ...]
    tree: Any
    medium: str
    latest: bool = False
    writer: LastWriter = field(default_factory=LastWriter)
    remote: str | None = None
    plan: Explanation | None = None

    def __repr__(self) -> str:
        return f"<CheckpointDescription of {self._title()}>"

    def _repr_html_(self) -> str:
        shown = Rows(self.tensors, "tensor", ("name", "dtype", "shape", "nbytes", "stored", "codec"))
        return shown.with_title(self._title())

    def _title(self) -> str:
        info = self.info
        chain = " > ".join(f"{link.ref} {link.kind}" for link in self.chain[:3])
        more = f" > ... ({len(self.chain):,} in all)" if len(self.chain) > 3 else ""
        stored = f"{size(info.nbytes)}, stored in {size(info.stored)}"
        return f"{info.ref}: {counted(len(self.tensors), 'tensor')}, {stored}; restored from {chain}{more}"


@dataclass(frozen=True, slots=True)
class TensorStatistics(HtmlTable):
    """Statistics of a tensor's values. A complex number counts as two values, its real and its imaginary part.

    Attributes:
        name: flat name.
        dtype: logical dtype.
        shape: logical shape.
        nbytes: logical bytes.
        values: number of values.
        nans: number of NaNs.
        infinities: number of infinite values.
        zeros: number of zeros, of either sign.
        minimum: smallest finite value, exact for integers. None if there is none; the same holds for the next four.
        maximum: largest finite value.
        mean: mean of the finite values.
        std: their population standard deviation.
        norm: their Euclidean norm.
        exponents: e -> number of finite, non-zero values with 2^e <= |value| < 2^(e+1); ascending.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    values: int = 0
    nans: int = 0
    infinities: int = 0
    zeros: int = 0
    minimum: float | int | None = None
    maximum: float | int | None = None
    mean: float | None = None
    std: float | None = None
    norm: float | None = None
    exponents: Mapping[int, int] = field(default_factory=dict)


def inspect(
    journal: Journal,
    ref: str | int = "latest",
    select: str | Sequence[str] | None = None,
    *,
    explain: bool = False,
) -> CheckpointDescription:
    """Describe a checkpoint. Reads and verifies the headers of its chain, but no tensor.

    Args:
        journal: the store's journal.
        ref: the checkpoint.
        select: describe only tensors that match one of these globs.
        explain: also explain how it would be restored: `CheckpointDescription.plan`.

    Raises:
        CheckpointNotFoundError, TensorNotFoundError: there is no checkpoint `ref`, or no tensor matches `select`.
        CorruptionError: a segment of the chain is missing or its header is damaged.
    """
    with opened(journal, ref) as found:
        chain = found.plan.encodings
        names = select_from(found.tree, select or None, found.ref).tensors
        return CheckpointDescription(
            found.info,
            tuple(_describe(found, name) for name in names),
            tuple(_link(link, [found.readers[segment].entry for segment in link.segments]) for link in chain),
            found.merged,
            journal.backend.medium(),
            _is_latest(found),
            last_writer(found.catalog),
            _remote(found.catalog),
            explained(found, select or None) if explain else None,
        )


def _is_latest(found: OpenCheckpoint) -> bool:
    try:
        newest = found.catalog.latest()
    except CorruptLogError:  # damage hides which one is the newest
        return False
    return newest is not None and newest.node == found.entry.node


def _remote(catalog: Catalog) -> str | None:
    term = catalog.terms.get(catalog.term)
    url = None if term is None else term.extra.get(REMOTE)
    return url if isinstance(url, str) else None


def _describe(found: OpenCheckpoint, name: str) -> TensorDescription:
    tensor = found.tensors[name]
    (first, _), *others = found.stored(name)
    return TensorDescription(
        name=tensor.name,
        dtype=tensor.dtype,
        shape=tuple(tensor.shape),
        nbytes=tensor.nbytes,
        stored=tensor.stored,
        codec=tensor.codec,
        kind=found.plan.encodings[-1].kind,
        hash=tensor.hash if all(chunk.decoded_hash is not None for chunk in tensor.chunks) else None,
        segment=first.links[-1].reader.entry.key,
        shards=1 + len(others) if found.sharded(name) else None,
        stored_with=_stored_with(tensor),
    )


def _stored_with(tensor: TensorEntry) -> str | None:
    leader = tensor.params.get("leader") if tensor.codec == STEP else master_of(tensor)
    return leader if not tensor.stored and isinstance(leader, str) else None


def _link(encoding: Encoding, segments: Sequence[SegmentEntry]) -> ChainLink:
    return ChainLink(
        ref=ref_of(encoding.checkpoint),
        kind=encoding.kind,
        base=None if encoding.base is None else encoding.base.ref,
        segments=tuple(entry.key for entry in segments),
        stored=sum(entry.size for entry in segments),
        lossy=encoding.lossy,
    )


def statistics(journal: Journal, ref: str | int, name: str, progress: Progress | None = None) -> TensorStatistics:
    """Compute statistics of one tensor, in one pass, in constant memory. Bytes are verified.

    Raises:
        TensorNotFoundError: the checkpoint has no such tensor.
        CorruptionError: its bytes are damaged.
    """
    with opened(journal, ref) as found:
        tensor = found.tensors[one_of(found.tensors, name, found.ref)]
        dtype = dtypes.get(tensor.dtype)
        moments = _Moments()
        tally = Tally(progress, tensor.nbytes)
        for data in streams(found)(name):
            for block in blocks(dtype, data):
                moments.add(doubles(dtype, block), scalars(dtype, block) if dtypes.is_integer(dtype) else None)
            tally.advance(len(data))
        return moments.result(tensor)


class _Moments:
    """Running statistics. Mean and variance are merged block by block (Chan, Golub and LeVeque 1979)."""

    def __init__(self) -> None:
        self.values = self.nans = self.infinities = self.zeros = self.finite = 0
        self.low: float | int = math.inf
        self.high: float | int = -math.inf
        self.mean = self.spread = self.squares = 0.0
        self.exponents: Counter[int] = Counter()

    def add(self, numbers: npt.NDArray[np.float64], integers: npt.NDArray[Any] | None) -> None:
        """Add a block. `integers` are the same values without rounding, if they are integers."""
        self.values += len(numbers)
        finite = np.isfinite(numbers)
        if not finite.all():
            self.nans += int(np.count_nonzero(np.isnan(numbers)))
            self.infinities += int(np.count_nonzero(np.isinf(numbers)))
            numbers = numbers[finite]
        count = len(numbers)
        if not count:
            return
        exact = numbers if integers is None else integers
        self.low = min(self.low, exact.min().item())
        self.high = max(self.high, exact.max().item())
        # Sums of large doubles may overflow to infinity, which is then reported.
        with np.errstate(over="ignore", invalid="ignore"):
            mean = float(numbers.mean())
            centred = numbers - mean
            shift, total = mean - self.mean, self.finite + count
            self.spread += float(centred @ centred) + shift * shift * self.finite * count / total
            self.mean += shift * count / total
            self.squares += float(numbers @ numbers)
        self.finite = total
        exponents = np.frexp(numbers[numbers != 0])[1]
        self.zeros += count - len(exponents)
        for exponent, many in zip(*np.unique(exponents, return_counts=True), strict=True):
            self.exponents[int(exponent) - 1] += int(many)  # frexp: 0.5 <= mantissa < 1

    def result(self, tensor: TensorEntry) -> TensorStatistics:
        some = self.finite > 0
        return TensorStatistics(
            name=tensor.name,
            dtype=tensor.dtype,
            shape=tuple(tensor.shape),
            nbytes=tensor.nbytes,
            values=self.values,
            nans=self.nans,
            infinities=self.infinities,
            zeros=self.zeros,
            minimum=self.low if some else None,
            maximum=self.high if some else None,
            mean=self.mean if some else None,
            std=math.sqrt(self.spread / self.finite) if some else None,
            norm=math.sqrt(self.squares) if some else None,
            exponents=dict(sorted(self.exponents.items())),
        )
