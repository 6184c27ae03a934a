"""Whether tensors are unchanged: no change is missed, and no false change is reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from ckptstore.training.capture.identity_guard import WatchedTensors, is_plain_module, is_plain_optimizer  # noqa: E402


class Other(torch.Tensor):  # type: ignore[misc]  # torch is Any here
    """Another type of tensors."""


def data(value: Callable[[Any], Any]) -> Callable[[Any], object]:
    return lambda one: setattr(one, "data", value(one.data))


CHANGES: dict[str, Callable[[Any], object]] = {
    "clone": data(lambda one: one.clone()),
    "view": data(lambda one: one.view(6, 4)),
    "flat": data(lambda one: one.view(24)),
    "transposed": data(lambda one: one.t()),
    "other dtype of the same bytes": data(lambda one: one.view(torch.int32)),
    "double": data(lambda one: one.double()),
    "bfloat16": data(lambda one: one.bfloat16()),
    "first rows": data(lambda one: one[:3]),
    "last rows": data(lambda one: one[1:]),
    "one more dimension": data(lambda one: one.unsqueeze(0)),
    "resized smaller": lambda one: one.resize_(2, 6),
    "resized larger": lambda one: one.resize_(40, 60),
    "transposed in place": lambda one: one.t_(),
    "one more dimension in place": lambda one: one.unsqueeze_(0),
    "set": lambda one: one.set_(one.untyped_storage(), 1, (4, 5), (5, 1)),
    "other storage": lambda one: one.set_(torch.zeros(24).untyped_storage(), 0, (4, 6), (6, 1)),
    "no storage": lambda one: one.untyped_storage().resize_(0),
    "moved storage": lambda one: one.untyped_storage().resize_(1 << 22),
    "freed and larger storage": lambda one: (one.untyped_storage().resize_(0), one.untyped_storage().resize_(1 << 22)),
    "sparse": lambda one: torch.utils.swap_tensors(one, torch.zeros(4, 6).to_sparse()),
    "meta": lambda one: torch.utils.swap_tensors(one, torch.zeros(4, 6, device="meta")),
    "other class": lambda one: setattr(one, "__class__", Other),
    "swapped": lambda one: torch.utils.swap_tensors(one, torch.zeros(4, 6)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_seen(change: Callable[[Any], object]) -> None:
    made = torch.zeros(4, 6)
    before = WatchedTensors([torch.ones(3), made])
    assert before.unchanged()
    change(made)
    assert not before.unchanged()


def test_a_storage_of_another_size_at_the_same_address_is_seen() -> None:
    """As when a storage was freed and its memory given to a smaller one: the tensor reaches beyond it."""
    memory = np.zeros(64, np.float32)
    larger, smaller = torch.from_numpy(memory), torch.from_numpy(memory[:32])
    made = larger[:16]
    before = WatchedTensors([made])
    made.data = smaller[:16]
    assert made.data_ptr() == larger.data_ptr()
    assert not before.unchanged()


def test_every_tensor_of_many_is_looked_at() -> None:
    made = [torch.zeros(2) for _ in range(600)]
    before = WatchedTensors(made)
    for one in made:
        kept = one.data
        one.data = torch.zeros(2)
        assert not before.unchanged()
        one.data = kept
        assert before.unchanged()


def test_signs_and_conjugates_are_seen() -> None:
    numbers, pairs = torch.zeros(64), torch.zeros(8, dtype=torch.complex64)
    for made, change in (
        (numbers[2:12], data(lambda _: numbers[3:13])),
        (pairs.view(8), data(lambda _: pairs.conj())),
        (pairs.imag, data(lambda _: pairs.conj().imag)),
    ):
        before = WatchedTensors([made])
        assert before.unchanged()
        change(made)
        assert not before.unchanged()


@pytest.mark.parametrize("dimensions", range(8))
def test_every_size_and_every_stride_is_seen(dimensions: int) -> None:
    numbers = torch.zeros(1024)
    shape, strides = [2] * dimensions, [1] * dimensions
    others = [(shape, strides, 5)]
    for number in range(dimensions):
        others.append((shape, [*strides[:number], 3, *strides[number + 1 :]], 0))
        others.append(([*shape[:number], 1, *shape[number + 1 :]], strides, 0))
    for other in others:
        made = numbers.as_strided(shape, strides)
        before = WatchedTensors([made])
        made.as_strided_(*other)
        assert not before.unchanged(), other


def test_changes_of_bits_by_training_are_no_change() -> None:
    weight = torch.nn.Parameter(torch.zeros(4, 6))
    weight.grad = torch.ones(4, 6)
    before = WatchedTensors([weight])
    with torch.no_grad():
        weight.add_(1.0)
    weight.grad = None
    weight.requires_grad_(requires_grad=False)
    assert before.unchanged()


@pytest.mark.parametrize(
    "name",
    [
        "_parameters", "_buffers", "_modules", "_state_dict_hooks", "_state_dict_pre_hooks",
        "_non_persistent_buffers_set",
    ],
)  # fmt: skip
def test_a_module_of_another_torch_is_not_plain(name: str) -> None:
    """The names are torch's own: a module that lacks them, or stores something else there, is asked for its state."""
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
    assert is_plain_module(module)
    vars(module[0])[name] = tuple(vars(module[0])[name])
    assert not is_plain_module(module)


@pytest.mark.parametrize("name", ["_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks"])
def test_an_optimizer_of_another_torch_is_not_plain(name: str) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    assert is_plain_optimizer(optimizer)
    del vars(optimizer)[name]
    assert not is_plain_optimizer(optimizer)
