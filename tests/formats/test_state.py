"""State to tree and back: types, bits, order and ties; refusals; hostile trees."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import enum
import ipaddress
import json
import math
import random
import re
import struct
import sys
import threading
import types
from collections import ChainMap, Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ckptstore.errors import FormatError, UnsupportedStateError
from ckptstore.formats import jsontext
from ckptstore.formats.sources import NumpySource
from ckptstore.formats.states import values
from ckptstore.formats.states.state import MAX_DEPTH, Tagged, flatten, places, select, tensor_names, unflatten
from tests.forms import short_or


def there_and_back(state: Any) -> Any:
    """Through the JSON text, as a segment stores it; arrays are rebuilt from their bytes."""
    flat = flatten(state)
    tree = jsontext.loads(jsontext.dumps(flat.tree), what="tree", max_bytes=1 << 30)
    assert tensor_names(tree) == list(flat.tensors)

    def resolve(name: str, origin: str) -> np.ndarray:
        assert origin == "numpy"
        source = flat.tensors[name]
        assert isinstance(source, NumpySource)
        image = np.empty(source.nbytes, np.uint8)
        source.read(0, image)
        return image.view(source.array.dtype.newbyteorder("<")).reshape(source.shape)

    return unflatten(tree, resolve)


def bits(value: float) -> bytes:
    return struct.pack(">d", value)


def assert_same(one: Any, two: Any) -> None:
    """Equal types, bits and order."""
    assert type(one) is type(two)
    if isinstance(one, np.ndarray):
        assert (one.shape, one.dtype) == (two.shape, two.dtype)
        assert one.tobytes() == two.tobytes()
    elif isinstance(one, np.generic):
        assert one.dtype == two.dtype
        assert one.tobytes() == two.tobytes()
    elif isinstance(one, dict):
        assert len(one) == len(two)
        for (key, member), (other_key, other) in zip(one.items(), two.items(), strict=True):
            assert_same(key, other_key)
            assert_same(member, other)
    elif isinstance(one, list | tuple):
        assert len(one) == len(two)
        for element, other in zip(one, two, strict=True):
            assert_same(element, other)
    elif isinstance(one, float):
        assert bits(one) == bits(two)
    elif isinstance(one, complex):
        assert bits(one.real) + bits(one.imag) == bits(two.real) + bits(two.imag)
    elif isinstance(one, set | frozenset):  # by text, because a NaN in it never equals itself
        assert jsontext.dumps(flatten(one).tree) == jsontext.dumps(flatten(two).tree)
    else:
        assert one == two


floats = st.one_of(st.floats(), st.integers(0, 2**64 - 1).map(lambda n: struct.unpack("<d", struct.pack("<Q", n))[0]))
texts = st.text(st.characters(), max_size=8) | st.sampled_from(
    ["$", "$t", "$tuple", "", "a.b", "\ud83d\ude00", "\udc80"]
)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**70), 2**70),
    floats,
    texts,
    st.binary(max_size=9),
    st.builds(complex, floats, floats),
    floats.map(np.float64),
    st.integers(0, 255).map(np.uint8),
    st.booleans().map(np.bool_),
    floats.map(ml_dtypes.bfloat16),
)
hashable = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4)
leaves = st.one_of(
    scalars,
    st.binary(max_size=9).map(bytearray),
    st.lists(st.integers(-(2**63), 2**64 - 1), min_size=30, max_size=40),
    st.lists(st.integers(-200, 200), min_size=30, max_size=40).map(tuple),
    st.sets(hashable, max_size=4),
    st.frozensets(hashable, max_size=4),
    st.integers(0, 3).map(lambda n: np.arange(n, dtype="<f4")),
    st.just(np.array(2.5)),
    st.just(np.arange(6, dtype=">i2").reshape(2, 3).T).map(lambda a: a.astype("<i2", order="K")),
)
states = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(texts, inner, max_size=4),
        st.dictionaries(hashable, inner, max_size=4),
        st.dictionaries(hashable, inner, max_size=4).map(OrderedDict),
        st.dictionaries(texts, st.integers(), max_size=4).map(Counter),
    ),
    max_leaves=15,
)


@given(states)
@settings(max_examples=short_or(80, 200), deadline=None)
@example({"$t": "looks like a tensor"})
@example([{"$a": 1, "b": 2}, {"$dict": []}, OrderedDict({"$x": 1})])
@example({1.0: 1, "1": 2, None: 3, (1, (None, "a")): 4, b"x": 5, -0.0: 6})
@example([0.0, -0.0, 1e300, 5e-324, math.inf, -math.inf, math.nan, 2**53, 2**53 + 1, -(2**53) - 1, 10**4299])
@example(["\ud83d\ude00", "\U0001f600", {"\ud83d\ude00": 1}])
@example([list(range(31)), list(range(32)), [*range(32), True], [*range(32), 2**64], [*range(32), -1, 2**63]])
def test_every_state_comes_back_identical(state: Any) -> None:
    assert_same(there_and_back(state), state)


@given(states)
@settings(max_examples=short_or(24, 60), deadline=None)
def test_equal_states_have_equal_text(state: Any) -> None:
    tree = flatten(state).tree
    assert jsontext.dumps(flatten(there_and_back(state)).tree) == jsontext.dumps(tree)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(states)
def test_a_tree_may_be_as_long_as_its_limit_and_no_longer(monkeypatch: pytest.MonkeyPatch, state: Any) -> None:
    monkeypatch.undo()
    length = len(jsontext.dumps(flatten(state).tree))
    monkeypatch.setattr("ckptstore.formats.states.state.TREE_LIMIT", length)
    flatten(state)
    monkeypatch.setattr("ckptstore.formats.states.state.TREE_LIMIT", length - 1)
    with pytest.raises(UnsupportedStateError, match=r"^state.*: takes .* MB as text; everything in a state"):
        flatten(state)


@pytest.mark.parametrize(
    ("state", "where"),
    [
        ({"run": {"notes": "x" * 20_000_000}}, "state['run']['notes']: takes 20.0 MB"),
        ({"a": [1, ("é" * 4_000_000,)], "b": "x" * 9_000_000}, "state['a'][1][0]: takes 24.0 MB"),
        ({7: {"k" * 100: b"x" * 15_000_000}}, f"state[7]['{'k' * 79}]: takes 20.0 MB"),
        ({"many": [{"note": "x" * 300_000} for _ in range(100)]}, "state['many']: takes 30.0 MB"),
        ({"set": {"x" * 20_000_000}}, "state['set']: takes 20.0 MB"),
        ({"x" * 20_000_000: 1}, "state: takes 20.0 MB"),
        (OrderedDict(log="x" * 20_000_000), "state['log']: takes 20.0 MB"),
    ],
)
def test_what_makes_a_state_too_long_is_named(state: Any, where: str) -> None:
    with pytest.raises(UnsupportedStateError) as raised:
        flatten(state)
    assert str(raised.value).startswith(where)
    assert "may take 16.7 MB: store it as a tensor" in str(raised.value)


def test_a_training_state() -> None:
    generator = np.random.default_rng(3)
    np.random.seed(7)  # the legacy state is the one that scripts save
    state = {
        "model": OrderedDict({"wte.weight": np.ones((4, 2), "<f4"), "steps": np.array(3)}),
        "optimizer": {
            "state": {0: {"step": np.float32(3), "exp_avg": np.zeros((4, 2), "<f4")}},
            "param_groups": [
                {"lr": 1e-3, "betas": (0.9, 0.95), "amsgrad": False, "foreach": None, "params": [*range(99)]}
            ],
        },
        "scheduler": {"milestones": Counter({30: 1, 80: 2}), "best": math.inf, "last_epoch": 12},
        "rng": {
            "python": random.Random(1).getstate(),
            "numpy": np.random.get_state(),
            "generator": generator.bit_generator.state,
        },
    }
    back = there_and_back(state)
    assert_same(back, state)
    restored = random.Random()
    restored.setstate(back["rng"]["python"])
    assert restored.random() == random.Random(1).random()
    assert len(jsontext.dumps(flatten(state).tree)) < 6000  # 624 words of a Mersenne twister, packed


def test_tied_tensors_are_stored_once_and_come_back_as_one_object() -> None:
    weight = np.arange(6, dtype="<f4").reshape(2, 3)
    state = {"embed": weight, "head": weight.view(), "transposed": weight.T, "copy": weight.copy()}
    flat = flatten(state)
    assert list(flat.tensors) == ["embed", "transposed", "copy"]
    back = there_and_back(state)
    assert back["embed"] is back["head"]
    assert back["copy"] is not back["embed"]


def test_resolve_is_called_once_per_name_in_tree_order() -> None:
    array = np.zeros(1)
    calls: list[str] = []
    tree = flatten({"b": array, "a": [np.ones(1), array]}).tree
    unflatten(tree, lambda name, origin: calls.append(name))
    assert calls == ["b", "a.0"]


def test_sets_are_sorted_because_their_own_order_is_chance() -> None:
    words = [f"word {number}" for number in range(50)]
    assert flatten(set(words)).tree == {"$set": sorted(words)}


def test_the_text_of_ordinary_states_is_ordinary_json() -> None:
    flat = flatten({"lr": 0.1, "on": True, "w": np.zeros(1), "t": (1, "x"), "o": OrderedDict(a=None), 3: {3: b"\0"}})
    assert jsontext.dumps(flat.tree) == (
        b'{"$dict":[["lr",0.1],["on",true],["w",{"$a":"w"}],["t",{"$tuple":[1,"x"]}],["o",{"$odict":{"a":null}}],'
        b'[3,{"$dict":[[3,{"$bytes":"AA=="}]]}]]}'
    )


# refusals of flatten


class Colour(enum.IntEnum):
    RED = 1


@dataclasses.dataclass
class Config:
    lr: float = 0.1


class Model:
    def state_dict(self) -> dict[str, Any]:
        return {}


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        (defaultdict(lambda: 0), "dict()"),
        (type("Mine", (defaultdict,), {})(int), "dict()"),
        (type("Mine", (deque,), {})([1]), "list()"),
        (type("Args", (argparse.Namespace,), {})(), "vars"),
        (type("When", (datetime.datetime,), {})(2026, 1, 1), "isoformat"),
        (type("Zone", (datetime.tzinfo,), {})(), "timezone"),
        (memoryview(b"x"), "bytes()"),
        (np.dtype([("a", "i4")]), "descr"),
        (np.random.Generator(type("Mine", (np.random.PCG64,), {})()), "bit_generator"),
        (Model(), "state_dict()"),
        (print, "code is not state"),
        (Config, "code is not state"),
        (lambda: 0, "code is not state"),
        (np.ma.array([1]), "plain array"),
        (np.array([None]), "dtype object"),
        (np.longdouble(1), "longdouble|float128"),
        (object(), "ckptstore.register"),
        (type("Version", (str,), {})("2.1"), "str()"),
    ],
)
def test_refused_objects_name_their_path_and_what_to_do(value: object, advice: str) -> None:
    with pytest.raises(UnsupportedStateError, match=advice) as caught:
        flatten({"model": [1, {7: value}]})
    assert str(caught.value).startswith("state['model'][1][7]: ")


@pytest.mark.parametrize(
    ("value", "named", "expression"),
    [
        (random.Random(1), "its getstate()", lambda x: x.getstate()),
        (np.random.Philox(1), "its .state", lambda x: x.state),
        (np.random.SeedSequence(1), "its .state", lambda x: x.state),
        (re.compile("a"), "its .pattern", lambda x: x.pattern),
        (ipaddress.ip_address("10.0.0.1"), "str() of it", str),
        (ValueError("no"), "str() of it", str),
        (ChainMap({"a": 1}), "dict() of it", dict),
        (UserDict(a=1), "dict() of it", dict),
        (types.MappingProxyType({"a": 1}), "dict() of it", dict),
        ({"a": 1}.keys(), "list() of it", list),
        ({"a": 1}.values(), "list() of it", list),
        (np.zeros(2, [("a", "i4")]), "{name: x[name] for", lambda x: {name: x[name] for name in x.dtype.names}),
        (np.array([None]), "its tolist()", lambda x: x.tolist()),
        (np.zeros(2, np.longdouble), "astype(numpy.float64)", lambda x: x.astype(np.float64)),
    ],
    ids=lambda one: type(one).__name__,
)
def test_the_expression_that_a_refusal_names_can_be_stored(value: Any, named: str, expression: Any) -> None:
    with pytest.raises(UnsupportedStateError) as caught:
        flatten({"a": value})
    assert f"store {named}" in str(caught.value) or f", {named}" in str(caught.value)
    flatten({"a": expression(value)})


@pytest.mark.parametrize(
    "value", [threading.Lock(), iter([1]), sys.stdout, (one for one in "ab")], ids=lambda one: type(one).__name__
)
def test_handles_are_refused_as_such(value: Any) -> None:
    with pytest.raises(UnsupportedStateError, match="a handle is not state; leave it out"):
        flatten({"a": value})


def test_integers_that_no_reader_takes() -> None:
    with pytest.raises(UnsupportedStateError, match="4300 digits"):
        flatten([-(10**4300)])


@pytest.mark.parametrize("key", [Colour.RED, Point(1, 2), frozenset([1]), Config, np.str_("a"), (1, Colour.RED)])
def test_refused_keys(key: Any) -> None:
    with pytest.raises(UnsupportedStateError, match=r"^state\['a'\]\["):
        flatten({"a": {key: 1}})


def test_tensors_in_sets_and_keys_do_not_exist() -> None:
    with pytest.raises(UnsupportedStateError, match="as key or set element"):
        flatten({"a": {Path("x")}})


def test_a_state_that_contains_itself() -> None:
    state: dict[str, Any] = {}
    state["self"] = [state]
    with pytest.raises(UnsupportedStateError, match="contains itself"):
        flatten(state)


WRAPPERS = {
    "list": lambda inner: [inner],
    "tuple": lambda inner: (inner,),
    "dict": lambda inner: {"k": inner},
    "pairs": lambda inner: {0: inner},
    "odict": lambda inner: OrderedDict(k=inner),
    "odict of pairs": lambda inner: OrderedDict({0: inner}),
    "frozenset": lambda inner: frozenset([inner]),
}


def deepest(wrap: Callable[[Any], Any], outermost: Callable[[Any], Any]) -> Any:
    """The last state of growing depth that `flatten` takes."""
    state: Any = "x"
    while True:
        try:
            flatten(outermost(wrap(state)))
        except UnsupportedStateError as error:
            message = str(error)
            break
        state = wrap(state)
    assert "nested" in message
    assert len(message) < 1500
    return outermost(state)


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_the_deepest_state_that_is_written_can_be_read(wrap: Callable[[Any], Any]) -> None:
    state = deepest(wrap, lambda inner: inner)
    assert there_and_back(state) == state


@pytest.mark.parametrize("outermost", [lambda key: {key: 1}, lambda element: {element}], ids=["key", "element"])
def test_the_deepest_key_or_element_that_is_written_can_be_read(outermost: Callable[[Any], Any]) -> None:
    state = deepest(lambda inner: (inner,), outermost)
    assert there_and_back(state) == state


# recognise and revive


class Special:
    pass


def test_recognise_and_revive() -> None:
    source = NumpySource(np.arange(3, dtype="<f4"))
    special = Special()

    def recognise(value: object) -> Any:
        if isinstance(value, Special):
            return Tagged("$size", [2, 3])
        return source if isinstance(value, memoryview) else None

    flat = flatten({"s": special, "w": memoryview(b""), "a": np.zeros(1)}, recognise)
    assert flat.tree == {"s": {"$size": [2, 3]}, "w": {"$a": "w"}, "a": {"$a": "a"}}
    assert flat.tensors["w"] is source
    resolved = unflatten(flat.tree, lambda name, origin: name)
    assert resolved == {"s": (2, 3), "w": "w", "a": "a"}
    assert unflatten(flat.tree, lambda name, origin: name, {"$size": max})["s"] == 3
    tree = {"d": {"$dtype": "float32"}, "v": {"$device": "cuda:0"}}
    assert unflatten(tree, lambda name, origin: name) == {"d": "float32", "v": "cuda:0"}


def test_errors_of_recognise_get_the_path() -> None:
    def recognise(value: object) -> Any:
        raise UnsupportedStateError("no such thing")

    with pytest.raises(UnsupportedStateError, match=r"^state\['a'\]\[0\]: no such thing$"):
        flatten({"a": [Special()]}, recognise)


# parts


def test_select_leaves_out_tensors_and_keeps_the_rest() -> None:
    state = {
        "model": OrderedDict(a=np.zeros(1), b=np.ones(1)),
        "optimizer": {"state": {0: {"step": np.array(1), "m": np.ones(1)}}, "lr": 0.1, "steps": (np.zeros(2), 5)},
        "none": [np.zeros(3)],
    }
    flat = flatten(state)
    tree = select(flat.tree, {"model.b", "optimizer.state.0.m"})
    assert tensor_names(tree) == ["model.b", "optimizer.state.0.m"]
    assert unflatten(tree, lambda name, origin: name) == {
        "model": OrderedDict(b="model.b"),
        "optimizer": {"state": {0: {"m": "optimizer.state.0.m"}}, "lr": 0.1, "steps": (5,)},
        "none": [],
    }
    assert flat.tree == flatten(state).tree  # select changes nothing
    assert select(flat.tree, set(flat.tensors)) == flat.tree


def test_a_state_that_is_one_tensor() -> None:
    flat = flatten(np.zeros(2))
    assert list(flat.tensors) == ["#"]
    assert select(flat.tree, set()) is None
    assert_same(there_and_back(np.zeros(2)), np.zeros(2))


# hostile trees

HOSTILE: list[Any] = [
    {"$t": 1},
    {"$t": None},
    {"$a": ["x"]},
    [{"$t": "x"}, {"$a": "x"}],
    {"$t": "x", "more": 1},
    {"$nonsense": 1},
    {"$": 1},
    {"$tuple": {}},
    {"$tuple": None},
    {"$dict": {"a": 1}},
    {"$dict": [[1]]},
    {"$dict": [[1, 2, 3]]},
    {"$dict": ["ab"]},
    {"$dict": [[[1], 2]]},
    {"$dict": [[{"a": 1}, 2]]},
    {"$dict": [[{"$t": "x"}, 2]]},
    {"$dict": [[{"$bytearray": "AA=="}, 2]]},
    {"$dict": [[{"$set": []}, 2]]},
    {"$dict": [[{"$np": ["C32", "00000000"]}, 2]]},
    {"$dict": [[1, 2], [1, 3]]},
    {"$dict": [[1, 2], [True, 3]]},
    {"$odict": 5},
    {"$odict": {"$x": 1}},
    {"$counter": [1]},
    {"$set": [[1]]},
    {"$set": [{"$set": []}]},
    {"$set": [1, 1]},
    {"$set": "abc"},
    {"$frozenset": [{"$tuple": [{"$set": []}]}]},
    {"$bytes": 1},
    {"$bytes": "A"},
    {"$bytes": "****"},
    {"$bytes": "\u20ac"},
    {"$int": "1"},
    {"$int": "0x10"},
    {"$int": "1_000_000_000_000_000_000_000"},
    {"$int": "9" * 5000},
    {"$int": 10**30},
    {"$float": "1.0"},
    {"$float": "3ff0000000000000"},
    {"$float": "7ff8000000000000"},
    {"$float": "NAN"},
    {"$float": None},
    {"$complex": [1.0]},
    {"$complex": [1, 2.0]},
    {"$complex": [1.0, {"$float": "x"}]},
    {"$str": "YQ=="},
    {"$str": "/w=="},
    {"$np": ["F32"]},
    {"$np": ["F32", "00"]},
    {"$np": ["F32", "0000 000"]},
    {"$np": ["F33", "00000000"]},
    {"$np": [["F32"], "00000000"]},
    {"$np": ["F32", 0]},
    {"$ints": []},
    {"$ints": ["set", "u1", "AA=="]},
    {"$ints": ["list", "u1", "AA=="]},
    {"$ints": ["list", "u3", "AA=="]},
    {"$ints": ["list", "u2", "AAAA"]},
    {"$ints": ["set", "u1", "AAEC" * 16]},
    {"$ints": ["list", "u3", "AAEC" * 16]},
    {"$ints": ["list", ["u1"], "AAEC" * 16]},
    {"$ints": ["list", "u8", "AAAA" * 128]},
    {"$size": [-1]},
    {"$size": [2**63]},
    {"$size": [True]},
    {"$size": 5},
    {"$dtype": 1},
    {"$device": ["cpu"]},
    2**53 + 1,
    math.inf,
]


@pytest.mark.parametrize("tree", HOSTILE, ids=lambda tree: ascii(tree)[:40])
def test_hostile_trees(tree: Any) -> None:
    for wrapped in (tree, {"a": [tree]}):
        with pytest.raises(FormatError):
            unflatten(wrapped, lambda name, origin: name)


HOSTILE_WRAPPERS = {
    "list": lambda tree: [tree],
    "dict": lambda tree: {"k": tree},
    "tuple": lambda tree: {"$tuple": [tree]},
    "set": lambda tree: {"$frozenset": [tree]},
}


@pytest.mark.parametrize("wrap", HOSTILE_WRAPPERS.values(), ids=HOSTILE_WRAPPERS)
def test_hostile_depth(wrap: Callable[[Any], Any]) -> None:
    tree: Any = 1
    for _ in range(100_000):
        tree = wrap(tree)
    for form in (tree, {"$dict": [[tree, 1]]}, {"$set": [tree]}):
        with pytest.raises(FormatError):
            unflatten(form, lambda name, origin: name)
    with pytest.raises(FormatError, match="deep"):
        unflatten(tree, lambda name, origin: name)
    assert tensor_names(tree) == []
    while isinstance(tree, list | dict):  # taken apart here: the interpreter would recurse to free it
        tree = tree[0] if isinstance(tree, list) else next(iter(tree.values()))


DEEPER = {
    "list": (MAX_DEPTH, lambda tree: [tree], 1),
    "tuple": (MAX_DEPTH // 2, lambda tree: {"$tuple": [tree]}, []),
    "set": (MAX_DEPTH // 2, lambda tree: {"$frozenset": [tree]}, {"$frozenset": []}),
    "key": (MAX_DEPTH // 2, lambda tree: {"$tuple": [tree]}, {"$bytes": ""}),
}


@pytest.mark.parametrize(("times", "wrap", "leaf"), DEEPER.values(), ids=DEEPER)
def test_the_first_level_too_deep(times: int, wrap: Callable[[Any], Any], leaf: Any, request: Any) -> None:
    def outermost(tree: Any) -> Any:
        return {"$dict": [[tree, 1]]} if request.node.callspec.id == "key" else tree

    tree = leaf
    for _ in range(times):
        tree = wrap(tree)
    unflatten(outermost(tree), lambda name, origin: name)
    with pytest.raises(FormatError, match=f"nested deeper than {MAX_DEPTH}"):
        unflatten(outermost(wrap(tree)), lambda name, origin: name)


def test_a_selection_is_refused_what_no_state_is() -> None:
    tree: Any = 1
    for _ in range(MAX_DEPTH + 1):
        tree = [tree]
    for hostile, reason in (
        (tree, "nested deeper"),
        ({"$dict": [["a", 1, 2]]}, r"not a \[key, value\] pair"),
        ({"$dict": [["a"]]}, r"not a \[key, value\] pair"),
        ({"$odict": [{"a": 1}]}, r"not a \[key, value\] pair"),
        ({"$t": 7}, "7 is not a valid tensor name"),
    ):
        with pytest.raises(FormatError, match=reason):
            select(hostile, {"a"})


def test_a_part_of_the_deepest_state() -> None:
    """A state that can be read whole can be selected from: the same limit, at exactly its value."""
    tree: Any = {"a": {"$t": "w"}, "b": {"$t": "x"}}
    for _ in range(MAX_DEPTH - 1):
        tree = [tree]
    unflatten(tree, lambda name, origin: name)
    assert tensor_names(select(tree, {"w"})) == ["w"]
    for read in (lambda: unflatten([tree], lambda name, origin: name), lambda: select([tree], {"w"})):
        with pytest.raises(FormatError, match="nested deeper"):
            read()


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.floats(), st.text(max_size=3), st.just("u1")),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["$t", "$a", "$tuple", "$dict", "$odict", "$counter", "$set", "$frozenset", "$np", "$ints",
                             "$bytes", "$float", "$complex", "$size", "$dtype", "$device", "$str", "$int", "a", "b"]),
            inner, max_size=2,
        ),
    ),
    max_leaves=12,
)  # fmt: skip


@given(json_values)
@settings(max_examples=short_or(200, 500), deadline=None)
def test_any_json_is_read_or_refused(tree: Any) -> None:
    for read in (
        lambda: unflatten(tree, lambda name, origin: name),
        lambda: tensor_names(tree),
        lambda: select(tree, {"a"}),
    ):
        try:
            read()
        except FormatError:
            continue


def test_packed_integers_take_the_narrowest_type() -> None:
    for low, high, code in [
        (0, 255, "u1"), (-128, 127, "i1"), (0, 256, "u2"), (-129, 0, "i2"), (0, 2**32 - 1, "u4"), (-(2**31), 0, "i4"),
        (0, 2**64 - 1, "u8"), (-1, 2**63 - 1, "i8"),
    ]:  # fmt: skip
        packed = values.pack_integers([low, high] * 16)
        assert packed is not None
        assert packed["$ints"][:2] == ["list", code]
        assert values.decode("$ints", packed["$ints"]) == [low, high] * 16


def test_a_tree_is_200_deep_as_the_page_counts() -> None:
    """At most 200 arrays and objects are around a value; an empty list is a value."""
    for leaf, text in ((1, "1"), ([], "[]")):
        tree: Any = leaf
        for _ in range(200):
            tree = [tree]
        assert json.dumps(tree).count("[") == 200 + text.count("[")
        unflatten(tree, lambda name, origin: name)
        with pytest.raises(FormatError, match="deeper than 200"):
            unflatten([tree], lambda name, origin: name)
    around = {"a": {"$tuple": [1]}}  # three around the 1
    for _ in range(197):
        around = {"b": around}
    unflatten(around, lambda name, origin: name)
    with pytest.raises(FormatError, match="deeper than 200"):
        unflatten({"b": around}, lambda name, origin: name)


@pytest.mark.parametrize("pair", [5, "ab", ["a"], ["a", 1, 2], {"a": 1, "b": 2}], ids=repr)
@pytest.mark.parametrize("kind", ["$dict", "$odict", "$counter"])
def test_places_refuse_what_is_no_pair(kind: str, pair: Any) -> None:
    with pytest.raises(FormatError, match=r"not a \[key, value\] pair"):
        places({kind: [pair]})


def test_places_are_looked_for_no_deeper_than_a_tree_may_be() -> None:
    tree: Any = {"$t": "w"}
    for _ in range(MAX_DEPTH):
        tree = [tree]
    assert [place.tensor for place in places(tree)] == ["w"]
    with pytest.raises(FormatError, match=f"deeper than {MAX_DEPTH}"):
        places([tree])
