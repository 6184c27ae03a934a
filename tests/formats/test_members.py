"""Members of a parsed object: each kind of member accepts its own values, and no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ckptstore.errors import FormatError
from ckptstore.formats.history.members import MAX_INT, MAX_TERM, Members, hexadecimal, is_time, natural
from ckptstore.formats.history.records import CheckpointId

HASH = "0123456789abcdef" * 2


def of(**members: Any) -> Members:
    return Members(members, "a text")


@pytest.mark.parametrize(
    ("value", "taken"),
    [(0, True), (1, True), (2**53, True), (2**53 + 1, False), (-1, False), (True, False), (1.0, False), ("1", False)],
)
def test_natural_numbers(value: Any, taken: bool) -> None:
    assert natural(value) is taken
    assert MAX_INT == 2**53


@pytest.mark.parametrize(
    ("value", "taken"),
    [
        (0, True),
        (1.5, True),
        (-1.5, True),
        (2**53, True),
        (-(2**53), True),
        (2.0**53, True),
        (-(2.0**53), True),
        (2**53 + 1, False),
        (-(2**53) - 1, False),
        (float("inf"), False),
        (float("nan"), False),
        (True, False),
        ("1", False),
        (None, False),
    ],
)
def test_times(value: Any, taken: bool) -> None:
    assert is_time(value) is taken
    if taken:
        assert of(time=value).time("time") == value
    else:
        with pytest.raises(FormatError, match="a text: member 'time' is not a number of seconds"):
            of(time=value).time("time")


@pytest.mark.parametrize(
    ("value", "taken"),
    [
        (HASH, True),
        (HASH.upper(), False),
        (HASH[:-1], False),
        (HASH + "0", False),
        (HASH[:-1] + "g", False),
        (list(HASH), False),
        (int(HASH, 16), False),
        (None, False),
    ],
)
def test_hex_digits(value: Any, taken: bool) -> None:
    assert hexadecimal(value) is taken
    if taken:
        assert of(id=value).digest("id") == value
    else:
        with pytest.raises(FormatError, match="member 'id' is not 32 lower-case hex digits"):
            of(id=value).digest("id")
    assert hexadecimal("0" * 16, 16)
    assert not hexadecimal("0" * 32, 16)


@pytest.mark.parametrize("value", [None, [], "x", 1, [["a", 1]]])
def test_only_an_object_has_members(value: Any) -> None:
    with pytest.raises(FormatError, match="a text: expected a JSON object, found"):
        Members(value, "a text")


def test_taken_members_are_removed_and_the_rest_is_kept() -> None:
    value = {"a": 1, "b": 2, "c": 3}
    found = Members(value, "it")
    assert found.number("b") == 2
    assert found.rest() == {"a": 1, "c": 3}
    assert value == {"a": 1, "b": 2, "c": 3}
    with pytest.raises(FormatError, match="it: member 'b'"):
        found.number("b")


def test_numbers_have_a_least_one() -> None:
    assert of(n=0).number("n") == 0
    assert of(n=5).number("n", least=5) == 5
    assert of(n=2**53).number("n") == 2**53
    assert of(n=1).term("n") == of(term=1).term() == 1
    assert of(term=MAX_TERM).term() == MAX_TERM
    for bad in (4, 2**53 + 1, 5.0, True, None, "5"):
        with pytest.raises(FormatError, match=r"an integer in 5\.\.2\^53"):
            of(n=bad).number("n", least=5)
    for bad in (0, MAX_TERM + 1, 2**53 + 1):
        with pytest.raises(FormatError, match="term"):
            of(term=bad).term()
    with pytest.raises(FormatError):
        of(n=-1).number("n")


def refused(value: Any, take: Callable[[Members], object], wanted: str) -> None:
    with pytest.raises(FormatError, match=rf"a text: member 'x' is not {wanted}"):
        take(of(x=value))


def test_texts_flags_and_objects() -> None:
    assert of(x="").text("x") == ""
    assert of().text("x", default="z") == of(x="z").text("x") == "z"
    for value in (None, 1, ["a"], b"x"):
        refused(value, lambda found: found.text("x"), "a string")
    assert of(x=True).flag("x")
    assert not of(x=False).flag("x")
    assert not of().flag("x")
    for value in (None, 0, 1, "true"):
        refused(value, lambda found: found.flag("x"), "a boolean")
    assert of(x={"a": 1}).mapping("x") == {"a": 1}
    assert of().mapping("x") == {}
    for value in ([], "a", 0, False, None):
        refused(value, lambda found: found.mapping("x"), "an object")


def test_lists() -> None:
    assert of(x=["a", ""]).names("x") == ("a", "")
    assert of(x=[HASH, HASH[::-1]]).ids("x") == (HASH, HASH[::-1])
    assert of(x=[[1, 0], [MAX_TERM, 2**53]]).nodes("x") == ((1, 0), (MAX_TERM, 2**53))
    for take in (lambda found: found.names("x"), lambda found: found.ids("x"), lambda found: found.nodes("x")):
        assert take(of()) == take(of(x=[])) == ()
        for value in ({}, "ab", 1, False, None):
            refused(value, take, "a list")
    for value in (["a", 1], [None]):
        refused(value, lambda found: found.names("x"), "a list of strings")
    for value in ([HASH, HASH[:-1]], [1]):
        refused(value, lambda found: found.ids("x"), "a list of uuids")
    for bad in ([0, 1], [1, -1], [1], [1, 2, 3], (1, 2), [MAX_TERM + 1, 1], [1, 2**53 + 1], [True, 1], [1, True], None):
        refused([[1, 1], bad], lambda found: found.nodes("x"), r"a list of \[term, step\]")


def test_checkpoints() -> None:
    assert of(x=[3, 4, HASH]).checkpoint_id("x") == CheckpointId(3, 4, HASH)
    assert of(x=[1, 0, HASH]).checkpoint_id("x") == CheckpointId(1, 0, HASH)
    assert of(x=None).checkpoint_id("x") is None
    assert of().checkpoint_id("x") is None
    for bad in ([3, 4], [3, 4, HASH, 5], [0, 4, HASH], [3, -1, HASH], [3, 4, HASH[1:]], [3, 4, None], {}, HASH[:3], 0):
        refused(bad, lambda found: found.checkpoint_id("x"), r"\[term, step, state\]")


def test_tags() -> None:
    assert of(x={"a": [1, 2], "b": None}).tags("x") == {"a": (1, 2), "b": None}
    assert of().tags("x") == {}
    for bad in ({"-a": [1, 2]}, {"-a": None}, {"": None}, {"a": [0, 2]}, {"a": 0}, {"a": False}, {"a": []}):
        refused(bad, lambda found: found.tags("x"), r"an object of tag names to \[term, step\] or null")
