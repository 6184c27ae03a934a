"""Lightning's own files: imported, and written so that a Trainer continues from them with the same losses."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning.pytorch")

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

import ckptstore
from ckptstore.errors import UnsupportedStateError, UsageError
from ckptstore.integrations.lightning import CkptstoreIO, StepCheckpoint
from tests.integrations.lightning_job import Manual, Net, lines_of, trainer_of
from tests.store.states import same
from tools.objects.server import free_port
from tools.warm import MODULES, Warm

pytestmark = [
    pytest.mark.filterwarnings("ignore", "error::ckptstore.BranchWarning"),
]


class Secret:
    """A hyperparameter that only its class makes."""

    def __init__(self) -> None:
        self.rate = 0.5


class Hyper(Net):
    """Without anything random, which Lightning's own checkpoints do not hold."""

    draws = False

    def __init__(self, losses: Path, **more: Any) -> None:
        super().__init__(losses)
        self.net[2] = torch.nn.Dropout(0.0)
        self.save_hyperparameters(ignore=["losses"])


class Two(Manual):
    draws = False

    def __init__(self, losses: Path) -> None:
        super().__init__(losses)
        self.net[2] = torch.nn.Dropout(0.0)


def run(
    folder: Path, name: str, epochs: int, *callbacks: pl.Callback, module: Any = Hyper, ckpt: Any = None, **options: Any
) -> Path:
    """Train; returns the newest file of Lightning's."""
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(24, 8))
    more = options.pop("more", {})
    saved = ModelCheckpoint(folder / name, save_last=True)
    trainer = trainer_of([saved, *callbacks], enable_checkpointing=True, max_epochs=epochs, **options)
    validated = DataLoader(data, batch_size=8)
    trainer.fit(module(folder / f"{name}.txt", **more), DataLoader(data, batch_size=4), validated, ckpt_path=ckpt)
    return Path(saved.best_model_path)


def test_a_checkpoint_is_imported_and_a_trainer_continues_from_the_export(tmp_path: Path) -> None:
    run(tmp_path, "whole", 3)
    file = run(tmp_path, "part", 2)
    store = ckptstore.open(tmp_path / "store")
    (one,) = store.import_files([file])
    assert (one.info.step, one.left_out) == (12, ())
    original = torch.load(file, weights_only=True)
    same(store.load(), original)
    result = store.export_folder("latest", tmp_path / "back.ckpt", "lightning")
    assert result.converted == ()
    same(torch.load(tmp_path / "back.ckpt", weights_only=True), original)
    run(tmp_path, "rest", 3, ckpt=tmp_path / "back.ckpt")
    whole = lines_of(tmp_path / "whole.txt")
    assert len(whole) == 18
    assert lines_of(tmp_path / "part.txt") + lines_of(tmp_path / "rest.txt") == whole


@pytest.mark.parametrize("module", [Hyper, Two])
def test_a_trainer_continues_from_what_step_checkpoint_saved(tmp_path: Path, module: Any) -> None:
    run(tmp_path, "whole", 3, module=module)
    file = run(tmp_path, "part", 2, StepCheckpoint(tmp_path / "run"), module=module)
    ckptstore.open(tmp_path / "run").export_folder("latest", tmp_path / "back.ckpt", "lightning")
    original, back = (torch.load(path, weights_only=True) for path in (file, tmp_path / "back.ckpt"))
    same(dict(back["state_dict"]), dict(original["state_dict"]))
    for mine, its in zip(back["optimizer_states"], original["optimizer_states"], strict=True):
        same(mine["state"], its["state"])
    # Lightning saved this one before the schedules, StepCheckpoint after them.
    counts = [[one["last_epoch"] for one in found["lr_schedulers"]] for found in (back, original)]
    assert counts[0] >= counts[1]
    run(tmp_path, "rest", 3, module=module, ckpt=tmp_path / "back.ckpt")
    assert lines_of(tmp_path / "part.txt") + lines_of(tmp_path / "rest.txt") == lines_of(tmp_path / "whole.txt")


def test_what_ckptstore_io_stored_is_written_without_the_plugin(tmp_path: Path) -> None:
    more = {"space": argparse.Namespace(rate=1e-3), "path": Path("a/b")}
    run(tmp_path, "part", 2, plugins=[CkptstoreIO(tmp_path / "store")], more=more)
    store = ckptstore.open(tmp_path / "store")
    result = store.export_folder("latest", tmp_path / "back.ckpt", "lightning")
    assert result.converted == ("hyper_parameters.space", "hyper_parameters.path")
    found = torch.load(tmp_path / "back.ckpt", weights_only=True)
    assert found["hyper_parameters"] == {"space": {"rate": 1e-3}, "path": "a/b"}
    run(tmp_path, "rest", 3, ckpt=tmp_path / "back.ckpt")
    assert len(lines_of(tmp_path / "rest.txt")) == 6


def test_hyperparameters_with_classes_are_left_out(tmp_path: Path) -> None:
    file = run(tmp_path, "part", 1, more={"loss": Secret(), "space": argparse.Namespace(rate=1e-3)})
    store = ckptstore.open(tmp_path / "store")
    with pytest.raises(UnsupportedStateError, match=r"hyper_parameters\.loss: it is a .*Secret") as raised:
        store.import_files([file])
    assert "--leave-out-key 'hyper_parameters.loss'" in raised.value.__notes__[0]
    assert store.latest_step() is None
    (one,) = store.import_files([file], leave_out_keys=["hyper_parameters"])
    assert one.left_out == ("hyper_parameters",)
    assert "hyper_parameters" not in store.load()
    (one,) = store.import_files([file], parent=None, objects=["*.Secret"])
    assert store.load(one.info.ref)["hyper_parameters"]["loss"].value == {"rate": 0.5}
    run(tmp_path, "rest", 2, more={"loss": Secret()}, ckpt=_exported(store, tmp_path / "back.ckpt"))
    assert len(lines_of(tmp_path / "rest.txt")) == 6


def _exported(store: ckptstore.Store, path: Path) -> Path:
    store.export_folder("latest", path, "lightning")
    return path


@pytest.fixture(scope="module")
def warm_lightning() -> Iterator[Warm]:
    """Lightning is imported once, not in each rank."""
    with Warm((*MODULES, "lightning.pytorch")) as warm:
        yield warm


def test_the_folder_of_a_sharded_strategy(tmp_path: Path, warm_lightning: Warm) -> None:
    """Two ranks with FSDP2 write a folder of DCP beside ``meta.pt``, and continue from the file that is made of it."""

    def ranks(name: str, epochs: int, ckpt: str = "") -> None:
        port = str(free_port())
        command = [sys.executable, "-m", "tests.integrations.lightning_sharded_job", str(tmp_path), name, str(epochs)]
        place = {"NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        command += [ckpt] if ckpt else []
        jobs = [
            warm_lightning.start(command, env={**os.environ, **place, "LOCAL_RANK": rank}, **streams) for rank in "01"
        ]
        try:
            said = [job.communicate(timeout=200)[0] for job in jobs]
        finally:
            for job in jobs:
                job.kill()
        assert [job.returncode for job in jobs] == [0, 0], said

    ranks("whole", 2)
    (folder,) = (tmp_path / "whole").glob("epoch=0-*.ckpt")
    assert (folder / "meta.pt").is_file()
    store = ckptstore.open(tmp_path / "store")
    (one,) = store.import_files([folder])
    assert one.left_out == ()
    found = store.load()
    assert found["global_step"] == one.info.step == 6
    assert {"state_dict", "optimizer_0", "loops", "callbacks", "lr_schedulers"} <= found.keys()
    back = torch.load(_exported(store, tmp_path / "back.ckpt"), weights_only=True)
    same(back["state_dict"], found["state_dict"])
    same(back["optimizer_states"], [found["optimizer_0"]])
    ranks("rest", 2, str(tmp_path / "back.ckpt"))
    for rank in "01":
        whole = lines_of(tmp_path / f"whole{rank}.txt")
        assert len(whole) == 12
        assert lines_of(tmp_path / f"rest{rank}.txt") == whole[6:]


def test_refusals_before_anything_is_written(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "store")
    with store.writer() as writer:
        writer.save({"model": {"w": torch.ones(2)}}, 1)
    with pytest.raises(UsageError, match="is not of Lightning"):
        store.export_folder(1, tmp_path / "x.ckpt", "lightning")
    (tmp_path / "there.ckpt").write_text("mine")
    with pytest.raises(UsageError, match="exists"):
        store.export_folder(1, tmp_path / "there.ckpt", "lightning")
    with pytest.raises(UsageError, match="inside the checkpoint store"):
        store.export_folder(1, tmp_path / "store" / "x.ckpt", "lightning")
    with pytest.raises(UsageError, match="one file"):
        store.export_folder(1, tmp_path / "x.ckpt", "lightning", max_shard_bytes=100)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store", "there.ckpt"]
