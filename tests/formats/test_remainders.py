"""Remainders of bit patterns: a neighbour is found again, and a device computes the same ones."""

from __future__ import annotations

import numpy as np
import pytest

from ckptstore.formats import remainders

RNG = np.random.default_rng(0)
WORDS = RNG.integers(0, 1 << 32, 70_003, np.uint32)
WORDS[:6] = [0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x7FC00000]


def test_the_remainder_is_that_of_the_signed_pattern() -> None:
    packed = remainders.pack(WORDS)
    assert len(packed) == remainders.packed_size(len(WORDS))
    signed = WORDS.view(np.int32).astype(np.int64)
    assert (remainders.unpack(packed, 0, len(WORDS)) == signed % 3).all()
    assert (remainders.unpack(packed, 7, 40_001) == signed[7:40_001] % 3).all()


@pytest.mark.parametrize("count", [0, 1, 4, 5, 6, 70_003])
def test_torch_computes_the_same(count: int) -> None:
    """The device's part, on the CPU."""
    torch = pytest.importorskip("torch")
    from ckptstore.frameworks import torch_recomputed

    found = torch_recomputed.pack(torch.from_numpy(WORDS[:count].view(np.int32)))
    assert (found.numpy() == remainders.pack(WORDS[:count])).all()


def test_torch_computes_the_same_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from ckptstore.frameworks import torch_recomputed

    monkeypatch.setattr(torch_recomputed, "_BATCH", 5 * 1000)
    tensors = [torch.from_numpy(WORDS[:1003].view(np.float32)), torch.from_numpy(WORDS[1003:].view(np.float32))]
    sources = [torch_recomputed.TorchSource(one) for one in tensors]
    found = torch_recomputed.remainders(sources).tensor
    assert (found.numpy() == remainders.pack(WORDS)).all()


def test_neighbours_are_settled() -> None:
    """Sums whose change is one unit in its last place too large or too small, also where the sum is far smaller."""
    old = RNG.normal(0, 1, 50_000).astype(np.float32)
    change = (RNG.normal(0, 1, 50_000) * 10.0 ** RNG.uniform(-8, 0, 50_000)).astype(np.float32)
    change[:20_000] = -old[:20_000] * (1 + 10.0 ** RNG.uniform(-6, -1, 20_000)).astype(np.float32)
    true = old + change
    change.view(np.int32)[:] += RNG.integers(-1, 2, 50_000, np.int32)
    words, wanted = (old + change).view(np.uint32).copy(), true.view(np.uint32)
    different = int((words != wanted).sum())
    power = (words & 0x7FFFFF) == 0  # its neighbours may have the same remainder: the spacing differs on its two sides
    digits = remainders.unpack(remainders.pack(wanted), 0, 50_000)
    blind = words.copy()
    found = remainders.settle(words, digits, old.view(np.uint32), lambda indices: change[indices])
    assert found == different > 10_000
    assert (words == wanted)[~power].all()
    remainders.settle(blind, digits, old.view(np.uint32))
    assert (blind == wanted).mean() > 0.99  # without the changes: not where a sum was rounded to even


def test_numbers_that_are_no_sums_are_left_alone() -> None:
    words = np.array([0x7FC00000, 0x7F800000, 0xFF800000, 0, 0x80000000, 1], np.uint32)
    before = words.copy()
    assert remainders.settle(words, remainders.unpack(remainders.pack(words), 0, 6), words.copy()) == 0
    assert (words == before).all()
