"""Copies past the caches are correct: every byte, at every alignment, and no byte beside them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.formats import uncached_copy
from tests.kernel_forms import KINDS

NOISE = np.random.default_rng(0).integers(0, 256, 1 << 14, np.uint8)


@pytest.mark.parametrize("form", KINDS)
@settings(deadline=None)
@given(length=st.integers(0, 3000), source=st.integers(0, 130), target=st.integers(0, 130))
def test_every_alignment(form: str, length: int, source: int, target: int) -> None:
    stream = uncached_copy.stream.compiled if form == "compiled" else uncached_copy.stream.reference
    data = NOISE[source : source + length]
    data.flags.writeable = False
    memory = np.full(target + length + 200, 7, np.uint8)
    stream(data, memory[target : target + length])
    assert np.array_equal(memory[target : target + length], data)
    assert (memory[:target] == 7).all()
    assert (memory[target + length :] == 7).all()


def test_it_is_used_for_large_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    monkeypatch.setattr(uncached_copy, "stream", lambda source, out: (used.append(len(out)), np.copyto(out, source)))
    data = np.arange(uncached_copy.LEAST, dtype=np.uint32).view(np.uint8)[: uncached_copy.LEAST]
    out = np.zeros_like(data)
    uncached_copy.copy(data, out)  # which also tries the kernels, if no test did before
    used.clear()
    out[:] = 0
    uncached_copy.copy(data, out)
    uncached_copy.copy(data[1:], out[1:])
    assert np.array_equal(out, data)
    assert used == [uncached_copy.LEAST]


@pytest.mark.parametrize("form", KINDS)
@settings(deadline=None)
@given(
    pieces=st.lists(st.tuples(st.integers(0, 900), st.integers(0, 70), st.integers(0, 70))), past=st.integers(0, 999)
)
def test_many_pieces_by_address(form: str, pieces: list[tuple[int, int, int]], past: int) -> None:
    moves = uncached_copy.moves.compiled if form == "compiled" else uncached_copy.moves.reference
    memory = np.full(sum(length + gap for length, gap, _ in pieces) + 1, 7, np.uint8)
    wanted = memory.copy()
    rows, end = [], 0
    for length, gap, source in pieces:
        rows.append((memory.ctypes.data + end + gap, NOISE.ctypes.data + source, length))
        wanted[end + gap : end + gap + length] = NOISE[source : source + length]
        end += gap + length
    to, at, lengths = (np.array([row[column] for row in rows], np.int64) for column in range(3))
    moves(to, at, lengths, past)
    assert np.array_equal(memory, wanted)
