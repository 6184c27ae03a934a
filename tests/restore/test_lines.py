"""A restored tensor is aligned like one of torch's own, so that BLAS computes the same with it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

import ckptstore
from ckptstore.training import Checkpointer

SIZES = (1, 3, 49, 50, 1 << 10, (1 << 18) + 1, (1 << 18) + 2)  # numbers of fp32: some odd, some above 1 MiB


def odd_state() -> dict[str, torch.Tensor]:
    """Tensors whose sizes are not multiples of a line, and some that are."""
    torch.manual_seed(0)
    return {f"t{size}.{which}": torch.randn(size) for size in SIZES for which in range(2)} | {"b": torch.ones(7).bool()}


@pytest.mark.parametrize("deltas", [None, 1])
def test_every_restored_tensor_begins_where_torchs_own_would(tmp_path: Path, deltas: int | None) -> None:
    store = ckptstore.open(tmp_path / "run")
    state = odd_state()
    with store.writer(deltas=deltas) as writer:
        for step in (1, 2):
            writer.save(state, step)
    for step in (1, 2):
        for found in (store.load(step), store.load(step, select=["t3.*", f"t{SIZES[-1]}.*"])):
            assert {name: tensor.data_ptr() % 64 for name, tensor in found.items()} == dict.fromkeys(found, 0)
            assert all(torch.equal(found[name], state[name]) for name in found)
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in store.load(1).values())
    assert all(left[1] <= right[0] for left, right in pairwise(spans))  # no tensor lies in another


@pytest.mark.parametrize("strategy", ["full", "delta", "gradient"])
@pytest.mark.filterwarnings("ignore:OptimizerStep", "ignore:step diffs take")
def test_an_optimizer_with_products_of_its_state_takes_the_same_steps(tmp_path: Path, strategy: str) -> None:
    """LBFGS: BLAS sums a misaligned vector in another order."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=5)
    inputs = torch.randn(32, 4)
    target = inputs.sum(1, keepdim=True).sin()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(inputs + torch.randn_like(inputs) * 0.01) - target).square().mean()
        loss.backward()
        return loss

    with Checkpointer(tmp_path / "run", model=model, optimizer=optimizer, strategy=strategy) as checkpointer:
        checkpointer.resume()
        for _ in range(12):
            optimizer.step(closure)
            checkpointer.step()
        first = [parameter.detach().clone() for parameter in model.parameters()]
        assert checkpointer.rollback(5) == 5
        for _ in range(7):
            optimizer.step(closure)
            checkpointer.step()
    assert all(torch.equal(*both) for both in zip(first, model.parameters(), strict=True))
