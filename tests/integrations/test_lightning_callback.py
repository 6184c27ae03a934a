"""Lightning's `Trainer` with a `StepCheckpoint`: runs that errors, signals and SIGKILL end, and continue."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning.pytorch")

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import ckptstore
from ckptstore import DeterminismWarning
from ckptstore.errors import UsageError
from ckptstore.integrations.lightning import StepCheckpoint
from tests.forms import LONG, long_only, short_or
from tests.integrations.lightning_job import CASES, Net, Stop, fit, trainer_of
from tests.torch_versions import needs_groups
from tools.objects.server import free_port
from tools.warm import MODULES, Warm

pytestmark = [
    # Lightning itself uses what torch has deprecated, and gives advice. Ours stay errors.
    pytest.mark.filterwarnings(
        "ignore", "error::ckptstore.DeterminismWarning", "error::ckptstore.UnexplainedStepWarning"
    ),
]

LONGER = ("accumulate", "generator", "manual", "steps", "validation", "workers")
"""Cases of which CI tries each part in another case."""
IN_PROCESS = [
    pytest.param(name, marks=long_only if name in LONGER else ())
    for name in CASES
    if name not in ("killed", "killed-workers", "ddp", "fsdp")
]
STOPS = (1, 11) if not LONG else (1, 2, 5, 10, 11, 12, 13, 20, 22, 23, 24)
"""In the middle of an epoch and at its end."""
MORE_STOPS = {"limit": (10,), "metrics": (24,)}
"""Where `limit` ends an epoch, and in a later one."""


@pytest.fixture(scope="module")
def warm_lightning() -> Iterator[Warm]:
    """Scripts that start with Lightning imported."""
    with Warm((*MODULES, "lightning.pytorch")) as warm:
        yield warm


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def same(found: list[str], wanted: list[str]) -> None:
    """Whether a run that was continued has the losses of one that was never stopped; it may repeat batches."""
    assert set(found) - set(wanted) == set(), "losses that the run that was never stopped does not have"
    assert list(dict.fromkeys(found)) == wanted


@pytest.mark.parametrize("case", IN_PROCESS)
def test_a_run_that_ends_anywhere_continues_bit_for_bit(tmp_path: Path, case: str) -> None:
    # Its samples draw nothing.
    warnings.filterwarnings("ignore", "the random generators of the loader's 2 worker", DeterminismWarning)
    whole = fit(tmp_path / "whole", tmp_path / "wanted", **CASES[case])
    wanted = lines(tmp_path / "wanted")
    assert len(wanted) == len(set(wanted)) > 14
    for at in sorted({*STOPS, *MORE_STOPS.get(case, ())}):
        fit(tmp_path / "run", tmp_path / "losses", Stop(at), **CASES[case])
    trainer = fit(tmp_path / "run", tmp_path / "losses", **CASES[case])
    same(lines(tmp_path / "losses"), wanted)
    with ckptstore.open(tmp_path / "run") as store, ckptstore.open(tmp_path / "whole") as other:
        last = whole.global_step if case != "manual" else 33
        assert [info.step for info in store.checkpoints()] == list(range(1, last + 1)), "every optimizer step"
        assert store.checkpoint().metadata["metrics"]["loss"] > 0
        differing = {one.path for one in store.compare_state(last, last, other=other)}
        # Whether this process had made an iterator before the epoch: true of the process.
        assert differing <= {"loader.begun.created"}, "progress, schedules, callbacks"
        assert all(one.status == "same" for one in store.compare(last, last, other=other))
        weights = store.load()["model"]
    assert all(torch.equal(one, weights[name]) for name, one in trainer.lightning_module.state_dict().items())


def test_the_callback_changes_nothing_in_a_run(tmp_path: Path) -> None:
    for case in ("plain", "stateful"):
        fit(None, tmp_path / f"{case}-alone", draws=False, **CASES[case])
        fit(tmp_path / case, tmp_path / f"{case}-saved", draws=False, **CASES[case])
        assert lines(tmp_path / f"{case}-alone") == lines(tmp_path / f"{case}-saved")


@pytest.mark.parametrize("case", [pytest.param("killed", marks=long_only), "killed-workers"])
def test_a_run_that_is_killed_at_random_continues_bit_for_bit(tmp_path: Path, warm_lightning: Warm, case: str) -> None:
    """Killed twice, thirty times in the long form."""

    def start(store: str, losses: str) -> Any:
        command = [sys.executable, "-m", "tests.integrations.lightning_job", case]
        return warm_lightning.start([*command, str(tmp_path / store), str(tmp_path / losses), "end"])

    with start("alone", "wanted") as alone:
        assert alone.wait() == 0
    wanted = lines(tmp_path / "wanted")
    assert len(wanted) == 44
    chance = random.Random(short_or(1, 2))
    for _ in range(short_or(2, 30)):
        with start("run", "losses") as run:
            before, enough = len(lines(tmp_path / "losses")), chance.randrange(1, 8)
            while run.poll() is None and len(lines(tmp_path / "losses")) < before + enough:
                time.sleep(0.001)
            time.sleep(chance.random() * 0.02)
            run.kill()
            assert run.wait() in (-signal.SIGKILL, 0)
    with start("run", "losses") as run:
        assert run.wait() == 0
    same(lines(tmp_path / "losses"), wanted)


def test_the_example_is_killed_and_continues(tmp_path: Path, warm_lightning: Warm) -> None:
    script = Path(__file__).parents[2] / "examples" / "lightning" / "train.py"

    def start(folder: str, crash: str = "") -> Any:
        how: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        how["env"] = {**os.environ, "CKPTSTORE_CRASH_AT": crash}
        return warm_lightning.start([sys.executable, str(script), str(tmp_path / folder)], **how)

    alone = start("alone").communicate(timeout=200)[0]
    assert "step 48: weights" in alone
    run, store = start("run", "commit.created:6"), ckptstore.open(tmp_path / "run" / "steps")
    run.communicate(timeout=200)
    assert run.returncode == -signal.SIGKILL
    assert store.latest_step() is not None
    assert start("run").communicate(timeout=200)[0] == alone
    assert len(ckptstore.open(tmp_path / "run" / "best").tags()) == 2


@needs_groups
@pytest.mark.parametrize("case", [pytest.param("ddp", marks=long_only), "fsdp"])
def test_ranks_continue_bit_for_bit(tmp_path: Path, case: str, warm_lightning: Warm) -> None:
    def ranks(*runs: tuple[str, str, str]) -> None:
        port = str(free_port())
        jobs = []
        for rank in ("0", "1"):
            place = {"LOCAL_RANK": rank, "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            command = [sys.executable, "-m", "tests.integrations.lightning_job", case]
            streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            for store, losses, at in runs:
                command += [str(tmp_path / store), str(tmp_path / f"{losses}{rank}"), at]
            jobs.append(warm_lightning.start(command, env={**os.environ, **place, "WORLD_SIZE": "2"}, **streams))
        try:
            said = [job.communicate(timeout=200)[0] for job in jobs]
        finally:
            for job in jobs:
                job.kill()
        assert [job.returncode for job in jobs] == [0, 0], said

    ranks(("alone", "wanted", "end"), ("run", "losses", "7"))
    ranks(("run", "losses", "end"))
    for rank in "01":
        assert len(lines(tmp_path / f"wanted{rank}")) == 15
        same(lines(tmp_path / f"losses{rank}"), lines(tmp_path / f"wanted{rank}"))
    with ckptstore.open(tmp_path / "run") as store:
        assert [info.step for info in store.checkpoints()] == list(range(1, 16))


class Signal(pl.Callback):
    """Sends this process SIGTERM, in the middle of a step."""

    def on_before_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 7:
            os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_and_the_deadline_lose_no_step(tmp_path: Path) -> None:
    fit(tmp_path / "whole", tmp_path / "alone")
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SIGTERMException):
        fit(tmp_path / "run", tmp_path / "losses", Signal())
    assert signal.getsignal(signal.SIGTERM) is before
    with ckptstore.open(tmp_path / "run") as store:
        assert store.latest_step() == len(lines(tmp_path / "losses"))
    trainer = fit(tmp_path / "run", tmp_path / "losses", saved={"deadline_seconds": 0.001})
    assert trainer.global_step < 33
    with ckptstore.open(tmp_path / "run") as store:  # not what Lightning's validation at the end left
        assert store.latest_step() == trainer.global_step - 1
    fit(tmp_path / "run", tmp_path / "losses")
    same(lines(tmp_path / "losses"), lines(tmp_path / "alone"))


def test_a_run_that_ended_and_gets_more_to_do_continues(tmp_path: Path) -> None:
    fit(tmp_path / "alone", tmp_path / "wanted", max_epochs=3)
    fit(tmp_path / "run", tmp_path / "losses", max_epochs=1)
    assert fit(tmp_path / "run", tmp_path / "losses", max_epochs=1).global_step == 11, "nothing to do"
    fit(tmp_path / "run", tmp_path / "losses", max_epochs=3)
    assert lines(tmp_path / "losses") == lines(tmp_path / "wanted")
    fit(tmp_path / "steps", tmp_path / "fewer", max_epochs=-1, max_steps=16)
    fit(tmp_path / "steps", tmp_path / "fewer", max_epochs=-1, max_steps=33)
    assert lines(tmp_path / "fewer") == lines(tmp_path / "wanted"), "also of the epoch's number"


class Notes(pl.Callback):
    """A callback with a state."""

    def __init__(self) -> None:
        self.seen = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen += 1

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


class Data(pl.LightningDataModule):
    """A data module with a state."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.randn(16, 8)), batch_size=4)

    def state_dict(self) -> dict[str, Any]:
        return {"passes": self.passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.passes = state["passes"]


class Hooked(Net):
    """A module that adds to checkpoints."""

    note = ""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert {"state_dict", "epoch", "global_step"} <= set(checkpoint)
        checkpoint["note"] = self.note

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.note = checkpoint["note"]


def test_the_states_of_callbacks_data_module_and_module_come_back(tmp_path: Path) -> None:
    def run(epochs: int, passes: int, note: str) -> tuple[Notes, Data, Hooked, pl.Trainer]:
        notes, data, module = Notes(), Data(), Hooked(tmp_path / "losses")
        data.passes, module.note = passes, note
        trainer = trainer_of([StepCheckpoint(tmp_path / "run"), notes], max_epochs=epochs)
        trainer.fit(module, datamodule=data)
        return notes, data, module, trainer

    run(2, 7, "first")
    notes, data, module, trainer = run(3, 0, "second")
    assert (notes.seen, data.passes, module.note) == (12, 7, "first")
    assert (trainer.current_epoch, trainer.global_step) == (3, 12)
    callback = StepCheckpoint(tmp_path / "run", resume=5)
    latest = callback.latest()
    assert latest is not None
    assert latest.step == 12
    earlier = trainer_of([callback], max_epochs=2)
    earlier.fit(Hooked(tmp_path / "again"), datamodule=Data())
    assert len(lines(tmp_path / "again")) == 3, "from step 5 of 8"
    assert StepCheckpoint(tmp_path / "none").latest() is None


class Endless(IterableDataset[Any]):
    """Has no length."""

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield (torch.zeros(8),)


def test_what_cannot_be_continued_is_refused(tmp_path: Path) -> None:
    loader = DataLoader(TensorDataset(torch.randn(16, 8)), batch_size=4)
    store = tmp_path / "run"

    def refused(match: str, given: Any = loader, path: Any = None, **options: Any) -> None:
        with pytest.raises(UsageError, match=match):
            trainer_of([StepCheckpoint(store)], **options).fit(Net(tmp_path / "losses"), given, ckpt_path=path)

    refused("several", CombinedLoader([loader, loader], "max_size"))
    refused("has no length", DataLoader(Endless(), batch_size=4))
    refused("reload_dataloaders", reload_dataloaders_every_n_epochs=1)
    other = trainer_of([], max_steps=1)
    other.fit(Net(tmp_path / "others"), loader)
    other.save_checkpoint(tmp_path / "x.ckpt")
    refused("ckpt_path", path=str(tmp_path / "x.ckpt"))
    with pytest.raises(UsageError, match="take interval='epoch'"):
        trainer_of([StepCheckpoint(store)]).fit(ByStep(tmp_path / "losses"), loader)
    with pytest.raises(UsageError, match="FSDPStrategy: a StepCheckpoint"):
        StepCheckpoint(store).setup(FakeTrainer(FSDPStrategy()), None, "fit")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="every="):
        StepCheckpoint(store, save_every=2)
    with pytest.raises(UsageError, match="this name is reserved"):
        StepCheckpoint(store, extra={"lightning": torch.Generator()})
    assert lines(tmp_path / "losses") == []


class ByStep(Net):
    """Its schedule follows a metric at every step."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters())
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return [optimizer], [{"scheduler": plateau, "monitor": "loss", "interval": "step"}]


class FakeTrainer:
    """A trainer of which only the strategy is asked: FSDP needs a device."""

    fast_dev_run = False

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy


def test_a_limit_gives_a_loader_a_length_and_a_plain_run_is_left_alone(tmp_path: Path) -> None:
    callback = StepCheckpoint(tmp_path / "run", every=2)
    trainer = trainer_of([callback], max_epochs=1, limit_train_batches=5)
    trainer.fit(Net(tmp_path / "losses"), DataLoader(Endless(), batch_size=4))
    assert [info.step for info in callback.store.checkpoints()] == [2, 4, 5]
    assert "process_dataloader" not in vars(trainer.strategy)
    trainer_of([StepCheckpoint(tmp_path / "dry")], fast_dev_run=True).fit(
        Net(tmp_path / "losses"), DataLoader(TensorDataset(torch.randn(16, 8)), batch_size=4)
    )
    assert not (tmp_path / "dry").exists()
