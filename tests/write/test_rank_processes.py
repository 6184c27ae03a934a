"""Real process groups (gloo): saves of DDP, FSDP2, HSDP and tensor-parallel ranks are loaded bit for bit.

One group of processes runs several scenarios (`rank_job`), because each process imports torch first.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from tests import warmth
from tools.objects.server import free_port

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed.tensor")

SIZE = 4
STEPWISE = ["ddp_diffs", "fsdp_diffs"]
SAVED = ["ddp", "fsdp", "fsdp_stored_bases", "hsdp", "tensor_parallel", "both", "placements"]


def run(folder: Path, names: list[str], size: int = SIZE) -> None:
    """Run a job to its end; raises an error with the ranks' output."""
    port = free_port()
    ranks = [
        warmth.start(
            [sys.executable, "-m", "tests.write.rank_job", str(port), str(rank), str(size), str(folder), *names],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        said = [rank.communicate(timeout=150)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * size, "\n".join(said)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    run(folder, [*SAVED, "diverged", *STEPWISE, "ddp_sums"])
    return folder


def assert_same(one: Any, other: Any, where: str = "state") -> None:
    if isinstance(one, dict):
        assert list(one) == list(other), where
        for key in one:
            assert_same(one[key], other[key], f"{where}[{key!r}]")
    elif isinstance(one, list):
        assert len(one) == len(other), where
        for number, member in enumerate(one):
            assert_same(member, other[number], f"{where}[{number}]")
    elif isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), where
        images = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
        assert torch.equal(*images), where
    else:
        assert one == other, where


@pytest.mark.parametrize("name", SAVED)
def test_one_process_loads_the_ranks_checkpoints(job: Path, name: str) -> None:
    store = ckptstore.open(job / name)
    assert [info.step for info in store.checkpoints()] == [1, 2]
    for rank in range(SIZE):
        saved = torch.load(job / f"{name}-{rank}.pt", weights_only=True)
        assert saved["rank"] == rank
        for step in (1, 2):
            assert_same(store.load(step, rank=rank), saved)
    assert store.verify(deep=True).ok


def test_replicas_are_stored_once(job: Path) -> None:
    store = ckptstore.open(job / "ddp")
    names = [name for _, doc in store.describe(1) for name in doc.tensors[1]]
    assert len(names) == len(set(names))
    assert {f"rng@{rank}" for rank in range(SIZE)} <= set(names)
    assert min(len(doc.tensors[1]) for _, doc in store.describe(1)[1:]) > 2  # every rank wrote some


def test_shards_are_stored_where_they_are(job: Path) -> None:
    own = [doc.tensors[1] for _, doc in ckptstore.open(job / "fsdp").describe(1)]
    boxes = [tensors["model.2.weight"] for tensors in own if "model.2.weight" in tensors]
    assert [(box.shape, box.global_shape, box.offset) for box in boxes] == [
        ((2, 36), (7, 36), (0, 0)),
        ((2, 36), (7, 36), (2, 0)),
        ((2, 36), (7, 36), (4, 0)),
        ((1, 36), (7, 36), (6, 0)),
    ]


def test_replicated_shards_are_stored_once(job: Path) -> None:
    own = [doc.tensors[1] for _, doc in ckptstore.open(job / "hsdp").describe(1)]
    assert sum("model.0.weight" in tensors for tensors in own) == 2


def test_deltas_build_on_shares_that_are_read_back(job: Path) -> None:
    store = ckptstore.open(job / "fsdp_stored_bases")
    assert [info.kind for info in store.checkpoints()] == ["full", "delta"]


def test_gradients_of_ranks_are_summed_up(job: Path) -> None:
    """Plain SGD: the sum gives training's result, except for the rounding of each step."""
    store = ckptstore.open(job / "ddp_sums")
    found = [(info.step, info.kind, info.lossy) for info in store.checkpoints()]
    assert found == [(1, "full", False), (4, "gradient", True), (7, "gradient", True)]
    trained = torch.load(job / "ddp_sums.pt", weights_only=True)
    with pytest.warns(ckptstore.LossyWarning):
        loaded = store.load(7)["model"]
    assert list(loaded) == list(trained)
    for name, tensor in trained.items():
        torch.testing.assert_close(loaded[name], tensor, rtol=1e-5, atol=1e-7)
    assert store.verify(deep=True).ok


@pytest.mark.parametrize("name", STEPWISE)
def test_every_step_of_an_optimizer_is_loaded_in_one_process(job: Path, name: str) -> None:
    store = ckptstore.open(job / name)
    assert [info.kind for info in store.checkpoints()] == ["full", *["gradient"] * 5, "full", "gradient"]
    for step in range(1, 9):
        assert_same(store.load(step, rank=0), torch.load(job / f"{name}-step-{step}.pt", weights_only=True))
    held = [doc.tensors[6] for _, doc in store.describe(6) if 6 in doc.tensors]
    moved = {entry.name for tensors in held for entry in tensors.values() if entry.codec == "step"}
    parameters = [entry for entry in store.tensors(6) if entry.startswith("model.")]
    assert moved >= set(parameters)  # each is with its moments, on whichever rank
    assert store.verify(deep=True).ok
