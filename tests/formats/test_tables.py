"""Tables that are shared, not copied, against plain dictionaries."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.formats.history import folds, tables
from ckptstore.formats.history.catalog import Catalog, CatalogBuilder
from ckptstore.formats.history.columns import CheckpointRows, EncodingRows, SegmentRows, SlotRows
from ckptstore.formats.history.records import (
    CheckpointEntry,
    CheckpointId,
    CommitRecord,
    Encoding,
    Node,
    OpenRecord,
    Record,
    SegmentEntry,
)
from ckptstore.formats.history.tables import NodeTable, Table
from tests.formats import log_strategies as some
from tests.formats.log_strategies import RUN, digest
from tests.forms import short_or

TABLES = ("checkpoints", "slots", "held", "encodings", "segments")


class Plain:
    """The contents of the big tables, in dictionaries: SPEC 7.4, word for word."""

    def __init__(self) -> None:
        self.term = 0
        self.checkpoints: dict[Node, CheckpointEntry] = {}
        self.slots: dict[Node, int] = {}
        self.held: dict[Node, CheckpointEntry] = {}
        self.encodings: dict[Node, tuple[Encoding, ...]] = {}
        self.segments: dict[str, SegmentEntry] = {}

    def apply(self, record: Record, seq: int) -> None:
        self.term = max(self.term, record.term)
        if isinstance(record, OpenRecord):
            self.term = record.term
            return
        self.segments |= {segment.id: segment for segment in record.segments}
        for entry in record.checkpoints:
            self.checkpoints[entry.node] = entry
            self.slots[entry.node] = seq
            self.held.pop(entry.node, None)
        for edge in record.encodings:
            self.encodings[edge.checkpoint] = (*self.encodings.get(edge.checkpoint, ()), edge)
        for node in record.retires:
            self.slots.pop(node, None)
            retired = self.checkpoints.pop(node, None)
            if retired is not None and node in self.encodings:
                self.held[node] = retired
        for name in record.drops:
            self.segments.pop(name, None)
            for node, edges in list(self.encodings.items()):
                kept = tuple(edge for edge in edges if name not in edge.segments)
                if kept == edges:
                    continue
                self.encodings[node] = kept
                if not kept:
                    del self.encodings[node]
                    self.held.pop(node, None)

    def frozen(self) -> dict[str, dict[Any, Any]]:
        return {name: dict(getattr(self, name)) for name in TABLES}


def compare(catalog: Catalog, plain: dict[str, dict[Any, Any]]) -> None:
    for name in TABLES:
        table: Table[Any, Any] = getattr(catalog, name)
        model = plain[name]
        assert list(table) == sorted(model)
        assert list(table.items()) == sorted(model.items(), key=lambda item: item[0])
        assert list(table.values()) == [model[key] for key in sorted(model)]
        assert len(table) == len(model)
        assert table == model
        for key in [*model, *table.changes, *table.rows.keys()]:
            assert (key in table) == (key in model)
            assert table.get(key) == model.get(key)
        if isinstance(table, NodeTable):
            assert list(reversed(table)) == sorted(model, reverse=True)
            for term in range(6):
                assert table.holds(term) == sum(node[0] == term for node in model)
                for step in (None, *range(7)):
                    below = [node for node in model if node[0] == term and (step is None or node[1] <= step)]
                    assert table.highest(term, step) == max(below, default=None)


def compare_edges(catalog: Catalog) -> None:
    """The readers and the dependants: all present ones are named; others may have been, once."""
    edges = [edge for all_of_one in catalog.encodings.values() for edge in all_of_one]
    for number in range(12):
        readers = {edge.checkpoint for edge in edges if digest(number) in edge.segments}
        assert readers <= catalog.edges().users(digest(number))
    for node in ((term, step) for term in range(1, 5) for step in range(7)):
        dependents = {edge.checkpoint for edge in edges if edge.base is not None and edge.base.node == node}
        assert dependents <= catalog.edges().dependents(node)


def refold(catalog: Catalog) -> Catalog:
    data, name = folds.encode_fold(catalog, run=RUN)
    return folds.decode_fold(data, seq=catalog.next_seq - 1, run=RUN, digest16=name[:16], what="fold")


@given(st.data(), st.integers(0, 5))
@settings(max_examples=short_or(20, 50), deadline=None)
def test_a_catalog_is_what_plain_dictionaries_are(data: st.DataObject, many: int) -> None:
    builder, plain = CatalogBuilder(), Plain()
    kept: list[tuple[Catalog, dict[str, dict[Any, Any]]]] = []
    with mock.patch.object(tables, "MANY", many), mock.patch.object(tables, "_BATCH", 2):
        for seq, record in enumerate(data.draw(st.lists(some.records, min_size=1, max_size=10))):
            builder.apply(record, seq)
            plain.apply(record, seq)
            action = data.draw(st.sampled_from(["go on", "go on", "snapshot", "fold", "edges"]))
            if action == "snapshot":
                kept.append((builder.snapshot(), plain.frozen()))
            elif action == "fold":
                builder = CatalogBuilder(refold(builder.catalog))
            elif action == "edges":
                compare_edges(builder.catalog)
        compare(builder.catalog, plain.frozen())
        compare_edges(builder.catalog)
        assert refold(builder.catalog) == builder.catalog
        assert folds.encode_fold(refold(builder.catalog), run=RUN) == folds.encode_fold(builder.catalog, run=RUN)
        for snapshot, then in kept:
            compare(snapshot, then)


def test_changes_become_rows_when_there_are_many() -> None:
    table: NodeTable[int] = NodeTable(SlotRows())
    for step in range(tables.MANY):
        table[1, step] = step
    assert not table.consolidate()
    assert len(table.rows) == 0
    table[1, tables.MANY] = 0
    assert table.consolidate()
    assert (len(table.rows), len(table.changes), len(table)) == (tables.MANY + 1, 0, tables.MANY + 1)
    for step in range(64 * tables.MANY, 0, -1):
        table[2, step] = step
    table.rows, table.changes = table.settled(), {}
    assert len(table.rows) // 64 > tables.MANY
    for step in range(len(table.rows) // 64):
        table[3, step] = step
    assert not table.consolidate()
    table[3, 10**6] = 1
    assert table.consolidate()


@pytest.mark.parametrize("rows", [SlotRows(), CheckpointRows(), EncodingRows(), SegmentRows()])
def test_an_empty_table(rows: Any) -> None:
    table: Table[Any, Any] = Table(rows)
    key: Any = digest(1) if isinstance(rows, SegmentRows) else (1, 1)
    assert (list(table), len(table), key in table, table.get(key, 5)) == ([], 0, False, 5)
    with pytest.raises(KeyError):
        table[key]
    with pytest.raises(KeyError):
        del table[key]
    assert table == {}
    assert table != 5


@pytest.mark.parametrize("name", ["", "x", "A" * 32, "a" * 31, " " + "a" * 31, "a" * 30 + "  ", "seg/1", "\u0663" * 32])
def test_an_invalid_id_is_absent(name: str) -> None:
    entry = SegmentEntry("a" * 32, 1, 2, 3, "b" * 32)
    table: Table[str, SegmentEntry] = Table(SegmentRows().with_changes({entry.id: entry}))
    assert table["a" * 32] == entry
    assert name not in table
    assert list(EncodingRows().users(name)) == []


def history(count: int) -> Iterator[tuple[CommitRecord, int]]:
    """Plain fulls, a commit each."""
    for step in range(1, count + 1):
        name = f"{step * 0x9E3779B97F4A7C15 % 2**64:032x}"
        yield (
            CommitRecord(
                1,
                digest(0),
                segments=(SegmentEntry(name, 1, 100, 64, digest(step)),),
                checkpoints=(CheckpointEntry(1, step, digest(step), 0.5, 1, 10),),
                encodings=(Encoding((1, step), "full", None, (name,), False, 10),),
            ),
            step,
        )


def seconds(work: Any, times: int) -> float:
    """The median of several times: one of them may include a garbage collection."""

    def once() -> float:
        begun = time.thread_time()
        work()
        return time.thread_time() - begun

    return statistics.median(once() for _ in range(times))


def test_a_snapshot_costs_what_changed_and_not_what_there_is() -> None:
    builder = CatalogBuilder(Catalog().apply(OpenRecord(1, None, digest(1), 0.0), 0))
    for record, seq in history(30_000):
        builder.apply(record, seq)
    builder = CatalogBuilder(refold(builder.catalog))
    first = builder.snapshot()
    assert first.checkpoints.rows is builder.catalog.checkpoints.rows  # shared
    assert seconds(builder.snapshot, 50) < 0.0005  # it takes 10 us; to copy 30,000 entries takes milliseconds
    record = CommitRecord(1, digest(0), retires=((1, 5),), tags={"x": (1, 7)})
    assert seconds(lambda: first.apply(record, 30_001), 50) < 0.0005
    assert (1, 5) in first.checkpoints
    assert first.latest() == CheckpointEntry(1, 30_000, digest(30_000), 0.5, 1, 10)


def test_bytes_kept_of_a_checkpoint() -> None:
    import tracemalloc

    builder = CatalogBuilder(Catalog().apply(OpenRecord(1, None, digest(1), 0.0), 0))
    count = 30_000
    for record, seq in history(count):
        builder.apply(record, seq)
    data, name = folds.encode_fold(builder.catalog, run=RUN)
    del builder
    tracemalloc.start()
    try:
        catalog = folds.decode_fold(data, seq=count, run=RUN, digest16=name[:16], what="fold")
        assert len(catalog.checkpoints) == count
        assert tracemalloc.get_traced_memory()[0] / count < 400
        identity = CheckpointId(1, count, digest(count))
        assert catalog.restorable(identity)
        catalog.edges().users(digest(3))
        catalog.edges().dependents((1, 1))
        assert tracemalloc.get_traced_memory()[0] / count < 400
    finally:
        tracemalloc.stop()
