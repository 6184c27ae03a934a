"""Real training in step diffs: any step is restored with all of its state, and continues identically."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import ckptstore  # noqa: E402 - torch decides whether this file runs at all
from ckptstore.formats.optim import SparseGradient  # noqa: E402
from ckptstore.training import OptimizerStep, clip_factor  # noqa: E402
from tests.forms import long_only, short_or  # noqa: E402
from tools.exact.recovery import HORIZON, choose, restore, resume, train  # noqa: E402
from tools.exact.training import Recipe, Training, fingerprint  # noqa: E402

STEPS = short_or(62, 150)
RUNS = {
    "batch norm, gradients": (Recipe("batch", "fused", "grad", steps=STEPS), 60, 20),
    "layer norm, predicted": (Recipe("layer", "foreach", "none", steps=STEPS), 40, 7),
}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """This training sets how many threads torch uses, which changes bits: the next writer would warn of it."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if "batch" in name else long_only) for name in RUNS])
def test_restored_and_resumed_runs_are_the_first_one_bit_for_bit(name: str, tmp_path: Path) -> None:
    recipe, full_every, batch = RUNS[name]
    url = str(tmp_path / "store")
    trained = train(url, recipe, ckptstore.DiffOptions(full_every=full_every, batch=batch, seconds=None))
    assert trained.last_loss < trained.first_loss
    assert 8 * trained.stored_bytes / STEPS / trained.parameters < 40  # of 96
    checkpoints = list(ckptstore.open(url).checkpoints())
    assert [info.step for info in checkpoints] == list(range(1, STEPS + 1))
    restored = restore(url, choose(recipe, 8), trained.fingerprints)
    assert (restored.compared, restored.wrong) == (8, ())
    resumed = resume(url, recipe, choose(recipe, 3, HORIZON, 2), trained.fingerprints)
    assert (resumed.compared, resumed.wrong) == (3, ())


def test_whatever_is_not_restored_shows_in_the_next_steps() -> None:
    """A check of the comparison: each part of the state that is left as in a fresh process gives another run."""
    recipe = Recipe(steps=40)
    first = Training(recipe)
    for _ in range(3):
        first.run_step()
    state = first.state()
    kept = fingerprint(state)
    parts = {name: copy.deepcopy(part) for name, part in state.items()}
    first.run_step()
    wanted = fingerprint(first.state())
    whole = Training(recipe)
    whole.load({name: copy.deepcopy(part) for name, part in parts.items()})
    assert fingerprint(whole.state()) == kept
    whole.run_step()
    assert fingerprint(whole.state()) == wanted
    for lost in ("model", "optimizer", "schedule", "data"):
        other = Training(recipe)
        fresh = other.state()
        other.load({name: copy.deepcopy(fresh[name] if name == lost else part) for name, part in parts.items()})
        other.run_step()
        assert fingerprint(other.state()) != wanted, lost
    for lost in ("torch", "numpy", "python"):
        other = Training(recipe)
        rng = {name: other.state()["rng"][name] if name == lost else part for name, part in parts["rng"].items()}
        other.load({name: copy.deepcopy(part) for name, part in parts.items()} | {"rng": rng})
        other.run_step()
        assert fingerprint(other.state()) != wanted, lost


def stored_bits(store: ckptstore.Store, parameters: int) -> float:
    found = [8 * info.stored / parameters for info in store.checkpoints() if info.kind == "gradient"]
    return sum(found) / len(found)


def test_mixed_precision_with_an_fp32_master(tmp_path: Path) -> None:
    """bf16 weights and gradients, their fp32 master in the optimizer, clipping in fp32: a ninth of the state."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.GELU(), torch.nn.Linear(256, 128)).bfloat16()
    masters = {weight: torch.nn.Parameter(weight.detach().float()) for weight in model.parameters()}
    optimizer = torch.optim.AdamW(masters.values(), lr=1e-3, fused=True)
    store, truth = ckptstore.open(tmp_path / "store"), {}
    with store.writer(diffs=ckptstore.DiffOptions(batch=10), poll_seconds=None) as writer:
        for step in range(1, 32):
            x = torch.randn(64, 128)
            model.zero_grad()
            (model(x.bfloat16()).float() - x.roll(1, 1)).square().mean().backward()
            for weight, master in masters.items():
                master.grad = weight.grad.float()
            norm = torch.nn.utils.clip_grad_norm_(masters.values(), 0.01)
            optimizer.step()
            gradients = {master: weight.grad for weight, master in masters.items()}
            updates = OptimizerStep(optimizer, gradients=gradients, clip=clip_factor(norm, 0.01))
            with torch.no_grad():
                for weight, master in masters.items():
                    weight.copy_(master)
            state = {"model": model.state_dict(), "master": list(masters.values()), "adam": optimizer.state_dict()}
            truth[step] = fingerprint(state)
            writer.save_async(state, step, updates=updates)
    assert all(fingerprint(store.load(step)) == truth[step] for step in truth)
    assert stored_bits(store, sum(master.numel() for master in masters.values())) < 13


def test_top_k_gradients_under_sgd(tmp_path: Path) -> None:
    """Compression with error feedback: a step costs only the hundredth of the gradient that is applied."""
    torch.manual_seed(4)
    model = torch.nn.Linear(400, 500)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    kept_back = {parameter: torch.zeros_like(parameter) for parameter in model.parameters()}
    store, truth = ckptstore.open(tmp_path / "store"), {}
    with store.writer(diffs=ckptstore.DiffOptions(batch=5), poll_seconds=None) as writer:
        for step in range(1, 17):
            x = torch.randn(32, 400)
            model.zero_grad()
            model(x).square().mean().backward()
            applied = {}
            for parameter, left in kept_back.items():
                left.add_(parameter.grad)
                flat = left.flatten()
                where = flat.abs().topk(max(1, flat.numel() // 100)).indices.sort().values
                applied[parameter] = SparseGradient(where.numpy(), flat[where].numpy(), flat.numel())
                parameter.grad = torch.zeros_like(flat).index_copy_(0, where, flat[where]).view_as(parameter)
                left.sub_(parameter.grad)
            optimizer.step()
            state = {"model": model.state_dict(), "sgd": optimizer.state_dict()}
            truth[step] = fingerprint(state)
            writer.save_async(state, step, updates=OptimizerStep(optimizer, gradients=applied))
    assert all(fingerprint(store.load(step)) == truth[step] for step in truth)
    assert stored_bits(store, 500 * 401) < 1.5
