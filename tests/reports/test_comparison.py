"""Differences between checkpoints: bits against a reference, norms against numpy, the rest of the state."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptstore
from ckptstore.errors import TensorNotFoundError
from ckptstore.formats import dtypes
from ckptstore.reports import comparison, tensor_numbers
from ckptstore.reports.comparison import StateDifference, TensorDifference, compare, compare_state


def both(a: Any, b: Any) -> ckptstore.Store:
    store = ckptstore.open("memory://comparison")
    with store.writer(parent=None, poll_seconds=None) as writer:
        writer.save(a, step=1)
        writer.save(b, step=2)
    return store


def difference(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> TensorDifference:
    (found,) = compare(both({"t": a}, {"t": b}).journal, "1", "2")
    return found


def popcount(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> int:
    return (int.from_bytes(a.tobytes(), "little") ^ int.from_bytes(b.tobytes(), "little")).bit_count()


@pytest.mark.parametrize("name", [name for name in dtypes.DTYPES if name not in ("C32", "F4_E2M1_X2")])
def test_every_dtype_against_a_reference(name: str) -> None:
    dtype = dtypes.get(name).numpy
    rng = np.random.default_rng(5)
    raw = rng.integers(0, 2 if name == "BOOL" else 256, (2, 600 * dtype.itemsize), np.uint8)
    raw[1, : 100 * dtype.itemsize] = raw[0, : 100 * dtype.itemsize]
    a, b = raw[0].view(dtype), raw[1].view(dtype)
    found = difference(a, b)
    assert found.status == "changed"
    assert found.bits == 8 * a.nbytes
    assert found.bits_changed == popcount(a, b)
    same = raw[0].reshape(600, -1) == raw[1].reshape(600, -1)
    assert found.elements_changed == 600 - same.all(axis=1).sum()
    values_a, values_b = (x.view(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else x for x in (a, b))
    with np.errstate(invalid="ignore"):
        wide_a, wide_b = values_a.astype(np.float64), values_b.astype(np.float64)
    finite = np.isfinite(wide_a) & np.isfinite(wide_b)
    changed = values_a.view(f"u{values_a.itemsize}") != values_b.view(f"u{values_b.itemsize}")
    assert found.nonfinite == (changed & ~finite).sum()
    with np.errstate(over="ignore"):
        if np.abs(wide_a[finite]).max() < 1e150 and np.abs(wide_b[finite]).max() < 1e150:
            gap = wide_b[finite] - wide_a[finite]
            assert found.norm_diff == pytest.approx(np.linalg.norm(gap), rel=1e-12)
            assert found.norm_a == pytest.approx(np.linalg.norm(wide_a[np.isfinite(wide_a)]), rel=1e-12)
            assert found.norm_b == pytest.approx(np.linalg.norm(wide_b[np.isfinite(wide_b)]), rel=1e-12)
            assert found.max_abs == pytest.approx(np.abs(gap).max(), rel=1e-15)


def test_bits_are_compared_not_values() -> None:
    nan, other_nan = np.uint32(0x7FC00000), np.uint32(0x7FC00001)
    zero, minus_zero = np.uint32(0), np.uint32(0x80000000)
    found = difference(
        np.array([nan, nan, zero], np.uint32).view(np.float32),
        np.array([nan, other_nan, minus_zero], np.uint32).view(np.float32),
    )
    assert (found.bits_changed, found.elements_changed, found.nonfinite) == (2, 2, 1)
    assert (found.norm_diff, found.max_abs) == (0.0, 0.0)


def test_integer_extremes_are_exact() -> None:
    found = difference(np.array([-(2**63), 5]), np.array([2**63 - 1, 7]))
    assert found.max_abs == 2**64 - 1
    assert difference(np.array([0, 9], np.uint64), np.array([2**64 - 1, 9], np.uint64)).max_abs == 2**64 - 1
    assert difference(np.array([-128], np.int8), np.array([127], np.int8)).max_abs == 255


def test_a_complex_element_counts_once() -> None:
    found = difference(np.array([1 + 1j, 2]), np.array([2 + 2j, 2]))
    assert (found.elements, found.elements_changed) == (2, 1)
    assert found.norm_diff == pytest.approx(math.sqrt(2))


def test_statuses() -> None:
    a = {
        "same": np.ones(3),
        "gone": np.ones(3),
        "typed": np.ones(3),
        "shaped": np.ones((2, 3)),
        "none": np.ones((0, 2)),
    }
    b = {
        "same": np.ones(3),
        "typed": np.ones(3, np.float32),
        "shaped": np.ones((3, 2)),
        "none": np.ones((0, 2)),
        "new": np.ones(1),
    }
    found = {one.name: one for one in compare(both(a, b).journal, 1, 2)}
    assert list(found) == ["same", "typed", "shaped", "none", "new", "gone"]
    assert {name: one.status for name, one in found.items()} == {
        "same": "same",
        "typed": "replaced",
        "shaped": "replaced",
        "none": "same",
        "new": "added",
        "gone": "removed",
    }
    assert found["typed"].was == ("F64", (3,))
    assert found["shaped"].was == ("F64", (2, 3))
    assert found["same"].bits_changed == 0
    assert found["new"].bits_changed is None
    assert found["gone"].relative is None


def test_select_and_progress() -> None:
    store = both({"a": np.zeros(3_000_000), "b": np.zeros(2)}, {"a": np.ones(3_000_000), "b": np.ones(2)})
    assert [one.name for one in compare(store.journal, 1, 2, "b")] == ["b"]
    with pytest.raises(TensorNotFoundError):
        compare(store.journal, 1, 2, "c")
    told: list[tuple[int, int]] = []
    compare(store.journal, 1, 2, progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (48_000_032, 48_000_032)
    assert [done for done, _ in told] == sorted(done for done, _ in told)


@settings(max_examples=30, deadline=None)
@given(st.binary(max_size=300), st.data())
def test_blocks_add_up(image: bytes, data: st.DataObject) -> None:
    a = np.frombuffer(image, np.uint8).copy()
    b = a.copy()
    for index in data.draw(st.lists(st.integers(0, max(0, len(a) - 1)), max_size=5)):
        if len(b):
            b[index] ^= data.draw(st.integers(0, 255))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_numbers, "BLOCK_VALUES", 7)
        found = difference(a, b)
    assert found.bits_changed == popcount(a, b)
    assert found.status == ("changed" if popcount(a, b) else "same")


def test_counting_bits_without_numpy_2(monkeypatch: pytest.MonkeyPatch) -> None:
    data = np.random.default_rng(2).integers(0, 256, 1003, np.uint8)
    fast = comparison.ones(data)
    monkeypatch.delattr(np, "bitwise_count", raising=False)
    assert comparison.ones(data) == fast == sum(int(byte).bit_count() for byte in data)


def test_the_rest_of_the_state() -> None:
    a = {
        "lr": 0.1,
        "flag": True,
        "old": 1,
        "nest": {"x": [1, {"y": None}]},
        "w": np.ones(2),
        "nan": math.nan,
        7: "seven",
    }
    b = {
        "lr": 0.2,
        "flag": 1,
        "nest": {"x": [1, {"y": None}, 2]},
        "w": np.zeros(2),
        "nan": math.nan,
        7: "seven",
        "new": (),
    }
    assert compare_state(both(a, b).journal, 1, 2) == [
        StateDifference("lr", "changed", 0.1, 0.2),
        StateDifference("flag", "changed", True, 1),
        StateDifference("nest.x.2", "added", None, 2),
        StateDifference("new", "added", None, {"$tuple": []}),
        StateDifference("old", "removed", 1, None),
    ]


@pytest.mark.parametrize(("a", "b"), [({"x": 1, "y": 2}, {"y": 2, "x": 1}), ({"x": [1]}, {"x": (1,)})])
def test_order_and_type_of_containers_are_state(a: Any, b: Any) -> None:
    assert compare_state(both(a, b).journal, 1, 2) == [StateDifference("", "changed", None, None)]
    assert compare_state(both(a, a).journal, 1, 2) == []


class TestTied:
    """A tied tensor is found under each of its places, as in `Store.load`."""

    @pytest.fixture
    def store(self) -> ckptstore.Store:
        one, other = np.arange(4.0), np.arange(4.0) + 1
        tied = {"wte": one, "head": one, "norm": np.ones(2)}
        untied = {"wte": one.copy(), "head": other, "norm": np.ones(2)}
        store = both(tied, {"wte": other, "head": other, "norm": np.ones(2)})
        with store.writer(poll_seconds=None) as writer:
            writer.save(untied, step=3)
        return store

    def found(self, store: ckptstore.Store, *arguments: Any) -> list[tuple[str, str]]:
        return [(one.name, one.status) for one in store.compare(*arguments)]

    def test_by_any_of_its_places(self, store: ckptstore.Store) -> None:
        assert self.found(store, 1, 2, "head") == [("head", "changed")]
        assert self.found(store, 1, 2, "wte") == [("wte", "changed")]
        assert self.found(store, 1, 2, ["head", "n*"]) == [("head", "changed"), ("norm", "same")]

    def test_once(self, store: ckptstore.Store) -> None:
        assert self.found(store, 1, 2) == self.found(store, 1, 2, "*") == [("wte", "changed"), ("norm", "same")]

    def test_tied_in_one_alone(self, store: ckptstore.Store) -> None:
        for select in ("*", None):
            assert self.found(store, 1, 3, select) == [("wte", "same"), ("head", "changed"), ("norm", "same")]
        assert self.found(store, 3, 1, "head") == [("head", "changed")]
        (head,) = store.compare(1, 3, "head")
        assert (head.norm_diff, head.elements_changed) == (2.0, 4)

    def test_nowhere(self, store: ckptstore.Store) -> None:
        with pytest.raises(TensorNotFoundError, match=r"1@.* or 2@.*: no tensor matches 'tail'"):
            store.compare(1, 2, "tail")
