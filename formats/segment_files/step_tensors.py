"""The tensors of each step of a packed segment, made from the columns of its index when they are asked for.

Restoring a chain needs the entries of its last step, and few of each step below. With an object for every tensor of
every step, a chain of twelve steps of 9,000 tensors would make half a million objects, which take longer to make and
to collect than everything else.
"""

from __future__ import annotations

import marshal
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ckptstore.formats.segment_files import layout
from ckptstore.formats.segment_files.layout import TensorSpec, chunk_extents
from ckptstore.formats.segment_files.segment_columns import cell
from ckptstore.formats.segment_files.segment_doc import HASH_OF_NOTHING, RAW, Chunk, TensorEntry

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["EntryColumns", "Numbers", "SpecTable", "StepTensors", "TensorRows", "chunk_counts", "logical_lengths"]

Numbers = np.ndarray[Any, np.dtype[np.int64]]
_KEPT: Final = 8
"""Number of different lists of tensors that a table remembers: the steps of a run usually have the same tensors."""


class TensorRows:
    """The tensors of a step, in the order of its entries. Steps that have the same ones share this object.

    Attributes:
        names: their names.
        places: name -> its position in `names`; shorter than `names` if a name comes twice.
        sharded: whether one of them is a shard.
        groups: the groups of optimizer steps that were found among them and checked (`step_codec.groups_of`).
    """

    __slots__ = ("groups", "names", "places", "sharded")

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self.names = tuple([spec.name for spec in specs])
        self.places = {name: place for place, name in enumerate(self.names)}
        self.sharded = any(spec.offset is not None for spec in specs)
        self.groups: Any = None


class SpecTable:
    """The descriptions of tensors in an index. Indices with the same ones share this object while one is in use.

    Attributes:
        specs: the descriptions.
        nbytes: logical bytes of each.
    """

    __slots__ = ("__weakref__", "_image", "_steps", "nbytes", "specs")
    _last: weakref.ref[SpecTable] | None = None

    def __init__(self, specs: Sequence[TensorSpec], image: bytes) -> None:
        self.specs = specs
        self.nbytes: Numbers = np.array([spec.nbytes for spec in specs], np.int64)
        self._image = image
        self._steps: list[tuple[Numbers, TensorRows]] = []

    @classmethod
    def of(cls, rows: list[Any], read: Callable[[Any], TensorSpec]) -> SpecTable:
        """The table of the rows of an index, each read by `read`; the last one that was made, if it has these rows."""
        # Unlike ==, marshal tells 1 from 1.0 and from true, which no row may have in place of a number.
        image = marshal.dumps(rows, 2)
        known = None if cls._last is None else cls._last()
        if known is None or known._image != image:
            known = cls([read(row) for row in rows], image)
            cls._last = weakref.ref(known)
        return known

    def rows(self, places: Numbers) -> TensorRows:
        """The tensors of a step, given as positions in the table."""
        for known, rows in self._steps:
            if np.array_equal(known, places):
                return rows
        found = TensorRows([self.specs[place] for place in places.tolist()])
        self._steps = [(places, found), *self._steps[: _KEPT - 1]]
        return found


@dataclass(frozen=True, slots=True, eq=False)
class EntryColumns:
    """The columns of an index.

    Attributes:
        table: the descriptions of tensors.
        tensor: for each entry its position in `table`.
        codecs: codec and parameters, for each row of the index's table of codecs.
        codec: for each entry its position in `codecs`.
        first: for each entry the number of its first chunk; one more at the end.
        offset, length: for each chunk its offset in the file and its stored bytes.
        stored: hash column of the chunks that have stored bytes; `stored_at`: for each chunk its place in it.
        decoded: hash column of the chunks that are not raw; `decoded_at`: for each chunk its place in it.
        digests: hash column of the entries; None: there is none.
    """

    table: SpecTable
    tensor: Numbers
    codecs: Sequence[tuple[str, Mapping[str, Any]]]
    codec: Numbers
    first: Numbers
    offset: Numbers
    length: Numbers
    stored: str
    stored_at: Numbers
    decoded: str
    decoded_at: Numbers
    digests: str | None

    def entry(self, place: int) -> TensorEntry:
        """The entry at a position."""
        spec = self.table.specs[self.tensor.item(place)]
        codec, params = self.codecs[self.codec.item(place)]
        chunks = []
        raw = codec == RAW
        for number, (_, logical) in enumerate(chunk_extents(spec.nbytes), self.first.item(place)):
            length = self.length.item(number)
            stored = (cell(self.stored, self.stored_at.item(number)) or "") if length else HASH_OF_NOTHING
            decoded = stored if raw else cell(self.decoded, self.decoded_at.item(number))
            chunks.append(Chunk(self.offset.item(number), length, logical, stored, decoded))
        known = None if self.digests is None else cell(self.digests, place)
        digest = None if known is None else int(known, 16)
        return TensorEntry(
            spec.name, spec.dtype, spec.shape, tuple(chunks), codec, params, spec.global_shape, spec.offset, digest
        )


class StepTensors(Mapping[str, TensorEntry]):
    """name -> entry, of one step. Entries are made when they are asked for, and kept.

    Attributes:
        rows: which tensors they are.
        columns: the columns of the index.
        start: position of the step's first entry in the columns.
    """

    __slots__ = ("_made", "columns", "rows", "start")

    def __init__(self, columns: EntryColumns, start: int, count: int) -> None:
        self.columns = columns
        self.start = start
        self.rows = columns.table.rows(columns.tensor[start : start + count])
        self._made: dict[str, TensorEntry] = {}

    def __getitem__(self, name: str) -> TensorEntry:
        made = self._made.get(name)
        if made is None:
            made = self._made[name] = self.columns.entry(self.start + self.rows.places[name])
        return made

    def __contains__(self, name: object) -> bool:
        return name in self.rows.places

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows.names)

    def __len__(self) -> int:
        return len(self.rows.names)

    def spec(self, name: str) -> TensorSpec:
        """The description of a tensor, without its entry."""
        return self.columns.table.specs[self.columns.tensor.item(self.start + self.rows.places[name])]

    @property
    def stored_chunks(self) -> npt.NDArray[np.bool_]:
        """For each entry whether one of its chunks has stored bytes."""
        columns, end = self.columns, self.start + len(self)
        first = columns.first[self.start : end + 1]
        sums = np.zeros(first[-1] - first[0] + 1, np.int64)
        np.cumsum(columns.length[first[0] : first[-1]] > 0, out=sums[1:])
        found: npt.NDArray[np.bool_] = np.diff(sums[first - first[0]]) > 0
        return found

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self)!r})"


def chunk_counts(nbytes: Numbers) -> Numbers:
    """Return the number of chunks of each of many tensors."""
    return -(-nbytes // layout.CHUNK)


def logical_lengths(nbytes: Numbers) -> Numbers:
    """Return the logical bytes of every chunk of many tensors. There are not too many chunks: count them before."""
    chunks = chunk_counts(nbytes)
    found = np.full(int(chunks.sum()), layout.CHUNK, np.int64)
    some = chunks > 0
    found[np.cumsum(chunks)[some] - 1] = nbytes[some] - (chunks[some] - 1) * layout.CHUNK
    return found
