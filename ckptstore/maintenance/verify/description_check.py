"""Compares the segments' own descriptions with the log: everything that a load checks before it decodes.

A state hash follows from tree, names, dtypes, shapes and the hashes of the decoded chunks (SPEC 4). The descriptions
contain all of them, so it is compared without decoding anything. An encoding against a base is compared with the
description of that base. Descriptions are large, and are released as soon as an encoding is compared. What is kept of
it (which tensors it has, and which of them need a base) is nearly always the same as for an earlier one, and is then
shared.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from ckptstore.errors import CkptError, CorruptionError, CorruptSegmentError, FormatError
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.records import Encoding, Node, ref_of
from ckptstore.formats.states.rank_trees import left_out, of_rank
from ckptstore.formats.states.state import unflatten
from ckptstore.maintenance.verify.verify_findings import Edge, Findings, edge_of
from ckptstore.restore.chains.assembly import Held, Spec, held_by, master_link, spec_of, tree_of
from ckptstore.restore.stored_parts import described_state
from ckptstore.segments.segment_reader import SegmentReader

__all__ = ["Descriptions", "reading_order"]

_Tensors = frozenset[tuple[str, Spec]]
_NONE: _Tensors = frozenset()


def reading_order(catalog: Catalog) -> list[str]:
    """Return the ids of all segments, those of one encoding next to each other as far as possible."""
    wanted = (segment for _, edges in sorted(catalog.encodings.items()) for edge in edges for segment in edge.segments)
    rest = sorted(catalog.segments)
    return [segment for segment in dict.fromkeys([*wanted, *rest]) if segment in catalog.segments]


class Descriptions:
    """Compares every encoding of a catalog as soon as all of its segments are described. Thread-safe."""

    def __init__(self, catalog: Catalog, found: Findings) -> None:
        """Start with nothing described. Errors are added to `found`."""
        self._catalog = catalog
        self._found = found
        self._readers: dict[str, list[Encoding]] = {}
        for edges in catalog.encodings.values():
            for edge in {edge_of(edge): edge for edge in edges}.values():  # a log may repeat an encoding
                for segment in dict.fromkeys(edge.segments):
                    self._readers.setdefault(segment, []).append(edge)
        self._waiting: dict[Edge, dict[str, SegmentReader]] = {}
        self._tensors: dict[Edge, tuple[_Tensors, _Tensors]] = {}  # all; those that need the same tensor in the base
        self._known: dict[_Tensors, _Tensors] = {}
        self._lock = threading.Lock()

    def take(self, reader: SegmentReader) -> None:
        """Take a segment's description, and compare the encodings that it completes. `reader` may be closed then."""
        for edge in self._readers.get(reader.entry.id, ()):
            with self._lock:
                parts = self._waiting.setdefault(edge_of(edge), {})
                parts[reader.entry.id] = reader
                complete = len(parts) == len(set(edge.segments))
                if complete:
                    del self._waiting[edge_of(edge)]
            if complete:
                self._compare(edge, [parts[segment] for segment in edge.segments])

    def compare_bases(self, chosen: Mapping[Node, Encoding]) -> None:
        """Check that bases have the tensors and shapes that deltas and steps need, once all are described.

        Args:
            chosen: the encoding that restores each checkpoint.
        """
        for edges in self._catalog.encodings.values():
            for edge in edges:
                if edge_of(edge) in self._tensors:
                    self._compare_base(edge, chosen)

    def _compare_base(self, edge: Encoding, chosen: Mapping[Node, Encoding]) -> None:
        _, based = self._tensors[edge_of(edge)]
        there = _NONE
        if edge.base is not None:
            below = chosen.get(edge.base.node)
            if below is None or edge_of(below) not in self._tensors:
                return  # the base has an error, which is recorded already
            there, _ = self._tensors[edge_of(below)]
        if there is not based and (absent := based - there):
            # Prevents: an intact store called damaged. Encodings of a base may differ in tensors that no tree names.
            if edge.base is not None and self._has(edge.base.node, absent):
                self._found.doubt(edge, [name for name, _ in absent])
                return
            name, spec = min(absent)
            ref = "nothing" if edge.base is None else edge.base.ref
            error = CorruptSegmentError(
                f"tensor {name!r} of {ref_of(edge.checkpoint)} builds on {ref}, which has no {_text(spec)}"
            )
            self._found.blame(edge, self._key(edge), error, names=[name for name, _ in absent])

    def _has(self, node: Node, wanted: _Tensors) -> bool:
        """Tell whether some encoding of a checkpoint has these tensors."""
        edges = map(edge_of, self._catalog.encodings.get(node, ()))
        return any(edge in self._tensors and wanted <= self._tensors[edge][0] for edge in edges)

    def _compare(self, edge: Encoding, readers: Sequence[SegmentReader]) -> None:
        try:
            held = held_by(readers, edge)
        except (CorruptionError, FormatError) as error:
            self._found.blame(edge, _guilty(error, readers), error, whole=True)
            return
        based: set[tuple[str, Spec]] = set()
        for name, link in held.items():
            try:
                ratio = link.base_ratio
                if ratio == 2:
                    master_link(held, link)
            except (CorruptionError, FormatError) as error:
                self._found.blame(edge, link.reader.entry.key, error, names=[name])
                continue
            if ratio == 1:
                based.add((name, spec_of(link.tensor)))
        tensors = frozenset((name, spec_of(link.tensor)) for name, link in held.items())
        with self._lock:
            kept = [self._known.setdefault(one, one) for one in (tensors, frozenset(based))]
            self._tensors[edge_of(edge)] = (kept[0], kept[1])
        try:
            self._compare_state(edge, readers, held)
        except (CorruptionError, FormatError) as error:
            self._found.blame(edge, _guilty(error, readers), error, state=True)

    def _compare_state(self, edge: Encoding, readers: Sequence[SegmentReader], held: Held) -> None:
        tree = tree_of(readers, edge)
        where = f"checkpoint {ref_of(edge.checkpoint)}"
        state = described_state(held, tree, where)
        unflatten(of_rank(tree, None), lambda _name, _origin: None)
        entry = self._catalog.find(edge.checkpoint)
        if entry is not None and state != entry.state:
            raise CorruptSegmentError(f"{where}: its segments describe another state than the log")
        if hidden := left_out(tree):
            # Nothing is damaged, and each rank can load its own tensors, so no checkpoint counts as lost.
            error = CorruptSegmentError(
                f"{where}: ranks have values of different kinds at tensor {hidden[0]!r}, so load() without "
                f"rank= leaves it out{_more(hidden)}; load(rank=) and read_tensor() have it"
            )
            self._found.blame(edge, self._key(edge), error)

    def _key(self, edge: Encoding) -> str:
        return self._catalog.segments[edge.segments[0]].key


def _guilty(error: CkptError, readers: Sequence[SegmentReader]) -> str:
    """Return the object that an error names, or the first one."""
    keys = [reader.entry.key for reader in readers]
    return next((key for key in keys if str(error).startswith(key)), keys[0])


def _more(hidden: Sequence[str]) -> str:
    return f" (as {len(hidden) - 1} more)" if len(hidden) > 1 else ""


def _text(spec: Spec) -> str:
    return f"{spec[0]} {list(spec[1])} of that name"
