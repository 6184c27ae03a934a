"""numpy arrays in files of torch.save: those that numpy makes are restored, others never reach numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptstore
from ckptstore.errors import FormatError
from ckptstore.exchange.import_files import import_files
from tests.store.states import same


class Made:
    """An object that is pickled as a call of a function with these arguments, and filled in with a state."""

    def __init__(self, function: Any, arguments: tuple[Any, ...], state: Any = None) -> None:
        self.function, self.arguments, self.state = function, arguments, state

    def __reduce__(self) -> Any:
        return (self.function, self.arguments, self.state)


def imported(tmp_path: Path, value: Any) -> Any:
    torch.save({"value": value}, tmp_path / "step_1.pt")
    store = ckptstore.open(tmp_path / "run")
    import_files(store.journal, [tmp_path / "step_1.pt"])
    return store.load(1)["value"]


@pytest.mark.parametrize("code", ["?", "i1", "u2", "<i4", ">i4", "u8", "f2", "f4", ">f8", "c8", "c16"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_of_numbers(tmp_path: Path, code: str, order: Any) -> None:
    array = np.arange(24).reshape(2, 3, 4).astype(code, order=order)
    same(imported(tmp_path, [array, array[:0], np.array(5, code)]), [array, array[:0], np.array(5, code)])


@pytest.mark.parametrize("value", [np.float64(0.1), np.int32(-7), np.bool_(True), np.float16(0.5), np.complex128(1j)])
def test_scalars(tmp_path: Path, value: Any) -> None:
    found = imported(tmp_path, value)
    assert (type(found), found) == (type(value), value)


def test_one_array_at_two_places_is_one_again(tmp_path: Path) -> None:
    array = np.arange(3)
    found = imported(tmp_path, [array, array])
    assert found[0] is found[1]


_U4 = np.dtype("u4")
_EMPTY = (np.ndarray, (0,), b"b")
_MAKE = np.zeros(0).__reduce__()[0]
_SCALAR = np.float64(0).__reduce__()[0]


def dtype(code: Any = "u4", state: Any = (3, "<", None, None, None, -1, -1, 0)) -> Made:
    return Made(np.dtype, (code, False, True), state)


@pytest.mark.parametrize(
    "value",
    [
        np.array([None], dtype=object),
        np.array(["text"]),
        np.array([b"text"]),
        np.array(["2020-01-01"], dtype="M8[D]"),
        np.zeros(2, [("a", "u4")]),
        Made(_MAKE, _EMPTY, (1, (2,), dtype(), False, b"1234")),
        Made(_MAKE, _EMPTY, (1, (2,), dtype(), False, "12345678")),
        Made(_MAKE, _EMPTY, (1, (-1, -2), dtype(), False, b"12345678")),
        Made(_MAKE, _EMPTY, (1, (True,), dtype(), False, b"1234")),
        Made(_MAKE, _EMPTY, (1, (2**60, 0), dtype(), False, b"")),
        Made(_MAKE, _EMPTY, (1, (1,) * 33, dtype(), False, b"1234")),
        Made(_MAKE, _EMPTY, (1, [1], dtype(), False, b"1234")),
        Made(_MAKE, _EMPTY, (1, (1,), "u4", False, b"1234")),
        Made(_MAKE, _EMPTY, (1, (1,), dtype())),
        Made(_MAKE, _EMPTY, [1, (1,), dtype(), False, b"1234"]),
        Made(_MAKE, _EMPTY, (1, (1,), dtype(state=(3, "<", (_U4, (9,)), None, None, -1, -1, 0)), False, b"1234")),
        Made(_MAKE, _EMPTY, (1, (1,), dtype(state=(3, "<", None, ("a",), None, -1, -1, 0)), False, b"1234")),
        Made(_MAKE, _EMPTY, (1, (1,), dtype(state=(3, "?", None, None, None, -1, -1, 0)), False, b"1234")),
        Made(_MAKE, _EMPTY, (1, (1,), dtype(state=(3, "<")), False, b"1234")),
        Made(_MAKE, _EMPTY, (1, (1,), dtype(state="3<   "), False, b"1234")),
        Made(_MAKE, _EMPTY, (1, (1,), dtype("u4,u4", None), False, b"12345678")),
        Made(_MAKE, _EMPTY, (1, (1,), dtype("u9", None), False, b"123456789")),
        Made(_MAKE, _EMPTY, (1, (1,), dtype(4, None), False, b"1234")),
        Made(_MAKE, _EMPTY, (1, (1,), dtype("uint32", None), False, b"1234")),
        Made(_MAKE, _EMPTY, (1, (1,), dtype(state=7), False, b"1234")),
        Made(_MAKE, _EMPTY, (1, (1,), dtype("V4", None), False, b"1234")),
        Made(bytes, (1 << 40,)),
        Made(_SCALAR, (dtype(), b"12345")),
        Made(_SCALAR, (dtype(), "1234")),
        Made(_SCALAR, (dtype("O", None), b"12345678")),
    ],
    ids=range(30),
)
def test_anything_else_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(FormatError, match=r"step_1\.pt: .*pickled|only numbers are taken from a pickle"):
        imported(tmp_path, value)
    assert not (tmp_path / "run").exists()


def test_globals_that_the_process_allows_change_nothing(tmp_path: Path) -> None:
    """transformers allows numpy's own functions while it loads; which of two with one name torch takes is undefined."""
    before = set(torch.serialization.get_safe_globals())
    own = [_MAKE, np.ndarray, np.dtype, type(np.dtype("u4")), type(np.dtype("f8"))]
    with torch.serialization.safe_globals(own):
        same(imported(tmp_path, np.arange(3, dtype=np.uint32)), np.arange(3, dtype=np.uint32))
        assert set(torch.serialization.get_safe_globals()) == before | set(own)
    assert set(torch.serialization.get_safe_globals()) == before


def test_of_two_functions_of_one_name_the_process_own_is_never_taken(tmp_path: Path) -> None:
    def theirs(*_arguments: Any) -> None:
        raise AssertionError("taken")

    for kind in range(16):  # each set has another order
        names = [f"numpy.{core}.multiarray._reconstruct" for core in ("core", "_core")] + ["numpy.dtype", f"x.{kind}"]
        (tmp_path / f"{kind}").mkdir()
        with torch.serialization.safe_globals([(theirs, name) for name in names]):
            same(imported(tmp_path / f"{kind}", np.arange(3.0)), np.arange(3.0))
