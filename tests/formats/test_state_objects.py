"""Objects that are stored as parts: their kinds, the types that the caller registers, and hostile trees."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import datetime
import decimal
import enum
import fractions
import pathlib
import threading
import types
import uuid
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckptstore
from ckptstore.errors import CkptError, FormatError, UnsupportedStateError, UsageError
from ckptstore.formats import jsontext
from ckptstore.formats.sources import NumpySource
from ckptstore.formats.states import rank_trees
from ckptstore.formats.states.numpy_objects import NUMPY
from ckptstore.formats.states.registered_types import forget
from ckptstore.formats.states.state import MAX_DEPTH, flatten, places, select, unflatten
from ckptstore.formats.states.state_objects import loader
from tests.forms import short_or


class Colour(enum.Enum):
    RED = "r"
    BLUE = ("b", 2)


class Level(enum.IntEnum):
    LOW = 1


@dataclasses.dataclass
class Config:
    lr: float = 0.1
    more: Any = None
    derived: int = dataclasses.field(default=0, init=False)


class Vector:
    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y


Point = namedtuple("Point", "x count")


def resolver(flat: Any) -> Any:
    def resolve(name: str, _origin: str) -> np.ndarray:
        source = flat.tensors[name]
        assert isinstance(source, NumpySource)
        image = np.empty(source.nbytes, np.uint8)
        source.read(0, image)
        return image.view(source.array.dtype.newbyteorder("<")).reshape(source.shape)

    return resolve


def loaded(state: Any, *, keep_foreign: bool = False) -> Any:
    """Through the text of the tree, as `Store.load` makes it."""
    flat = flatten(state)
    tree = jsontext.loads(jsontext.dumps(flat.tree), what="tree", max_bytes=1 << 30)
    unflatten(tree, lambda _name, _origin: None)  # what verify does
    return unflatten(tree, resolver(flat), None, loader(NUMPY, (), keep_foreign=keep_foreign))


def text_of(state: Any) -> bytes:
    return jsontext.dumps(flatten(state).tree)


BERLIN = zoneinfo.ZoneInfo("Europe/Berlin")
VALUES: list[Any] = [
    defaultdict(list, {"a": [1], 2: None}),
    defaultdict(None, {}),
    defaultdict(OrderedDict),
    deque([1, "a", [2]], 5),
    deque(range(40)),
    deque(maxlen=2**62),
    datetime.datetime(2026, 11, 27, 1, 2, 3, 4),
    datetime.datetime(1, 1, 1, tzinfo=datetime.UTC),
    datetime.datetime(2026, 10, 25, 2, 30, tzinfo=BERLIN, fold=1),
    datetime.time(1, 2, 3, fold=1),
    datetime.time(1, tzinfo=datetime.timezone(datetime.timedelta(hours=-2, seconds=1), "X")),
    datetime.date.max,
    datetime.timedelta.min,
    datetime.timedelta.max,
    datetime.timezone(datetime.timedelta(hours=2)),
    BERLIN,
    pathlib.Path("/a/b"),
    pathlib.PurePosixPath("."),
    pathlib.PureWindowsPath("c:\\x"),
    argparse.Namespace(lr=0.1, nested=argparse.Namespace(a=[1])),
    types.SimpleNamespace(a=1),
    range(0, 10**30, 7),
    range(0),
    slice(None, "a", 2),
    decimal.Decimal("0.10"),
    decimal.Decimal("-0E+10"),
    decimal.Decimal("1E+999999"),
    fractions.Fraction(-1, 3),
    uuid.UUID(int=2**128 - 1),
    np.dtype("<f4"),
    np.dtype(">i8"),
    np.dtype("M8[25s]"),
    np.dtype("U7"),
    np.str_("é"),
    np.bytes_(b"\0a"),
    np.datetime64("2026-01-01", "D"),
    np.datetime64("NaT"),
    np.timedelta64(3),
    np.timedelta64(-5, "ns"),
    np.array([["ab", "c"], ["\U0001f600", ""]]),
    np.array(["ab"]).astype(">U2"),
    np.array("abc"),
    np.empty((0, 3), "U4"),
    np.array([b"a\0b", b"c"]),
    np.array(["2026-01-01", "NaT"], "M8[25s]"),
    np.arange(6).astype("m8[us]").reshape(2, 3).T,
    np.array(5, "m8"),
]


def same(one: Any, two: Any) -> None:
    assert type(one) is type(two)
    if isinstance(one, np.ndarray):
        assert (one.shape, one.dtype) == (two.shape, two.dtype.newbyteorder("<"))
        assert one.tolist() == two.tolist() or str(one) == str(two)
    else:
        assert repr(one) == repr(two)  # == is less exact: of zones, folds, NaN and zeros


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{type(value).__name__} {value!r:.30}")
def test_each_kind_comes_back_the_same(value: Any) -> None:
    found = loaded({"a": [value]})["a"][0]
    same(found, value)
    assert text_of(found) == text_of(value)


def test_nan_of_decimals() -> None:
    for text in ("NaN", "-NaN123", "sNaN", "Infinity", "-Infinity"):
        assert str(loaded(decimal.Decimal(text))) == text


def test_a_namedtuple_is_one_of_the_same_fields() -> None:
    found = loaded(Point(1, [2]))
    assert found == (1, [2])
    assert (found.x, found.count, found._fields, found._asdict()) == (1, [2], ("x", "count"), {"x": 1, "count": [2]})
    assert repr(found) == "Point(x=1, count=[2])"
    assert found._replace(x=5) == (5, [2])
    assert type(loaded(found)) is type(found)
    assert type(copy.deepcopy(found)) is type(found)
    assert copy.deepcopy(found) == found
    with pytest.raises(ValueError, match="'z'"):
        found._replace(z=1)


@pytest.mark.parametrize(
    "bits", [np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64]
)
def test_generators_continue_their_stream(bits: Any) -> None:
    generator = np.random.Generator(bits(3))
    generator.integers(0, 9, 5, dtype=np.uint32)
    found = loaded(generator)
    assert found.bit_generator is not generator.bit_generator
    assert found.random(1000).tobytes() == generator.random(1000).tobytes()


def test_a_random_state_continues_its_stream() -> None:
    generator = np.random.RandomState(3)
    generator.standard_normal(3)  # leaves one in reserve
    found = loaded(generator)
    assert found.standard_normal(1001).tobytes() == generator.standard_normal(1001).tobytes()


# Types of the caller


@pytest.fixture(autouse=True)
def unregistered() -> Iterator[None]:
    yield
    for one in (Vector, Config, Colour, Level, Point):
        forget(one)


def test_enums_and_dataclasses_without_registration_are_parts() -> None:
    state = [Colour.BLUE, Level.LOW, Config(0.5, [1])]
    found = loaded(state)
    name = f"{__name__}."
    assert found == [
        ckptstore.Foreign(name + "Colour", ("b", 2), "enum"),
        ckptstore.Foreign(name + "Level", 1, "enum"),
        ckptstore.Foreign(name + "Config", {"lr": 0.5, "more": [1], "derived": 0}, "dataclass"),
    ]
    assert text_of(found) == text_of(state)


def test_registered_enums_and_dataclasses_come_back() -> None:
    config = Config(0.5, [1])
    config.derived = 7
    state = [Colour.BLUE, Level.LOW, config]
    before = text_of(state)
    for one in (Colour, Level, Config):
        ckptstore.register(one)
    assert text_of(state) == before
    found = loaded(state)
    assert found == state
    assert [type(one) for one in found] == [Colour, Level, Config]


def test_a_registered_type() -> None:
    ckptstore.register(Vector, lambda one: (one.x, one.y), lambda parts: Vector(*parts), name="mine.Vector")
    found = loaded({"v": Vector(1, np.arange(3))})["v"]
    assert (type(found), found.x, found.y.tolist()) == (Vector, 1, [0, 1, 2])


def test_without_registration_the_error_names_type_and_call() -> None:
    ckptstore.register(Vector, lambda one: (one.x, one.y), lambda parts: Vector(*parts), name="mine.Vector")
    flat = flatten([Vector(1, 2)])
    forget(Vector)
    with pytest.raises(UnsupportedStateError, match=r"'mine\.Vector'.*ckptstore\.register\(.*keep_foreign"):
        unflatten(flat.tree, resolver(flat), None, loader(NUMPY, (), keep_foreign=False))
    found = unflatten(flat.tree, resolver(flat), None, loader(NUMPY, (), keep_foreign=True))
    assert found == [ckptstore.Foreign("mine.Vector", (1, 2))]
    assert flatten(found).tree == flat.tree


def test_subclasses_are_registered_themselves() -> None:
    ckptstore.register(Vector, vars, lambda parts: Vector(**parts))
    with pytest.raises(UnsupportedStateError, match=r"state\[0\]: .*ckptstore\.register"):
        flatten([type("Sub", (Vector,), {})(1, 2)])


def test_registering_again_replaces_and_names_belong_to_one_type() -> None:
    ckptstore.register(Vector, vars, lambda parts: Vector(**parts), name="v")
    ckptstore.register(Vector, lambda one: [one.x, one.y], lambda parts: Vector(*parts), name="v")
    assert flatten(Vector(1, 2)).tree == {"$object": ["registered", [1, 2], "v"]}
    with pytest.raises(UsageError, match="is that of"):
        ckptstore.register(Config, vars, lambda parts: Config(**parts), name="v")
    again = type("Vector", (Vector,), {"__module__": Vector.__module__, "__qualname__": Vector.__qualname__})
    ckptstore.register(again, vars, lambda parts: again(**parts), name="v")
    with pytest.raises(UnsupportedStateError):
        flatten(Vector(1, 2))
    forget(again)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((dict, vars, dict), "not stored as it is"),
        (("Vector", vars, dict), "not stored as it is"),
        ((Vector, vars), "both"),
        ((Vector,), "to= and from_="),
        ((Vector, vars, dict, ""), "printable"),
        ((Vector, vars, dict, "a\nb"), "printable"),
    ],
)
def test_invalid_registrations(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ckptstore.register(*arguments)


def test_registering_from_many_threads() -> None:
    made = [type(f"T{number}", (), {"__module__": "many"}) for number in range(40)]
    threads = [threading.Thread(target=ckptstore.register, args=(one, lambda _: 1, lambda _: 1)) for one in made]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert [flatten(one()).tree["$object"][2] for one in made] == [f"many.T{number}" for number in range(40)]
    for one in made:
        forget(one)


def test_a_type_that_stores_itself_is_refused() -> None:
    ckptstore.register(Vector, lambda one: [one], lambda parts: parts)
    with pytest.raises(UnsupportedStateError, match="nested"):
        flatten(Vector(1, 2))


def test_errors_of_from_are_errors_of_the_format() -> None:
    ckptstore.register(Vector, vars, lambda parts: Vector(**parts), name="v")
    with pytest.raises(FormatError, match="v: its from_ refused"):
        unflatten({"$object": ["registered", 5, "v"]}, resolver(None), None, loader(NUMPY, (), keep_foreign=False))


def test_a_field_that_the_class_has_no_more() -> None:
    ckptstore.register(Config)
    tree = {"$object": ["dataclass", {"gone": 1}, f"{__name__}.Config"]}
    with pytest.raises(FormatError, match="no field 'gone'"):
        unflatten(tree, resolver(None), None, loader(NUMPY, (), keep_foreign=False))


# Places, selections, ranks


def test_tensors_in_objects_are_named_as_in_plain_containers() -> None:
    array = np.arange(3)
    state = {"n": argparse.Namespace(w=array), "p": Point(array + 1, deque([array + 2])), "c": Config(more=array + 3)}
    flat = flatten(state)
    assert list(flat.tensors) == ["n.w", "p.x", "p.count.0", "c.more"]
    assert [place.name for place in places(flat.tree)] == list(flat.tensors)


def test_selections() -> None:
    array = np.arange(3)
    generator = np.random.Generator(np.random.Philox(1))
    state = {"n": argparse.Namespace(w=array, lr=1), "g": generator, "when": datetime.date(2026, 1, 1)}
    tree = flatten(state).tree
    found = unflatten(select(tree, {"n.w"}), lambda name, _: name)
    assert found == {"n": argparse.Namespace(w="n.w", lr=1), "when": datetime.date(2026, 1, 1)}
    part = unflatten(select(tree, {"g.buffer"}), lambda name, _: name)
    assert part["g"]["buffer"] == "g.buffer"
    assert part["n"] == argparse.Namespace(lr=1)


def test_ranks_share_what_is_the_same_in_an_object() -> None:
    def tree(seed: int) -> Any:
        return flatten({"args": argparse.Namespace(lr=0.1, seed=seed), "t": datetime.timedelta(seed)}).tree

    merged = rank_trees.merge([tree(1), tree(2)])
    assert merged["args"] == {"$object": ["namespace", {"lr": 0.1, "seed": {"$ranks": [[0, 1], [1, 2]]}}]}
    for rank, seed in ((0, 1), (1, 2), (None, 1)):
        found = unflatten(rank_trees.of_rank(merged, rank), lambda name, _: name)
        assert found == {"args": argparse.Namespace(lr=0.1, seed=seed), "t": datetime.timedelta(seed)}


def test_the_deepest_object_that_is_written_can_be_read() -> None:
    states: list[Any] = [1]
    for _ in range(MAX_DEPTH):
        states.append(deque([states[-1]]))
    with pytest.raises(UnsupportedStateError, match="nested"):
        flatten(states[-1])
    for state in reversed(states):
        try:
            flatten(state)
        except UnsupportedStateError:
            continue
        assert loaded(state) == state
        return


# Hostile trees

HOSTILE: list[Any] = [
    [],
    {},
    "deque",
    ["deque"],
    ["deque", [], ""],
    ["deque", [], 5],
    ["deque", [], "-1"],
    ["deque", [], "99999999999999999999"],
    ["deque", [1, 2], "1"],
    ["deque", {}],
    ["defaultdict", {}, "eval"],
    ["defaultdict", []],
    ["namedtuple", {"a": 1}],
    ["namedtuple", {"_a": 1}, "P"],
    ["namedtuple", {"class": 1}, "P"],
    ["namedtuple", {"a b": 1}, "P"],
    ["namedtuple", {"a": 1}, "P()"],
    ["namedtuple", [1], "P"],
    ["datetime", "x"],
    ["datetime", "2026-11-27"],
    ["datetime", "2026-11-27T00:00:00+01:00"],
    ["datetime", ["2026-11-27T00:00:00", None, 0]],
    ["datetime", ["2026-11-27T00:00:00", 5, 0]],
    ["datetime", ["2026-11-27T00:00:00", None, True]],
    ["datetime", "2026-11-27T00:00:00", "x"],
    ["date", 5],
    ["time", "25:00:00"],
    ["timedelta", [10**9, 0, 0]],
    ["timedelta", [0, -1, 0]],
    ["timedelta", [True, 0, 0]],
    ["timezone", [1, 0, 0]],
    ["timezone", [0, 0, 0, "UTC"]],
    ["zoneinfo", "../../etc/passwd"],
    ["zoneinfo", "/etc/passwd"],
    ["zoneinfo", ""],
    ["path", "a", "Popen"],
    ["path", "a\0", "PosixPath"],
    ["path", "a//b", "PosixPath"],
    ["namespace", [1]],
    ["namespace", {"$dict": [[1, 2]]}],
    ["range", [0, 1]],
    ["range", [0, 1, 0]],
    ["range", [0, 1.5, 1]],
    ["slice", [0]],
    ["decimal", "1_0"],
    ["decimal", "x"],
    ["decimal", 5],
    ["decimal", "1E+99999999999999999999"],
    ["fraction", [1, 0]],
    ["fraction", [2, 4]],
    ["fraction", ["1", 3]],
    ["uuid", "{00000000-0000-0000-0000-000000000000}"],
    ["np.dtype", "O"],
    ["np.dtype", "<f3"],
    ["np.dtype", "<U99999999999"],
    ["registered", 1],
    ["Deque", []],
    ["os.system", "true", ""],
    ["deque", {"$object": ["range", 0]}],
]
PHILOX = {
    "bit_generator": "Philox",
    "state": {"counter": {"$a": "four"}, "key": {"$a": "two"}},
    "buffer": {"$a": "four"},
    "buffer_pos": 4,
    "has_uint32": 0,
    "uinteger": 0,
}
WITH_ARRAYS: list[Any] = [
    ["np.str", 5],
    ["np.str", {"$a": "words"}],
    ["np.bytes", {"$a": "words"}],
    ["np.datetime64", "x", "s"],
    ["np.datetime64", 5, "eval"],
    ["np.datetime64", 5, "1s"],
    ["np.datetime64", 5],
    ["np.datetime64", {"$a": "numbers"}],
    ["np.datetime64", {"$a": "words"}, "s"],
    ["np.timedelta64", {"$int": str(2**63)}, "s"],
    ["np.generator", {}],
    ["np.generator", {"bit_generator": "os.system", "state": {}}],
    ["np.generator", {"bit_generator": "PCG64", "state": {"state": -1, "inc": 1}, "has_uint32": 0, "uinteger": 0}],
    ["np.generator", {"bit_generator": "MT19937", "state": {"key": {"$a": "key"}, "pos": 625}}],
    ["np.generator", {"bit_generator": "MT19937", "state": {"key": {"$a": "key"}, "pos": -1}}],
    ["np.generator", {"bit_generator": "MT19937", "state": {"key": {"$a": "words"}, "pos": 1}}],
    ["np.random_state", {"bit_generator": "MT19937", "state": {"key": {"$a": "key"}, "pos": 1}}],
    *(["np.generator", PHILOX | {"buffer_pos": at}] for at in (-1, 5)),
    ["np.generator", PHILOX | {"buffer_pos": 4, "has_uint32": 2}],
    ["np.generator", PHILOX | {"buffer_pos": 4, "uinteger": 2**32}],
    ["np.generator", PHILOX | {"buffer_pos": 4, "buffer": {"$a": "two"}}],
    ["registered", 1, "unknown"],
    ["later.kind", 1],
]
ARRAYS = {"words": np.full((2, 3), 2**32 - 1, "<u4"), "key": np.zeros(624, "<u4")}
ARRAYS |= {"four": np.zeros(4, "<u8"), "two": np.zeros(2, "<u8"), "numbers": np.zeros(2, "<i8")}


def refused(body: Any, **how: Any) -> None:
    text = jsontext.dumps({"$object": body})
    tree = jsontext.loads(text, what="tree", max_bytes=1 << 20)
    with pytest.raises((FormatError, UnsupportedStateError)):
        unflatten(tree, lambda name, _: ARRAYS[name], *([None, loader(NUMPY, (), keep_foreign=False)] if how else []))


@pytest.mark.parametrize("body", HOSTILE, ids=repr)
def test_hostile_objects(body: Any) -> None:
    refused(body)
    refused(body, load=True)


@pytest.mark.parametrize("body", WITH_ARRAYS, ids=repr)
def test_hostile_objects_with_arrays(body: Any) -> None:
    refused(body, load=True)


def test_a_generator_at_the_last_place_of_its_table_is_taken() -> None:
    for state in ({"bit_generator": "MT19937", "state": {"key": {"$a": "key"}, "pos": 624}}, PHILOX):
        tree = {"$object": ["np.generator", state]}
        unflatten(tree, lambda name, _: ARRAYS[name], None, loader(NUMPY, (), keep_foreign=False)).random()


def test_a_time_zone_that_this_machine_does_not_have() -> None:
    zone = {"$object": ["zoneinfo", "Nowhere/Atlantis"]}
    tree = [zone, {"$object": ["datetime", ["2026-01-01T00:00:00", zone, 0]]}]
    found = unflatten(tree, resolver(None), None, loader(NUMPY, (), keep_foreign=False))
    assert [type(one) for one in found] == [ckptstore.Foreign] * 2
    assert flatten(found).tree == tree


def test_hostile_nesting() -> None:
    tree: Any = 1
    for _ in range(MAX_DEPTH):
        tree = {"$object": ["slice", tree]}
    for read in (lambda: unflatten(tree, resolver(None)), lambda: places(tree), lambda: select(tree, set())):
        with pytest.raises(FormatError, match="nested deeper"):
            read()


plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.sampled_from(VALUES[:30]),
)
names = st.from_regex("[a-z][a-z0-9]{0,3}q", fullmatch=True)
trees = st.recursive(
    st.one_of(
        plain,
        st.datetimes(timezones=st.none() | st.timezones()),
        st.times(),
        st.timedeltas(),
        st.decimals(allow_nan=False),
        st.fractions(),
        st.uuids(),
        st.builds(range, st.integers(), st.integers(), st.integers(1, 9)),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(names, inner, max_size=3),
        st.dictionaries(names, inner, max_size=3).map(lambda one: argparse.Namespace(**one)),
        st.dictionaries(names, inner, max_size=3).map(lambda one: types.SimpleNamespace(**one)),
        st.dictionaries(names, inner, max_size=3).map(lambda one: defaultdict(set, one)),
        st.dictionaries(names, inner, max_size=3).map(Counter),
        st.lists(inner, max_size=3).map(lambda one: deque(one, 7)),
        st.builds(slice, inner, inner, inner),
        st.dictionaries(names, inner, min_size=1, max_size=3).map(lambda one: namedtuple("N", one)(**one)),
    ),
    max_leaves=10,
)


@settings(max_examples=short_or(100, 2000), deadline=None, suppress_health_check=list(HealthCheck))
@given(trees)
def test_random_states_come_back_the_same(state: Any) -> None:
    found = loaded(state)
    assert repr(found) == repr(state)
    assert text_of(found) == text_of(state)


bodies = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**53), 2**53),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=5),
        st.just({"$a": "words"}),
        st.just({"$a": "key"}),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from(["state", "key", "pos", "bit_generator", "a"]), inner, max_size=3),
        st.tuples(
            st.sampled_from(sorted({body[0] for body in HOSTILE[3:] + WITH_ARRAYS if isinstance(body, list)})), inner
        ).map(lambda pair: {"$object": list(pair)}),
        st.tuples(
            st.sampled_from(sorted({body[0] for body in HOSTILE[3:] + WITH_ARRAYS if isinstance(body, list)})),
            inner,
            st.sampled_from(["s", "P", "PosixPath", "list", "5", "", "x.y"]),
        ).map(lambda three: {"$object": list(three)}),
    ),
    max_leaves=8,
)


@settings(max_examples=short_or(200, 20000), deadline=None, suppress_health_check=list(HealthCheck))
@given(bodies)
def test_any_tree_is_a_value_or_an_error_of_ours(tree: Any) -> None:
    for keep in (False, True):
        try:
            found = unflatten(tree, lambda name, _: ARRAYS[name], None, loader(NUMPY, (), keep_foreign=keep))
        except CkptError:
            continue
        assert repr(found)
