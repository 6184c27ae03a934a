"""The contents of a checkpoint, and statistics of its tensors against numpy."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import ckptstore
from ckptstore import Store
from ckptstore.errors import CheckpointNotFoundError, TensorNotFoundError
from ckptstore.formats import dtypes
from ckptstore.reports import tensor_numbers
from ckptstore.reports.inspection import TensorStatistics, inspect, statistics


def stored(name: str, state: Any, *, step: int = 1) -> Store:
    store = ckptstore.open(f"memory://{name}")
    with store.writer(parent=None, poll_seconds=None) as writer:
        writer.save(state, step=step)
    return store


def measured(array: npt.NDArray[Any]) -> TensorStatistics:
    return statistics(stored("inspection-one", {"t": array}).journal, "latest", "t")


def test_description() -> None:
    store = stored("inspection", {"a": {"w": np.zeros((3, 4), np.float32)}, "b": np.arange(5), "n": 1}, step=7)
    found = inspect(store.journal)
    assert found.info.ref == found.chain[0].ref
    assert [(t.name, t.dtype, t.shape, t.nbytes, t.stored, t.codec, t.kind) for t in found.tensors] == [
        ("a.w", "F32", (3, 4), 48, 48, "raw", "full"),
        ("b", "I64", (5,), 40, 40, "raw", "full"),
    ]
    (link,) = found.chain
    assert (link.kind, link.base, link.lossy) == ("full", None, False)
    assert link.stored == found.info.stored
    assert found.tensors[0].segment in link.segments
    assert found.tree["n"] == 1
    assert [t.name for t in inspect(store.journal, 7, "a.*").tensors] == ["a.w"]
    with pytest.raises(TensorNotFoundError):
        inspect(store.journal, 7, ["a.*", "c"])
    with pytest.raises(CheckpointNotFoundError):
        inspect(store.journal, 8)


def test_equal_bits_have_equal_hashes() -> None:
    found = inspect(stored("inspection-hash", {"a": np.ones(9), "b": np.ones(9), "c": np.zeros(9)}).journal).tensors
    assert found[0].hash == found[1].hash != found[2].hash


@pytest.mark.parametrize("name", [name for name in dtypes.DTYPES if name not in ("C32", "F4_E2M1_X2")])
def test_every_dtype_against_numpy(name: str) -> None:
    dtype = dtypes.get(name).numpy
    rng = np.random.default_rng(3)
    data = rng.integers(0, 2 if name == "BOOL" else 256, 600 * dtype.itemsize, np.uint8).view(dtype)
    found = measured(data.reshape(20, 30))
    values = data.view(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else data
    with np.errstate(invalid="ignore"):
        values = values.astype(np.float64)
    finite = values[np.isfinite(values)]
    assert (found.dtype, found.shape, found.values) == (name, (20, 30), len(values))
    assert found.nans == np.isnan(values).sum()
    assert found.infinities == np.isinf(values).sum()
    assert found.zeros == (values == 0).sum()
    assert found.minimum == pytest.approx(finite.min(), rel=1e-15)
    assert found.maximum == pytest.approx(finite.max(), rel=1e-15)
    with np.errstate(over="ignore"):
        scale = np.abs(finite).max()
        if scale < 1e150:
            assert found.mean == pytest.approx(finite.mean(), rel=1e-9, abs=1e-12 * scale)
            assert found.std == pytest.approx(finite.std(), rel=1e-9)
            assert found.norm == pytest.approx(np.linalg.norm(finite), rel=1e-12)
    assert sum(found.exponents.values()) == len(finite) - found.zeros


def test_fp4_and_half_complex() -> None:
    fp4 = dtypes.get("F4_E2M1_X2")
    assert tensor_numbers.doubles(fp4, np.array([0x10, 0xF7], np.uint8)).tolist() == [0.0, 0.5, 6.0, -6.0]
    half = dtypes.get("C32")
    assert tensor_numbers.doubles(half, np.array([1, -2], np.float16).view(np.uint8)).tolist() == [1.0, -2.0]


def test_integers_are_exact() -> None:
    found = measured(np.array([-(2**63), 2**63 - 1, 0], np.int64))
    assert (found.minimum, found.maximum) == (-(2**63), 2**63 - 1)
    assert measured(np.array([2**64 - 1], np.uint64)).maximum == 2**64 - 1


def test_exponents_are_powers_of_two() -> None:
    found = measured(np.array([0.25, 0.49, 0.5, 1.0, -1.5, 2.0, 5e-324, 0.0, math.inf, math.nan]))
    assert found.exponents == {-1074: 1, -2: 2, -1: 1, 0: 2, 1: 1}
    assert list(found.exponents) == sorted(found.exponents)


@pytest.mark.parametrize("values", [[], [math.nan, math.inf]])
def test_nothing_finite(values: list[float]) -> None:
    found = measured(np.array(values))
    assert (found.minimum, found.maximum, found.mean, found.std, found.norm) == (None,) * 5
    assert found.values == len(values)


def test_overflow_is_infinite_not_an_error() -> None:
    found = measured(np.array([1e308, -1e308]))
    assert (found.mean, found.norm, found.maximum) == (0.0, math.inf, 1e308)


@settings(max_examples=40, deadline=None)
@given(arrays.arrays(np.float32, st.integers(0, 200), elements=st.floats(-(2**60), 2**60, width=32)))
def test_blocks_add_up(array: npt.NDArray[Any]) -> None:
    whole = measured(array)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_numbers, "BLOCK_VALUES", 7)
        parts = measured(array)
    assert (parts.minimum, parts.maximum, parts.exponents) == (whole.minimum, whole.maximum, whole.exponents)
    if len(array):
        assert parts.mean == pytest.approx(whole.mean, rel=1e-9, abs=1e-9 * float(np.abs(array).max()))
        assert parts.std == pytest.approx(whole.std, rel=1e-6, abs=1e-9 * float(np.abs(array).max()))


def test_progress_and_missing_tensors() -> None:
    store = stored("inspection-progress", {"weights": np.zeros(5_000_000)})
    told: list[tuple[int, int]] = []
    statistics(store.journal, "latest", "weights", lambda done, total: told.append((done, total)))
    assert told == [(16 << 20, 40_000_000), (32 << 20, 40_000_000), (40_000_000, 40_000_000)]
    with pytest.raises(TensorNotFoundError, match="close: weights"):
        statistics(store.journal, "latest", "weight")
    with pytest.raises(TensorNotFoundError):
        statistics(store.journal, "latest", "w*")  # a name, not a pattern


def test_bfloat16_denormals() -> None:
    found = measured(np.array([1, 0x8001], np.uint16).view(ml_dtypes.bfloat16))
    assert found.exponents == {-133: 2}
