"""Lightning's own checkpoints in a store: names, what stays, resuming from them, errors."""

from __future__ import annotations

import argparse
import datetime
import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning.pytorch")

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

import ckptstore
from ckptstore.errors import FormatError, UnsupportedStateError, UsageError
from ckptstore.integrations.lightning import CkptstoreIO
from tests.integrations.lightning_job import Net, lines_of, trainer_of

pytestmark = [
    pytest.mark.filterwarnings("ignore", "error::ckptstore.BranchWarning"),
]


class Hyper(Net):
    """With hyperparameters of every kind."""

    def __init__(self, losses: Path, width: int = 3, **more: Any) -> None:
        super().__init__(losses)
        self.save_hyperparameters(ignore=["losses"])


MORE: dict[str, Any] = {
    "names": ["a", ("b", 2)],
    "space": argparse.Namespace(rate=1e-3, inner=argparse.Namespace(x=None)),
    "nested": {"tensor": torch.arange(3), "dtype": torch.bfloat16, "path": Path("a/b")},
    "time": datetime.timedelta(hours=1, microseconds=5),
}


def run(folder: Path, *, epochs: int, ckpt_path: Any = None, io: Any = None, **saved: Any) -> tuple[pl.Trainer, Any]:
    """Train with a `ModelCheckpoint`."""
    torch.manual_seed(1)
    folder.mkdir(exist_ok=True)
    data = TensorDataset(torch.randn(24, 8))
    checkpoint = ModelCheckpoint(folder / "ckpts", **saved)
    io = CkptstoreIO(folder / "store") if io is None else io
    trainer = trainer_of([checkpoint], enable_checkpointing=True, plugins=[io], max_epochs=epochs)
    trainer.fit(Hyper(folder / "losses", **MORE), DataLoader(data, batch_size=4, shuffle=True), ckpt_path=ckpt_path)
    return trainer, checkpoint


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_names_of_model_checkpoint_are_tags_and_what_it_removes_is_retired(
    tmp_path: Path, asynchronous: bool
) -> None:
    io = CkptstoreIO(tmp_path / "store", asynchronous=asynchronous, deltas=None if asynchronous else 3)
    saved: dict[str, Any] = {"save_top_k": 2, "monitor": "epoch", "mode": "max", "save_last": True}
    trainer, checkpoint = run(tmp_path, epochs=5, io=io, **saved)
    files = {path.stem for path in (tmp_path / "ckpts").iterdir()}
    assert len(files) == 3
    assert "last" in files
    with ckptstore.open(tmp_path / "store") as store:
        tags = store.tags()
        assert {json.loads(path.read_text())["ckptstore"]["tag"] for path in (tmp_path / "ckpts").iterdir()} == {*tags}
        assert tags["last"].metadata["lightning"]["global_step"] == 30
        assert {info.ref for info in tags.values()} >= {info.ref for info in store.checkpoints()[:-2]}
        assert len(store.checkpoints()) < 6, "what no path names is retired"
        assert store.verify(deep=True).ok
    for path in (checkpoint.best_model_path, checkpoint.last_model_path):
        loaded = CkptstoreIO(tmp_path / "store").load_checkpoint(path)
        assert loaded["global_step"] == int(loaded["epoch"] + 1) * 6
    assert trainer.global_step == 30
    for name, one in loaded["state_dict"].items():
        assert torch.equal(one, trainer.lightning_module.state_dict()[name])
    assert loaded["hyper_parameters"]["space"] == MORE["space"]
    assert loaded["hyper_parameters"]["nested"]["path"] == Path("a/b")
    assert loaded["hyper_parameters"]["nested"]["dtype"] == torch.bfloat16
    assert torch.equal(loaded["hyper_parameters"]["nested"]["tensor"], torch.arange(3))
    assert (loaded["hyper_parameters"]["time"], loaded["hyper_parameters"]["names"]) == (MORE["time"], MORE["names"])
    assert isinstance(loaded["state_dict"], OrderedDict)


def test_fit_continues_from_last_best_and_a_path(tmp_path: Path) -> None:
    trainer, _ = run(tmp_path, epochs=2, save_last=True)
    again, checkpoint = run(tmp_path, epochs=3, ckpt_path="last", save_last=True)
    assert (trainer.global_step, again.global_step) == (12, 18)
    assert len(lines_of(tmp_path / "losses")) == 18, "nothing is trained twice"
    third, _ = run(tmp_path, epochs=4, ckpt_path=checkpoint.best_model_path, save_last=True)
    assert third.global_step == 24
    fresh, _ = run(tmp_path / "other", epochs=1, ckpt_path="last", save_last=True)
    assert fresh.global_step == 6, "there is none"
    fresh.validate(Net(tmp_path / "x"), DataLoader(TensorDataset(torch.randn(4, 8))), ckpt_path="best", verbose=False)


def test_the_same_step_again_is_another_tag_or_the_next_step(tmp_path: Path) -> None:
    io = CkptstoreIO(tmp_path / "store")
    state = {"global_step": 7, "epoch": 1, "state_dict": {"w": torch.ones(3)}}
    io.save_checkpoint(state, tmp_path / "a" / "x=1.ckpt")
    io.save_checkpoint(state, tmp_path / "last.ckpt")
    io.save_checkpoint({**state, "more": 1}, tmp_path / "b" / "x=1.ckpt")
    io.save_checkpoint({**state, "global_step": 20}, tmp_path / "last.ckpt")
    io.save_checkpoint({**state, "global_step": 3}, tmp_path / "low.ckpt")
    named = {name: (info.step, info.metadata["lightning"]["global_step"]) for name, info in io.store.tags().items()}
    assert named == {"x_1": (7, 7), "x_1-2": (8, 7), "last": (20, 20), "low": (21, 3)}
    assert io.load_checkpoint(tmp_path / "a" / "x=1.ckpt")["global_step"] == 7
    assert io.load_checkpoint(tmp_path / "b" / "x=1.ckpt")["more"] == 1
    io.remove_checkpoint(tmp_path / "a" / "x=1.ckpt")
    assert {*io.store.tags()} == {"x_1-2", "last", "low"}
    io.remove_checkpoint(tmp_path / "a" / "x=1.ckpt")
    io.teardown()
    with pytest.raises(FileNotFoundError):
        io.load_checkpoint(tmp_path / "a" / "x=1.ckpt")


def test_what_is_saved_after_a_load_continues_from_there(tmp_path: Path) -> None:
    io = CkptstoreIO(tmp_path / "store")
    for step in (1, 2, 3):
        io.save_checkpoint({"global_step": step, "w": torch.full((3,), step)}, tmp_path / f"{step}.ckpt")
    io.teardown()
    assert io.load_checkpoint(tmp_path / "1.ckpt")["global_step"] == 1
    io.save_checkpoint({"global_step": 2, "w": torch.zeros(3)}, tmp_path / "other.ckpt")
    io.teardown()
    assert io.store.checkpoint("tag:other").ref == "2@2"
    assert io.store.checkpoint("tag:ckpt-2").ref == "2@1", "the later ones stay"
    assert io.load_checkpoint("2@2", map_location="cpu")["w"].sum() == 0, "a REF is a path, too"


def test_the_run_was_killed_before_the_file_was_written(tmp_path: Path) -> None:
    io = CkptstoreIO(tmp_path / "store")
    io.save_checkpoint({"global_step": 1}, tmp_path / "last.ckpt")
    io.teardown()
    (tmp_path / "last.ckpt").unlink()
    assert io.load_checkpoint(tmp_path / "last.ckpt")["global_step"] == 1
    io.save_checkpoint({"global_step": 2}, tmp_path / "last.ckpt")
    assert {*io.store.tags()} == {"last"}
    io.teardown()
    (tmp_path / "store").rename(tmp_path / "moved")
    assert CkptstoreIO(tmp_path / "moved").load_checkpoint(tmp_path / "last.ckpt")["global_step"] == 2
    with pytest.raises(UsageError, match="is a checkpoint of"):
        CkptstoreIO(tmp_path / "new").load_checkpoint(tmp_path / "last.ckpt")
    (tmp_path / "last.ckpt").write_text('{"ckptstore": {')
    with pytest.raises(FormatError, match="damaged"):
        CkptstoreIO(tmp_path / "moved").load_checkpoint(tmp_path / "last.ckpt")


def test_a_file_of_lightning_loads_and_a_link_is_a_name(tmp_path: Path) -> None:
    torch.save({"global_step": 4}, tmp_path / "old.ckpt")
    io = CkptstoreIO(tmp_path / "store")
    assert io.load_checkpoint(tmp_path / "old.ckpt", weights_only=True) == {"global_step": 4}
    io.save_checkpoint({"global_step": 5}, tmp_path / "five.ckpt")
    (tmp_path / "last.ckpt").symlink_to("five.ckpt")
    assert io.load_checkpoint(tmp_path / "last.ckpt")["global_step"] == 5
    io.remove_checkpoint(tmp_path / "last.ckpt")
    assert io.load_checkpoint(tmp_path / "five.ckpt")["global_step"] == 5
    io.teardown()


def test_what_cannot_be_stored_is_named(tmp_path: Path) -> None:
    io = CkptstoreIO(tmp_path / "store")
    with pytest.raises(UnsupportedStateError, match="hyper_parameters") as caught:
        io.save_checkpoint({"hyper_parameters": {"loss": torch.nn.MSELoss}}, tmp_path / "x.ckpt")
    assert "save_hyperparameters(ignore=[...])" in caught.value.__notes__[0]
    with pytest.raises(UsageError, match="storage_options"):
        io.save_checkpoint({}, tmp_path / "x.ckpt", storage_options={})
    with pytest.raises(UsageError, match="max_in_flight"):
        CkptstoreIO(tmp_path / "store", max_in_flight=0)
    assert not (tmp_path / "x.ckpt").exists()


def test_an_error_of_a_save_in_flight_comes_with_the_next_save_or_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for ends in ("save", "teardown"):
        io = CkptstoreIO(tmp_path / ends, asynchronous=True)
        io.save_checkpoint({"global_step": 1}, tmp_path / "file" / "x.ckpt")  # no folder can be made there
        if ends == "save":
            with pytest.raises(OSError, match="file"):
                io.save_checkpoint({"global_step": 2}, tmp_path / "y.ckpt")
            io.teardown()
        else:
            with pytest.raises(OSError, match="file"):
                io.teardown()
