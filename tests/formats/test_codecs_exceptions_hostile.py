"""Exceptions that do not fit their plane or group, and unknown forms: refused before anything is written."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
import pytest

from ckptstore.errors import CorruptSegmentError
from ckptstore.formats import codecs
from tests.kernel_forms import FORMS, use_form

COUNT = 100
GUARD = 4096
WORD = 4

GOOD = ([3, 5, 89], 3)
WRONG = {
    "beyond the end": ([3, 96], 2),
    "just beyond the end": ([3, 5, 90], 3),
    "far beyond the end": ([254, 254], 2),
    "fewer than there are": ([3, 255], 2),
    "none at all": ([255], 1),
    "more than there are": ([3, 5], 1),
    "more than there is space for": ([0] * 101, 101),
}


@pytest.fixture(params=FORMS)
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    use_form(request.param)
    yield request.param
    use_form(None)


def raw(values: bytes) -> bytes:
    return b"\0" + values


def exceptions(steps: list[int], count: int, values: bytes) -> bytes:
    return struct.pack("<II", len(steps), count) + raw(bytes(steps)) + values


def narrow(steps: list[int], count: int) -> bytes:
    """A group of narrow words of 0 bits."""
    return b"\x10" + exceptions(steps, count, bytes([WORD]) + b"\1\2\3\4" * count)


def sparse(steps: list[int], count: int) -> bytes:
    """Four planes, the lowest of them sparse."""
    return b"\0\3" + exceptions(steps, count, raw(b"\5" * count)) + b"\1\0" * 3


def sparse_top(steps: list[int], count: int) -> bytes:
    """Four planes, the highest of them sparse."""
    return b"\0" + b"\1\0" * 3 + b"\3" + exceptions(steps, count, raw(b"\5" * count))


def packed(steps: list[int], count: int) -> bytes:
    """Four planes, the second packed to 4 bits."""
    return b"\0\1\0\6" + raw(bytes(COUNT // 2)) + exceptions(steps, count, raw(b"\5" * count)) + b"\1\0" * 2


FORMS = (narrow, sparse, sparse_top, packed)


def decode(payload: bytes, codec: str) -> np.ndarray:
    space = np.full(COUNT * WORD + 2 * GUARD, 0xC3, np.uint8)
    out = space[GUARD:-GUARD]
    base = np.zeros(COUNT * WORD, np.uint8)
    try:
        codecs.decode(codecs.codec(codec, {"word": WORD}), payload, out.size, None if codec == "planes" else base, out)
    finally:
        assert (space[:GUARD] == 0xC3).all()
        assert (space[-GUARD:] == 0xC3).all()
    return out.view("<u4")


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("codec", ["planes", "xor", "sub"])
@pytest.mark.parametrize("form", FORMS)
def test_steps_that_fit(form: object, codec: str) -> None:
    words = decode(form(*GOOD), codec)  # type: ignore[operator]
    usual, (first, second) = words[0], words[[3, 99]]
    assert first == second != usual
    assert np.flatnonzero(words != usual).tolist() == [3, 9, 99]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("mode", [7, 61, 255])
def test_an_unknown_mode_is_not_taken_for_another(mode: int) -> None:
    payload = bytearray(sparse(*GOOD))
    assert payload[1] == 3
    payload[1] = mode
    with pytest.raises(CorruptSegmentError, match=f"unknown plane mode {mode}"):
        decode(bytes(payload), "planes")


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("unknown", [1, 3, 8, 17, 18, 24, 32, 36, 254])
def test_an_unknown_form_is_not_taken_for_another(unknown: int) -> None:
    """Including widths of narrow words, and narrow halves, that no writer of version 1 makes."""
    payload = bytearray(narrow(*GOOD))
    payload[0] = unknown
    with pytest.raises(CorruptSegmentError, match=f"unknown form {unknown}"):
        decode(bytes(payload), "planes")


def test_an_unknown_form_of_a_prefix_block() -> None:
    codec = codecs.codec("prefix", {"word": WORD, "bits": 9})
    image = np.arange(COUNT, dtype="<u4").view(np.uint8)
    payload = bytearray(codecs.encode(codec, image).tobytes())
    assert payload[0] == 1
    payload[0] = 2
    with pytest.raises(CorruptSegmentError, match="unknown form 2"):
        codecs.decode(codec, bytes(payload), image.size)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("codec", ["planes", "sub"])
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("form", FORMS)
def test_steps_that_do_not_fit(form: object, wrong: str, codec: str) -> None:
    with pytest.raises(CorruptSegmentError, match=r"exceptions"):
        decode(form(*WRONG[wrong]), codec)  # type: ignore[operator]
