"""Trees of many ranks: merged, and taken apart again for each rank."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.errors import FormatError, UnsupportedStateError
from ckptstore.formats import jsontext, ranked
from ckptstore.formats.state import flatten, unflatten
from tests.forms import short_or

LEAVES = st.one_of(st.none(), st.booleans(), st.integers(0, 2), st.sampled_from([0.0, -0.0, 1.0, "a", "b", b"x"]))
KEYS = st.sampled_from(["a", "b", "c", "$odd", "d.e"])
STATES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(st.sampled_from([1, True, "a", 2.5]), inner, max_size=3),
        st.tuples(inner, inner),
    ),
    max_leaves=12,
)


def text(tree: Any) -> bytes:
    return jsontext.dumps(tree)


@settings(max_examples=short_or(120, 300), deadline=None)
@given(st.lists(STATES, min_size=1, max_size=4), st.lists(st.integers(0, 3), min_size=1, max_size=6))
def test_every_rank_gets_its_own_back(states: list[Any], ranks: list[int]) -> None:
    trees = [flatten(states[rank % len(states)]).tree for rank in ranks]
    merged = ranked.merge(trees)
    for rank, tree in enumerate(trees):
        assert text(ranked.of_rank(merged, rank)) == text(tree)
    assert ranked.rank_count(merged) in (None, len(trees))
    assert (ranked.rank_count(merged) is None) == (len({text(tree) for tree in trees}) == 1)
    unflatten(ranked.of_rank(merged, None), lambda name, origin: name)  # what no rank reads is a state, too


def test_what_is_alike_stands_once_and_the_rest_for_each() -> None:
    merged = ranked.merge([flatten({"step": 7, "seed": seed}).tree for seed in (5, 6, 5)])
    assert merged == {"step": 7, "seed": {"$ranks": [[0, 1, 0], [5, 6]]}}  # SPEC.md 3.3


def test_ranks_of_a_pipeline_have_different_members_and_one_reader_has_all() -> None:
    merged = ranked.merge([{"first": 1, "both": 2}, {"both": 2, "last": 3}])
    assert ranked.of_rank(merged, None) == {"first": 1, "both": 2, "last": 3}
    assert list(ranked.of_rank(merged, 1)) == ["both", "last"]


def test_more_ranks_than_before_begin_again_from_the_first() -> None:
    merged = ranked.merge([1, 2])
    assert [ranked.of_rank(merged, rank) for rank in range(4)] == [1, 2, 1, 2]


def test_true_and_one_are_two_values() -> None:
    assert ranked.merge([{"a": 1}, {"a": True}, {"a": 1.0}])["a"] == {"$ranks": [[0, 1, 2], [1, True, 1.0]]}


def test_values_too_deep_for_their_ranks_are_refused() -> None:
    def nested(value: int) -> Any:
        tree: Any = value
        for _ in range(198):
            tree = [tree]
        return tree

    with pytest.raises(UnsupportedStateError, match="nested too deep"):
        ranked.merge([nested(1), nested(2)])


@pytest.mark.parametrize(
    "body",
    [
        '{"$ranks": 1}',
        '{"$ranks": [[], []]}',
        '{"$ranks": [[0], []]}',
        '{"$ranks": [[1], [1]]}',
        '{"$ranks": [[true], [1, 2]]}',
        '{"$ranks": [[-1], [1]]}',
        '{"$ranks": [[0, 0], [{"$ranks": [[0, 0], [1]]}]]}',
        '{"a": {"$ranks": [[0], [1]]}, "b": {"$ranks": [[0, 0], [1]]}}',
        '[{"$ranks": [[null, 0], [1]]}]',
        '{"$tuple": {"$ranks": [[null, 0], [1]]}}',
    ],
)
def test_what_is_no_tree_of_ranks_is_refused(body: str) -> None:
    with pytest.raises(FormatError):
        ranked.of_rank(json.loads(body), 0)
