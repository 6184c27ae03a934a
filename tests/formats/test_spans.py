"""Sets of whole numbers that take memory by their gaps, against plain sets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.formats.history.spans import Spans

MOVES = st.lists(st.tuples(st.sampled_from(["add", "discard"]), st.integers(0, 40)), max_size=60)


@given(st.lists(st.integers(0, 60)), MOVES)
def test_it_is_a_set(begin: list[int], moves: list[tuple[str, int]]) -> None:
    spans, plain = Spans(begin), set(begin)
    before, copied = set(plain), spans.copy()
    for name, number in moves:
        getattr(spans, name)(number)
        getattr(plain, name)(number)
        assert list(spans) == sorted(plain)
        assert len(spans) == len(plain)
        assert spans.highest == max(plain, default=None)
        assert [one in spans for one in range(62)] == [one in plain for one in range(62)]
    assert spans == plain
    assert spans == Spans(plain)
    assert copied == before  # whatever happened to the other
    spans.clear()
    assert not spans
    assert spans.highest is None


@pytest.mark.parametrize("apart", [1, 10])
def test_evenly_spaced_numbers_are_one_span(apart: int) -> None:
    steps = range(apart, 1000 * apart, apart)
    spans = Spans()
    for step in steps:
        spans.add(step)
    assert spans.spans == Spans(steps).spans == 1


def test_a_run_that_keeps_some_has_a_span_for_each_gap() -> None:
    spans = Spans()
    for step in range(1, 10_001):
        if step % 1000:
            spans.add(step)
    assert len(spans) == 9_990
    assert spans.spans == 10
    for step in range(1000, 10_001, 1000):  # and closes them, in the end
        spans.add(step)
    assert spans.spans == 1
    spans.discard(5000)
    assert spans.spans == 2


def test_only_whole_numbers_are_in_it() -> None:
    assert "1" not in Spans([1])
    assert 1.5 not in Spans([1, 2])
