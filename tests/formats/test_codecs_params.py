"""Each check of a codec's parameters and payloads alone: inputs that pass all other checks and must fail this one."""

from __future__ import annotations

import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest

from ckptstore.errors import CorruptSegmentError, FormatError
from ckptstore.formats import codecs
from ckptstore.formats.codecs import plane_coder

PARAMS: list[tuple[str, dict[str, Any]]] = [
    ("unknown", {}),
    ("raw", {"word": 1}),
    ("planes", {"word": 3}),
    ("planes", {"word": True}),
    ("planes", {"word": 4.0}),
    ("planes", {}),
    ("planes", {"word": 4, "map": "other"}),
    ("planes", {"word": 4, "map": ["none"]}),
    ("planes", {"word": 4, "map": None}),
    ("planes", {"word": 4, "more": 1}),
    ("xor", {"word": 4, "more": 1}),
    ("sub", {"word": 4, "more": 1}),
    ("sub", {"word": 4, "context": 5}),
    ("sub", {"word": 4, "context": [23, 110]}),
    ("sub", {"word": 4, "context": [23, 110, 120, 1]}),
    ("sub", {"word": 4, "context": [True, 110, 120]}),
    ("sub", {"word": 4, "context": [23.0, 110, 120]}),
    ("sub", {"word": 4, "context": [-1, 110, 120]}),
    ("sub", {"word": 4, "context": [23, -5, 5]}),
    ("sub", {"word": 8, "context": [0, 69_999, 70_001]}),
    ("sub", {"word": 4, "context": [31, 0, 1]}),
    ("sub", {"word": 4, "context": [200, 0, 1]}),
    ("sub", {"word": 4, "context": [23, 110, 110]}),
    ("sub", {"word": 4, "context": [23, 120, 110]}),
    ("sub", {"word": 4, "context": [23, 100, 116]}),
    ("sub", {"word": 4, "context": [23, 250, 256]}),
    ("prefix", {"word": 4, "bits": 13}),
    ("prefix", {"word": 4, "bits": 0}),
    ("prefix", {"word": 1, "bits": 8}),
    ("prefix", {"word": 4, "bits": 9, "group": 100}),
    ("prefix", {"word": 4, "bits": 9, "more": 1}),
    ("derive", {}),
    ("derive", {"to": "F64"}),
    ("derive", {"to": "BF16", "more": 1}),
]


@pytest.mark.parametrize(("name", "params"), PARAMS, ids=str)
def test_parameters_that_no_codec_has(name: str, params: dict[str, Any]) -> None:
    with pytest.raises(FormatError, match=name):
        codecs.codec(name, params)


@pytest.mark.parametrize("length", [-1, codecs.CHUNK + 1, 1 << 60])
def test_a_length_that_no_chunk_has(length: int) -> None:
    with pytest.raises(FormatError, match="logical bytes"):
        codecs.decode(codecs.Planes(1), b"", length)


@pytest.mark.parametrize("word", [1, 2, 4, 8])
@pytest.mark.parametrize("form", [1, 2, 3, 4, 5, 8, 15, 19, 21, 25, 200, 254])
def test_forms_of_groups(word: int, form: int) -> None:
    """A form is a count of whole bytes within the word, or narrow, or zero."""
    known = {0, word, 255} | ({2} if word > 2 else set()) | ({4} if word > 4 else set())
    if form in known:
        return
    image = np.zeros(40 * word, np.uint8)
    with pytest.raises(CorruptSegmentError):
        codecs.decode(codecs.Planes(word), bytes([form]) + bytes(len(image) * 2), len(image))


@pytest.mark.parametrize("codec", [codecs.Planes(4), codecs.Xor(4), codecs.Sub(4), codecs.Raw()])
def test_what_follows_the_last_block(codec: codecs.Codec) -> None:
    image = np.arange(4000, dtype=np.uint8)
    base = np.ones(4000, np.uint8)
    payload = codecs.encode(codec, image, base if codec.base_ratio else None).tobytes()
    state = base.copy()
    codecs.apply([(codec, payload)], state)
    assert state.tobytes() == image.tobytes()
    with pytest.raises(CorruptSegmentError, match="follow"):
        codecs.decode(codec, payload + b"\0", len(image), base if codec.base_ratio else None)
    with pytest.raises(CorruptSegmentError, match="follow"):
        codecs.apply([(codec, payload + b"\0")], base.copy())


def sparse(steps: int, exceptions: int, rest: bytes) -> bytes:
    return b"\0" + bytes([plane_coder.SPARSE]) + struct.pack("<II", steps, exceptions) + rest


FILL_255 = bytes([plane_coder.FILL, 255])
FILL_0 = bytes([plane_coder.FILL, 0])


@pytest.mark.parametrize(
    ("steps", "exceptions", "rest"),
    [(1 << 23, 0, FILL_255 + b"\0"), (1 << 23, 1 << 23, FILL_0 + FILL_0), (4, 0, FILL_255 + b"\0")],
)
def test_counts_are_bounded_before_anything_is_made_of_them(steps: int, exceptions: int, rest: bytes) -> None:
    codec = codecs.Planes(1)
    codecs.decode(codec, codecs.encode(codec, bytes(600)), 600)
    tracemalloc.start()
    with pytest.raises(CorruptSegmentError):
        codecs.decode(codec, sparse(steps, exceptions, rest), 600)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_pieces_nest_so_deep_and_no_deeper() -> None:
    def nested(depth: int) -> bytes:
        head = bytes([plane_coder.PACK4]) * depth
        counts = (struct.pack("<II", 0, 0) + bytes([plane_coder.RAW]) * 2) * depth
        return b"\0" + head + FILL_0 + counts

    codec = codecs.Planes(1)
    assert not codecs.decode(codec, nested(plane_coder.DEPTH), 600).any()
    with pytest.raises(CorruptSegmentError, match="depth"):
        codecs.decode(codec, nested(plane_coder.DEPTH + 1), 600)


def test_narrow_groups_do_not_nest() -> None:
    words = np.zeros(600, "<u4")
    words[::7] = 1 << 20
    codec = codecs.Planes(4)
    count = len(words[::7])
    positions = bytes([plane_coder.RAW]) + bytes([0] + [6] * (count - 1)) if count else b""
    inner = bytes([16]) + struct.pack("<II", 0, 0) + bytes([plane_coder.RAW]) * 1
    narrow = bytes([16]) + struct.pack("<II", count, count) + positions + inner
    with pytest.raises(CorruptSegmentError, match="nest"):
        codecs.decode(codec, narrow, words.nbytes)
