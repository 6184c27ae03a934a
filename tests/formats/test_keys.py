"""Which keys are the same key (SPEC.md 3.1): exact numbers, by two implementations, and against random keys."""

from __future__ import annotations

import contextlib
import json
import math
import struct
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.errors import FormatError, UnsupportedStateError
from ckptstore.formats import dtypes, jsontext
from ckptstore.formats.states.keys import identity
from ckptstore.formats.states.state import flatten, unflatten
from ckptstore.formats.states.tree import decode_key
from ckptstore.formats.states.tree_union import union_of
from tests.forms import short_or
from tools.conformance.page.ranks import same_key, unranked

SCALAR_DTYPES = [name for name in dtypes.DTYPES if name not in ("C32", "F4_E2M1_X2")]
INTEGERS = st.one_of(st.integers(-3, 3), st.integers(-(2**54), 2**54), st.sampled_from([2**63, 2**127, -(2**127)]))
FLOATS = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, 0.5, math.inf, -math.inf, math.nan, 2.0**53, 2.0**127]), st.floats()
)


@st.composite
def numpy_scalars(draw: st.DrawFn) -> np.generic:
    dtype = dtypes.DTYPES[draw(st.sampled_from(SCALAR_DTYPES))]
    if dtype.name == "BOOL":
        return np.bool_(draw(st.booleans()))
    if draw(st.booleans()):
        image = draw(st.binary(min_size=dtype.itemsize, max_size=dtype.itemsize))
        return np.frombuffer(image, dtype.numpy)[0]  # type: ignore[no-any-return]
    small = draw(st.sampled_from([0, 1, 2]))
    return np.array([small]).astype(dtype.numpy)[0]  # type: ignore[no-any-return]


KEYS: st.SearchStrategy[Any] = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        INTEGERS,
        FLOATS,
        st.builds(complex, FLOATS, st.one_of(st.just(0.0), FLOATS)),
        numpy_scalars(),
        st.sampled_from(["", "1", "a", "\ud800", b"", b"1", b"a"]),
    ),
    lambda inner: st.lists(inner, max_size=2).map(tuple),
    max_leaves=4,
)


def node_of(key: Any) -> Any:
    """A key in the form of a tree."""
    return flatten({key: 0, 0.5j: 0}).tree["$dict"][0][0]


def told(one: Any, other: Any) -> bool:
    """The page's sentence, applied to values."""
    if isinstance(one, tuple) or isinstance(other, tuple):
        both = isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other)
        return both and all(map(told, one, other))
    pairs = [parts_of(key) for key in (one, other)]
    if None in pairs:
        return type(one) is type(other) and bool(one == other)
    if any(isinstance(part, str) and part == "nan" for pair in pairs for part in pair or ()):
        return jsontext.dumps(node_of(one)) == jsontext.dumps(node_of(other))
    return pairs[0] == pairs[1]


def parts_of(key: Any) -> tuple[Any, Any] | None:
    """(real, imaginary) of a number, exact."""
    value = key.item() if isinstance(key, np.generic) else key
    if not isinstance(value, bool | int | float | complex):
        return None
    parts = (value.real, value.imag) if isinstance(value, complex) else (value, 0)
    return tuple(Fraction(part) if math.isfinite(part) else repr(float(part)) for part in parts)  # type: ignore[return-value]


@settings(max_examples=short_or(400, 4000), deadline=None)
@given(KEYS, KEYS)
def test_two_implementations_and_the_page_agree(one: Any, other: Any) -> None:
    first, second = node_of(one), node_of(other)
    same = told(one, other)
    assert (identity(first) == identity(second)) is same
    assert same_key(first, second) is same
    for node in (first, second):
        assert identity(node) == identity(json.loads(json.dumps(node)))
        assert same_key(node, json.loads(json.dumps(node)))
    if same:
        assert hash(identity(first)) == hash(identity(second))


@settings(max_examples=short_or(150, 1500), deadline=None)
@given(st.lists(st.dictionaries(KEYS, st.integers(0, 3), max_size=4), min_size=2, max_size=3))
def test_unions_of_dicts_with_any_keys_agree(states: list[dict[Any, int]]) -> None:
    trees = [flatten({**state, 0.5j: 0}).tree for state in states]  # the last key makes pairs of all
    ranks = {"$ranks": [list(range(len(trees))), trees]}
    assert jsontext.dumps(union_of(trees)) == jsontext.dumps(unranked(ranks))


NAN = {"$float": "nan"}
FLOAT32_2_127 = {"$np": ["F32", struct.pack("<f", 2.0**127).hex()]}


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (True, 1, True),
        (1, 1.0, True),
        (-0.0, 0, True),
        (1, {"$complex": [1.0, 0.0]}, True),
        (1, {"$complex": [1.0, 1.0]}, False),
        ({"$np": ["C64", "0000803f00000000"]}, {"$np": ["F8_E4M3", "38"]}, True),
        ({"$np": ["F8_E8M0", "7f"]}, True, True),
        ({"$np": ["BF16", "803f"]}, {"$np": ["U64", "0100000000000000"]}, True),
        ({"$np": ["F32", "cdcccc3d"]}, 0.1, False),
        (2**53, float(2**53), True),
        ({"$int": str(2**53 + 1)}, float(2**53), False),
        ({"$int": str(2**127)}, FLOAT32_2_127, True),
        ({"$int": str(2**127 + 2**61 - 1)}, FLOAT32_2_127, False),  # the same to Python: of equal hash, and rounded
        (NAN, NAN, True),
        (NAN, {"$float": "7ff8000000000001"}, False),
        (NAN, {"$np": ["F64", "000000000000f87f"]}, False),
        ({"$complex": [NAN, 0.0]}, {"$complex": [NAN, 0.0]}, True),
        ({"$complex": [NAN, 0.0]}, NAN, False),
        ({"$tuple": [NAN, 1]}, {"$tuple": [NAN, True]}, True),
        ({"$tuple": [1]}, {"$tuple": [1, 1]}, False),
        ({"$tuple": []}, {"$tuple": []}, True),
        ("1", 1, False),
        ("a", {"$bytes": "YQ=="}, False),
        ({"$bytes": "YQ=="}, {"$bytes": "YR=="}, True),  # the same byte, with different bits that do not count
        (None, 0, False),
        (None, False, False),
        ({"$float": "inf"}, {"$np": ["F16", "007c"]}, True),
    ],
)
def test_the_same_key(one: Any, other: Any, same: bool) -> None:
    assert (identity(one) == identity(other)) is same
    assert same_key(one, other) is same


@pytest.mark.parametrize("node", [[], {"a": 1}, {"$bytearray": ""}, {"$tuple": [[]]}, {"$t": "w"}, {"$size": [1]}])
def test_invalid_keys(node: Any) -> None:
    with pytest.raises(FormatError):
        identity(node)


def test_a_key_may_be_as_deep_as_a_tree_may_have_it() -> None:
    def nested(levels: int) -> Any:
        node: Any = 0
        for _ in range(levels):
            node = {"$tuple": [node]}
        return node

    deepest = 0
    with contextlib.suppress(FormatError):
        for levels in range(1, 1000):
            decode_key(nested(levels), 0)
            deepest = levels
    assert 50 < deepest < 500
    assert identity(nested(deepest)) != identity(nested(deepest - 1))
    with pytest.raises(FormatError):
        identity(nested(deepest + 1))


@pytest.mark.parametrize(
    "state",
    [
        {float("nan"): 1, float("nan"): 2},  # two objects, and so two keys
        {"a": {(float("nan"), 1): 1, (float("nan"), 1): 2}},  # noqa: F601
        {float("nan"), float("nan")},
        {frozenset([float("nan")]), frozenset([float("nan")])},
        {np.float32("nan"): 1, np.float32("nan"): 2},
    ],
)
def test_a_nan_twice_is_refused_when_it_is_saved(state: Any) -> None:
    with pytest.raises(UnsupportedStateError, match="the same NaN"):
        flatten(state)


def test_keys_that_hold_no_nan_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer's state has a key for each parameter. Writing each as text would take four times as long."""
    written = []
    dumps = jsontext.dumps
    monkeypatch.setattr(jsontext, "dumps", lambda value: written.append(value) or dumps(value))
    flatten(dict.fromkeys(range(100), 0) | {np.float32(0.5): 1})
    assert len(written) < 10


def test_nans_that_differ_are_kept() -> None:
    other = struct.unpack(">d", bytes.fromhex("7ff8000000000001"))[0]
    state = {float("nan"): 1, other: 2, np.float32("nan"): 3, (1, float("nan")): {float("nan")}}
    tree = flatten(state).tree
    assert flatten(unflatten(tree, lambda name, origin: name)).tree == tree
