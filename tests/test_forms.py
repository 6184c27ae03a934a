"""The part of a matrix that CI runs covers every row and every column."""

from __future__ import annotations

import pytest

from tests.forms import in_turn


@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize("values", [1, 2, 3, 4])
@pytest.mark.parametrize("names", [4, 5, 11])
def test_parameters_in_turn_have_every_name_and_every_value(names: int, values: int, each: int) -> None:
    found = in_turn([f"name{place}" for place in range(names)], [(at, f"value{at}") for at in range(values)], each)
    assert len({one.id for one in found}) == len(found) == names * values, "the long form has each with each"
    now = [one.values for one in found if not one.marks]
    assert {name for name, _, _ in now} == {f"name{place}" for place in range(names)}
    assert {at for _, at, _ in now} == set(range(values))
    assert len(now) == names * min(each, values)


def test_a_value_of_one_part_is_given_as_it_is() -> None:
    assert [one.values for one in in_turn(["a"], [None, True])] == [("a", None), ("a", True)]
