"""Accelerate's door, with the real Accelerator: runs that are stopped or killed anywhere repeat the same numbers."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.utils.data import DataLoader

import ckptstore
from ckptstore import DeterminismWarning
from ckptstore.errors import UsageError
from ckptstore.integrations.accelerate import checkpointer
from ckptstore.training import Checkpointer
from tests.forms import LONG, long_only, short_or
from tests.integrations.accelerate_job import CASES, EPOCHS, Samples, StoppedError, lines_of, prepared, train
from tests.loader_workers import ended_workers
from tests.torch_versions import needs_groups
from tools.objects.server import free_port
from tools.warm import MODULES, Warm

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # of torchdata
    # Loading a sample draws nothing in the workers of these jobs.
    pytest.mark.filterwarnings("ignore:the random generators of the loader's:ckptstore.DeterminismWarning"),
]

LONGER = (
    "persistent",
    "augmented-stateful",
    "stateful",
    "stateful-dispatcher",
    "stateful-seedable",
    "stateful-workers-generator",
    "stateful-dispatcher-workers",
    "dispatcher-workers",
    "stream-persistent",
    "whole",
)
"""Cases of which CI tries each part in another case."""
STOPS = (3, 9, 5, 1, 2) if not LONG else (3, 9, 5, 1, 2, 4, 1, 1, 6)
"""After so many micro-batches each life of a run is stopped: in the middle of an accumulation, after an epoch's last
batch, in the next epoch, before and after the first batch that follows a resume."""


def in_process(names: Any) -> list[Any]:
    return [pytest.param(one, marks=long_only if one in LONGER else ()) for one in names]


@pytest.fixture(scope="module")
def warm_accelerate() -> Iterator[Warm]:
    """Scripts that start with Accelerate imported."""
    with Warm((*MODULES, "accelerate")) as warm:
        yield warm


def same(found: list[str], wanted: list[str]) -> None:
    """Whether a run that was continued has the losses of one that was never stopped; it may repeat batches."""
    assert set(found) - set(wanted) == set(), "losses that the run that was never stopped does not have"
    assert list(dict.fromkeys(found)) == wanted


@pytest.mark.parametrize("case", in_process(one for one in CASES if not one.startswith(("killed", "ranks"))))
def test_a_run_that_ends_anywhere_continues_bit_for_bit(tmp_path: Path, case: str) -> None:
    train(tmp_path / "whole", tmp_path / "wanted", **CASES[case])
    wanted = lines_of(tmp_path / "wanted")
    assert len(set(wanted)) == len(wanted) >= EPOCHS * 10
    for at in STOPS[:3] if "workers" in CASES[case] else STOPS:
        with suppress(StoppedError), ended_workers():
            train(tmp_path / "run", tmp_path / "losses", stop=at, **CASES[case])
    train(tmp_path / "run", tmp_path / "losses", **CASES[case])
    same(lines_of(tmp_path / "losses"), wanted)
    store = ckptstore.open(tmp_path / "run")
    steps = EPOCHS * -(-len(wanted) // EPOCHS // CASES[case].get("accumulate", 2))
    assert [one.step for one in store.checkpoints()] == list(range(1, steps + 1)), "every optimizer step, and no other"
    assert store.load()["extra"]["custom_checkpoint_0"]["value"].hex() == wanted[-1].split()[3]


@pytest.mark.parametrize("case", ["seedable", "shard"])
def test_the_seed_is_that_of_the_checkpoint(tmp_path: Path, case: str) -> None:
    train(tmp_path / "whole", tmp_path / "wanted", **CASES[case])
    for seed, stop in ((3, 3), (4, 9), (5, -1)):
        with suppress(StoppedError):
            train(tmp_path / "run", tmp_path / "losses", stop=stop, seed=seed, **CASES[case])
    same(lines_of(tmp_path / "losses"), lines_of(tmp_path / "wanted"))


@pytest.mark.parametrize("case", ["shard", "seedable", "dispatcher", pytest.param("persistent", marks=long_only)])
def test_the_checkpointer_changes_nothing_in_a_run(tmp_path: Path, case: str) -> None:
    train(None, tmp_path / "alone", **CASES[case])
    train(tmp_path / "run", tmp_path / "saved", **CASES[case])
    assert lines_of(tmp_path / "saved") == lines_of(tmp_path / "alone")


@pytest.mark.parametrize("case", [pytest.param("killed", marks=long_only), "killed-workers"])
def test_a_run_that_is_killed_at_random_continues_bit_for_bit(tmp_path: Path, case: str, warm_accelerate: Warm) -> None:
    def start(store: str, losses: str, crash: str = "") -> Any:
        command = [sys.executable, "-m", "tests.integrations.accelerate_job"]
        how: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        how["env"] = {**os.environ, "CKPTSTORE_CRASH_AT": crash}
        return warm_accelerate.start([*command, str(tmp_path / store), str(tmp_path / losses), case], **how)

    def finished(store: str, losses: str) -> list[str]:
        job = start(store, losses)
        said = job.communicate(timeout=200)[0]
        assert job.returncode == 0, said
        return lines_of(tmp_path / losses)

    wanted = finished("alone", "wanted")
    assert len(wanted) == 60
    chance = random.Random(short_or(1, int(time.time())))
    kills = 0
    for _ in range(short_or(1, 5)):
        # At the latest at a commit: on a busy machine this process may notice a step too late.
        with start("run", "losses", "commit.created:20") as run:
            before, enough = len(lines_of(tmp_path / "losses")), chance.randrange(1, 11)
            while run.poll() is None and len(lines_of(tmp_path / "losses")) < before + enough:
                time.sleep(0.001)
            time.sleep(chance.random() * 0.02)
            run.kill()
            kills += run.wait() == -signal.SIGKILL
    assert kills
    same(finished("run", "losses"), wanted)
    assert ckptstore.verify(tmp_path / "run").ok


@needs_groups
@pytest.mark.parametrize(
    "case",
    [
        "ranks",
        "ranks-dispatcher",
        *(pytest.param(one, marks=long_only) for one in ("ranks-seedable", "ranks-stateful", "ranks-stateful-workers")),
    ],
)
def test_ranks_continue_bit_for_bit(tmp_path: Path, case: str, warm_accelerate: Warm) -> None:
    def ranks(store: str, losses: str, *options: str) -> None:
        port = str(free_port())
        jobs = []
        for rank in ("0", "1"):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ACCELERATE_USE_CPU": "true"}
            command = [sys.executable, "-m", "tests.integrations.accelerate_job", str(tmp_path / store)]
            streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            command += [str(tmp_path / losses), case, *options]
            jobs.append(warm_accelerate.start(command, env={**os.environ, **place}, **streams))
        try:
            said = [job.communicate(timeout=200)[0] for job in jobs]
        finally:
            for job in jobs:
                job.kill()
        assert [job.returncode for job in jobs] == [0, 0], said

    ranks("alone", "wanted")
    ranks("run", "losses", "stop=13")
    if LONG:
        ranks("run", "losses", "stop=6")
    ranks("run", "losses")
    for rank in "01":
        assert len(lines_of(tmp_path / f"wanted{rank}")) == 30
        same(lines_of(tmp_path / f"losses{rank}"), lines_of(tmp_path / f"wanted{rank}"))
    with ckptstore.open(tmp_path / "run") as store:
        assert [one.step for one in store.checkpoints()] == list(range(1, 16))


def test_a_checkpointer_takes_prepared_objects_itself(tmp_path: Path) -> None:
    found: list[str] = []
    for until in (3, 8):
        accelerator, (model, optimizer, loader, schedule) = prepared({"accumulate": 1})
        objects = {"model": model, "optimizer": optimizer, "scheduler": schedule, "loader": loader}
        with Checkpointer(tmp_path / "run", **objects, strategy="full") as saved:
            assert saved.resume() == len(found)
            assert saved.loader.iteration == 0
            for batch in saved.loader:
                loss = (model(batch) - batch).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                saved.step()
                found.append(loss.item().hex())
                if saved.steps_done == until:
                    break
    train(None, tmp_path / "alone", accumulate=1)
    assert found == [line.split()[2] for line in lines_of(tmp_path / "alone")][:8]


@pytest.mark.filterwarnings("ignore:the accelerator is in a DataLoader:ckptstore.DeterminismWarning")  # of another test
def test_the_scaler_is_saved_and_a_skipped_step_too(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=1)
    accelerator.sync_gradients = True  # it is the process's
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model = torch.nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    with checkpointer(accelerator, tmp_path / "run", model, optimizer, strategy="full") as saved:
        saved.resume()
        for factor in (1.0, torch.inf, 1.0):
            accelerator.backward((model(torch.ones(4)) * factor).sum())
            optimizer.step()
            optimizer.zero_grad()
            saved.step()
        assert saved.steps_done == 3
    scales = [ckptstore.open(tmp_path / "run").load(step)["scaler"]["scale"] for step in (1, 2, 3)]
    assert scales == [1024.0, 512.0, 512.0]
    accelerator.scaler.load_state_dict({**accelerator.scaler.state_dict(), "scale": 1.0})
    with checkpointer(accelerator, tmp_path / "run", model, optimizer) as saved:
        assert saved.resume() == 3
    assert accelerator.scaler.get_scale() == 512.0
    accelerator.scaler = None


def test_the_count_of_micro_batches_comes_back(tmp_path: Path) -> None:
    accelerator, (model, optimizer, loader, schedule) = prepared({})
    with checkpointer(accelerator, tmp_path / "run", model, optimizer, loader, schedule) as saved:
        saved.resume()
        for number, batch in enumerate(saved.loader, 1):
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            assert (saved.step() is None) == bool(number % 2), "no checkpoint of an accumulated batch"
            if number == 4:
                break
        assert saved.steps_done == 2
    accelerator.step = 1
    with checkpointer(accelerator, tmp_path / "run", model, optimizer, loader, schedule) as saved:
        assert saved.resume() == 2
        assert accelerator.step == 4
        for _ in saved.loader:
            break
        assert saved.loader.given == 5


def test_an_epoch_that_the_script_sets_wrongly_is_put_right(tmp_path: Path) -> None:
    with suppress(StoppedError):
        train(tmp_path / "run", tmp_path / "losses", stop=15, seedable=True)
    accelerator, (model, optimizer, loader, schedule) = prepared({"seedable": True})
    with checkpointer(
        accelerator, tmp_path / "run", model, optimizer, loader, schedule, extra={"average": torch.Generator()}
    ) as saved:
        saved.resume(parts=["model", "optimizer", "scheduler", "loader", "random"])
        saved.loader.set_epoch(0)
        with pytest.warns(DeterminismWarning, match="set to 0, but the checkpoint is in the middle of epoch 1"):
            next(iter(saved.loader))
        assert saved.loader.iteration == 1


@pytest.mark.parametrize(("stop", "first"), [(11, (1, 1)), (5, (0, 1))])
def test_a_loader_that_changed_after_an_epochs_last_batch(tmp_path: Path, stop: int, first: tuple[int, int]) -> None:
    """The next epoch begins. In the middle of an epoch that starts again, because its order is another one."""
    with suppress(StoppedError):
        train(tmp_path / "run", tmp_path / "losses", stop=stop)
    accelerator, prepared_objects = prepared({"samples": 30})
    with checkpointer(accelerator, tmp_path / "run", *prepared_objects) as saved:
        with pytest.warns(DeterminismWarning, match="the dataset had 42 samples, and has 30 now") as caught:
            saved.resume(parts=["model", "optimizer", "scheduler", "loader", "random"])
        assert any("another epoch begins with that" in str(one.message) for one in caught) == (first[0] == 1)
        next(iter(saved.loader))
        assert (saved.loader.iteration, saved.loader.given) == first


def test_a_loader_that_was_not_passed_is_reported(tmp_path: Path) -> None:
    accelerator, (model, optimizer, loader, schedule) = prepared({"accumulate": 1})
    with checkpointer(accelerator, tmp_path / "run", model, optimizer, schedule) as saved:
        saved.resume()
        for batch in loader:
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            with pytest.warns(DeterminismWarning, match="in a DataLoaderShard that the Checkpointer was not given"):
                saved.step()
            break


class Distributed:
    """An accelerator of which only the kind of distribution is asked: DeepSpeed needs a device."""

    is_fsdp2 = False

    def __init__(self, kind: DistributedType) -> None:
        self.distributed_type = kind


def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    accelerator, (model, optimizer, loader, schedule) = prepared({})
    store = tmp_path / "run"
    with pytest.raises(UsageError, match="no model was passed, and an Accelerator has no public list"):
        checkpointer(accelerator, store)
    with pytest.raises(UsageError, match="2 loaders were passed; a Checkpointer continues one"):
        checkpointer(accelerator, store, model, loader, DataLoader(Samples(8, False)))
    with pytest.raises(UsageError, match=r"object 1 \(int\) is not a model, optimizer, schedule or loader"):
        checkpointer(accelerator, store, model, 3)
    with pytest.raises(UsageError, match="scaler: this Checkpointer takes the accelerator's own"):
        checkpointer(accelerator, store, model, scaler=None)
    with pytest.raises(UsageError, match="extra\\['accelerator'\\]: this name is reserved"):
        checkpointer(accelerator, store, model, extra={"accelerator": torch.Generator()})
    for kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.FSDP, DistributedType.XLA):
        with pytest.raises(UsageError, match=f"Accelerate with {kind.value} is not supported: "):
            checkpointer(Distributed(kind), store, model)
    assert not store.exists()
    with checkpointer(accelerator, store, model, optimizer, schedule) as saved:
        saved.resume()
    with pytest.raises(ckptstore.errors.WriterClosedError):
        saved.step()


def test_the_example_is_killed_and_continues(tmp_path: Path, warm_accelerate: Warm) -> None:
    script = Path(__file__).parents[2] / "examples" / "accelerate" / "train.py"

    def start(folder: str, crash: str = "") -> Any:
        how: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        how["env"] = {**os.environ, "CKPTSTORE_CRASH_AT": crash}
        return warm_accelerate.start([sys.executable, str(script), str(tmp_path / folder)], **how)

    def finished(folder: str) -> str:
        job = start(folder)
        said, wrong = job.communicate(timeout=200)
        assert job.returncode == 0, wrong
        return str(said.splitlines()[-1])

    alone = finished("alone")
    assert alone.startswith("weights ")
    run, store = start("run", "commit.created:21"), ckptstore.open(tmp_path / "run")
    run.communicate(timeout=200)
    assert run.returncode == -signal.SIGKILL
    assert 20 <= (store.latest_step() or 0) < 48
    assert finished("run") == alone
