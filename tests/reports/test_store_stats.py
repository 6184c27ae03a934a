"""Where a store's bytes are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptstore
from ckptstore import ClassBytes, Share, Store
from ckptstore.analysis.growth_plot import draw_growth
from ckptstore.training import OptimizerStep
from tests.maintenance.test_pruning import CHAIN


def state(step: int) -> dict[str, Any]:
    weight = np.random.default_rng(1).normal(size=6000).astype(np.float32)
    weight[: step % 90] = step
    moments = {"exp_avg": weight[:3000].copy(), "exp_avg_sq": np.ones(3000, np.float32), "step": np.array(step)}
    return {"model": {"layer.weight": weight}, "optimizer": {"state": {"0": moments}}, "seen": step}


def fill(store: Store, first: int, last: int, **options: Any) -> None:
    with store.writer(poll_seconds=None, **options) as writer:
        for step in range(first, last + 1):
            writer.save(state(step), step, metadata={"loss": 10 / step})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Term 1: 4 fulls. Term 2: a full and 3 deltas."""
    store = ckptstore.open(tmp_path / "store")
    fill(store, 1, 4)
    fill(store, 5, 8, deltas=CHAIN)
    return store


def on_disk(store: Store, term: str = "*") -> int:
    return sum(path.stat().st_size for path in (Path(store.url) / "seg").glob(f"{term}/*.safetensors"))


def test_every_byte_is_counted_once(store: Store) -> None:
    found = store.stats()
    assert [info.step for info in found.checkpoints] == list(range(1, 9))
    assert found.latest == "8@2"
    assert found.nbytes == on_disk(store)
    assert found.terms == {1: Share(4, on_disk(store, "*1")), 2: Share(4, on_disk(store, "*2"))}
    assert {kind: share.checkpoints for kind, share in found.kinds.items()} == {"delta": 3, "full": 5}
    assert sum(share.nbytes for share in found.kinds.values()) == found.nbytes
    assert sum(size for _, _, size in found.steps) == found.nbytes
    assert [step for step, _, _ in found.steps] == list(range(1, 9))
    assert found.growth == pytest.approx((found.nbytes - found.steps[0][2]) * 1000 / 7)
    assert (found.rules, found.prunable_nbytes, found.garbage_nbytes) == ((), None, 0)


def test_classes_are_those_of_the_newest_and_its_chain(store: Store) -> None:
    classes = store.stats().classes
    assert {kind: (one.tensors, one.nbytes) for kind, one in classes.items()} == {
        "first_moment": (1, 12000),
        "other": (1, 8),
        "second_moment": (1, 12000),
        "weight": (1, 24000),
    }
    assert 24000 < classes["weight"].chain < 26000  # the full, and three small deltas of it
    assert 0 < classes["weight"].stored < 1000  # the last delta
    assert isinstance(classes["weight"], ClassBytes)


def test_a_step_that_moves_several_tensors_counts_for_each_of_them(tmp_path: Path) -> None:
    """The payload of a step lies with its leader, a weight, which had the bytes of all moments."""
    store = ckptstore.open(tmp_path / "store")
    layers = [torch.nn.Linear(64, 64) for _ in range(3)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters())
    with store.writer(diffs=ckptstore.DiffOptions(full_every=100, batch=5), poll_seconds=None) as writer:
        for step in range(1, 13):
            optimizer.zero_grad()
            model(torch.ones(2, 64) * step).square().mean().backward()
            optimizer.step()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            writer.save_async(state, step, updates=OptimizerStep(optimizer))
    assert store.checkpoint("latest").kind == "gradient"
    classes = store.stats().classes
    weights, first, second = (classes[kind] for kind in ("weight", "first_moment", "second_moment"))
    assert weights.nbytes == first.nbytes == second.nbytes
    assert abs(weights.stored - first.stored) < 20 > abs(weights.stored - second.stored)  # the rest after rounding
    assert abs(weights.chain - first.chain) < 200
    assert all(one.stored <= one.nbytes for one in classes.values())
    described = store.inspect("latest").tensors
    assert sum(one.stored for one in classes.values()) == sum(one.stored for one in described)
    explained = store.explain("latest")
    assert sum(one.chain for one in classes.values()) == explained.bytes_read


def test_bytes_that_prune_and_gc_would_free(store: Store) -> None:
    store.keep("last:2", take_over=True)
    before = store.stats()
    planned = store.prune(dry_run=True)
    assert before.prunable_nbytes == planned.dropped_nbytes > 0
    assert before.garbage_nbytes == 0
    store.prune(take_over=True)
    after = store.stats()
    assert after.kinds["held"].checkpoints == 2
    assert after.prunable_nbytes == 0
    assert after.garbage_nbytes == planned.dropped_nbytes
    assert after.nbytes == before.nbytes - planned.dropped_nbytes
    assert store.gc().nbytes == after.garbage_nbytes


def test_growth_is_that_of_the_last_thousand_steps(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "long")
    with store.writer(poll_seconds=None) as writer:
        for step in (0, 100, 1000, 1900, 2000):
            writer.save({"x": np.zeros(step + 1, np.uint8)}, step)
    sizes = {step: size for step, _, size in store.stats().steps}
    assert store.stats().growth == sizes[1900] + sizes[2000]


def test_an_empty_store_and_one_checkpoint(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "new", create=True)
    found = store.stats()
    assert (found.checkpoints, found.latest, found.nbytes, found.classes, found.growth) == ((), None, 0, {}, None)
    with pytest.raises(ckptstore.UsageError, match="no checkpoint to draw"):
        draw_growth(found, tmp_path / "x.svg")
    fill(store, 1, 1)
    assert store.stats().growth is None


def test_a_damaged_log(store: Store) -> None:
    slots = sorted((Path(store.url) / "log").iterdir())
    slots[-1].write_bytes(b"garbage")
    found = store.stats()
    assert (found.latest, found.classes, found.prunable_nbytes) == (None, {}, None)
    assert len(found.checkpoints) == 8  # all: the damaged record is the end of term 2


@pytest.mark.parametrize("suffix", ["svg", "png", "pdf"])
def test_the_picture(store: Store, tmp_path: Path, suffix: str) -> None:
    store.prune("last:2", take_over=True)
    out = tmp_path / f"store.{suffix}"
    draw_growth(store.stats(), out)
    assert out.stat().st_size > 2000
    with pytest.raises(ckptstore.UsageError, match=r"ends with \.svg"):
        draw_growth(store.stats(), tmp_path / "store.txt")


def test_the_picture_has_the_loss_if_there_is_one(store: Store, tmp_path: Path) -> None:
    for metric in ("loss", "nothing"):
        draw_growth(store.stats(), tmp_path / f"{metric}.png", metric)
    assert (tmp_path / "loss.png").stat().st_size > 1.3 * (tmp_path / "nothing.png").stat().st_size
