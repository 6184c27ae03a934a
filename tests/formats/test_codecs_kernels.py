"""The kernels, in numpy and compiled for every instruction set, against their definitions in Python integers."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.formats import codecs, kernel_choice
from ckptstore.formats.codecs import bitpacking, kernels, rounding
from tests.formats import codec_data
from tests.formats.codec_data import CHANGES, CLASSES, base_of, codecs_of, pair
from tests.forms import short_or
from tests.kernel_forms import SETS, use_form

WORD_SIZES = (1, 2, 4, 8)
SPLITS = [(1, 1), (2, 1, 1), (1, 1, 1, 1), (2, 2), (4, 1, 1, 1, 1), (2, 1, 1, 1, 1, 1, 1), (1,) * 8, (4, 4)]
form = codec_data.every_form  # under one name: imported under its own, it would be a second fixture
"""Everything here holds for all."""


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
    mapped, delta = np.empty_like(new), new - base
    kernels.zigzag(delta, mapped)
    assert (mapped == out).all()
    kernels.combine([out], kernels.ADD, base, mapped)
    assert (mapped == new).all()
    kernels.zigzag(delta, delta)
    assert (delta == out).all()


@pytest.mark.parametrize("word", WORD_SIZES)
def test_rotations(word: int) -> None:
    values, bits = numbers(word, 3, 100), 8 * word
    out = np.empty_like(values)
    kernels.rotate_left(values, out)
    assert out.tolist() == [((v << 1) | (v >> (bits - 1))) % (1 << bits) for v in values.tolist()]
    kernels.combine([out.copy()], kernels.ROTATE, out, out)
    assert (out == values).all()


@pytest.mark.parametrize("sizes", SPLITS, ids=str)
@pytest.mark.parametrize("count", [0, 1, 4095, 70_001])
def test_planes(sizes: tuple[int, ...], count: int) -> None:
    """Every way to split words into planes, and every operation when they are joined again."""
    word = sum(sizes)
    values, base = numbers(word, 4, count), numbers(word, 5, count)
    space = np.full(count * word + 9, 0xC3, np.uint8)  # planes may begin at any byte, and none is overrun
    planes, at = [], 1
    for size in sizes:
        planes.append(space[at : at + size * count].view(kernels.WORDS[size]))
        at += size * count
    kernels.split(values, planes)
    assert space[0] == 0xC3
    assert (space[at:] == 0xC3).all()
    at = 0
    for plane, size in zip(planes, sizes, strict=True):
        assert (plane == values >> values.dtype.type(8 * at) & values.dtype.type((1 << 8 * size) - 1)).all()
        at += size
    one, last = values.dtype.type(1), values.dtype.type(8 * word - 1)
    undone = np.where(values & one, ~(values >> one), values >> one)
    expected = {
        kernels.PUT: values,
        kernels.UNZIGZAG: undone,
        kernels.ROTATE: values >> one | values << last,
        kernels.ADD: base + undone,
        kernels.XOR: base ^ values,
    }
    for some in (planes, [values]):
        for how, result in expected.items():
            out = np.empty_like(values)
            kernels.combine(some, how, base, out)
            assert (out == result).all(), how
            out = base.copy()
            kernels.combine(some, how, out, out)
            assert (out == result).all(), (how, "in place")


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
@settings(deadline=None, max_examples=short_or(24, 60))
@given(st.data())
def test_numbers_of_any_width_pack(word: int, data: st.DataObject) -> None:
    bits = data.draw(st.integers(0, 8 * word))
    values = numbers(word, data.draw(st.integers(0, 999)), data.draw(st.integers(0, 60)))
    packed = bitpacking.pack_bits(values, bits)
    assert len(packed) == bitpacking.packed_size(len(values), bits)
    count, whole, rest = len(values), bits // 8, bits % 8
    expected = [v >> 8 * byte & 0xFF for byte in range(whole) for v in values.tolist()]
    stream = sum((v >> 8 * whole & ((1 << rest) - 1)) << rest * i for i, v in enumerate(values.tolist()))
    assert packed.tolist() == expected + list(stream.to_bytes(len(packed) - count * whole, "little"))
    unpacked = bitpacking.unpack_bits(packed, count, bits, word)
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
    values, rest = mask.astype(np.uint8) * 9, np.zeros(len(mask), np.uint8)
    taken, greater = kernels.take_exceptions(values, 1, rest)
    assert taken.tolist() == steps.tolist()
    assert kernels.put_exceptions(taken, greater, 1, rest)
    assert (rest == values).all()


@pytest.mark.parametrize("word", WORD_SIZES)
@settings(deadline=None, max_examples=short_or(24, 60))
@given(
    st.integers(0, 3000),
    st.sampled_from([0, 0.001, 0.02, 0.5, 1]),
    st.sampled_from([0, 1, 2, 4, 8]),
    st.integers(0, 99),
)
def test_exceptions(word: int, count: int, density: float, bits: int, seed: int) -> None:
    if bits == 8 * word:
        return
    rng, limit = np.random.default_rng(seed), 1 << bits
    values = np.where(rng.random(count) < density, numbers(word, seed, count), 0).astype(kernels.WORDS[word])
    values[rng.random(count) < 0.1] = limit - 1
    rest = np.full(count if bits else 0, 7, np.uint8)
    steps, greater = kernels.take_exceptions(values, limit, rest)
    where = [i for i, value in enumerate(values.tolist()) if value >= limit]
    assert kernels.positions_of_steps(steps).tolist() == where
    assert steps.tolist() == kernels.steps(values >= limit)[1].tolist()
    assert greater.tolist() == [value - limit for value in values[where].tolist()]
    if bits:
        assert rest.tolist() == [value if value < limit else 0 for value in values.tolist()]
    out = np.where(values < limit, values, 0).astype(values.dtype)
    assert kernels.put_exceptions(steps, greater, limit, out)
    assert (out == values).all()


@pytest.mark.parametrize("word", WORD_SIZES)
def test_exceptions_that_do_not_fit(word: int) -> None:
    """Too many or too few steps, and steps past the end: refused, and nothing is written outside."""
    kind = kernels.WORDS[word]

    def put(steps: list[int], greater: list[int], count: int) -> list[int] | None:
        space = np.full(count + 20, 99, kind)
        space[10 : 10 + count] = 0
        fits = kernels.put_exceptions(np.array(steps, np.uint8), np.array(greater, kind), 16, space[10 : 10 + count])
        assert (space[:10] == 99).all()
        assert (space[10 + count :] == 99).all()
        return np.flatnonzero(space[10 : 10 + count]).tolist() if fits else None

    assert put([], [], 0) == []
    assert put([0, 255, 0, 2], [1, 2, 3], 300) == [0, 256, 259]
    assert put([255, 255], [], 300) == []
    assert put([255, 45], [1], 300) is None
    assert put([255, 44], [1], 300) == [299]
    assert put([0, 0], [1], 300) is None
    assert put([0], [1, 2], 300) is None
    assert put([0], [1], 0) is None


def n_log_n(counts: list[int]) -> int:
    return sum(int(kernels.N_LOG_N[count]) for count in counts)


def test_the_table_of_information() -> None:
    for count in (0, 1, 2, 3, 1000, kernels.SAMPLE):
        exact = count * math.log2(count) if count else 0
        assert int(kernels.N_LOG_N[count]) == pytest.approx(exact * (1 << 20), abs=1)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 700, 4096])
@pytest.mark.parametrize("most", [1, 2, 20, 256])
def test_surveys_count(count: int, most: int) -> None:
    values = (np.random.default_rng(count).random(count) ** 3 * most).astype(np.uint8)
    listed = values.tolist()
    counts = [listed.count(value) for value in range(256)]
    assert kernels.survey(values) == (counts[0], max(counts), n_log_n(counts))
    for bits in (1, 2, 4):
        packed = kernels.pack_small(np.where(values < 1 << bits, values, 0).astype(np.uint8), bits).tolist()
        packs = [packed.count(byte) for byte in range(256)]
        greater = counts[1 << bits :]
        assert kernels.survey_packed(values, bits) == (sum(greater), n_log_n(greater), max(packs), n_log_n(packs))


def test_classes_are_clipped_exponents() -> None:
    base = np.array([0.0, -0.0, 1e-30, -1.0, 1.9, 2.0, 3e38, np.inf, -np.nan], "<f4").view("<u4")
    labels = np.empty(len(base), np.uint8)
    counts = kernels.classify(base, 23, 120, 130, labels)
    exponents = [(v & 0x7FFFFFFF) >> 23 for v in base.tolist()]
    assert labels.tolist() == [min(max(e, 120), 130) - 120 for e in exponents]
    quarters = [labels[:2], labels[2:4], labels[4:6], labels[6:]]
    assert counts.tolist() == [[part.tolist().count(label) for label in range(11)] for part in quarters]


@pytest.mark.parametrize("word", WORD_SIZES)
@pytest.mark.parametrize("count", [0, 1, 2, 5, 70_001, 150_000])
def test_sorting_by_class_is_stable(word: int, count: int) -> None:
    base, words = numbers(word, 6, count), numbers(word, 7, count)
    labels, out = np.empty(count, np.uint8), np.empty_like(words)
    counts = kernels.classify(base, 8 * word - 5, 3, 12, labels)
    kernels.sort(words, labels, counts, out)
    assert (out == words[np.argsort(labels, kind="stable")]).all()
    expected, back = np.empty_like(words), np.empty_like(words)
    kernels.combine([words], kernels.ADD, base, expected)
    kernels.add_unsorted(out, labels, counts, base, back)
    assert (back == expected).all()
    kernels.add_unsorted(out, labels, counts, base, base)
    assert (base == expected).all()


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
    [(rounding.to_bfloat16, ml_dtypes.bfloat16, 0x7FC0), (rounding.to_float16, np.float16, 0x7E00)],
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


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F64", "U8"])
@pytest.mark.parametrize("kind", list(CLASSES))
@pytest.mark.parametrize("form", SETS[-1:], indirect=True)  # numpy's output is compared with it
def test_both_forms_write_the_same_bytes(dtype: str, kind: str, form: str) -> None:
    """A store's bytes do not depend on the installed packages."""
    for change in CHANGES:
        base, image = pair(dtype, kind, change, 30_000, 11)
        for codec in codecs_of(dtype):
            for level in (codecs.FAST, codecs.THRIFTY):
                payload = codecs.encode(codec, image, base_of(codec, base), level=level).tobytes()
                kernel_choice.use("numpy")
                try:
                    assert codecs.encode(codec, image, base_of(codec, base), level=level).tobytes() == payload, codec
                    assert (codecs.decode(codec, payload, len(image), base_of(codec, base)) == image).all()
                finally:
                    use_form(form)
                assert (codecs.decode(codec, payload, len(image), base_of(codec, base)) == image).all()
