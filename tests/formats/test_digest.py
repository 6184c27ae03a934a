"""The state digest: its definition, the changes that it detects, and its computation in parts."""

from __future__ import annotations

import itertools
import random
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.formats import digest as d
from ckptstore.formats import kernel_choice
from tests.forms import short_or
from tests.kernel_forms import KINDS, needs_core

MASK = (1 << 64) - 1
B = d.BLOCK_WORDS


def splitmix64(seed: int, index: int) -> int:
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def by_definition(data: bytes) -> int:
    """The docstring's formula in Python integers."""
    padded = data + bytes(-len(data) % 4)
    total = len(data) * 0x9E3779B97F4A7C15
    for p in range(len(padded) // 4):
        word = int.from_bytes(padded[4 * p : 4 * p + 4], "little")
        total += word * (splitmix64(0, p % B) | 1) * (splitmix64(5, p // B) | 1)
    return total & MASK


def test_the_generator_is_the_published_one() -> None:
    assert splitmix64(0, 0) == 0xE220A8397B1DCDAF


def noise(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 1000, 4 * B - 1, 4 * B, 4 * B + 1, 8 * B + 6])
def test_the_definition(size: int) -> None:
    data = noise(size)
    assert d.digest(data) == by_definition(data.tobytes())


def test_golden_values() -> None:
    """These numbers are in stores: they must never change."""
    assert d.digest(b"") == 0
    assert d.digest(b"\x01") == 0x39F7E50D7635E64A
    assert d.digest(bytes(range(256))) == 0xCAFEE31EF04A6360
    assert d.digest(np.arange(100_000, dtype="<f4")) == 0x60419B8DCD71D280


@given(st.binary(max_size=300))
@settings(max_examples=short_or(24, 60))
def test_the_definition_on_any_bytes(data: bytes) -> None:
    assert d.digest(data) == by_definition(data)


@given(st.data())
@settings(max_examples=short_or(20, 50), deadline=None)
def test_parts_combine_in_any_order(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([0, 7, 999, 4 * B + 3, 12 * B + 5]))
    image = noise(size)
    cuts = sorted(data.draw(st.sets(st.integers(0, size // 4), max_size=8)))
    bounds = [0, *(4 * cut for cut in cuts), size]
    parts = list(itertools.pairwise(bounds))
    random.Random(data.draw(st.integers(0, 99))).shuffle(parts)
    partials = [d.partial(image[start:stop], start // 4) for start, stop in parts]
    assert d.combine(*partials, nbytes=size) == d.digest(image)


def test_weights_are_odd_and_distinct_up_to_sign_where_only_the_sign_bit_counts() -> None:
    """So two flipped sign bits always show, in one block or at one place of two blocks (16 GiB)."""
    for table in (d.weights(), d.multipliers(0, B)):
        assert bool((table & np.uint64(1)).all())
        low = table & np.uint64(2**33 - 1)
        up_to_sign = np.minimum(low, np.uint64(2**33) - low)
        assert len(np.unique(up_to_sign)) == len(table) == B
    np.testing.assert_array_equal(d.multipliers(4000, 200), d.multipliers(0, 5000)[4000:4200])


@given(st.integers(0, 3 * B - 1), st.integers(0, 3 * B - 1))
@settings(max_examples=short_or(80, 200), deadline=None)
def test_two_flipped_sign_bits(first: int, second: int) -> None:
    words = noise(12 * B).view("<u4")
    before = d.digest(words)
    words[first] ^= 0x80000000
    assert d.digest(words) != before
    words[second] ^= 0x80000000
    assert (d.digest(words) == before) == (first == second)


@given(st.integers(0, 3 * B - 1), st.integers(0, 3 * B - 1), st.integers(0, 31))
@settings(max_examples=short_or(40, 100), deadline=None)
def test_two_swapped_words_that_differ_in_one_bit(first: int, second: int, bit: int) -> None:
    words = np.full(3 * B, 0x3F800000, "<u4")
    words[first] ^= np.uint32(1 << bit)
    before = d.digest(words)
    words[[first, second]] = words[[second, first]]
    assert (d.digest(words) == before) == (first == second)


def test_every_single_flipped_bit_of_a_small_tensor() -> None:
    data = noise(37)
    seen = {d.digest(data)}
    for position in range(37 * 8):
        flipped = data.copy()
        flipped[position // 8] ^= 1 << (position % 8)
        seen.add(d.digest(flipped))
    assert len(seen) == 1 + 37 * 8


def test_moved_swapped_and_rotated_blocks() -> None:
    words = noise(16 * B, seed=1).view("<u4")
    blocks = words.reshape(4, B)
    others = [
        blocks[[1, 0, 2, 3]],
        blocks[[0, 1, 3, 2]],
        blocks[::-1],
        np.roll(blocks, 1, axis=0),
        np.roll(words, 1),
        np.roll(words, B // 2),
        words[::-1],
    ]
    seen = {d.digest(np.ascontiguousarray(other)) for other in (words, *others)}
    assert len(seen) == 1 + len(others)


def test_sign_only_patterns_that_cancel_under_regular_weights() -> None:
    """+ - - + at equal distances: an arithmetic progression of weights would miss it."""
    zeros = np.zeros(4 * B, "<f4")
    for distance in (1, 2, 64, 4096, B // 2, B):
        tensor = zeros.copy()
        tensor[[0, 3 * distance]] = -0.0
        other = zeros.copy()
        other[[distance, 2 * distance]] = -0.0
        assert d.digest(tensor) != d.digest(other)


def test_appended_zeros_change_it() -> None:
    seen = {d.digest(bytes(size)) for size in range(64)}
    assert len(seen) == 64


def test_any_contiguous_buffer() -> None:
    array = np.arange(12, dtype="<f4").reshape(3, 4)
    expected = by_definition(array.tobytes())
    odd = np.empty(49, np.uint8)
    odd[1:] = array.reshape(-1).view(np.uint8)
    for form in (array, memoryview(array), array.tobytes(), bytearray(array.tobytes()), odd[1:], memoryview(odd)[1:]):
        assert d.digest(form) == expected
    assert d.digest(np.zeros((0, 3), "<f4")) == d.digest(np.float32(0).reshape(1)[:0]) == 0
    with pytest.raises(ValueError, match="contiguous"):
        d.digest(array.T)


def test_negative_positions_are_refused() -> None:
    with pytest.raises(ValueError, match="first_word"):
        d.partial(b"1234", -1)


def test_far_positions() -> None:
    """Beyond the table of multipliers, and across its end."""
    data = noise(8 * B + 4)
    for first in (4095 * B + 5, 4096 * B, 2**40 + 17):
        expected = sum(
            int.from_bytes(data[4 * i : 4 * i + 4].tobytes(), "little")
            * (splitmix64(0, (first + i) % B) | 1)
            * (splitmix64(5, (first + i) // B) | 1)
            for i in range(data.size // 4)
        )
        assert d.partial(data, first) == expected & MASK


@given(st.lists(st.binary(max_size=9), max_size=40))
def test_bytes_that_pass_by_in_pieces(pieces: list[bytes]) -> None:
    running = d.Running()
    for piece in pieces:
        running.update(piece)
    assert running.result() == d.digest(b"".join(pieces))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", [0, 1, B - 1, B, 5 * B + 3])
@pytest.mark.parametrize("size", [0, 4, 8, 4 * B - 4, 4 * B, 8 * B + 12, 12 * B + 3])
def test_both_kinds_of_kernels(kind: str, first: int, size: int, request: pytest.FixtureRequest) -> None:
    data = np.frombuffer(random.Random(size).randbytes(size + 1), np.uint8)[1:]  # at any address
    words = np.frombuffer(data.tobytes() + bytes(-size % 4), "<u4").astype(object)
    weights = d.weights()
    expected = sum(
        int(word) * int(weights[(first + p) % B]) * int(d.multipliers((first + p) // B, 1)[0])
        for p, word in ((p, word) for p, word in enumerate(words) if p < 40 or p > len(words) - 40)
    )
    kept = np.zeros(size, np.uint8)
    kept[:160] = data[:160]
    kept[max(0, (len(words) - 39) * 4) :] = data[max(0, (len(words) - 39) * 4) :]
    request.addfinalizer(lambda: kernel_choice.use(None))
    kernel_choice.use(kind)
    assert d.partial(kept, first) == expected & MASK


@pytest.mark.parametrize(("skip", "count"), [(0, 4 * B), (0, 9 * B), (0, 11 * B + 5), (7, 8 * B), (0, 4 * B - 1)])
@needs_core
def test_compiled_blocks_are_those_of_the_reference(skip: int, count: int) -> None:
    words = np.random.default_rng(count).integers(0, 1 << 32, count, np.uint32)
    found, expected = (np.zeros(-(-(skip + count) // B), np.uint64) for _ in range(2))
    d.block_sums.compiled(words, skip, d.weights(), found)
    d.block_sums.reference(words, skip, d.weights(), expected)
    assert found.tolist() == expected.tolist()


def test_memory_is_that_of_one_block(request: pytest.FixtureRequest) -> None:
    """However long or short the data is."""
    request.addfinalizer(lambda: kernel_choice.use(None))
    kernel_choice.use("numpy")
    for nbytes, most in ((64 << 20, 600 << 10), (400, 16 << 10)):
        data = np.zeros(nbytes, np.uint8)
        d.partial(data[:8], 0)
        tracemalloc.start()
        d.partial(data, 0)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < most, (nbytes, peak)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("start", [0, 1])
def test_many_small_tensors_in_one_call(kind: str, start: int, request: pytest.FixtureRequest) -> None:
    request.addfinalizer(lambda: kernel_choice.use(None))
    kernel_choice.use(kind)
    lengths = [0, 4, 12, 4 * B, 4096, 0, 8, 4 * B - 4]
    image = noise(sum(lengths) + start)[start:]  # at any address
    ends = [0, *itertools.accumulate(lengths)]
    assert d.partials(image, lengths) == [d.partial(image[at:end], 0) for at, end in itertools.pairwise(ends)]
    assert d.partials(image[:0], []) == []


@pytest.mark.parametrize("lengths", [[4], [8, 3], [6, 6], [-4, 16], [4 * B + 4]])
def test_lengths_that_are_no_small_tensors_of_the_bytes_are_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="whole words"):
        d.partials(noise(max(12, 4 * B + 4 if lengths[0] > 16 else 12)), lengths)
