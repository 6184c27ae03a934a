"""The kernels against their definitions in Python integers: what a compiled implementation must match too."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.formats.codecs import kernels

WORD_SIZES = (1, 2, 4, 8)
BITS = {1: 8, 2: 16, 4: 32, 8: 64}


def numbers(word: int, seed: int, count: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    found = np.frombuffer(rng.bytes(count * word), kernels.WORDS[word]).copy()
    edges = np.array([0, 1, (1 << (8 * word - 1)) - 1, 1 << (8 * word - 1), (1 << (8 * word)) - 1], kernels.WORDS[word])
    found[: min(count, 5)] = edges[: min(count, 5)]
    return found


@pytest.mark.parametrize("word", WORD_SIZES)
def test_difference_is_zigzag_of_the_wrapped_difference(word: int) -> None:
    new, base = numbers(word, 1, 300), numbers(word, 2, 300)[::-1].copy()
    out, bits = np.empty_like(new), 8 * word
    kernels.difference(new, base, out)
    for a, b, z in zip(new.tolist(), base.tolist(), out.tolist(), strict=True):
        d = (a - b) % (1 << bits)
        signed = d - (1 << bits) if d >> (bits - 1) else d
        assert z == (2 * signed if signed >= 0 else -2 * signed - 1)
    kernels.unfold(out, out)
    assert (base + out == new).all()


@pytest.mark.parametrize("word", WORD_SIZES)
def test_rotations(word: int) -> None:
    values, bits = numbers(word, 3, 100), 8 * word
    out = np.empty_like(values)
    kernels.rotate_left(values, out)
    assert out.tolist() == [((v << 1) | (v >> (bits - 1))) % (1 << bits) for v in values.tolist()]
    kernels.rotate_right(out, out)
    assert (out == values).all()


@pytest.mark.parametrize(("word", "wide"), [(1, 0), (2, 0), (4, 0), (4, 2), (8, 0), (8, 2), (8, 4)])
@pytest.mark.parametrize("zero_above", [False, True])
def test_planes(word: int, wide: int, zero_above: bool) -> None:
    values = numbers(word, 4, 1000)
    planes = [np.empty(1000, kernels.WORDS[wide])] if wide else []
    planes += [np.empty(1000, np.uint8) for _ in range(wide, word)]
    if zero_above and len(planes) > 1:
        values &= values.dtype.type((1 << (8 * word - 8)) - 1)
    kernels.split(values, wide, planes)
    image = values.view(np.uint8).reshape(-1, word)
    for byte, plane in enumerate(planes[1 if wide else 0 :], wide):
        assert (plane == image[:, byte]).all()
    out, unfolded = np.empty_like(values), np.empty_like(values)
    kernels.unfold(values, unfolded)
    for some in (planes, planes[:-1]) if zero_above and len(planes) > 1 else (planes,):
        kernels.merge(some, out)
        assert (out == values).all()
        kernels.merge_folded(some, out)
        assert (out == unfolded).all()


@settings(deadline=None)
@given(st.lists(st.integers(0, 15), max_size=70), st.sampled_from([1, 2, 4]))
def test_small_numbers_pack(values: list[int], bits: int) -> None:
    small = np.array([value % (1 << bits) for value in values], np.uint8)
    packed = kernels.pack_small(small.copy(), bits)
    per = 8 // bits
    expected = [
        sum(v << (bits * i) for i, v in enumerate(small[k : k + per].tolist())) for k in range(0, len(small), per)
    ]
    assert packed.tolist() == expected
    out = np.full(len(small), 99, np.uint8)
    kernels.unpack_small(packed, bits, out)
    assert (out == small).all()


@pytest.mark.parametrize("word", WORD_SIZES)
@settings(deadline=None, max_examples=60)
@given(st.data())
def test_numbers_of_any_width_pack(word: int, data: st.DataObject) -> None:
    bits = data.draw(st.integers(0, 8 * word))
    values = numbers(word, data.draw(st.integers(0, 999)), data.draw(st.integers(0, 60)))
    packed = kernels.pack_bits(values, bits)
    assert len(packed) == kernels.packed_size(len(values), bits)
    count, whole, rest = len(values), bits // 8, bits % 8
    expected = [v >> 8 * byte & 0xFF for byte in range(whole) for v in values.tolist()]
    stream = sum((v >> 8 * whole & ((1 << rest) - 1)) << rest * i for i, v in enumerate(values.tolist()))
    assert packed.tolist() == expected + list(stream.to_bytes(len(packed) - count * whole, "little"))
    unpacked = kernels.unpack_bits(packed, count, bits, word)
    assert unpacked.tolist() == [v & ((1 << bits) - 1) for v in values.tolist()]


@settings(deadline=None)
@given(st.integers(0, 3000), st.sampled_from([0, 0.001, 0.02, 0.2, 1]), st.integers(0, 2**32))
def test_positions_and_steps(count: int, density: float, seed: int) -> None:
    mask = np.random.default_rng(seed).random(count) < density
    where, steps = kernels.steps(mask)
    assert where.tolist() == [i for i, hit in enumerate(mask.tolist()) if hit]
    assert kernels.positions(mask).tolist() == where.tolist()
    at, found = -1, []
    for step in steps.tolist():
        at += step if step == 255 else step + 1
        found += [] if step == 255 else [at]
    assert found == where.tolist()
    assert kernels.positions_of_steps(steps).tolist() == where.tolist()
    assert len(steps) <= len(where) + count // 255


def test_gaps_about_the_longest_step() -> None:
    where = np.cumsum([0, 254, 255, 256, 257, 509, 510, 511, 512, 765, 1, 766])
    mask = np.zeros(where[-1] + 300, np.bool_)
    mask[where] = True
    found, steps = kernels.steps(mask)
    assert found.tolist() == where.tolist()
    assert kernels.positions_of_steps(steps).tolist() == where.tolist()


def test_classes_are_clipped_exponents() -> None:
    base = np.array([0.0, -0.0, 1e-30, -1.0, 1.9, 2.0, 3e38, np.inf, -np.nan], "<f4").view("<u4")
    out = np.empty(len(base), np.uint8)
    kernels.classes(base, 23, 120, 130, out)
    exponents = [(v & 0x7FFFFFFF) >> 23 for v in base.tolist()]
    assert out.tolist() == [min(max(e, 120), 130) - 120 for e in exponents]
    order = kernels.stable_order(out)
    assert order.tolist() == sorted(range(len(out)), key=lambda i: out[i])


def fp32_cases() -> np.ndarray:
    rng = np.random.default_rng(5)
    ties = [
        (e << 23) | m for e in range(256) for m in (0, 1, 0xFFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x7FFF, 0x8000, 0x8001)
    ]
    ties += [(e << 23) | (0x7FFFFF - m) for e in range(90, 150) for m in range(0, 0x3000, 0x400)]
    small = np.arange(0x33000000 - 50, 0x39000000, 4099).tolist()
    patterns = np.concatenate([np.array(ties + small, "<u4"), np.frombuffer(rng.bytes(400_000), "<u4")])
    return np.concatenate([patterns, patterns | np.uint32(1 << 31)])


@pytest.mark.parametrize(
    ("kernel", "narrow", "nan"),
    [(kernels.to_bfloat16, ml_dtypes.bfloat16, 0x7FC0), (kernels.to_float16, np.float16, 0x7E00)],
)
def test_rounding_is_to_nearest_even(kernel: object, narrow: type, nan: int) -> None:
    values = fp32_cases()
    out = np.empty(len(values), "<u2")
    kernel(values, out)  # type: ignore[operator]
    nans = np.isnan(values.view("<f4"))
    with np.errstate(all="ignore"):
        expected = values.view("<f4").astype(narrow).view("<u2")
    assert (out[~nans] == expected[~nans]).all()
    assert (out[nans] == nan).all(), "one NaN for all, whatever processor rounds"


def test_scratch_is_one_buffer_for_a_role() -> None:
    first = kernels.scratch("test", 100, 4)
    first.fill(7)
    assert kernels.scratch("test", 50, 4).tolist() == [7] * 50
    assert not np.shares_memory(first, kernels.scratch("another", 100, 4))
