"""Real training in gradient diffs: any step comes back with all of its state, and goes on as it did."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

pytest.importorskip("torch")

import ckptstore
from tools.exact.recovery import HORIZON, choose, restore, resume, train
from tools.exact.training import Recipe, Training, fingerprint

STEPS = 150
RUNS = {
    "batch norm, gradients": (Recipe("batch", "fused", "grad", steps=STEPS), 60, 20),
    "layer norm, predicted": (Recipe("layer", "foreach", "none", steps=STEPS), 40, 7),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
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
    """The comparison has teeth: each part of the state left as a fresh process has it gives another run."""
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
