"""Hashes: known answers, any buffer, and injective framing of the state hash."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import xxhash

from ckptstore.formats import checksums


def test_known_answers() -> None:
    assert checksums.chunk_hash(b"") == "2d06800538d394c2"  # XXH3-64 of nothing, from the xxHash specification
    assert checksums.header_hash(b"") == "99aa06d3014798d86001c324468d497f"
    assert checksums.tensor_hash(["2d06800538d394c2"]) == xxhash.xxh3_128_hexdigest(
        struct.pack("<Q", 0x2D06800538D394C2)
    )


@pytest.mark.parametrize("shape", [(0,), (7,), (3, 5)])
def test_any_contiguous_buffer(shape: tuple[int, ...]) -> None:
    array = np.arange(int(np.prod(shape)), dtype="<u2").reshape(shape)
    assert checksums.xxh3_64(array) == checksums.xxh3_64(array.tobytes())


def test_state_hash_ignores_order_and_nothing_else() -> None:
    one, two = ("a", "F32", (2, 3), "00" * 16), ("b", "I64", (), "11" * 16)
    reference = checksums.state_hash(b"{}", [one, two])
    assert checksums.state_hash(b"{}", [two, one]) == reference
    others = [
        checksums.state_hash(b"{ }", [one, two]),
        checksums.state_hash(b"{}", [one]),
        checksums.state_hash(b"{}", [("a", "F32", (3, 2), "00" * 16), two]),
        checksums.state_hash(b"{}", [("a", "F16", (2, 3), "00" * 16), two]),
        checksums.state_hash(b"{}", [("a", "F32", (2, 3), "01" + "00" * 15), two]),
        checksums.state_hash(b"{}", [("aF", "32", (2, 3), "00" * 16), two]),
    ]
    assert reference not in others
    assert len(set(others)) == len(others)
