"""Long chains of one chunk: applied in parts by several threads, with the same bytes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptstore
from ckptstore import DeltaOptions, RestoreBound
from ckptstore.errors import CorruptSegmentError
from ckptstore.formats import codecs
from ckptstore.formats.checksums import chunk_hash
from ckptstore.formats.codecs import Policy
from ckptstore.formats.segment_files.segment import TensorEntry
from ckptstore.restore.chains import chain
from ckptstore.write import delta_encoding


@pytest.mark.parametrize("names", [("sub",), ("xor",), ("sub", "xor")], ids=str)
def test_a_long_chain_of_one_chunk(names: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    state = {"w": rng.normal(0, 1, 700_001).astype("<f4"), "odd": rng.integers(0, 255, 3 << 20, np.uint8)}
    state["w"][:9] = [np.nan, -np.nan, np.inf, -0.0, 0, 1e-45, -1e-45, 3e38, 1]
    store = ckptstore.open(tmp_path / "store", create=True)
    truth: dict[int, Any] = {}
    bound = RestoreBound(times=None)
    for step in range(1, 25):
        truth[step] = {key: array.copy() for key, array in state.items()}
        state["w"].view("<u4")[rng.integers(0, 700_001, 50_000)] += rng.integers(0, 1 << 32, 50_000, np.uint32)
        state["odd"][rng.integers(0, 3 << 20, 900)] ^= 77
    policy = Policy(codecs=("planes", *names))
    with store.writer(deltas=DeltaOptions(interval=1, bound=bound, policy=policy)) as writer:
        for step, saved in truth.items():
            writer.save(saved, step)
    assert store.checkpoint(24).kind == "delta"
    seen = []
    original = chain.apply_in_parts

    def counted(parts: Any, *args: Any, **more: Any) -> None:
        seen.append(len(parts))
        original(parts, *args, **more)

    monkeypatch.setattr(chain, "apply_in_parts", counted)
    for threads in (1, 4):
        seen.clear()
        for step in (24, 9, 2):
            found = store.load(step, threads=threads)
            into = {key: np.zeros_like(array) for key, array in truth[step].items()}
            store.load(step, threads=threads, into=into)
            for key, array in truth[step].items():
                assert found[key].tobytes() == into[key].tobytes() == array.tobytes(), (threads, step, key)
        assert bool(seen) == (threads == 4)
        assert all(2 <= count <= 4 for count in seen)


def test_the_sum_is_compared_with_what_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every payload and digest is as stored; the hash of the last result is not."""
    rng = np.random.default_rng(3)
    weight = rng.normal(0, 1, 300_000).astype("<f4")
    store = ckptstore.open(tmp_path / "store", create=True)
    append, applied = delta_encoding.append_tensor, chain.apply_in_parts
    seen: list[int] = []

    def misled(*arguments: Any) -> TensorEntry:
        entry = append(*arguments)
        return replace(entry, chunks=tuple(replace(one, decoded_hash=chunk_hash(b"other")) for one in entry.chunks))

    def counted(parts: Any, *args: Any, **more: Any) -> None:
        seen.append(len(parts))
        applied(parts, *args, **more)

    policy = Policy(codecs=("planes", "sub", "xor"))
    with store.writer(deltas=DeltaOptions(interval=1, bound=RestoreBound(times=None), policy=policy)) as writer:
        for step in range(1, 25):
            if step == 24:
                monkeypatch.setattr(delta_encoding, "append_tensor", misled)
            writer.save({"w": weight}, step)
            weight.view("<u4")[rng.integers(0, 300_000, 900)] += 1
    monkeypatch.setattr(chain, "apply_in_parts", counted)
    store.load(23, threads=4)
    with pytest.raises(CorruptSegmentError, match=r"'w': chunk 0.* were saved in step 24"):
        store.load(24, threads=4)
    assert len(seen) == 2


@settings(deadline=None)
@given(
    st.sampled_from([codecs.Xor(1), codecs.Xor(4), codecs.Sub(1), codecs.Sub(2), codecs.Sub(8)]),
    st.lists(st.binary(min_size=83, max_size=83), min_size=3, max_size=6),
)
def test_sums_are_the_chain(codec: codecs.Codec, images: list[bytes]) -> None:
    states = [np.frombuffer(image, np.uint8) for image in images]
    payloads = [codecs.encode(codec, new, old) for old, new in pairwise(states)]
    out = states[0].copy()
    later = np.zeros(83, np.uint8)
    codecs.decode(codec, payloads[0], 83, out, out)
    for payload in payloads[1:]:
        codecs.decode(codec, payload, 83, later, later)
    codecs.add(codec, later, out)
    assert out.tobytes() == images[-1]


def test_values_that_are_no_sum() -> None:
    zeros = np.zeros(8, np.uint8)
    for codec in (codecs.Planes(4), codecs.Sub(4, codecs.Context(24, 0, 3))):
        assert not codec.additive
        with pytest.raises(ValueError, match="do not add up"):
            codecs.add(codec, zeros, zeros)
    with pytest.raises(ValueError, match="8 and 4 bytes"):
        codecs.add(codecs.Xor(4), zeros, zeros[:4])
