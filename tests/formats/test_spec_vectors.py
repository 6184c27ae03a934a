"""The test vectors of SPEC.md 4 hold: for the product, for a store's contents, and for the page's reader."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import ckptstore
from ckptstore.formats import checksums, digest, jsontext
from ckptstore.formats.segment_files.layout import CHUNK
from ckptstore.formats.segment_files.segment import Chunk, TensorEntry
from ckptstore.formats.segment_files.shards import key_of, state_parts, with_key
from ckptstore.store import Store
from tests.formats.test_spec import section
from tools.conformance.page import store as page

W = np.arange(6, dtype="<f4").reshape(2, 3)
B = np.zeros(0, "u1")
STATE = {"w": W, "é": 7.0, "b": B}
TREE = {"w": {"$a": "w"}, "é": 7.0, "b": {"$a": "b"}}
LONG = bytes(number % 256 for number in range(1000))


def table() -> dict[str, str]:
    """The table of the page: input -> hex digits."""
    return dict(re.findall(r"^\| ([^|]+) \| `([0-9a-f]+)` \|$", section("4 Hashes and digests"), re.MULTILINE))


def entry(name: str, array: Any, whole: Any = None, offset: Any = None) -> TensorEntry:
    data = array.tobytes()
    hashed = checksums.chunk_hash(data)
    chunks = (Chunk(0, len(data), len(data), hashed, hashed),) if data else ()
    dtype = {"<f4": "F32", "|u1": "U8"}[array.dtype.str]
    made = TensorEntry(name, dtype, array.shape, chunks, "raw", {}, whole, offset)
    return with_key(made, key_of(made)) if offset is not None else made


def state_of(entries: list[TensorEntry]) -> str:
    return checksums.state_hash(jsontext.dumps(TREE), state_parts(entries))


def tensor_hash(data: bytes) -> str:
    pieces = [data[at : at + CHUNK] for at in range(0, len(data), CHUNK)]
    return checksums.tensor_hash([checksums.chunk_hash(piece) for piece in pieces])


def computed() -> dict[str, str]:
    rows = [entry("w", W[row : row + 1], (2, 3), (row, 0)) for row in (1, 0)]
    texts = {"no bytes": b"", "the 9 bytes `ckptstore`": b"ckptstore", "1000 bytes, byte i is i mod 256": LONG}
    zeros = np.zeros(CHUNK + 1, "u1")
    return {
        **{f"XXH3-64 of {name}": checksums.chunk_hash(data) for name, data in texts.items()},
        **{f"XXH3-128 of {name}": checksums.xxh3_128(data) for name, data in texts.items()},
        "tensor hash of `w`": tensor_hash(W.tobytes()),
        "tensor hash of `b`, which has no chunks": tensor_hash(B.tobytes()),
        "tensor hash of 2^24 + 1 zero bytes, two chunks": tensor_hash(zeros.tobytes()),
        "state hash of the state": state_of([entry("w", W), entry("b", B)]),
        "state hash, `w` in two shards of a row each": state_of([*rows, entry("b", B)]),
        "state digest of `w`": f"{digest.digest(W):016x}",
        "state digest of `b`": f"{digest.digest(B):016x}",
        "state digest of the 5 bytes 1, 2, 3, 4, 5": f"{digest.digest(bytes([1, 2, 3, 4, 5])):016x}",
        "state digest of 2^24 + 1 bytes, each 1": f"{digest.digest(zeros + np.uint8(1)):016x}",
    }


def test_the_page_s_vectors_are_what_is_computed() -> None:
    assert table() == computed()


def test_the_page_s_tree_is_that_of_the_state() -> None:
    assert f"`{jsontext.dumps(TREE).decode()}`" in section("4 Hashes and digests")


def test_a_store_holds_the_page_s_state(tmp_path: Path) -> None:
    store: Store = ckptstore.open(tmp_path / "run", create=True)
    with store.writer(poll_seconds=None) as writer:
        writer.save(STATE, 1)
    assert store.checkpoint("latest").state == table()["state hash of the state"]
    assert store.tree("latest") == TREE


def held(tensors: dict[str, dict[str, Any]], images: dict[str, bytes], parts: dict[str, list[str]]) -> page.State:
    """A state whose tensors are decoded."""
    state = page.State([TREE], tensors, {}, None)
    state.tree, state.images, state.parts = TREE, images, parts
    return state


def test_the_reader_from_the_page_computes_them() -> None:
    told = table()
    whole = {"dtype": "F32", "shape": [2, 3], "global_shape": None, "offset": None, "chunks": []}
    empty = {"dtype": "U8", "shape": [0], "global_shape": None, "offset": None, "chunks": []}
    state = held({"w": whole, "b": empty}, {"w": W.tobytes(), "b": b""}, {"w": ["w"], "b": ["b"]})
    assert page.state_hash(state) == told["state hash of the state"]
    shards = {f"w{row}": {**whole, "shape": [1, 3], "global_shape": [2, 3], "offset": [row, 0]} for row in (0, 1)}
    images = {"b": b"", **{f"w{row}": W[row].tobytes() for row in (0, 1)}}
    cut = held({**shards, "b": empty}, images, {"w": ["w0", "w1"], "b": ["b"]})
    assert page.state_hash(cut) == told["state hash, `w` in two shards of a row each"]
    assert page.tensor_hash(W.tobytes()).hex() == told["tensor hash of `w`"]
    assert replace(entry("b", B), name="c").hash == told["tensor hash of `b`, which has no chunks"]
