"""Codecs: every codec x dtype x hostile class is restored bit for bit, within its bound, in place and as chains."""

from __future__ import annotations

import doctest
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.errors import FormatError
from ckptstore.formats import codecs
from ckptstore.formats.codecs.blocks import OVERHEAD, block_count
from tests.formats.codec_data import ALL_DTYPES, CHANGES, CLASSES, base_of, codecs_of, image, pair
from tests.forms import short_or

DOCS = Path(__file__).parents[2] / "docs"

SIZES = st.one_of(st.integers(0, 40), st.integers(41, 700), st.sampled_from([4096, 9999, 70_001]))


def check(codec: codecs.Codec, data: np.ndarray, base: np.ndarray | None, level: int = 0) -> np.ndarray:
    """Encode and decode; returns the payload."""
    before = data.copy()
    payload = codecs.encode(codec, data, base, level=level)
    assert (data == before).all(), "encoding changed its input"
    assert len(payload) <= len(data) + OVERHEAD * block_count(len(data))
    restored = codecs.decode(codec, payload.tobytes(), len(data), base)
    assert restored.tobytes() == data.tobytes(), f"{codec} does not come back"
    assert codecs.codec(codec.name, codec.params) == codec
    return payload


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from(sorted(CLASSES)), st.sampled_from(sorted(CHANGES)), SIZES, st.integers(0, 2**32), st.integers(0, 3)
)
def test_every_codec_round_trips(dtype: str, kind: str, change: str, count: int, seed: int, level: int) -> None:
    base, data = pair(dtype, kind, change, count, seed)
    for codec in codecs_of(dtype):
        check(codec, data, base_of(codec, base), level)


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F8_E4M3", "I64"])
@settings(deadline=None, max_examples=25)
@given(st.binary(max_size=300), st.integers(0, 7))
def test_lengths_that_are_no_whole_number_of_words(dtype: str, data: bytes, offset: int) -> None:
    buffer = np.frombuffer(bytes(offset) + data, np.uint8)[offset:]  # unaligned as well
    for codec in codecs_of(dtype):
        if codec.base_ratio < 2:
            check(codec, buffer, buffer[::-1].copy() if codec.base_ratio else None)


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F64", "U8"])
def test_chunks_of_several_blocks(dtype: str) -> None:
    word = codecs.word_size(dtype)
    base, data = pair(dtype, "numbers", "near", (2 * codecs.BLOCK + 4 * 777) // word, 3)
    data[: codecs.BLOCK] = base[: codecs.BLOCK]  # blocks differ
    for codec in codecs_of(dtype):
        check(codec, data, base_of(codec, base))


def test_a_codec_fits_its_data() -> None:
    """Not the ratios of real trajectories (tools/bench), but that each mechanism has its effect."""
    base, data = pair("F32", "numbers", "near", 1 << 18, 5)

    def ratio(codec: codecs.Codec, new: np.ndarray = data) -> float:
        return len(new) / len(check(codec, new, base_of(codec, base)))

    assert ratio(codecs.Planes(4, "rotate")) > ratio(codecs.Planes(4)) > 1.15
    assert ratio(codecs.Sub(4)) > 1.1 * ratio(codecs.Xor(4)) > 3
    words = data.view("<u4")
    bound = codecs.difference_entropy(words, base.view("<u4"))
    assert bound < 32 / ratio(codecs.Sub(4)) < 1.02 * bound
    assert ratio(codecs.Prefix(4, 9, 256)) > ratio(codecs.Prefix(4, 9)) > 1.05


def test_context_pays_where_steps_have_one_size() -> None:
    rng = np.random.default_rng(9)
    base = rng.normal(0, 0.02, 1 << 18).astype("<f4")
    data = base + rng.normal(0, 1e-5, len(base)).astype("<f4")
    chosen = codecs.choose("F32", [codecs.Sample(data, base)], codecs.SMALL_POLICY)
    assert isinstance(chosen.codec, codecs.Sub)
    assert chosen.codec.context is not None
    assert len(check(chosen.codec, codecs.as_bytes(data), codecs.as_bytes(base))) < 0.97 * len(
        check(codecs.Sub(4), codecs.as_bytes(data), codecs.as_bytes(base))
    )


def test_unchanged_tensors_cost_nothing() -> None:
    base = image("F32", "noise", 700_001, 1)
    for codec in (codecs.Xor(4), codecs.Sub(4), codecs.Sub(4, codecs.Context(23, 100, 115))):
        assert len(check(codec, base.copy(), base)) == 0
    zeros = np.zeros(3 * codecs.BLOCK, np.uint8)
    assert len(check(codecs.Planes(4), zeros, None)) == 3


def test_no_payload_for_a_tail_that_looks_like_no_change() -> None:
    base = np.full(7, 0xFF, np.uint8)
    for codec in (codecs.Xor(4), codecs.Sub(4)):
        assert check(codec, base.copy(), base).tobytes() == b"\xff" * 4  # a zero group, and three uncompressed bytes


def test_classes_of_few_words_are_encoded_together() -> None:
    """One zero group for each run of classes; the lone byte after the words keeps the payload from vanishing."""
    exponents = np.repeat(np.array([100, 101, 102, 103, 104, 105], "<u4"), [5000, 4095, 1, 4096, 3000, 1096])
    base = np.append(np.random.default_rng(1).permutation(exponents << 23).view(np.uint8), np.uint8(1))
    codec = codecs.Sub(4, codecs.Context(23, 100, 105))
    assert check(codec, base.copy(), base).tobytes() == b"\xff" * 4 + b"\x01"


@pytest.mark.parametrize(("dtype", "narrow"), [("BF16", ml_dtypes.bfloat16), ("F16", np.float16)])
@settings(deadline=None, max_examples=short_or(24, 60))
@given(st.sampled_from(["noise", "specials", "numbers", "sparse"]), st.integers(0, 5000), st.integers(0, 2**32))
def test_a_rounded_copy_costs_nothing(dtype: str, narrow: type, kind: str, count: int, seed: int) -> None:
    master = image("F32", kind, count, seed).view("<f4")
    if kind == "noise":
        master = np.where(np.isnan(master), np.float32(0), master)
    with np.errstate(all="ignore"):
        copy = master.astype(narrow)
    payload = check(codecs.Derive(dtype), codecs.as_bytes(copy), codecs.as_bytes(master))
    if not np.isnan(master).any():
        assert len(payload) == 0
    changed = codecs.as_bytes(copy).copy()
    changed[len(changed) // 2 :] ^= 1
    check(codecs.Derive(dtype), changed, codecs.as_bytes(master))


@pytest.mark.parametrize("dtype", ["F32", "BF16", "U8", "F64"])
def test_a_chain_is_applied_in_one_pass(dtype: str) -> None:
    word, rng = codecs.word_size(dtype), np.random.default_rng(2)
    states = [image(dtype, "numbers", (codecs.BLOCK + 4000) // word, 11)]
    links: list[tuple[codecs.Codec, np.ndarray]] = []
    kinds = [codec for codec in codecs_of(dtype) if codec.base_ratio == 1]
    for step in range(9):
        words = states[-1].view(f"<u{word}")
        moved = words + rng.integers(0, 30, len(words)).astype(words.dtype) if step % 4 else words.copy()
        states.append(moved.view(np.uint8))
        links.append((kinds[step % len(kinds)], codecs.encode(kinds[step % len(kinds)], states[-1], states[-2])))
    state = states[0].copy()
    codecs.apply(links, state)
    assert (state == states[-1]).all()
    full = codecs.Planes(word)
    state = np.full_like(states[0], 0xAA)
    codecs.apply([(full, codecs.encode(full, states[4])), *links[4:]], state)
    assert (state == states[-1]).all(), "a full below the deltas replaces what was there"


def test_decoding_over_the_base_itself() -> None:
    base, data = pair("F32", "numbers", "near", 300_000, 8)
    for codec in codecs_of("F32"):
        if codec.base_ratio == 1:
            state = base.copy()
            codecs.decode(codec, codecs.encode(codec, data, state), len(data), state, out=state)
            assert (state == data).all()


def test_threads_do_not_share_anything() -> None:
    work = []
    for seed in range(24):
        dtype = ("F32", "BF16", "U8")[seed % 3]
        base, data = pair(dtype, "numbers", "near", 40_000, seed)
        work += [(codec, data, base_of(codec, base)) for codec in codecs_of(dtype)]
    with ThreadPoolExecutor(8) as pool:
        assert len(list(pool.map(lambda item: check(*item), work))) == len(work)


def test_memory_of_the_caller() -> None:
    base, data = pair("F32", "numbers", "near", 5000, 8)
    out = np.full(codecs.bound(len(data)) + 64, 0x5A, np.uint8)
    payload = codecs.encode(codecs.Sub(4), data, base, out=out)
    assert payload.base is out
    assert (out[codecs.bound(len(data)) :] == 0x5A).all(), "written past the bound"
    target = np.empty(len(data), np.uint8)
    assert codecs.decode(codecs.Sub(4), payload, len(data), base, out=target) is target
    for buffer in (data.tobytes(), bytearray(data), memoryview(data.tobytes()), data.view("<f4").reshape(50, 100)):
        assert codecs.encode(codecs.Sub(4), buffer, base).tobytes() == payload.tobytes()


def test_misuse_is_refused() -> None:
    data = np.zeros(64, np.uint8)
    with pytest.raises(ValueError, match="needs 64 bytes of base"):
        codecs.encode(codecs.Xor(4), data)
    with pytest.raises(ValueError, match="needs 64 bytes of base"):
        codecs.decode(codecs.Sub(4), b"", 64, data[:60])
    with pytest.raises(ValueError, match="at most"):
        codecs.encode(codecs.Raw(), np.zeros(codecs.CHUNK + 1, np.uint8))
    with pytest.raises(ValueError, match="out has"):
        codecs.encode(codecs.Raw(), data, out=np.empty(64, np.uint8))
    with pytest.raises(ValueError, match="out has"):
        codecs.decode(codecs.Raw(), data, 64, out=np.empty(63, np.uint8))
    with pytest.raises(ValueError, match="contiguous"):
        codecs.encode(codecs.Raw(), np.zeros((8, 8), np.uint8)[:, ::2])
    with pytest.raises(ValueError, match="applied"):
        codecs.apply([(codecs.Derive("BF16"), b"")], data)
    with pytest.raises(FormatError, match="logical bytes"):
        codecs.decode(codecs.Raw(), b"", codecs.CHUNK + 1)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("lzma", {}),
        ("raw", {"word": 4}),
        ("planes", {}),
        ("planes", {"word": 3}),
        ("planes", {"word": True}),
        ("planes", {"word": 4, "map": "rot13"}),
        ("planes", {"word": 4, "map": 7}),
        ("xor", {"word": 4, "shift": 1}),
        ("sub", {"word": 4, "context": [23, 100]}),
        ("sub", {"word": 4, "context": [23, 100, 116]}),
        ("sub", {"word": 4, "context": [23, 100, 99]}),
        ("sub", {"word": 4, "context": [31, 0, 1]}),
        ("sub", {"word": 4, "context": [23, 250, 256]}),
        ("sub", {"word": 4, "context": [23, -1, 4]}),
        ("sub", {"word": 4, "context": "23"}),
        ("prefix", {"word": 4}),
        ("prefix", {"word": 1, "bits": 8}),
        ("prefix", {"word": 4, "bits": 13}),
        ("prefix", {"word": 4, "bits": 9, "group": 255}),
        ("derive", {}),
        ("derive", {"to": "F64"}),
    ],
)
def test_parameters_are_not_trusted(name: str, params: dict[str, object]) -> None:
    with pytest.raises(FormatError):
        codecs.codec(name, params)


def test_the_examples_in_the_docs_run() -> None:
    result = doctest.testfile(str(DOCS / "codecs.md"), module_relative=False)
    assert result.attempted >= 10
    assert result.failed == 0


def test_payload_bytes_do_not_change() -> None:
    """Payloads of released versions must decode forever; these are small enough to see."""
    base = np.arange(12, dtype="<u4").view(np.uint8)
    data = np.arange(3, 15, dtype="<u4").view(np.uint8)
    assert codecs.encode(codecs.Sub(4), data, base).tobytes().hex() == "00" + "0106" + "0100" * 3
    narrow = "14" + "00" + "436587a9cbed" + "00" * 8 + "00"
    assert codecs.decode(codecs.Planes(4), bytes.fromhex(narrow), 48).tobytes() == data.tobytes()
    assert codecs.encode(codecs.Planes(4), data).tobytes().hex() == "00" + "00" + data[::4].tobytes().hex() + "0100" * 3
