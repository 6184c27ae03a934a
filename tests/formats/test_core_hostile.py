"""Wrong calls of the compiled kernels are refused, and nothing is written: neither into an argument nor beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.formats.codecs.kernels import N_LOG_N
from ckptstore.formats.codecs.plane_coder import compressed, decompressed
from tests.forms import short_or
from tests.kernel_forms import SETS, needs_core, use_form

core = pytest.importorskip("ckptstore.formats.core", reason="the kernels are not compiled")
pytestmark = needs_core
COUNT = 64
GUARD = 4096
NUMBERS = np.zeros(COUNT + 1, np.int64)


@pytest.fixture(autouse=True, params=SETS, scope="module")
def instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    use_form(request.param)
    yield
    use_form(None)


def array(kind: str, count: int = COUNT) -> np.ndarray:
    """An array with guards on both sides."""
    nbytes = np.dtype(kind).itemsize * count
    memory = np.full(nbytes + 2 * GUARD, 0xC3, np.uint8)
    return memory[GUARD : GUARD + nbytes].view(kind)


def counts(of: int = COUNT, classes: int = 2) -> np.ndarray:
    """Those of labels that are all 0: quarters of `of` words."""
    found = np.zeros((4, classes), np.int64)
    found[:, 0] = [of // 4] * 3 + [of - 3 * (of // 4)]
    return found


def labels() -> np.ndarray:
    found = array("u1")
    found[:] = 0
    return found


def ascending(count: int) -> np.ndarray:
    return np.arange(count, dtype="<u4")


def floats(count: int) -> list[np.ndarray]:
    return [array("<f4") for _ in range(count)]


def space(times: int, more: int = 1 << 18) -> np.ndarray:
    return array("u1", times * 4 * COUNT + more)


OUT = 4 * COUNT + 64
RUNS = 300
"""Two runs of scales."""
SCALARS = [0.1, 0.9, 0.1, 1.0, 0.5, 1e-8, 1e-3]

# Calls that are right. Each argument is then replaced by wrong ones.
CALLS: dict[str, Callable[[], list[Any]]] = {
    "difference": lambda: [array("<u4"), array("<u4"), array("<u4")],
    "zigzag": lambda: [array("<u2"), array("<u2")],
    "rotate_left": lambda: [array("<u8"), array("<u8")],
    "split": lambda: [array("<u4"), [array("<u2"), array("u1"), array("u1")]],
    "combine": lambda: [[array("<u2"), array("u1"), array("u1")], 3, array("<u4"), array("<u4")],
    "pack_small": lambda: [array("u1"), 4, array("u1", COUNT // 2)],
    "unpack_small": lambda: [array("u1", COUNT // 2), 4, array("u1")],
    "find_exceptions": lambda: [array("<u4"), 1, array("<u4")],
    "take_exceptions": lambda: [array("<u4"), 1, ascending(5), array("u1"), array("u1", 5), array("<u4", 5)],
    "put_exceptions": lambda: [np.zeros(5, np.uint8), array("<u4", 5), 1, array("<u4")],
    "survey": lambda: [array("u1"), NUMBERS],
    "survey_packed": lambda: [array("u1"), 4, NUMBERS],
    "classify": lambda: [array("<u4"), 23, 100, 101, array("u1"), array("<i8", 8)],
    "sort": lambda: [array("<u4"), labels(), counts(), array("<u4")],
    "add_unsorted": lambda: [array("<u4"), labels(), counts(), array("<u4"), array("<u4")],
    "to_bfloat16": lambda: [array("<u4"), array("<u2")],
    "to_float16": lambda: [array("<u4"), array("<u2")],
    "fma": lambda: [array("<f4"), array("<f4"), array("<f4"), array("<f4")],
    "moments": lambda: [0, True, array("<f4"), array("<f4"), array("<f4"), 0.1, 0.9, 0.1],
    "second_moment": lambda: [array("<f4"), array("<f4"), array("<f4"), 10.0, 0.9, 0.1, array("<f4")],
    "move": lambda: [False, array("<f4"), array("<f4"), array("<f4"), 1.0, 1.0, 1e-8, -0.1],
    "buffered": lambda: [False, True, array("<f4"), array("<f4"), array("<f4"), 0.9, 1.0, -0.1],
    "missed": lambda: [array("<u4"), array("<u4")],
    "block_sums": lambda: [array("<u4"), 3, array("<u8", 16), array("<u8", 5)],
    "piece_sums": lambda: [array("<u4"), np.array([0, 10, 26], np.int64), array("<u8", 16), array("<u8", 3)],
    "mean_scales": lambda: [array("<f4", RUNS), array("<f4", RUNS), 0, array("u1", 2)],
    "away": lambda: [array("<u4", RUNS), array("<f4", RUNS), array("u1", 2), array("<u4", RUNS)],
    "back": lambda: [array("<u2", RUNS), array("<f4", RUNS), array("u1", 2), array("<u2", RUNS)],
    "classes": lambda: [
        *(array("<u4", RUNS), array("<f4", RUNS), array("u1", 2), array("u1", RUNS), np.zeros((4, 16), np.int64)),
    ],
    "changes": lambda: [array("<u4"), array("<u4"), array("<u4")],
    "unsorted_changes": lambda: [array("<u4"), labels(), counts(), array("<u4"), array("<u4")],
    "scaled": lambda: [array("<f4"), 0.9, array("<f4")],
    "literals": lambda: [array("u1", 4 * COUNT), array("u1", 4 * COUNT)],
    "read_literals": lambda: [array("u1", 4 * COUNT), array("u1", 4 * COUNT)],
    "write_group": lambda: [array("<u4"), 0, False, N_LOG_N, space(8, 1 << 17), array("u1", OUT - 32), compressed],
    "write_chunks": lambda: [
        *(array("u1", 30), array("u1", 10), np.array([4 * 2, 4 * 3 + 2], np.uint8), np.array([20, 10], np.int64), 0),
        *(N_LOG_N, array("u1", 9 * 20 + (1 << 18)), array("u1", 30 + 2 * 16 + 32), array("<i8", 2), compressed),
    ],
    "read_group": lambda: [array("u1", 9), 3, 3, array("<u4"), array("<u4"), space(6, 1 << 17), decompressed],
    "write_adam": lambda: [*floats(6), False, *SCALARS, 0, N_LOG_N, space(11), array("u1", 3 * OUT), compressed],
    "read_adam": lambda: [array("u1", 9), 3, *floats(3), False, *SCALARS, space(8), decompressed],
    "step_adam": lambda: [*floats(3), array("<u2"), 0, True, False, array("<f4", 2), *SCALARS],
    "write_replayed": lambda: [
        *(*floats(6), array("<u2"), 0, True, False, array("<f4", 2), *SCALARS),
        *(0, N_LOG_N, space(11), array("u1", 3 * OUT), compressed),
    ],
    "stream": lambda: [array("u1"), array("u1")],
    "moves": lambda: [np.zeros(2, np.int64), np.zeros(2, np.int64), np.zeros(2, np.int64), 5],
}
ANY_ITEMS = {
    ("find_exceptions", 0), ("classify", 0), ("combine", 0), ("write_group", 0), ("step_adam", 3),
    ("write_replayed", 6),
}  # fmt: skip
"""Arguments with words of several sizes."""
ALIKE = {
    "difference", "zigzag", "rotate_left", "add_unsorted", "fma", "second_moment", "move", "missed",
    "away", "back", "changes", "unsorted_changes", "scaled",
}  # fmt: skip
"""Kernels that may work in place."""


def flat(arguments: list[Any]) -> list[tuple[int, int | None]]:
    """Places of arrays among the arguments, also in lists."""
    found: list[tuple[int, int | None]] = []
    for at, one in enumerate(arguments):
        if isinstance(one, list):
            found += [(at, inside) for inside, part in enumerate(one) if isinstance(part, np.ndarray)]
        elif isinstance(one, np.ndarray):
            found.append((at, None))
    return found


def at(arguments: list[Any], place: tuple[int, int | None]) -> np.ndarray:
    found = arguments[place[0]]
    return found if place[1] is None else found[place[1]]


def changed(arguments: list[Any], place: tuple[int, int | None], value: Any) -> list[Any]:
    found = [list(one) if isinstance(one, list) else one for one in arguments]
    if place[1] is None:
        found[place[0]] = value
    else:
        found[place[0]][place[1]] = value
    return found


def memory_of(one: np.ndarray) -> np.ndarray:
    """All memory of an array, with its guards."""
    found = one
    while isinstance(found.base, np.ndarray):
        found = found.base
    return found.reshape(-1).view(np.uint8)


def refused(name: str, arguments: list[Any], *errors: type[Exception]) -> None:
    places = flat(arguments)
    before = [memory_of(at(arguments, place)).tobytes() for place in places]
    with pytest.raises(errors or (ValueError, TypeError, OverflowError)):
        getattr(core, name)(*arguments)
    assert [memory_of(at(arguments, place)).tobytes() for place in places] == before


def test_every_kernel_is_here() -> None:
    assert set(CALLS) == {name for name in dir(core) if not name.startswith("_")} - {"sets", "selected", "select"}


@pytest.mark.parametrize("name", CALLS)
def test_right_calls_write_nothing_beside_their_arguments(name: str) -> None:
    arguments = CALLS[name]()
    getattr(core, name)(*arguments)
    for place in flat(arguments):
        one = at(arguments, place)
        memory = memory_of(one)
        if memory.size > one.nbytes:
            assert (memory[:GUARD] == 0xC3).all()
            assert (memory[-GUARD:] == 0xC3).all()


@pytest.mark.parametrize("name", CALLS)
def test_wrong_sizes(name: str) -> None:
    """An array that is longer or shorter than the others; larger tables and results are allowed."""
    larger = {("unpack_small", 0), ("find_exceptions", 1), ("find_exceptions", 2), ("take_exceptions", 4)}
    larger |= {("survey", 1), ("survey_packed", 2), ("block_sums", 2), ("piece_sums", 0), ("piece_sums", 2)}
    larger |= {("put_exceptions", 3), ("put_exceptions", 1), ("put_exceptions", 0), ("block_sums", 0)}
    smaller = {("find_exceptions", 0), ("survey", 0), ("survey_packed", 0), ("put_exceptions", 0)}
    smaller |= {("put_exceptions", 1), ("put_exceptions", 3), ("block_sums", 0), ("block_sums", 2)}
    smaller |= {("take_exceptions", 4), ("piece_sums", 0), ("unpack_small", 2)}
    anything = {("literals", 0), ("literals", 1), ("read_literals", 0), ("read_literals", 1), ("write_group", 0)}
    anything |= {("read_group", 0), ("read_adam", 0), ("step_adam", 7), ("write_replayed", 10)}
    larger |= anything | {("write_group", 3), ("write_group", 4), ("write_group", 5), ("read_group", 5)}
    larger |= {("write_chunks", at) for at in (5, 6, 7)}
    larger |= {("write_adam", at) for at in (15, 16, 17)} | {("read_adam", 13), ("write_replayed", 19)}
    larger |= {("write_replayed", at) for at in (20, 21)}
    smaller |= anything
    arguments = CALLS[name]()
    for place in flat(arguments):
        one = at(arguments, place)
        kind, count = one.dtype.str, one.size
        for size in (0, 1, count - 1, count + 1, 5 * count):
            if (name, size) in {("pack_small", COUNT - 1), ("unpack_small", COUNT - 1)}:
                continue  # the last byte is not full
            if size == count or ((name, place[0]) in (larger if size > count else smaller)):
                continue
            if name == "take_exceptions" and place[0] == 3 and size == 0:
                continue  # no rest is wanted
            other = array(kind, size)
            other[:] = 0
            refused(name, changed(CALLS[name](), place, other))


@pytest.mark.parametrize("name", CALLS)
def test_wrong_items_and_kinds(name: str) -> None:
    arguments = CALLS[name]()
    for place in flat(arguments):
        one = at(arguments, place)
        for kind in ("u1", "<u2", "<u4", "<u8"):
            kept = (name, place[0]) in ANY_ITEMS
            if np.dtype(kind).itemsize != one.itemsize and not kept:
                refused(name, changed(CALLS[name](), place, array(kind, one.size)))
        refused(name, changed(CALLS[name](), place, np.zeros(one.size, "c16")))
        refused(name, changed(CALLS[name](), place, np.zeros(2 * one.size, one.dtype)[::2]))
        refused(name, changed(CALLS[name](), place, None), TypeError)
        refused(name, changed(CALLS[name](), place, "text"), TypeError)
    for place, one in enumerate(arguments):
        if isinstance(one, list):
            for wrong in ([], [*one, array("u1")], [array("<u4")] * 13, (), None):
                refused(name, changed(CALLS[name](), (place, None), wrong))
        elif not isinstance(one, np.ndarray):
            refused(name, changed(CALLS[name](), (place, None), "1"), TypeError)
    refused(name, arguments[:-1], TypeError)
    refused(name, [*arguments, 1], TypeError)


WRITTEN = {
    "difference": [2], "zigzag": [1], "rotate_left": [1], "split": [1], "combine": [3], "pack_small": [2],
    "unpack_small": [2], "find_exceptions": [2], "take_exceptions": [3, 4, 5], "put_exceptions": [3],
    "classify": [4, 5], "sort": [3], "add_unsorted": [4], "to_bfloat16": [1], "to_float16": [1], "fma": [3],
    "moments": [2, 3], "second_moment": [6], "move": [1], "buffered": [2, 3], "block_sums": [3], "piece_sums": [3],
    "mean_scales": [3], "away": [3], "back": [3], "classes": [3, 4], "changes": [2], "unsorted_changes": [4],
    "scaled": [2], "stream": [1], "literals": [1], "read_literals": [1], "write_group": [4, 5], "read_group": [4, 5],
    "write_chunks": [6, 7, 8],
    "write_adam": [16, 17], "read_adam": [2, 3, 4, 13], "step_adam": [0, 1, 2], "write_replayed": [20, 21],
}  # fmt: skip
"""Positions of the arguments that are written."""


@pytest.mark.parametrize("name", WRITTEN)
def test_what_may_not_be_written_is_not(name: str) -> None:
    for place in flat(CALLS[name]()):
        if place[0] in WRITTEN[name]:
            one = at(CALLS[name](), place).copy()
            one.flags.writeable = False
            refused(name, changed(CALLS[name](), place, one), ValueError)
            refused(name, changed(CALLS[name](), place, np.frombuffer(bytes(one.nbytes), one.dtype)), ValueError)


@pytest.mark.parametrize("name", WRITTEN)
def test_arrays_that_overlap(name: str) -> None:
    """By a part: always. Entirely: unless the kernel works in place."""
    places = flat(CALLS[name]())
    for written in places:
        if written[0] not in WRITTEN[name]:
            continue
        for other in places:
            if other == written or (name, other[0]) == ("combine", 2):
                continue
            arguments = CALLS[name]()
            target, source = at(arguments, written), at(arguments, other)
            memory = np.full(target.nbytes + source.nbytes + 64, 0, np.uint8)
            one = memory[8 : 8 + target.nbytes].view(target.dtype)
            two = memory[9 : 9 + source.nbytes].view(source.dtype)
            two[:] = source.reshape(-1)
            refused(name, changed(changed(arguments, written, one), other, two.reshape(source.shape)), ValueError)


@pytest.mark.parametrize(
    ("name", "place", "values"),
    [
        ("combine", 1, [-1, 5, 1 << 32, 1 << 40, 1 << 70]),
        ("pack_small", 1, [-1, 0, 1, 3, 8, 1 << 62]),
        ("unpack_small", 1, [-1, 0, 1, 3, 8, 1 << 62]),
        ("find_exceptions", 1, [-1, 1 << 32, 1 << 63]),
        ("take_exceptions", 1, [-1, 1 << 32]),
        ("put_exceptions", 2, [-1, 1 << 32]),
        ("survey_packed", 1, [-1, 0, 3, 8]),
        ("classify", 1, [-1, 32, 1 << 40]),
        ("classify", 2, [-1, 102, 1 << 32]),
        ("classify", 3, [99, 102, 356, 1 << 32]),
        ("moments", 0, [-1, 3, 1 << 32]),
        ("moments", 1, [-1, 2]),
        ("block_sums", 1, [-1, 16, 1 << 62]),
        ("mean_scales", 2, [-(1 << 30) - 1, (3 << 29) + 1, 1 << 62]),
    ],
)
def test_numbers_out_of_range(name: str, place: int, values: list[int]) -> None:
    for value in values:
        refused(name, changed(CALLS[name](), (place, None), value))


def test_chunks_that_are_none() -> None:
    """Kinds and lengths that do not fit the bytes, also if their sum overflows."""
    arguments = CALLS["write_chunks"]()
    for kinds in ([20, 14], [255, 14], [8, 8], [14, 14]):
        refused("write_chunks", changed(arguments, (2, None), np.array(kinds, np.uint8)), ValueError)
    for lengths in ([-1, 31], [31, -1], [10, 20], [1 << 62, 1 << 62], [30, 0], [-(1 << 63), 10]):
        refused("write_chunks", changed(arguments, (3, None), np.array(lengths, np.int64)), ValueError)
    for level in (-1, 2, 1 << 40):
        refused("write_chunks", changed(arguments, (4, None), level), ValueError)


@pytest.mark.parametrize("where", [[0, 1, 2, 3, 64], [3, 2, 4, 5, 6], [1, 1, 2, 3, 4], [0, 1, 2, 3, 1 << 31]])
def test_positions_that_are_none(where: list[int]) -> None:
    arguments = changed(CALLS["take_exceptions"](), (2, None), np.array(where, "<u4"))
    with pytest.raises(ValueError, match="positions that are not of these values"):
        core.take_exceptions(*arguments)
    for place in (3, 4, 5):
        assert (memory_of(arguments[place])[:GUARD] == 0xC3).all()
        assert (memory_of(arguments[place])[-GUARD:] == 0xC3).all()


def test_more_steps_than_there_is_space_for() -> None:
    values, steps = array("<u4", 2000), array("u1", 3)
    for where in ([1999], [0, 800]):
        with pytest.raises(ValueError, match="positions"):
            core.take_exceptions(
                values, 1, np.array(where, "<u4"), np.empty(0, np.uint8), steps, array("<u4", len(where))
            )
        assert (memory_of(steps)[-GUARD:] == 0xC3).all()


@pytest.mark.parametrize("name", ["sort", "add_unsorted", "unsorted_changes"])
@settings(deadline=None, max_examples=short_or(60, 600))
@given(st.data())
def test_counts_that_are_not_those_of_the_labels(name: str, data: st.DataObject) -> None:
    """They are refused, or lead to places inside; nothing outside is read or written."""
    arguments = CALLS[name]()
    arguments[1][:] = data.draw(st.lists(st.integers(0, 255), min_size=COUNT, max_size=COUNT))
    classes = data.draw(st.integers(0, 256))
    numbers = st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(0, COUNT)
    if data.draw(st.booleans()) and classes:
        found = counts(classes=classes)
    else:
        some = data.draw(st.lists(numbers, min_size=1, max_size=8))
        found = np.array((some * (4 * classes))[: 4 * classes], np.int64)
    arguments[2] = found
    out = memory_of(arguments[-1])
    with suppress(ValueError):
        getattr(core, name)(*arguments)
    assert (out[:GUARD] == 0xC3).all()
    assert (out[-GUARD:] == 0xC3).all()


@pytest.mark.parametrize("ends", [[-1, 5, 9], [5, 4, 9], [0, 10, 65], [0, 17, 20], [0, 1, 1 << 62]])
def test_pieces_that_are_none(ends: list[int]) -> None:
    refused("piece_sums", changed(CALLS["piece_sums"](), (1, None), np.array(ends, np.int64)), ValueError)


def test_moves_of_negative_lengths() -> None:
    refused("moves", changed(CALLS["moves"](), (2, None), np.array([0, -1], np.int64)), ValueError)


def test_an_instruction_set_that_is_not_here() -> None:
    before = core.selected()
    for wrong in ("sse9", "", None, 3):
        with pytest.raises(ValueError, match="has no instruction set"):
            core.select(wrong)
    assert core.selected() == before
