"""Segments that no writer of ours makes, under hashes that fit: the right bits, or an error of the documented kind."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import ckptstore
from ckptstore import encoding
from ckptstore.deltas import DeltaOptions
from ckptstore.formats import hashing
from ckptstore.formats.errors import CorruptSegmentError
from ckptstore.formats.segment import Chunk, TensorEntry
from ckptstore.reading import Piece, check_chunk
from tests.engine.states import same

CHUNK = 16 << 20


@pytest.fixture
def forge(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ckptstore.Store]:
    """Saves states whose tensors are described otherwise than they are."""

    def forged(states: list[dict[str, Any]], change: Callable[[TensorEntry], TensorEntry]) -> ckptstore.Store:
        original = encoding._append
        monkeypatch.setattr(encoding, "_append", lambda *arguments: change(original(*arguments)))
        store = ckptstore.open(f"memory://{uuid.uuid4().hex}")
        with store.writer(deltas=DeltaOptions(interval=1, compress_fulls=True), poll_seconds=None) as writer:
            for step, state in enumerate(states, 1):
                writer.save(state, step=step)
        return store

    return forged


def test_raw_chunks_in_any_order(forge: Callable[..., ckptstore.Store]) -> None:
    """The packed form allows it, so a tensor whose chunks lie backwards is put together as described."""
    noise = np.random.default_rng(0).integers(0, 256, 2 * CHUNK, dtype=np.uint8)

    def backwards(entry: TensorEntry) -> TensorEntry:
        assert entry.codec == "raw"
        return replace(entry, chunks=entry.chunks[::-1])

    store = forge([{"w": noise}], backwards)
    expected = {"w": np.concatenate([noise[CHUNK:], noise[:CHUNK]])}
    same(expected, store.load(1, framework="numpy"))
    same(expected["w"], store.read_tensor(1, "w"))
    target = {"w": np.zeros(2 * CHUNK, np.uint8)}
    same(expected, store.load(1, into=target, framework="numpy"))
    assert b"".join(part.tobytes() for _, part in store.chunks(1, "w")) == expected["w"].tobytes()
    assert ckptstore.verify(store).ok


@pytest.mark.parametrize("of", ["nothing", "c", "other", "double", 7, None])
def test_copies_of_what_is_no_master(forge: Callable[..., ckptstore.Store], of: Any) -> None:
    master = torch.randn(70, 30)
    state = {"c": master.bfloat16(), "m": master, "other": torch.randn(30, 70), "double": master.double()}

    def misled(entry: TensorEntry) -> TensorEntry:
        return replace(entry, params=entry.params | {"of": of}) if entry.codec == "derive" else entry

    store = forge([state], misled)
    assert store.backend.list("seg/")
    with pytest.raises(ckptstore.CorruptSegmentError, match=r"seg/.*tensor 'c'"):
        store.load(1)


def test_a_chunk_that_was_cut_is_none() -> None:
    data = np.arange(100, dtype=np.uint8)
    digest = hashing.chunk_hash(data.data)
    entry = TensorEntry("w", "U8", (200,), (Chunk(0, 200, 200, digest, digest),))
    with pytest.raises(CorruptSegmentError, match=r"here: tensor 'w'.*0\.\.200"):
        check_chunk("here", Piece(entry, entry.chunks[0], 0), data)
