"""Segments that no writer of ours makes, with valid hashes: the right bits, or an error of the documented kind."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptstore
from ckptstore.errors import CorruptSegmentError
from ckptstore.formats import checksums
from ckptstore.formats.history.records import CheckpointId
from ckptstore.formats.segment_files.segment import Chunk, SegmentDoc, TensorEntry
from ckptstore.maintenance.merge import merge
from ckptstore.restore.stored_base import open_base
from ckptstore.segments import packed_segments
from ckptstore.segments.segment_reader import SegmentReader, check_chunk
from ckptstore.write import delta_encoding
from ckptstore.write.policy.delta_interval import RestoreBound
from ckptstore.write.policy.delta_options import DeltaOptions
from tests.store.states import same

CHUNK = 16 << 20


@pytest.fixture
def forge(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ckptstore.Store]:
    """Saves states whose tensors are described wrongly."""

    def forged(states: list[dict[str, Any]], change: Callable[[TensorEntry], TensorEntry]) -> ckptstore.Store:
        original = delta_encoding.append_tensor
        monkeypatch.setattr(delta_encoding, "append_tensor", lambda *arguments: change(original(*arguments)))
        store = ckptstore.open(f"memory://{uuid.uuid4().hex}")
        with store.writer(deltas=DeltaOptions(interval=1, compress_fulls=True), poll_seconds=None) as writer:
            for step, state in enumerate(states, 1):
                writer.save(state, step=step)
        return store

    return forged


@pytest.mark.parametrize("length", [0, 5, 4000, 1 << 27, 1 << 53])
def test_a_header_of_another_length_than_was_committed(length: int) -> None:
    store = ckptstore.open(f"memory://{uuid.uuid4().hex}")
    with store.writer(poll_seconds=None) as writer:
        writer.save({"w": np.arange(5)}, step=1)
    (entry,) = store.view().catalog.segments.values()
    SegmentReader(store.backend, entry).close()
    with pytest.raises(CorruptSegmentError, match=f"a header of {length} bytes" if length > entry.size else entry.key):
        SegmentReader(store.backend, replace(entry, header=length))


def damaged(folder: Path, old: bytes, new: bytes) -> ckptstore.Store:
    """A store of one segment in which some bytes are changed."""
    assert len(old) == len(new)
    store = ckptstore.open(folder)
    with store.writer(poll_seconds=None) as writer:
        writer.save({"w": np.frombuffer(b"the bits" * 1000, np.uint8), "note": "what is in the tree"}, step=1)
    (file,) = folder.glob("seg/*/*.safetensors")
    data = file.read_bytes()
    assert old in data
    file.write_bytes(data.replace(old, new, 1))
    return store


def test_every_byte_of_the_header_counts(tmp_path: Path) -> None:
    """Another value in the state's tree is JSON as valid as the right one; only the header's hash shows it."""
    store = damaged(tmp_path, b"what is in the tree", b"what is on the tree")
    with pytest.raises(CorruptSegmentError, match="header's hash"):
        store.load(1)


def test_mapped_tensors_are_compared_first(tmp_path: Path) -> None:
    store = damaged(tmp_path, b"the bits", b"the bats")
    with pytest.raises(CorruptSegmentError, match="'w': checksum"):
        store.load(1, mmap=True)
    assert store.load(1, mmap=True, verify=False, framework="numpy")["w"].tobytes().startswith(b"the bats")


@pytest.mark.parametrize("of", ["nothing", "c", "other", "double", 7, None])
def test_copies_of_what_is_no_master(forge: Callable[..., ckptstore.Store], of: Any) -> None:
    master = torch.randn(70, 30)
    state = {"c": master.bfloat16(), "m": master, "other": torch.randn(30, 70), "double": master.double()}

    def misled(entry: TensorEntry) -> TensorEntry:
        return replace(entry, params=entry.params | {"of": of}) if entry.codec == "derive" else entry

    store = forge([state], misled)
    assert store.backend.list("seg/")
    for verify in (True, False):  # hashes need not detect what the description shows
        with pytest.raises(ckptstore.CorruptSegmentError, match=r"seg/.*tensor 'c'"):
            store.load(1, verify=verify)


def test_a_master_that_derives_from_itself(forge: Callable[..., ckptstore.Store]) -> None:
    master = torch.randn(70, 30)

    def circular(entry: TensorEntry) -> TensorEntry:
        return replace(entry, codec="derive", params={"to": "BF16", "of": "m"}) if entry.name == "m" else entry

    store = forge([{"c": master.bfloat16(), "m": master}], circular)
    with pytest.raises(ckptstore.CorruptSegmentError, match="tensor 'm': derived from 'm'"):
        store.load(1)


@pytest.mark.parametrize("what", ["shape", "dtype"])
def test_a_base_of_another_shape(forge: Callable[..., ckptstore.Store], what: str) -> None:
    """The hashes of the bits are not checked."""
    first = np.random.default_rng(0).integers(0, 256, (20, 3000), dtype=np.uint8)
    second = first.copy()
    second[1, ::1000] += 1
    seen: list[str] = []

    def other(entry: TensorEntry) -> TensorEntry:
        seen.append(entry.codec)
        if len(seen) > 1:
            return entry
        if what == "shape":
            return replace(entry, shape=entry.shape[::-1])
        return replace(entry, dtype="I8")

    store = forge([{"w": first}, {"w": second}], other)
    assert len(seen) == 2
    assert seen[1] != "raw"
    for verify in (True, False):
        with pytest.raises(ckptstore.CorruptSegmentError, match="'w': its base has another shape"):
            store.load(2, verify=verify)


@pytest.fixture
def misdescribed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ckptstore.Store]:
    """Saves a full and a delta whose document is changed."""

    def saved(change: Callable[[SegmentDoc], SegmentDoc], kind: str = "delta") -> ckptstore.Store:
        original = packed_segments.encode_packed

        def encode(doc: SegmentDoc, *rest: Any) -> Any:
            return original(change(doc) if doc.kind == kind else doc, *rest)

        monkeypatch.setattr(packed_segments, "encode_packed", encode)
        weight = np.random.default_rng(0).integers(0, 256, 60000, dtype=np.uint8)
        store = ckptstore.open(f"memory://{uuid.uuid4().hex}")
        with store.writer(deltas=DeltaOptions(interval=1, compress_fulls=True), poll_seconds=None) as writer:
            writer.save({"w": weight}, step=1)
            weight[::100] += 1
            assert writer.save({"w": weight}, step=2).kind == "delta"
        return store

    return saved


OTHERS: dict[str, dict[str, Any]] = {
    "another state": {"base": CheckpointId(1, 1, "0" * 32)},
    "another checkpoint": {"base": CheckpointId(1, 0, "0" * 32)},
    "nothing": {"base": None},
    "a step of another term": {"term": 2},
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_segment_that_builds_on_something_else(misdescribed: Callable[..., ckptstore.Store], other: str) -> None:
    change = OTHERS[other]
    store = misdescribed(lambda doc: replace(doc, encodings={2: replace(doc.encodings[2], **change)}))
    store.load(1)
    for verify in (True, False):
        with pytest.raises(CorruptSegmentError, match="does not build 2@1 on 1@1"):
            store.load(2, verify=verify)


def test_a_full_that_builds_on_something(misdescribed: Callable[..., ckptstore.Store]) -> None:
    """A log that is rebuilt from it would make a delta of it."""
    below = CheckpointId(1, 0, "0" * 32)
    store = misdescribed(lambda doc: replace(doc, encodings={1: replace(doc.encodings[1], base=below)}), "full")
    with pytest.raises(CorruptSegmentError, match="does not build 1@1 on nothing"):
        store.load(1)


@pytest.mark.parametrize(
    "change", [{"run": "0" * 32}, {"segment": "0" * 32}, {"term": 7}], ids=["run", "segment", "term"]
)
def test_a_segment_that_is_another_one(misdescribed: Callable[..., ckptstore.Store], change: dict[str, Any]) -> None:
    store = misdescribed(lambda doc: replace(doc, **change))
    for verify in (True, False):
        with pytest.raises(CorruptSegmentError, match="holds segment"):
            store.load(2, verify=verify)


def test_a_base_is_named_by_its_state_too(misdescribed: Callable[..., ckptstore.Store]) -> None:
    store = misdescribed(lambda doc: doc)
    (identity,) = [entry.id for entry in store.view().catalog.checkpoints.values() if entry.step == 1]
    open_base(store.journal, identity).forget()
    with pytest.raises(CorruptSegmentError, match="was replaced by another one"):
        open_base(store.journal, identity._replace(state="0" * 32))


def test_more_stored_bytes_than_a_chunk_can_have(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They are not read: no reader has memory for them."""
    code = delta_encoding.code_group

    def padded(*arguments: Any) -> Any:
        return [replace(one, payload=np.zeros(CHUNK + (64 << 10), np.uint8)) for one in code(*arguments)]

    store = ckptstore.open(tmp_path / "store")
    weights = np.zeros(60000, np.uint8)
    chain = DeltaOptions(interval=1, bound=RestoreBound(times=None, depth=100))
    with store.writer(deltas=chain, poll_seconds=None) as writer:
        writer.save({"w": weights}, step=1)
        for step in (2, 3):
            with monkeypatch.context() as patched:
                patched.setattr(delta_encoding, "code_group", padded if step == 3 else code)
                weights = weights + np.uint8(1)
                writer.save({"w": weights}, step=step)
    for verify in (True, False):
        with pytest.raises(CorruptSegmentError, match=f"{CHUNK + (64 << 10)} stored bytes"):
            store.load(3, verify=verify)
    with pytest.raises(CorruptSegmentError, match=f"{CHUNK + (64 << 10)} stored bytes"):
        merge(store.journal, "1..3", keep_steps=True, take_over=True)


WAYS: dict[str, Callable[[ckptstore.Store], Any]] = {
    "load": lambda store: store.load(2),
    "part": lambda store: store.load(2, select="c"),
    "into": lambda store: store.load(2, into={name: torch.empty_like(value) for name, value in store.load(1).items()}),
    "read_tensor": lambda store: store.read_tensor(2, "c"),
    "chunks": lambda store: list(store.chunks(2, "c")),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("codec", ["derive", "delta"])
def test_payloads_that_fit_and_lead_elsewhere(forge: Callable[..., ckptstore.Store], way: str, codec: str) -> None:
    """Every stored byte is as it was stored; the decoded bytes are not those that the log names."""
    states = []
    for step in range(2):
        weight = torch.arange(2100.0).reshape(70, 30) * (1 + step / 128)
        states.append({"c": weight.bfloat16(), "m": weight} if codec == "derive" else {"c": weight})
    seen: list[str] = []

    def misled(entry: TensorEntry) -> TensorEntry:
        seen.append(entry.codec if entry.name == "c" else "")
        if entry.name != "c" or len([one for one in seen if one]) < 2:
            return entry
        chunk = entry.chunks[0]
        return replace(entry, chunks=(replace(chunk, decoded_hash=checksums.chunk_hash(b"other bytes")),))

    store = forge(states, misled)
    codecs_of_c = [one for one in seen if one]
    assert codecs_of_c[1] == "derive" if codec == "derive" else codecs_of_c[1] not in ("raw", "derive")
    same(states[0], store.load(1))
    with pytest.raises(ckptstore.CorruptSegmentError, match=r"tensor 'c': chunk 0.*step 2"):
        WAYS[way](store)


def test_a_chunk_that_was_cut_is_none() -> None:
    data = np.arange(100, dtype=np.uint8)
    digest = checksums.chunk_hash(data.data)
    entry = TensorEntry("w", "U8", (200,), (Chunk(0, 200, 200, digest, digest),))
    with pytest.raises(CorruptSegmentError, match=r"here: tensor 'w'.*0\.\.200"):
        check_chunk("here", entry, entry.chunks[0], data)
