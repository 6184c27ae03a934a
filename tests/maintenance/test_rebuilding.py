"""Segments describe themselves: the catalog is rebuilt from them alone: checkpoints, encodings and lines of terms.

The function below is written from SPEC.md 5.1 ("Making the log again"): it has the segments' files, nothing of the log.
"""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import DeltaOptions, DiffOptions, Update
from ckptstore.formats import checksums, jsontext, optim
from ckptstore.formats.history.records import CheckpointEntry, CheckpointId, Encoding
from ckptstore.formats.segment_files.segment import SegmentDoc, header_length, parse
from ckptstore.formats.sources import NumpySource
from ckptstore.formats.states.tree import tensor_names
from ckptstore.maintenance.merge import merge
from ckptstore.segments.plain_segments import write_full
from ckptstore.write.delta_encoding import write_packed
from ckptstore.write.steps import batch_segments, batcher

Found = tuple[SegmentDoc, int]  # a segment's description of itself, and its length


def described(folder: Path) -> list[Found]:
    """All segments of a store, without a look at its log."""
    found = []
    for path in sorted(folder.glob("seg/*/*.safetensors")):
        data = path.read_bytes()
        header = data[: header_length(data, len(data), path.name)]
        doc = parse(header, len(data), path.name, lambda at, length, data=data: data[at : at + length])
        found.append((doc, len(data)))
    return found


def rebuilt(found: list[Found]) -> tuple[dict[Any, CheckpointEntry], list[Encoding], dict[int, CheckpointId | None]]:
    """Checkpoints by node, encodings, and the parents of terms."""
    groups: dict[tuple[int, int, str], list[Found]] = {}
    parents: dict[int, CheckpointId | None] = {}
    for doc, size in found:
        parents |= doc.parents
        for step, told in doc.encodings.items():
            first = doc.segment if told.part is None else told.part.first
            groups.setdefault((told.term, step, first), []).append((doc, size))
    checkpoints, encodings = {}, []
    for (term, step, _), parts in groups.items():
        parts.sort(key=lambda one: one[0].encodings[step].part.number if one[0].encodings[step].part else 0)  # type: ignore[union-attr]
        told = parts[0][0].encodings[step]
        if len(parts) != (told.part.count if told.part else 1):
            continue  # some of its segments are gone
        (tree,) = [doc.trees[step] for doc, _ in parts if step in doc.trees]
        tensors = {name: entry for doc, _ in parts for name, entry in doc.tensors[step].items()}
        assert set(tensor_names(tree)) == {name for name in tensors if not name.startswith("ckptstore/")}
        hashes = [(name, entry.dtype, entry.shape, entry.hash) for name, entry in tensors.items()]
        state = checksums.state_hash(jsontext.dumps(tree), hashes)
        nbytes = sum(entry.nbytes for entry in tensors.values())
        checkpoints[term, step] = CheckpointEntry(term, step, state, told.time, len(tensors), nbytes)
        ids = tuple(doc.segment for doc, _ in parts)
        stored = sum(share(doc, size, step) for doc, size in parts)
        encodings.append(Encoding((term, step), told.kind, told.base, ids, told.lossy, stored))
    return checkpoints, encodings, parents


def share(doc: SegmentDoc, size: int, step: int) -> int:
    """The cost of a step of a segment."""
    stored = {one: sum(entry.stored for entry in doc.tensors.get(one, {}).values()) for one in doc.steps}
    rest, left = divmod(size - sum(stored.values()), len(stored))
    return stored[step] + rest + (left if step == doc.steps[-1] else 0)


def compare(store: ckptstore.Store, folder: Path) -> None:
    catalog = store.view().catalog
    checkpoints, encodings, parents = rebuilt([one for one in described(folder) if one[0].segment in catalog.segments])
    wanted = {**catalog.held, **catalog.checkpoints}
    assert {node: entry.id for node, entry in checkpoints.items()} == {node: one.id for node, one in wanted.items()}
    assert checkpoints == wanted
    edges = [edge for found in catalog.encodings.values() for edge in found]
    assert sorted(encodings, key=repr) == sorted(edges, key=repr)
    assert parents == {term: entry.parent for term, entry in catalog.terms.items() if term in parents}
    assert {term for term, _ in wanted} <= parents.keys()


class Training:
    """Two parameters under Adam and one tensor that never changes."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.group = optim.AdamW(weight_decay=0.1)
        self.slots = [[rng.normal(0, scale, 3000).astype("<f4") for scale in (0.02, 1e-4)] for _ in range(2)]
        for parameter in self.slots:
            parameter.append(np.abs(parameter[1]) * np.float32(1e-3))
        self.rng, self.count = rng, 0

    def take(self) -> list[Update]:
        self.count += 1
        step = optim.Step(count=self.count, lr=1e-3)
        updates = []
        for number, parameter in enumerate(self.slots):
            gradient = self.rng.normal(0, 1e-4, 3000).astype("<f4")
            optim.advance(self.group.rule(step), parameter, gradient)
            names = tuple(f"p{number}.{slot}" for slot in range(3))
            updates.append(Update(names, self.group, step, NumpySource(gradient)))
        return updates

    def state(self) -> dict[str, Any]:
        named = {f"p{n}": {str(slot): part.copy() for slot, part in enumerate(p)} for n, p in enumerate(self.slots)}
        return {**named, "table": np.arange(2000), "step": self.count}


def steps(store: ckptstore.Store, run: Training, count: int, first: int, **options: Any) -> None:
    with store.writer(diffs=DiffOptions(seconds=None, **options)) as writer:
        for step in range(first, first + count):
            updates = run.take()
            writer.save_async(run.state(), step, updates=updates)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


def test_a_catalog_is_made_again_from_the_segments(folder: Path) -> None:
    """Fulls, raw and compressed, deltas, batches of steps, lossy sums, a fork; merges of each kind."""
    store, run = ckptstore.open(folder, create=True), Training()
    with store.writer(deltas=DeltaOptions(interval=2, compress_fulls=False)) as writer:
        for step in range(1, 7):
            run.take()
            writer.save(run.state(), step)
    compare(store, folder)
    with store.writer(parent=4, deltas=DeltaOptions(interval=1, compress_fulls=True)) as writer:
        for step in (5, 6, 7):
            run.take()
            writer.save(run.state(), step)
    steps(store, run, 9, 8, batch=4)
    steps(store, run, 5, 17, batch=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        steps(store, run, 3, 22, batch=2, accumulate="sum")
    compare(store, folder)
    merge(store.journal, "9@3..16@3", keep_steps=True, take_over=True)  # copied, in a later term
    compare(store, folder)
    merge(store.journal, "2@1..4@1", take_over=True)  # encoded again
    merge(store.journal, "18@4..21@4", take_over=True)
    compare(store, folder)
    kinds = {edge.kind for edges in store.view().catalog.encodings.values() for edge in edges}
    assert kinds == {"full", "delta", "gradient"}
    assert any(edge.lossy for edges in store.view().catalog.encodings.values() for edge in edges)


def test_checkpoints_in_several_segments_are_put_together(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptstore.write.deltas.write_full", functools.partial(write_full, limit=30_000))
    monkeypatch.setattr("ckptstore.write.delta_encoding.write_packed", functools.partial(write_packed, limit=30_000))
    monkeypatch.setattr(batcher, "write_batch", functools.partial(batch_segments.write_batch, limit=50_000))
    store, run = ckptstore.open(folder, create=True), Training()
    with store.writer(deltas=DeltaOptions(interval=1, compress_fulls=False)) as writer:
        for step in (1, 2, 3):
            run.take()
            writer.save(run.state(), step)
    steps(store, run, 6, 4, batch=6)
    edges = [edge for found in store.view().catalog.encodings.values() for edge in found]
    assert {len(edge.segments) > 1 for edge in edges} == {True, False}
    compare(store, folder)
    merge(store.journal, "5@2..9@2", keep_steps=True, take_over=True)
    compare(store, folder)


def test_an_encoding_of_which_a_segment_is_gone_is_not_taken_for_whole(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptstore.write.deltas.write_full", functools.partial(write_full, limit=30_000))
    store, run = ckptstore.open(folder, create=True), Training()
    with store.writer() as writer:
        writer.save(run.state(), 1)
    found = described(folder)
    assert len(found) > 1
    assert rebuilt(found)[1]
    for number in range(len(found)):
        assert not rebuilt(found[:number] + found[number + 1 :])[1]
