"""A store with a checkpoint that is stored twice: as the writer's delta, and as a full, in a later term."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

import ckptstore
from ckptstore import DeltaOptions
from ckptstore.formats.history.records import CommitRecord, Encoding
from ckptstore.formats.states.state import FlatState
from ckptstore.host.buffers import Staging
from ckptstore.host.threads import workers
from ckptstore.log.term import open_term
from ckptstore.maintenance.merge.checkpoint_portions import ChainSource
from ckptstore.maintenance.merge.chunk_copies import merged_draft
from ckptstore.restore.open_checkpoint import opened
from ckptstore.restore.stored_base import StoredBase
from ckptstore.segments.plain_segments import write_full
from ckptstore.segments.write_session import SegmentSession


def state(step: int) -> dict[str, object]:
    """Two tensors that drift a little, and one that does not change."""
    rng = np.random.default_rng(1)
    weight = rng.standard_normal(60_000).astype("f4")
    return {"w": weight * np.float32(1 + step * 1e-6), "v": weight[:5000] + step, "table": np.arange(900), "n": step}


def twofold(root: Path, ref: str = "3@1") -> ckptstore.Store:
    """1@1 to 4@1: a full, and deltas on it; then `ref` once more as a full."""
    store = ckptstore.open(root, create=True)
    with store.writer(deltas=DeltaOptions(interval=10), poll_seconds=None) as writer:
        for step in range(1, 5):
            writer.save(state(step), step)
    stored_again(store, ref)
    return store


def stored_again(store: ckptstore.Store, ref: str) -> None:
    """Add an encoding of `ref` as an uncompressed full, as compaction does."""
    term = open_term(store.journal, lambda catalog: found.id if (found := catalog.latest()) else None)
    with opened(store.journal, ref) as found, workers(1, "test") as blocks, workers(1, "test") as coders:
        edge = Encoding(found.entry.node, "full", None, (), False, 0)
        base = StoredBase(found.entry.id, found.chains, lambda: None)
        flat = FlatState(found.merged, {name: ChainSource(base, name) for name in found.chains})
        nothing = lambda _: None  # noqa: E731
        session = SegmentSession(store.backend, Staging.for_chunks(4), blocks.pool, coders, nothing, nothing)
        made = write_full(session, flat, merged_draft([edge], found.catalog, store.run, term.number))
    edge = replace(edge, segments=tuple(one.id for one in made.segments), bytes=made.stored)
    term.commit(CommitRecord(term.number, segments=made.segments, encodings=(edge,)))
