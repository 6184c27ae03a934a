"""Canonical JSON out, strict JSON in."""

from __future__ import annotations

import random
import sys
import time
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.errors import FormatError
from ckptstore.formats import jsontext
from tests.formats import inside

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def load(text: bytes) -> Any:
    return jsontext.loads(text, what="here", max_bytes=10_000, max_depth=64)


@given(json_values)
def test_round_trip_keeps_types_and_order(value: Any) -> None:
    text = jsontext.dumps(value)
    text.decode("ascii")
    assert jsontext.dumps(load(text)) == text


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (b'{"a":1,"b":2,"a":3}', "duplicate JSON key 'a'"),
        (b"[NaN]", "NaN is not allowed"),
        (b"[-Infinity]", "-Infinity is not allowed"),
        (b"[1e999]", "beyond a double's range"),
        (b"[" * 65 + b"]" * 65, "nested deeper than 64"),
        (b"[" + b"9" * 5000 + b"]", "digits"),
        (b" " * 10_001, "at most 10000"),
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b"\xef\xbb\xbf{}", "BOM"),
        (b'"\\\xed\xa0\xbd"', "a backslash before a surrogate"),
        (b'"\\\\\\\xed\xb8\x80"', "a backslash before a surrogate"),
        (b"", "not JSON"),
    ],
)
def test_refuses(text: bytes, complaint: str) -> None:
    with pytest.raises(FormatError, match=complaint) as caught:
        load(text)
    assert "here" in str(caught.value)


@pytest.mark.parametrize(
    ("number", "canonical"),
    [
        (b"3e-324", b"5e-324"),
        (b"1e-400", b"0.0"),
        (b"-1e-400", b"-0.0"),
        (b"1125899906842624.25", b"1125899906842624.2"),
        (b"1125899906842624.3", b"1125899906842624.2"),
        (b"9007199254740993.0", b"9007199254740992.0"),
    ],
)
def test_the_canonical_text_of_a_float_is_the_nearest_of_the_shortest(number: bytes, canonical: bytes) -> None:
    """SPEC 1: state hashes depend on it."""
    assert jsontext.dumps(load(number)) == canonical


def test_brackets_inside_strings_are_not_depth() -> None:
    text = jsontext.dumps(["[{" * 100, '\\"[', {"[" * 70: 1}])
    assert load(text) == ["[{" * 100, '\\"[', {"[" * 70: 1}]


def test_nan_is_never_written() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        jsontext.dumps([float("nan")])


def test_deep_text_is_refused_quickly() -> None:
    start = time.thread_time()
    with pytest.raises(FormatError):
        jsontext.loads(b"[" * 5_000_000, what="here", max_bytes=10_000_000)
    assert time.thread_time() - start < 20  # linear: seconds would already mean a quadratic scan


def test_long_integers_are_refused_whatever_python_is_set_to() -> None:
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        assert jsontext.loads(b"1" * 4300, what="here", max_bytes=10_000) > 0
        with pytest.raises(FormatError, match="4301 digits"):
            jsontext.loads(b"1" * 4301, what="here", max_bytes=10_000)
    finally:
        sys.set_int_max_str_digits(before)


@pytest.mark.parametrize(
    "text", ['{"a":1}'.encode("utf-16"), '{"a":1}'.encode("utf-32-le"), b"\xef\xbb\xbf[1]", b'["\xff"]']
)
def test_other_encodings_than_utf8(text: bytes) -> None:
    with pytest.raises(FormatError, match="here"):
        jsontext.loads(text, what="here", max_bytes=100)


def test_nesting_is_counted_in_brackets() -> None:
    """SPEC.md 1: 0 of a number, 1 of ``[]`` and ``{"a": 1}``, 2 of ``[[]]``."""
    for text, depth in (("7", 0), ("[]", 1), ('{"a": 1}', 1), ("[[]]", 2), ('{"a": [1]}', 2)):
        jsontext.loads(text.encode(), what="here", max_bytes=100, max_depth=depth)
        if depth:
            with pytest.raises(FormatError, match="nested deeper"):
                jsontext.loads(text.encode(), what="here", max_bytes=100, max_depth=depth - 1)
    deepest = b"[" * 256 + b"]" * 256
    jsontext.loads(deepest, what="here", max_bytes=1000)
    with pytest.raises(FormatError, match="nested deeper than 256"):
        jsontext.loads(b"[" + deepest + b"]", what="here", max_bytes=1000)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
def test_strings_are_left_out_piece_by_piece(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Wherever the text is cut: in a string, in an escape, in a string that never ends."""
    choose = random.Random(size)
    for _ in range(300):
        text = bytes(choose.choice(rb'"\[]{},a') for _ in range(choose.randint(0, 60)))
        in_pieces, at_once = inside.without_strings(text, monkeypatch, size)
        assert in_pieces == at_once


def test_brackets_in_millions_of_strings_take_no_memory() -> None:
    text = b"[" + b'"[",' * (1 << 22) + b"0]"  # 4 M brackets, all but one in strings
    tracemalloc.start()
    try:
        jsontext.check(text, what="here")
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("number", ["1" * 4301, "1." + "1" * 4300, "1" * 2000 + "." + "1" * 2000 + "e-" + "1" * 301])
def test_a_number_has_at_most_so_many_digits(number: str) -> None:
    for text in (number, "-" + number, f"[0, {number}]"):
        with pytest.raises(FormatError, match=r"a number of 4301 digits, at most 4300 are allowed"):
            jsontext.loads(text.encode(), what="here", max_bytes=10_000)
    assert load(('["' + number + '"]').encode()) == [number]


@pytest.mark.parametrize(
    "number", ["1e999", "-1e999", "1E400", "1e+309", "1" + "0" * 309 + ".0", "1" + "0" * 300 + "e9", "1" * 310 + "e0"]
)
def test_a_number_beyond_a_double_is_refused(number: str) -> None:
    with pytest.raises(FormatError, match="beyond a double's range"):
        load(number.encode())


def test_long_numbers_are_found_wherever_they_begin() -> None:
    """Only every 17th byte of a text is looked at first."""
    three_parts = "1" * 1433 + "." + "1" * 1434 + "e-" + "1" * 1434
    for before in range(40):
        text = '["' + "x" * before + '",'
        with pytest.raises(FormatError, match=r"a number of 4301 digits, at most 4300 are allowed"):
            load(f"{text}{three_parts}]".encode())
        with pytest.raises(FormatError, match="beyond a double's range"):
            load(f"{text}{'9' * 309}.0]".encode())


@pytest.mark.parametrize("number", ["1e-999", "1e308", "0." + "0" * 400 + "1", "1" * 300 + ".5"])
def test_a_number_within_a_double_is_load(number: str) -> None:
    assert load(number.encode()) == float(number)


def test_a_string_has_a_longest_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsontext, "MAX_STRING", 10)
    assert load(b'["0123456789", "0123456789"]') == ["0123456789"] * 2
    for text in ('["01234567890"]', '{"01234567890": 1}', '"012345678' + r"\n" + '"'):
        with pytest.raises(FormatError, match="a string longer than 10 bytes"):
            load(text.encode())
