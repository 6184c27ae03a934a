"""Flat tensor names."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from ckptstore.formats.states.names import flat_names

keys = st.one_of(
    st.text(max_size=6),
    st.sampled_from(["a", "b", "a.b", "", "#0", "0", "_", "__metadata__", "ckptstore/x", "%2E", "a~2", "%", "\ud800"]),
    st.integers(-2, 12),
    st.booleans(),
    st.none(),
    st.tuples(st.integers(0, 2)),
)


def distinct(path: tuple[Any, ...]) -> tuple[tuple[type, Any], ...]:
    return tuple((type(key), key) for key in path)


@given(st.lists(st.lists(keys, max_size=4).map(tuple), max_size=12, unique_by=distinct))
@example([("a", "b"), ("a.b",), ("a%2Eb",)])
@example([("a", 0), ("a", "0"), ("a.0",), ("a", "#0")])
@example([(1,), (True,), ("1",), ("True",)])
@example([((1,),), ("(1,)",)])
@example([(), ("",), ("", "")])
def test_names_are_distinct_and_allowed(paths: list[tuple[Any, ...]]) -> None:
    names = flat_names(paths)
    assert len(set(names)) == len(names) == len(paths)
    for name in names:
        assert name
        assert name != "__metadata__"
        assert not name.startswith("ckptstore/")
        name.encode()


def test_familiar_names() -> None:
    paths = [("model", "encoder.0.weight"), ("optimizer", "state", 0, "exp_avg"), ("rng", "numpy", 1)]
    assert flat_names(paths) == ["model.encoder.0.weight", "optimizer.state.0.exp_avg", "rng.numpy.1"]


def test_only_what_collides_is_escaped() -> None:
    paths = [("a", "b.c"), ("a.b", "c"), ("a", "d")]
    assert flat_names(paths) == ["a.b%2Ec", "a%2Eb.c", "a.d"]
    assert flat_names([("x", 0), ("x", "0")]) == ["x.#0", "x.0"]


def test_reserved_names() -> None:
    assert flat_names([("__metadata__",), ("ckptstore/payload", "w"), ("",), ()]) == [
        "%5F_metadata__",
        "ckptstore%2Fpayload.w",
        "%",
        "#",
    ]


def test_an_escaped_name_that_is_taken_gets_a_number() -> None:
    assert flat_names([("a.b",), ("a", "b"), ("a%2Eb",), ("a.b~2",)]) == ["a%2Eb~2", "a.b", "a%2Eb", "a.b~2"]
    alike = [(np.float32(0.1),), (0.1,), (np.float16(0.1),)]  # different keys of one dict, one text
    assert flat_names(alike) == ["#0%2E1", "#0%2E1~2", "#0%2E1~3"]
