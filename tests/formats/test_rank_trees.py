"""Trees of many ranks: merged, and taken apart again for each rank."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.errors import FormatError, UnsupportedStateError
from ckptstore.formats import jsontext
from ckptstore.formats.states import rank_trees
from ckptstore.formats.states.state import flatten, paths, tensor_names, unflatten
from ckptstore.formats.states.tree import decode_key
from ckptstore.formats.states.tree_union import union_of
from tests.forms import short_or
from tools.conformance.page import ranks as page

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
    merged = rank_trees.merge(trees)
    for rank, tree in enumerate(trees):
        assert text(rank_trees.of_rank(merged, rank)) == text(tree)
    assert rank_trees.rank_count(merged) in (None, len(trees))
    assert (rank_trees.rank_count(merged) is None) == (len({text(tree) for tree in trees}) == 1)
    # The part that no rank reads is a state, too.
    unflatten(rank_trees.of_rank(merged, None), lambda name, origin: name)


def shuffled(state: Any, chance: random.Random, *, drops: float = 0.0) -> Any:
    """The same state with the members of its dicts in another order, without some of them."""
    if isinstance(state, dict):
        keys = [key for key in state if chance.random() >= drops]
        chance.shuffle(keys)
        return type(state)({key: shuffled(state[key], chance, drops=drops) for key in keys})
    if isinstance(state, list | tuple):
        return type(state)(shuffled(element, chance, drops=drops) for element in state)
    return state


TENSORS = st.builds(lambda: np.ones(2))
WITH_TENSORS = st.recursive(
    st.one_of(LEAVES, TENSORS, TENSORS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(st.sampled_from([1, True, "a", 2.5, (1, "x")]), inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict),
        st.tuples(inner, inner),
        st.lists(st.integers(0, 9), min_size=32, max_size=33),
    ),
    max_leaves=16,
)
"""Names are by path, so that tensors of two ranks at one place are one tensor of the run."""


@settings(max_examples=short_or(100, 1500), deadline=None)
@given(st.lists(WITH_TENSORS, min_size=2, max_size=4), st.randoms(use_true_random=False))
def test_the_union_of_any_states_is_that_of_the_page(states: list[Any], chance: random.Random) -> None:
    """And everything that is not in it is reported: nothing vanishes silently."""
    trees = [flatten(one).tree for one in states]
    merged = rank_trees.merge(trees)
    union = rank_trees.of_rank(merged, None)
    assert text(union) == text(page.unranked(merged)) == text(page.union(trees))
    unflatten(union, lambda name, origin: name)
    names = set(tensor_names(union))
    there = {path for path, _ in paths(union)}
    hidden = set(rank_trees.left_out(merged))
    for tree in trees:
        for path, name in paths(tree):
            assert name in names or name in hidden or path in there
        assert hidden.isdisjoint(names)
    again = rank_trees.merge([flatten(shuffled(one, chance)).tree for one in states])
    assert unordered(rank_trees.of_rank(again, None)) == unordered(union)


def unordered(tree: Any) -> Any:
    """Equal for trees whose members have another order, and for keys that are equal in Python."""
    if isinstance(tree, list):
        return [unordered(element) for element in tree]
    if not isinstance(tree, dict):
        return repr(tree)
    for tag in ("$dict", "$odict", "$counter"):
        if list(tree) == [tag] and isinstance(tree[tag], list):
            return tag, {decode_key(key): unordered(value) for key, value in tree[tag]}
    return {key: unordered(value) for key, value in tree.items()}


@settings(max_examples=short_or(100, 1500), deadline=None)
@given(st.dictionaries(KEYS, WITH_TENSORS, max_size=4), st.integers(2, 4), st.randoms(use_true_random=False))
def test_parts_of_ranks_are_united(whole: Any, count: int, chance: random.Random) -> None:
    """Each rank has some members of one state, at any depth and in any order: the union has every tensor of a rank."""
    states = [shuffled(whole, chance, drops=0.3) for _ in range(count)]
    trees = [flatten(one).tree for one in states]
    merged = rank_trees.merge(trees)
    union = rank_trees.of_rank(merged, None)
    assert rank_trees.left_out(merged) == []
    assert set(tensor_names(union)) == {name for tree in trees for name in tensor_names(tree)}
    expected = {path for tree in trees for path, _ in paths(tree)}
    assert {path for path, _ in paths(union)} == expected


def test_each_ranks_own_tensor_represents_those_of_the_others() -> None:
    merged = rank_trees.merge([{"rng": {"$t": f"rng@{rank}"}, "w": {"$t": "w"}} for rank in range(3)])
    assert rank_trees.of_rank(merged, None) == {"rng": {"$t": "rng@0"}, "w": {"$t": "w"}}
    assert rank_trees.left_out(merged) == []


@pytest.mark.parametrize(
    ("trees", "union"),
    [
        ([{"a": 1, "b": 2}, {"b": 3, "a": 1, "c": 4}], {"a": 1, "b": 2, "c": 4}),
        ([None, {"$t": "w"}], {"$t": "w"}),
        ([[1, 2], [3, 4, 5]], [1, 2]),
        ([[1, {"a": 1}], [3, {"b": 1}, 5]], [1, {"a": 1, "b": 1}, 5]),
        ([[], [{"$t": "w"}]], [{"$t": "w"}]),
        ([{"$tuple": [1]}, [{"$t": "w"}], [2, {"$t": "v"}]], [{"$t": "w"}, {"$t": "v"}]),
        ([{}, {"$dict": [[1, 2]]}, {"a": 3}], {"$dict": [[1, 2], ["a", 3]]}),
        ([{"$dict": [[1, 2]]}, {"$dict": [[True, 3], [1.5, 4]]}], {"$dict": [[1, 2], [1.5, 4]]}),
        ([{"$odict": {"a": 1}}, {"b": 1}], {"$odict": {"a": 1}}),
        (
            [{"$dict": [[{"$float": "nan"}, 1]]}, {"$dict": [[2, 0], [{"$float": "nan"}, 3]]}],
            {"$dict": [[{"$float": "nan"}, 1], [2, 0]]},
        ),
    ],
)
def test_unions(trees: list[Any], union: Any) -> None:
    assert text(union_of(trees)) == text(union)
    assert text(rank_trees.of_rank(rank_trees.merge(trees), None)) == text(union)


def test_a_tensor_without_a_place_is_reported() -> None:
    merged = rank_trees.merge([{"x": {"a": {"$t": "x.a"}}, "y": 1}, {"y": 1, "x": [{"$t": "x.0"}, {"$a": "x.1"}]}])
    assert rank_trees.left_out(merged) == ["x.0", "x.1"]
    unnamed = {"$ranks": [[0, 0], [{"$t": "w"}, {"$t": "v"}]]}  # a node that is not a rank's
    assert rank_trees.left_out(unnamed) == ["v"]
    assert rank_trees.left_out({"x": {"$ranks": [[None, None], [{"$t": "w"}]]}}) == ["w"]


@pytest.mark.parametrize(
    "nodes",
    [
        '[{"$dict": [[1, 2], [1, 3]]}, {"$dict": [[2, 2]]}]',
        '[{"$dict": [[1, 2], [true, 3]]}, {"$dict": [[2, 2]]}]',
        '[{"$dict": {"a": 1}}, {"$dict": [[2, 2]]}]',
        '[{"$dict": {"a": 1}}, {"b": 1}]',
        '[{"$dict": [1]}, {"$dict": [[2, 2]]}]',
        '[{"$dict": [[1, 2, 3]]}, {"$dict": [[2, 2]]}]',
        '[{"$t": "w", "a": 1}, {"b": 1}]',
        '[{"$dict": [[[], 1]]}, {"$dict": [[2, 2]]}]',
        '[{"$dict": 1}, {"$dict": [[2, 2]]}]',
        '[{"$tuple": 1}, {"$tuple": [2]}]',
        '[{"$odict": 1}, {"$odict": {}}]',
        '[{"$t": 1}, 1]',
        '[{"a": {"$t": []}}, 1]',
    ],
)
def test_nodes_that_are_none_are_refused(nodes: str) -> None:
    with pytest.raises(FormatError):
        rank_trees.of_rank({"$ranks": [[0, 1], json.loads(nodes)]}, None)


def test_a_union_is_nested_no_deeper_than_a_tree() -> None:
    """Pairs lie deeper than members: so a union may be too deep although no node is."""
    deep: Any = {"$t": "w"}
    for _ in range(199):
        deep = {"a": deep}
    other: Any = {"$dict": [["a", deep["a"]["a"]], [1, 2]]}
    for tree in (deep, other):
        unflatten(tree, lambda name, origin: name)
    with pytest.raises(FormatError, match="nested deeper"):
        unflatten(union_of([deep, other]), lambda name, origin: name)
    with pytest.raises(FormatError, match="nested deeper"):
        union_of([deep, deep], 10)


def test_equal_parts_are_stored_once_and_the_rest_for_each_rank() -> None:
    merged = rank_trees.merge([flatten({"step": 7, "seed": seed}).tree for seed in (5, 6, 5)])
    assert merged == {"step": 7, "seed": {"$ranks": [[0, 1, 0], [5, 6]]}}  # SPEC.md 3.3


def test_ranks_of_a_pipeline_have_different_members_and_one_reader_has_all() -> None:
    merged = rank_trees.merge([{"first": 1, "both": 2}, {"both": 2, "last": 3}])
    assert rank_trees.of_rank(merged, None) == {"first": 1, "both": 2, "last": 3}
    assert list(rank_trees.of_rank(merged, 1)) == ["both", "last"]


def test_more_ranks_than_before_begin_again_from_the_first() -> None:
    merged = rank_trees.merge([1, 2])
    assert [rank_trees.of_rank(merged, rank) for rank in range(4)] == [1, 2, 1, 2]


def test_true_and_one_are_two_values() -> None:
    assert rank_trees.merge([{"a": 1}, {"a": True}, {"a": 1.0}])["a"] == {"$ranks": [[0, 1, 2], [1, True, 1.0]]}


def test_values_too_deep_for_their_ranks_are_refused() -> None:
    def nested(value: int) -> Any:
        tree: Any = value
        for _ in range(198):
            tree = [tree]
        return tree

    with pytest.raises(UnsupportedStateError, match="nested too deep"):
        rank_trees.merge([nested(1), nested(2)])


@pytest.mark.parametrize("leaf", [{"$t": "w"}, {"$int": "9" * 30}, {"$float": "nan"}, 5, [], {}])
@pytest.mark.parametrize("tag", [None, "$tuple", "$dict"])
def test_equal_parts_too_deep_for_a_ranks_part_are_refused(leaf: Any, tag: str | None) -> None:
    """A merged tree can be taken apart again: by each rank, and by a reader that is not a rank."""
    wraps = {
        None: lambda node: {"a": node},
        "$tuple": lambda node: {"$tuple": [node]},
        "$dict": lambda node: {"$dict": [[1, node]]},
    }

    def refused(levels: int) -> bool:
        tree = leaf
        for _ in range(levels):
            tree = wraps[tag](tree)
        alike = [{"d": tree, "seed": 1}] * 2
        assert rank_trees.merge(alike) == alike[0]
        try:
            merged = rank_trees.merge([{"d": tree, "seed": 1}, {"d": tree, "seed": 2}])
        except UnsupportedStateError:
            with pytest.raises(FormatError, match="deeper than 200"):
                rank_trees.of_rank({"d": tree, "seed": {"$ranks": [[0, 1], [1, 2]]}}, None)
            return True
        for rank in (0, 1, None):
            assert rank_trees.of_rank(merged, rank)["d"] == tree
        return False

    found = {levels: refused(levels) for levels in range(60, 202, short_or(5, 1))}
    first = min(levels for levels, no in found.items() if no)
    found |= {levels: refused(levels) for levels in range(first - 4, first)}  # every depth around the limit
    first = min(levels for levels, no in found.items() if no)
    assert {levels for levels, no in found.items() if no} == {levels for levels in found if levels >= first}


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
def test_an_invalid_tree_of_ranks_is_refused(body: str) -> None:
    with pytest.raises(FormatError):
        rank_trees.of_rank(json.loads(body), 0)


def deep(value: Any, around: int) -> Any:
    """A value with so many arrays around it."""
    for _ in range(around):
        value = [value]
    return value


NAN = {"$float": "nan"}
READ_TWICE: dict[str, tuple[Any, Any]] = {
    "nodes that are the same": ({"a": {"$ranks": [[0, 1], [5, 5]]}}, {"a": 5}),
    "a place for all": ({"a": {"$ranks": [[0, 0], [5]]}}, {"a": 5}),
    "beside another member": ({"a": {"$ranks": 1, "b": 1}, "c": {"$ranks": [[0], [2]]}}, None),
    "as the body of a tag": ({"$odict": {"$ranks": [[0, 1], [{"x": 1}, {"y": 2}]]}}, {"$odict": {"x": 1, "y": 2}}),
    "a key twice": ({"$ranks": [[0, 1], [{"$dict": [[1, 2], [True, 3]]}, {"$dict": [[1, 5]]}]]}, FormatError),
    "a NaN twice": ({"$ranks": [[0, 1], [{"$dict": [[NAN, 2], [NAN, 3]]}, {"$dict": [[1, 5]]}]]}, FormatError),
    "a key twice alone": ({"$ranks": [[0, 0], [{"$dict": [[1, 2], [True, 3]]}]]}, {"$dict": [[1, 2], [True, 3]]}),
    "a NaN twice, left alone": (
        {"$ranks": [[0, 1], [{"$dict": [[NAN, 2], [NAN, 3]]}, [1]]]},
        {"$dict": [[NAN, 2], [NAN, 3]]},
    ),
    "200 around null": ([deep(None, 199), {"$ranks": [[0], [1]]}], [deep(None, 199), 1]),
    "201 around null": ([deep(None, 200), {"$ranks": [[0], [1]]}], FormatError),
    "201 around an empty array": ([deep([], 200), {"$ranks": [[0], [1]]}], FormatError),
}


@pytest.mark.parametrize("name", READ_TWICE)
def test_sentences_about_the_union_that_had_two_readings(name: str) -> None:
    """SPEC 3.3 and 3.1: ours and the page's reader choose the same reading."""
    tree, wanted = READ_TWICE[name]
    if wanted is FormatError:
        with pytest.raises(FormatError):
            rank_trees.of_rank(tree, None)
        with pytest.raises(page.RefusedError):
            page.unranked(tree)
        return
    wanted = wanted or {"a": tree["a"], "c": 2}
    assert text(rank_trees.of_rank(tree, None)) == text(wanted) == text(page.unranked(tree))
