"""Frames of literals: both forms write the same bytes, zstd reads them, and hostile ones are refused or zstd's."""

from __future__ import annotations

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.formats.codecs import literals as module
from ckptstore.formats.codecs import plane_coder
from ckptstore.formats.codecs.kernels import Bytes
from ckptstore.formats.codecs.literals import literals, matches_pay
from tests.formats import codec_data
from tests.forms import short_or
from tests.kernel_forms import SETS, needs_core, use_form

form = codec_data.every_form
"""Everything here holds for all."""
COUNTS = (1, 2, 63, 64, 65, 255, 256, 300, 1023, 1024, 5000, 16383, 16384, 65791, 65792, 131072, 131073, 140000)
KINDS = ("any", "few", "one", "two", "near zero", "long tail", "each", "high", "deep")


def plane(kind: str, count: int, seed: int) -> Bytes:
    rng = np.random.default_rng(seed)
    fibonacci = [1, 1]
    while len(fibonacci) < 40:  # codes of 39 bits without a limit
        fibonacci.append(fibonacci[-1] + fibonacci[-2])
    return {
        "any": lambda: rng.integers(0, 256, count),
        "few": lambda: rng.geometric(rng.uniform(0.02, 0.9), count) % 256,
        "one": lambda: np.full(count, seed % 256),
        "two": lambda: rng.integers(0, 2, count) * (seed % 256),
        "near zero": lambda: np.minimum(255, np.abs(rng.normal(0, rng.uniform(0.5, 60), count))),
        "long tail": lambda: np.minimum(255, np.exp(rng.exponential(1.2, count))),
        "each": lambda: rng.permutation(np.arange(count) % 256),
        "high": lambda: 128 + rng.geometric(rng.uniform(0.02, 0.9), count) % 100,
        "deep": lambda: rng.choice(40, count, p=np.array(fibonacci) / sum(fibonacci)) + seed % 200,
    }[kind]().astype(np.uint8)


def frame_of(values: Bytes) -> Bytes:
    """The frame; nothing is written behind it."""
    out = np.full(len(values) + 64, 0xC3, np.uint8)
    size = literals(values, out)
    assert size
    assert (out[size:] == 0xC3).all()
    return out[:size]


@settings(deadline=None, max_examples=short_or(40, 300))
@given(st.sampled_from(KINDS), st.sampled_from(COUNTS), st.integers(0, 999))
def test_zstd_reads_what_both_forms_write(kind: str, count: int, seed: int) -> None:
    values = plane(kind, count, seed)
    frame = frame_of(values)
    assert plane_coder.decompressed(frame.data, count) == values.tobytes()
    out = np.empty(len(frame), np.uint8)
    assert module.literals.reference(values, out) == len(frame), "a frame fits into just its size"
    assert (out == frame).all()
    assert literals(values, out[:-1]) == 0
    assert (out == frame).all(), "what does not fit is not begun"
    used = np.bincount(values)
    used = used[used > 0]
    if count == 16384 and len(used) > 1:
        bits = count * np.log2(count) - float(used @ np.log2(used))
        assert len(frame) <= max(
            min(count + 20, 1.02 * bits / 8 + count / 8 * (kind in ("few", "high", "two", "deep")) + 200), 0
        )


def test_no_values_make_no_frame() -> None:
    assert literals(np.empty(0, np.uint8), np.empty(99, np.uint8)) == 0


@pytest.mark.parametrize("table", ["rows", "runs", "cycle", "sequence of tops", "noise", "small numbers", "skewed"])
@pytest.mark.parametrize("count", [100, 1024, 70_000])
def test_matches_are_left_to_zstd(table: str, count: int) -> None:
    rng = np.random.default_rng(7)
    row = rng.integers(0, 200, 40)
    values, pays = {
        "rows": (np.resize(row, count), True),
        "runs": (np.repeat(rng.integers(0, 9, count // 30 + 1), 30)[:count], True),
        "cycle": (np.arange(count) % 9, True),
        "sequence of tops": (np.where(rng.random(count) < 0.01, 7, 255), True),
        "noise": (rng.integers(0, 256, count), False),
        "small numbers": (rng.integers(0, 9, count), False),
        "skewed": (rng.geometric(0.6, count), False),
    }[table]
    plane = values.astype(np.uint8)
    assert matches_pay(plane) == pays
    out = np.empty(2 * count + 10, np.uint8)
    end = plane_coder.encode(plane, out, 0, plane_coder.ZSTD)
    own = literals(plane, np.empty(count + 20, np.uint8))
    assert out[0] != plane_coder.ZSTD or (end - 5 < own) == pays
    cursor = plane_coder.Cursor(out[:end])
    assert (plane_coder.decode(cursor, count) == plane).all()


@needs_core
@pytest.mark.parametrize("name", SETS)
@settings(deadline=None, max_examples=short_or(60, 2000))
@given(st.data())
def test_changed_frames_are_refused_or_zstds(name: str, data: st.DataObject) -> None:
    """Whatever the compiled decoder accepts, zstd decodes to the same bytes."""
    from ckptstore.formats import core

    use_form(name)
    count = data.draw(st.sampled_from([64, 200, 300, 3000, 20_000]))
    values = plane(data.draw(st.sampled_from(KINDS)), count, data.draw(st.integers(0, 99)))
    frame = frame_of(values).copy()
    room = np.full(count + 40, 0xC3, np.uint8)
    out = room[20:-20]
    coded = frame[9 if count < 256 else 10] >> 1 & 3 == 2
    assert core.read_literals(frame, out) or not coded or count < 64
    for _ in range(data.draw(st.integers(1, 2))):
        place = data.draw(st.integers(0, min(len(frame), 120) - 1) | st.integers(0, len(frame) - 1))
        frame[place] ^= 1 << data.draw(st.integers(0, 7))
    frame = frame[: data.draw(st.sampled_from([len(frame)] * 3 + [len(frame) // 2]))]
    if core.read_literals(frame, out):
        assert plane_coder.decompressed(frame.data, count) == out.tobytes()
    assert (room[:20] == 0xC3).all()
    assert (room[-20:] == 0xC3).all()


def test_the_windows_that_bound_what_matches_save() -> None:
    """The shortcut of the reference gives the compiled answer: neither is asked for less than a match can save."""
    rng = np.random.default_rng(1)
    for length in (8, 9, 12, 20, 40):
        values = rng.integers(0, 256, 1000).astype(np.uint8)
        for start in range(0, 900, 90):
            values[start + 45 : start + 45 + length] = values[start : start + length]
        gain = 10 * max(0, 8 * length - 22)
        assert matches_pay(values) == (32 * gain > 8000), length


def test_frames_of_zstd_are_still_read() -> None:
    values = plane("near zero", 50_000, 3)
    values[20_000:30_000] = values[10_000:20_000]
    for level in (1, 3, 19):
        frame = zstandard.ZstdCompressor(level).compress(values.data)
        piece = np.frombuffer(bytes([plane_coder.ZSTD]) + len(frame).to_bytes(4, "little") + frame, np.uint8)
        assert (plane_coder.decode(plane_coder.Cursor(piece), len(values)) == values).all()
