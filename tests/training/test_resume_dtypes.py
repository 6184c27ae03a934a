"""`resume()` into tensors of another dtype, layout or memory: cast, restored or refused, never cut off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ckptstore import DeterminismWarning  # noqa: E402
from ckptstore.errors import StateMismatchError  # noqa: E402
from ckptstore.training import Checkpointer  # noqa: E402
from tests.training.two_layers import Two, everything, moments, nn, refused, resumed, same, trained  # noqa: E402

# -- dtypes


@pytest.mark.parametrize("make", [torch.optim.AdamW, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)])
@pytest.mark.parametrize(("before", "after"), [("float32", "bfloat16"), ("float32", "float64"), ("float64", "float32")])
def test_another_dtype_is_cast_with_a_warning_and_trains_on(tmp_path: Path, make: Any, before: str, after: str) -> None:
    model, optimizer = trained(tmp_path / "s", Two().to(getattr(torch, before)), make)
    other = Two().to(getattr(torch, after))
    fresh = make(other.parameters())
    slots = sum(isinstance(one, torch.Tensor) and one.ndim > 0 for one in moments(model, optimizer).values())
    with pytest.warns(
        DeterminismWarning,
        match=f"Cast: 4 tensors of the model from {before} to {after}.*{slots} tensors of the optimizer from {before}",
    ):
        assert resumed(tmp_path / "s", other, fresh) == 3
    for name, one in moments(other, fresh).items():
        if isinstance(one, torch.Tensor) and one.ndim:
            assert torch.equal(one, moments(model, optimizer)[name].to(getattr(torch, after)))
    for parameter in other.parameters():
        parameter.grad = torch.ones_like(parameter)
    fresh.step()


MASK = torch.finfo(torch.float32).min


def test_a_dtype_that_cuts_numbers_off_is_refused(tmp_path: Path) -> None:
    for dtype in (torch.complex64, torch.float32):
        model = Two()
        model.register_buffer("kept", torch.full((2,), 1.5, dtype=dtype))
        trained(tmp_path / str(dtype), model)
        other = Two()
        other.register_buffer("kept", torch.zeros(2, dtype=torch.int64))
        error = refused(tmp_path / str(dtype), other, torch.optim.AdamW(other.parameters()))
        assert f"{str(dtype).removeprefix('torch.')} [2] in the checkpoint cannot become int64" in str(error)


@pytest.mark.parametrize(
    ("before", "values", "after", "lost"),
    [
        ("int64", [0, 1, 500], "int8", 1),
        ("int64", [0, 127, -128], "int8", 0),
        ("int64", [-129, 128, 3], "int8", 2),
        ("int64", [-1, 0, 5], "uint64", 1),
        ("uint64", [2**63, 0, 5], "int64", 1),
        ("uint16", [60_000, 0, 5], "int16", 1),
        ("int64", [10**6, 0, 5], "float16", 1),
        ("float32", [1e6, -1e6, float("inf")], "float16", 2),
        ("float32", [65_504.0, float("nan"), float("-inf")], "float16", 0),
        ("float64", [1e300, 0.1, 2.0], "float32", 1),
        ("float32", [MASK, -MASK, 1.0], "bfloat16", 0),
        ("float32", [MASK, -MASK, 1e6], "float16", 1),
        ("float32", [MASK, 0.999 * MASK, 1.0], "float16", 1),
        ("float16", [-65_504.0, 65_504.0, 1.0], "bfloat16", 0),
        ("bfloat16", [torch.finfo(torch.bfloat16).min, 0.0, 1e9], "float16", 1),
        ("float64", [torch.finfo(torch.float64).min, 0.0, 1.0], "float32", 0),
        ("float64", [MASK, 0.0, 1.0], "bfloat16", 1),
        ("float32", [MASK, -MASK, 1.0], "float8_e5m2", 0),
        ("float32", [MASK, -MASK, 1.0], "float8_e4m3fnuz", 2),
        ("float32", [1e6, 0.1, 2.0], "float8_e4m3fn", 1),
        ("complex128", [1e300j, 0.1, 2.0], "complex64", 1),
        ("bool", [True, False, True], "int8", 0),
    ],
)
def test_a_dtype_that_is_too_small_for_a_number_is_refused(
    tmp_path: Path, before: str, values: list[Any], after: str, lost: int
) -> None:
    def script(dtype: str, values: list[Any]) -> Any:
        model = Two()
        model.register_buffer("kept", torch.tensor(values, dtype=getattr(torch, dtype)))
        return model, torch.optim.AdamW(model.parameters())

    saved, _ = trained(tmp_path / "s", *script(before, values))
    model, optimizer = script(after, [0, 0, 0])
    if lost:
        error = refused(tmp_path / "s", model, optimizer)
        said = f"{before} [3] in the checkpoint cannot become {after}: {lost} of 3 values are too large for it"
        assert list(error.differences) == [f"model.kept: {said}"]
        with pytest.warns(DeterminismWarning, match="left as the script has it: model.kept"):
            assert resumed(tmp_path / "s", model, optimizer, {"strict": False}) == 3
        assert not model.kept.any()
    else:
        with pytest.warns(DeterminismWarning, match="tensors of the script have another dtype than the checkpoint's"):
            assert resumed(tmp_path / "s", model, optimizer) == 3
        found, wanted = (one.double().nan_to_num(7.0) for one in (model.kept, saved.kept.to(model.kept.dtype)))
        assert torch.equal(found, wanted)


def test_moments_that_would_become_infinite_are_refused(tmp_path: Path) -> None:
    model = Two()
    optimizer = torch.optim.AdamW(model.parameters())
    with Checkpointer(tmp_path / "s", model=model, optimizer=optimizer, strategy="full") as checkpointer:
        checkpointer.resume()
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1e5)  # squared, a thousandth of it: 1e7
        optimizer.step()
        checkpointer.step()
    half = Two().half()
    error = refused(tmp_path / "s", half, torch.optim.AdamW(half.parameters()))
    assert len(error.differences) == 4
    assert error.differences[0] == (
        "optimizer: exp_avg_sq of model.a.weight: float32 [4, 4] in the checkpoint cannot become float16: 16 of 16 "
        "values are too large for it"
    )


def test_repeated_elements_are_restored(tmp_path: Path) -> None:
    def net(value: float) -> Any:
        model = Two()
        model.register_buffer("base", torch.full((1,), value))
        model.register_buffer("spread", torch.full((1, 3), value).expand(2, 3))
        model.register_buffer("view", model.base.expand(4))
        model.register_buffer("windows", torch.full((4,), value).as_strided((3, 2), (1, 1)))
        return model

    model, optimizer = trained(tmp_path / "s", net(2.0))
    other = net(5.0)
    view = other.view
    fresh = torch.optim.AdamW(other.parameters())
    resumed(tmp_path / "s", other, fresh)
    same(everything(other, fresh), everything(model, optimizer))
    assert view.data_ptr() == other.base.data_ptr()  # equal by the tensor that it is a view of: left as it is
    equal = net(2.0)
    spread = equal.spread.data_ptr()
    resumed(tmp_path / "s", equal, torch.optim.AdamW(equal.parameters()))
    assert equal.spread.data_ptr() == spread
    assert equal.spread.stride() == (0, 1)


def test_non_contiguous_parameters_are_restored(tmp_path: Path) -> None:
    def net() -> Any:
        model = Two()
        model.turned = nn.Parameter(torch.randn(3, 5).t())
        return model

    model, optimizer = trained(tmp_path / "s", net())
    other = net()
    fresh = torch.optim.AdamW(other.parameters())
    resumed(tmp_path / "s", other, fresh)
    same(everything(other, fresh), everything(model, optimizer))
    assert other.turned.stride() == (1, 5)


def test_tensors_that_are_one_in_the_script_alone_are_refused(tmp_path: Path) -> None:
    trained(tmp_path / "s", Two())
    model = Two()
    model.b.weight = model.a.weight
    error = refused(tmp_path / "s", model, torch.optim.AdamW(model.parameters()))
    assert any("model.b.weight: one tensor with model.a.weight in the script" in one for one in error.differences)


def test_a_model_without_memory_is_refused(tmp_path: Path) -> None:
    trained(tmp_path / "s", Two())
    with torch.device("meta"):
        model = Two()
    with (
        Checkpointer(tmp_path / "s", model=model, strategy="full") as checkpointer,
        pytest.raises(StateMismatchError, match="on the meta device"),
    ):
        checkpointer.resume()
