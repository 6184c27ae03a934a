"""The Checkpointer and sharded models (FSDP2): real ranks that save, resume, change their sharding, and get signals."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed.fsdp")

import ckptstore  # noqa: E402 - torch decides whether this file runs at all
from ckptstore import DeterminismWarning  # noqa: E402
from ckptstore.training import Checkpointer  # noqa: E402
from tests.forms import long_only  # noqa: E402
from tests.training import fsdp_job  # noqa: E402
from tools.objects.server import free_port  # noqa: E402
from tools.warm import Warm  # noqa: E402


def run(warm: Warm, folder: Path, size: int, *names: str, expected: tuple[int, ...] = ()) -> None:
    """Run a job to its end; raises an error with the ranks' output. `expected`: exit statuses."""
    port = free_port()
    ranks = [
        warm.start(
            [sys.executable, "-m", "tests.training.fsdp_job", str(port), str(rank), str(size), str(folder), *names],
            stdin=warm.lent,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        said = [rank.communicate(timeout=280)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == list(expected or (0,) * size), "\n".join(said)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> Path:
    folder = tmp_path_factory.mktemp("fsdp")
    cut = ("resumed", "compressed", "precise", "replicated", "mostly_frozen", "offloaded", "tensor_parallel")
    run(warm, folder, 2, *cut, "back", "as_one", "chosen", "refused", "changed", "signalled")
    for size in (0, 1, 4):
        shutil.copytree(folder / "parts-gradient", folder / f"parts-gradient-{size}")
    return folder


def test_steps_of_a_sharded_model_are_steps(job: Path) -> None:
    for strategy in fsdp_job.STRATEGIES:
        store = ckptstore.open(job / f"whole-{strategy}")
        kind = "full" if strategy == "full" else strategy
        assert [info.kind for info in store.checkpoints()] == ["full", *[kind] * 5]
        shards = [entry.shape for _, doc in store.describe(1) for entry in doc.tensors[1].values()]
        assert {(19, 16), (18, 16)} <= set(shards), "37 rows on two ranks"
        assert store.verify(deep=True).ok


def test_an_agent_of_each_rank_repeats_the_steps_of_its_shards(tmp_path: Path, warm: Warm) -> None:
    run(warm, tmp_path, 2, "replica", "on_device")


@pytest.mark.parametrize("size", [1, pytest.param(4, marks=long_only)])
def test_another_number_of_ranks_continues(job: Path, size: int, warm: Warm) -> None:
    run(warm, job, size, "other_ranks")


@long_only
def test_tensor_parallel_ranks_whose_shards_are_cut_again(tmp_path: Path, warm: Warm) -> None:
    run(warm, tmp_path, 4, "tensor_parallel")


@long_only
def test_every_sample_of_an_epoch_comes_once_on_four_two_and_four_ranks(tmp_path: Path, warm: Warm) -> None:
    for size, dies in ((4, True), (2, True), (4, False)):
        run(warm, tmp_path, size, "loaded", expected=(-signal.SIGKILL if dies else 0,) * size)
    found = [int(line) for one in tmp_path.glob("samples-*") for line in one.read_text().split()]
    assert sorted(found) == list(range(fsdp_job.SAMPLES))
    store = ckptstore.open(tmp_path / "loaded")
    assert [one.ref for one in store.checkpoints()] == [
        f"{step}@{1 + (step > 4) + (step > 10)}" for step in range(1, 16)
    ]
    assert store.verify(deep=True).ok


def test_a_process_that_shards_nothing_continues(job: Path) -> None:
    saved = torch.load(job / "resumed-0.pt", weights_only=False)
    script = fsdp_job.Script(cut=False)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    parts = {"model": script.model, "optimizer": script.optimizer, "scheduler": script.scheduler}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Checkpointer(job / "parts-gradient-0", **parts, strategy="gradient") as checkpointer:
            assert checkpointer.resume() == 6
            fsdp_job.same(script.everything(), saved)
            script.one(6)
            checkpointer.step()
    torch.set_num_threads(before)
    (said,) = [str(one.message) for one in caught if one.category is DeterminismWarning]
    assert "ranks: 2 -> 1" in said
    assert "sharding:" in said


@pytest.mark.parametrize("name", ["usr1", pytest.param("term", marks=long_only), "deadline"])
def test_ranks_save_and_stop_at_the_same_step(job: Path, name: str) -> None:
    steps = [int((job / f"signalled-{name}-{rank}").read_text()) for rank in range(2)]
    assert steps[0] == steps[1]
    assert [info.step for info in ckptstore.open(job / f"signalled-{name}").checkpoints()] == steps[:1]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("terminated", (0, -signal.SIGTERM)), pytest.param("first_terminated", (-signal.SIGTERM, 0), marks=long_only)],
)
def test_sigterm_ends_one_rank_and_the_others_stop(
    tmp_path: Path, name: str, expected: tuple[int, ...], warm: Warm
) -> None:
    run(warm, tmp_path, 2, name, expected=expected)
    assert len(ckptstore.open(tmp_path / "terminated").checkpoints()) == 1
