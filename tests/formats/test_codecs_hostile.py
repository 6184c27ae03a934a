"""Payloads that no encoder wrote: decoding ends with a value or one of our errors, in bounds, without large memory."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.errors import CorruptSegmentError, FormatError
from ckptstore.formats import codecs, kernel_choice
from ckptstore.formats.codecs import plane_coder
from tests.formats import codec_data
from tests.formats.codec_data import base_of, codecs_of, pair
from tests.forms import short_or

form = codec_data.both_forms  # under one name: imported under its own, it would be a second fixture
DTYPES = ("F32", "BF16", "U8", "F64")


def attempt(codec: codecs.Codec, payload: bytes, length: int, base: np.ndarray | None) -> bytes | None:
    """Decode between guard bytes; None if it was refused."""
    space = np.full(length + 128, 0xC3, np.uint8)
    try:
        codecs.decode(codec, payload, length, base, out=space[64 : 64 + length])
    except (CorruptSegmentError, FormatError):
        return None
    finally:
        assert (space[:64] == 0xC3).all()
        assert (space[64 + length :] == 0xC3).all()
    return space[64 : 64 + length].tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=short_or(24, 60))
@given(st.data(), st.sampled_from(["numbers", "sparse", "bits", "specials"]), st.integers(0, 2**32))
def test_damaged_payloads(dtype: str, data: st.DataObject, kind: str, seed: int) -> None:
    count = data.draw(st.sampled_from([3, 60, 600, 5000]))
    base, image = pair(dtype, kind, "near" if seed % 2 else "few", count, seed)
    for codec in codecs_of(dtype):
        payload = bytearray(codecs.encode(codec, image, base_of(codec, base)).tobytes())
        for _ in range(data.draw(st.integers(1, 3))):
            if payload:
                position = data.draw(st.integers(0, min(len(payload), 80) - 1))
                payload[position] ^= data.draw(st.integers(1, 255))
        attempt(codec, bytes(payload), len(image), base_of(codec, base))


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=short_or(24, 60))
@given(st.binary(max_size=200), st.sampled_from([0, 1, 8, 64, 1000, 70_000]))
def test_random_payloads(dtype: str, payload: bytes, length: int) -> None:
    base = np.zeros(length * 2, np.uint8)
    for codec in codecs_of(dtype):
        attempt(codec, payload, length, base[: length * codec.base_ratio] if codec.base_ratio else None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_truncated_and_extended_payloads(dtype: str) -> None:
    base, image = pair(dtype, "numbers", "near", 3000, 4)
    for codec in codecs_of(dtype):
        payload = codecs.encode(codec, image, base_of(codec, base)).tobytes()
        for stop in {0, 1, 2, 5, len(payload) // 3, len(payload) // 2, len(payload) - 1} - {len(payload)}:
            restored = attempt(codec, payload[:stop], len(image), base_of(codec, base))
            # An empty payload is valid, too: of a delta from an unchanged base.
            assert restored is None or (stop == 0 and codec.base_ratio), (codec, stop)
        with pytest.raises(CorruptSegmentError, match="follow the last block"):
            codecs.decode(codec, payload + b"\0", len(image), base_of(codec, base))


def zstd_piece(frame: bytes) -> bytes:
    return bytes([plane_coder.ZSTD]) + struct.pack("<I", len(frame)) + frame


def test_frames_must_declare_what_belongs() -> None:
    """A frame is decompressed only into the size that the metadata implies, and its header must repeat that size."""
    count = 10_000
    right = zstandard.ZstdCompressor().compress(bytes(count))
    without = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(count))
    frames = {
        "larger": zstandard.ZstdCompressor().compress(bytes(1 << 28)),
        "smaller": zstandard.ZstdCompressor().compress(bytes(count - 1)),
        "unknown": without,
        "cut": right[:-3],
        "longer": right + b"\0",
        "two": right + right,
        "skippable": struct.pack("<II", 0x184D2A50, count) + bytes(count),
        "none": b"",
        "window": struct.pack("<IB", 0xFD2FB528, 0x80) + b"\xf0" + struct.pack("<I", count) + b"\0\0\0",
    }
    group = b"\0"  # no uncoded bytes
    codec = codecs.Planes(1)
    assert attempt(codec, group + zstd_piece(right), count, None) == bytes(count)
    for name, frame in frames.items():
        with pytest.raises(CorruptSegmentError):
            codecs.decode(codec, group + zstd_piece(frame), count)
        assert name


def test_claimed_sizes_are_not_allocated() -> None:
    """Counts of four billion, nested to the limit, cost no memory."""
    huge = struct.pack("<II", 0xFFFFFFFF, 0xFFFFFFFF)
    hostile = [
        b"\0" + bytes([plane_coder.SPARSE]) + huge + b"\0" * 64,
        b"\0" + bytes([plane_coder.SPARSE]) + huge + bytes([plane_coder.FILL, 0]) * 2,
        b"\0" + bytes([plane_coder.SPARSE]) + struct.pack("<II", 1 << 30, 9) + bytes([plane_coder.FILL, 255]) * 2,
        b"\0" + bytes([plane_coder.ZSTD]) + b"\xff\xff\xff\xff" + b"\0" * 64,
        b"\0" + bytes([plane_coder.PACK4] * 200),
        b"\0" + bytes([plane_coder.PACK1, plane_coder.PACK1, plane_coder.FILL, 0]) + huge,
        b"\0" + zstd_piece(zstandard.ZstdCompressor().compress(bytes(1 << 29))),
        bytes([1]) + b"\xff" * 500,
    ]
    kinds = [codecs.Planes(1), codecs.Sub(1), codecs.Prefix(4, 12, 256), codecs.Prefix(4, 12)]
    length = 1 << 16
    base = np.zeros(length, np.uint8)
    for codec in kinds:
        codecs.decode(codec, codecs.encode(codec, base, base), length, base)  # this thread's scratch memory exists
        for payload in hostile:
            tracemalloc.start()
            attempt(codec, payload, length, base if codec.base_ratio else None)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < 40 * length, (codec, payload[:8], peak)


def test_nesting_is_bounded() -> None:
    count, none = 1 << 12, struct.pack("<II", 0, 0) + b"\0\0"

    def nested(depth: int) -> bytes:
        return b"\0" + bytes([plane_coder.PACK4] * depth + [plane_coder.FILL, 0]) + none * depth

    assert attempt(codecs.Planes(1), nested(plane_coder.DEPTH), count, None) == bytes(count)
    with pytest.raises(CorruptSegmentError, match="depth"):
        codecs.decode(codecs.Planes(1), nested(plane_coder.DEPTH + 1), count)


@pytest.mark.parametrize("word", [1, 2, 4, 8])
def test_every_claim_of_uncompressed_bytes(word: int) -> None:
    count = 100
    accepted = set()
    for wide in range(256):
        fills = max(0, word - wide)
        payload = bytes([wide]) + bytes(min(wide, word) * count) + bytes([plane_coder.FILL, 0]) * fills
        if attempt(codecs.Planes(word), payload, count * word, None) is not None:
            accepted.add(wide)
    assert accepted == {wide for wide in (0, 2, 4, word) if wide <= word}


def test_nothing_is_no_payload_of_a_broken_length() -> None:
    base = np.zeros(9, np.uint8)
    with pytest.raises(CorruptSegmentError):
        codecs.decode(codecs.Sub(4), b"", 9, base)


def test_positions_stay_in_the_plane() -> None:
    """Steps that lead past the end, or to fewer exceptions than announced."""
    count = 600

    def sparse(steps: bytes, values: bytes, announced: int | None = None) -> bytes:
        counts = struct.pack("<II", len(steps), len(values) if announced is None else announced)
        return b"\0" + bytes([plane_coder.SPARSE]) + counts + b"\0" + steps + b"\0" + values

    codec = codecs.Planes(1)
    good = codecs.decode(codec, sparse(b"\x00\xff\xff\x05", b"\x01\x02"), count)
    assert np.flatnonzero(good).tolist() == [0, 516]
    assert good[[0, 516]].tolist() == [2, 3]
    assert codecs.decode(codec, sparse(b"\xff\xff", b""), count).sum() == 0
    for payload in (
        sparse(b"\x00\xff\xff\x59", b"\x01\x02"),  # position 600
        sparse(b"\xff\xff\xff\x00", b"\x01"),
        sparse(b"\xff\xff\x00", b"\x01\x02"),
        sparse(b"\x01\x01", b"\x01"),
    ):
        with pytest.raises(CorruptSegmentError):
            codecs.decode(codec, payload, count)


def test_a_prefix_index_past_its_dictionary() -> None:
    data = np.repeat(np.array([0, 1 << 23, 2 << 23], "<u4"), 400)  # three prefixes: index 3 is none
    codec = codecs.Prefix(4, 9)
    payload = codecs.encode(codec, data).tobytes()
    assert codecs.decode(codec, payload, data.nbytes).tobytes() == data.tobytes()
    head = 1 + 2 + 4
    with pytest.raises(CorruptSegmentError, match="past its dictionary"):
        codecs.decode(codec, payload[:head] + b"\xff" * 300 + payload[head + 300 :], data.nbytes)


def test_a_failing_chain_names_the_damage_and_stays_in_bounds() -> None:
    base, image = pair("F32", "numbers", "near", 3000, 4)
    payload = codecs.encode(codecs.Sub(4), image, base).tobytes()
    space = np.full(len(base) + 64, 0xC3, np.uint8)
    space[32:-32] = base
    with pytest.raises(CorruptSegmentError, match="ends early"):
        codecs.apply([(codecs.Sub(4), payload), (codecs.Sub(4), payload[:-1])], space[32:-32])
    assert (space[:32] == 0xC3).all()
    assert (space[-32:] == 0xC3).all()


def test_narrow_groups_do_not_nest() -> None:
    """Each level would cost a call; 400 of them fit into a payload of a small tensor."""
    exceptions = struct.pack("<II", 4, 4) + bytes([plane_coder.FILL, 0])
    uncoded = bytes([2]) + bytes(8)
    assert attempt(codecs.Planes(2), bytes([16]) + exceptions + uncoded, 8, None) is not None
    nested = bytes([16]) + exceptions + bytes([16]) + exceptions + uncoded
    with pytest.raises(CorruptSegmentError, match="do not nest"):
        codecs.decode(codecs.Planes(2), nested, 8)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=25)
@given(st.data(), st.sampled_from(["numbers", "sparse", "bits"]), st.integers(0, 2**32))
def test_both_forms_take_damage_alike(form: str, dtype: str, data: st.DataObject, kind: str, seed: int) -> None:
    if form == "numpy":
        return  # nothing to compare it with
    count = data.draw(st.sampled_from([60, 600, 5000]))
    base, image = pair(dtype, kind, "near" if seed % 2 else "few", count, seed)
    for codec in codecs_of(dtype):
        payload = bytearray(codecs.encode(codec, image, base_of(codec, base)).tobytes())
        for _ in range(data.draw(st.integers(1, 3))):
            if payload:
                payload[data.draw(st.integers(0, min(len(payload), 80) - 1))] ^= data.draw(st.integers(1, 255))
        found = attempt(codec, bytes(payload), len(image), base_of(codec, base))
        kernel_choice.use("numpy")
        try:
            assert attempt(codec, bytes(payload), len(image), base_of(codec, base)) == found
        finally:
            kernel_choice.use(form)
