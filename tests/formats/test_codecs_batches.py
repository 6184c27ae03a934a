"""Chunks that are encoded together have the payloads that each of them has alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.formats import codecs
from ckptstore.formats.codecs import chunk_batches
from tests.formats import codec_data
from tests.formats.codec_data import CHANGES, CLASSES, base_of, codecs_of, pair
from tests.forms import short_or

form = codec_data.every_form
COUNTS = [0, 1, 3, 47, 48, 511, 513, 5000]


def jobs_of(seed: int, number: int) -> list[codecs.ChunkJob]:
    """Chunks of every codec and class of data, with bytes after the last word; half of them equal their base."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(number):
        dtype = str(rng.choice(["F32", "BF16", "U8", "I64"]))
        found = codecs_of(dtype)
        codec = found[int(rng.integers(len(found)))]
        change = str(rng.choice(["same", *CHANGES]))
        base, chunk = pair(
            dtype, str(rng.choice(list(CLASSES))), change, int(rng.choice(COUNTS)), int(rng.integers(99))
        )
        cut = int(rng.integers(4)) if codec.base_ratio < 2 and codec.name != "prefix" else 0
        end = max(0, len(chunk) - cut)
        made.append(codecs.ChunkJob(codec, chunk[:end], base_of(codec, base[:end]), int(rng.integers(3))))
    return made


@settings(deadline=None, max_examples=short_or(15, 200))
@given(st.integers(0, 10**6))
def test_payloads_are_those_of_single_chunks(seed: int) -> None:
    jobs = jobs_of(seed, 40)
    alone = [codecs.encode(codec, chunk, base, level=level).tobytes() for codec, chunk, base, level in jobs]
    assert [payload.tobytes() for payload in codecs.encode_all(jobs)] == alone


def test_every_kind_that_is_encoded_together() -> None:
    rng = np.random.default_rng(1)
    base = rng.normal(0, 0.02, 2000).astype("<f4").view(np.uint8)
    chunk = base.copy()
    chunk[::9] += 1
    jobs = [
        codecs.ChunkJob(codec, data, base[: len(data)] if codec.base_ratio else None, level)
        for codec in chunk_batches.KINDS
        for data in (chunk, chunk[:1003], chunk[:5], base)
        for level in (0, 1)
    ]
    alone = [codecs.encode(codec, data, before, level=level).tobytes() for codec, data, before, level in jobs]
    assert [payload.tobytes() for payload in codecs.encode_all(jobs)] == alone
    assert sum(not payload for payload in alone) == 12, "equal to their base, in words of several bytes"


def test_large_chunks_and_a_base_of_another_size() -> None:
    chunk = np.arange(1 << 16, dtype="<u4").view(np.uint8)
    (payload,) = codecs.encode_all([codecs.ChunkJob(codecs.Planes(4), chunk)])
    assert payload.tobytes() == codecs.encode(codecs.Planes(4), chunk).tobytes()
    assert codecs.encode_all([]) == []
    with pytest.raises(ValueError, match="sub needs 8 bytes of base"):
        codecs.encode_all([codecs.ChunkJob(codecs.Sub(4), chunk[:8], chunk[:7])])
