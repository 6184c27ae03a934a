"""`ckpt import`."""

from __future__ import annotations

import fractions
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import ckptstore
from tests.cli.conftest import Run, assert_documented, documented, state
from tests.exchange.trainer_folder import write_trainer_folder
from tests.store.states import same
from tests.write.test_deltas import trajectory


def write(path: Path, value: float) -> Path:
    path.parent.mkdir(exist_ok=True)
    save_file({"layer.weight": np.full((3, 4), value, np.float32), "bias": np.zeros(3, np.float16)}, path)
    return path


def test_one_file_into_a_new_store(ckpt: Run, tmp_path: Path) -> None:
    outcome = ckpt("import", tmp_path / "run", write(tmp_path / "model.safetensors", 1), "--step", "1000")
    assert outcome.code == 0
    assert outcome.out.splitlines()[1].split()[1:4] == ["1000@1", "full", "2"]
    loaded = ckptstore.open(tmp_path / "run").load(1000, framework="torch")
    assert torch.equal(loaded["layer.weight"], torch.ones(3, 4))
    assert loaded["bias"].dtype == torch.float16


def test_a_series_in_any_order(ckpt: Run, tmp_path: Path) -> None:
    files = [write(tmp_path / f"checkpoint-{step}" / "model.safetensors", step) for step in (30, 5, 100)]
    outcome = ckpt("import", tmp_path / "run", *files, "--json")
    assert_documented(outcome.json, documented("ckpt import")[0])
    assert [one["ref"] for one in outcome.json["checkpoints"]] == ["5@1", "30@1", "100@1"]
    assert outcome.json["checkpoints"][0]["file"] == str(files[1])
    folders = ckpt("import", tmp_path / "again", *(file.parent for file in files), "--json")
    assert [one["step"] for one in folders.json["checkpoints"]] == [5, 30, 100]


def test_the_step_after_the_parents(ckpt: Run, run: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "model.safetensors", 1)
    assert ckpt("import", run, file, "--json").json["checkpoints"][0]["ref"] == "6@4"
    forked = ckpt("import", run, file, "--parent", "2@1", "--json")
    assert forked.json["checkpoints"][0]["ref"] == "3@5"
    assert ckpt("log", run, "--json").json["checkpoints"][0]["parent"] == "2@1"


def test_steps_at_or_below_the_parent(ckpt: Run, run: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "step_4.safetensors", 1)
    outcome = ckpt("import", run, file)
    assert outcome.code == 2
    assert "step 4 is not above step 5 of 5@3" in outcome.err
    assert "--parent none" in outcome.err
    assert ckpt("log", run, "--json").json["terms"][0]["term"] == 3, "no term was opened for nothing"
    alone = ckpt("import", run, file, "--parent", "none", "--json")
    assert alone.json["checkpoints"][0]["ref"] == "4@4"


def test_a_torch_file(ckpt: Run, tmp_path: Path) -> None:
    saved = {"model": {"w": torch.arange(6.0).reshape(2, 3).t()}, "lr": 0.1, "steps": (1, 2), "none": None}
    torch.save(saved, tmp_path / "step_7.pt")
    assert ckpt("import", tmp_path / "run", tmp_path / "step_7.pt").code == 0
    same(ckptstore.open(tmp_path / "run").load(7, framework="torch"), saved)


def test_a_torch_file_with_code_in_it_is_refused(ckpt: Run, tmp_path: Path) -> None:
    torch.save({"model": torch.nn.Linear(2, 2)}, tmp_path / "step_7.pt")
    outcome = ckpt("import", tmp_path / "run", tmp_path / "step_7.pt")
    assert outcome.code == 6
    assert "model: it is a torch.nn.modules.linear.Linear" in outcome.err
    assert "hint: to import the rest: --leave-out-key 'model'" in outcome.err
    assert not (tmp_path / "run").exists()


def test_keys_are_left_out_and_objects_are_taken(ckpt: Run, tmp_path: Path) -> None:
    state = {"w": torch.ones(2), "hyper_parameters": {"loss": torch.nn.MSELoss()}, "scale": fractions.Fraction(1, 3)}
    torch.save(state, tmp_path / "step_7.pt")
    refused = ckpt("import", tmp_path / "run", tmp_path / "step_7.pt")
    assert refused.code == 6
    assert "hyper_parameters.loss: it is a torch.nn.modules.loss.MSELoss" in refused.err
    done = ckpt("import", tmp_path / "run", tmp_path / "step_7.pt", "--leave-out-key", "hyper_parameters", "--json")
    assert done.json["checkpoints"][0]["left_out"] == ["hyper_parameters"]
    assert "hyper_parameters" not in ckptstore.open(tmp_path / "run").load()
    taken = ckpt("import", tmp_path / "two", tmp_path / "step_7.pt", "--object", "torch.nn.*")
    assert taken.code == 0
    found = ckptstore.open(tmp_path / "two").load()["hyper_parameters"]["loss"]
    assert (found.name, found.value["reduction"]) == ("torch.nn.modules.loss.MSELoss", "mean")


def test_trainer_folders_are_imported_whole_or_in_part(ckpt: Run, tmp_path: Path) -> None:
    folders = [tmp_path / f"checkpoint-{step}" for step in (10, 5)]
    saved = {int(folder.name[11:]): write_trainer_folder(folder, step=int(folder.name[11:])) for folder in folders}
    whole = ckpt("import", tmp_path / "whole", *folders, "--json").json["checkpoints"]
    assert [one["left_out"] for one in whole] == [[], []]
    assert "training_args.bin" in ckptstore.open(tmp_path / "whole").load(5)["files"]
    arguments = ["import", tmp_path / "run", *folders, "--leave-out", "training_args.bin"]
    shown = ckpt(*arguments, "--json").json["checkpoints"]
    assert [(one["step"], one["left_out"]) for one in shown] == [(step, ["training_args.bin"]) for step in (5, 10)]
    for step, parts in saved.items():
        same(ckptstore.open(tmp_path / "run").load(step)["optimizer"], parts["optimizer"])
    text = ckpt("import", tmp_path / "again", *arguments[2:])
    assert f"note: {folders[1]}: not in 5@1: training_args.bin" in text.err


@pytest.mark.parametrize("name", ["x.safetensors", "x.pt"])
def test_a_restored_file_can_be_imported(ckpt: Run, pristine: Path, tmp_path: Path, name: str) -> None:
    ckpt("restore", pristine, "--out", tmp_path / name)
    assert ckpt("import", tmp_path / "copy", tmp_path / name, "--step", "5").code == 0
    copy = ckptstore.open(tmp_path / "copy")
    if name == "x.safetensors":  # all of the state, down to its hash
        same(copy.load("latest", framework="numpy"), state(5))
        assert copy.checkpoint("latest").state == ckptstore.open(pristine).checkpoint("latest").state
    else:
        assert torch.equal(copy.load("latest", framework="torch")["odd"]["z"], torch.tensor(1 + 2j))


def test_usage(ckpt: Run, tmp_path: Path) -> None:
    one, two = write(tmp_path / "a" / "step_1.safetensors", 1), write(tmp_path / "b" / "step_1.safetensors", 2)
    store = tmp_path / "run"
    both = ckpt("import", store, one, two)
    assert both.code == 2
    assert "both seem to be step 1" in both.err
    assert ckpt("import", store, one, two, "--step", "3").code == 2
    assert ckpt("import", store, tmp_path / "nothing.pt").code == 2
    assert ckpt("import", store, tmp_path).code == 2
    (tmp_path / "junk.pt").write_bytes(b"this is not a checkpoint at all")
    assert ckpt("import", store, tmp_path / "junk.pt").code == 5
    alone = ckpt("import", tmp_path / "alone", write(tmp_path / "d" / "ckpt.safetensors", 3))
    assert (alone.code, "its name contains no step, so it is 0@1; set the step with --step N" in alone.err) == (0, True)
    told = ckpt("import", tmp_path / "told", tmp_path / "d" / "ckpt.safetensors", "--step", "500")
    assert (told.code, told.err) == (0, "")
    nameless = ckpt("import", store, one, write(tmp_path / "c" / "final.safetensors", 3))
    assert nameless.code == 2
    assert "its name has no step" in nameless.err
    assert not store.exists()


def test_a_series_shrinks_as_deltas(ckpt: Run, tmp_path: Path) -> None:
    states = trajectory(6)
    for step, saved in enumerate(states, 1):
        torch.save({"model": saved["model"], "master": saved["optimizer"]["master"]}, tmp_path / f"step_{step}.pt")
    files = [tmp_path / f"step_{step}.pt" for step in range(1, 7)]
    shown = ckpt("import", tmp_path / "store", *files, "--delta", "--interval", "2", "--json")
    assert shown.code == 0
    found = json.loads(shown.out)
    assert [one["kind"] for one in found["checkpoints"]] == ["full"] + ["delta"] * 5
    assert found["bytes_before"] == sum(file.stat().st_size for file in files)
    assert found["bytes_after"] < 0.8 * found["bytes_before"]
    for step, saved in enumerate(states, 1):
        same(saved["optimizer"]["master"], ckptstore.open(tmp_path / "store").load(step)["master"])
    text = ckpt("import", tmp_path / "other", *files, "--delta", "--max-restore-cost", "2x").out
    assert "before" in text
    assert "after" in text


@pytest.mark.parametrize("bad", [["--interval", "0"], ["--interval", "soon"], ["--max-restore-cost", "lots"]])
def test_bad_delta_options(ckpt: Run, tmp_path: Path, bad: list[str]) -> None:
    assert ckpt("import", tmp_path / "store", write(tmp_path / "step_1.safetensors", 1), "--delta", *bad).code == 2
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("unused", [["--interval", "7"], ["--max-restore-cost", "3x"]])
def test_delta_options_without_deltas(ckpt: Run, tmp_path: Path, unused: list[str]) -> None:
    outcome = ckpt("import", tmp_path / "store", write(tmp_path / "step_1.safetensors", 1), *unused)
    assert outcome.code == 2
    assert "need --delta" in outcome.err
    assert not (tmp_path / "store").exists()


def test_a_state_without_tensors_comes_back(ckpt: Run, tmp_path: Path) -> None:
    whole = {"step": 7, "name": "run", "lr": [1e-3, 2e-3]}
    with ckptstore.open(tmp_path / "run").writer() as writer:
        writer.save(whole, 1)
    assert ckpt("restore", tmp_path / "run", "--out", tmp_path / "x.safetensors").code == 0
    assert ckpt("import", tmp_path / "copy", tmp_path / "x.safetensors", "--step", "1").code == 0
    assert ckptstore.open(tmp_path / "copy").load(1) == whole


def test_no_store_inside_a_store(ckpt: Run, run: Path, tmp_path: Path) -> None:
    outcome = ckpt("import", run / "seg" / "inner", write(tmp_path / "step_9.safetensors", 1))
    assert outcome.code == 2
    assert "is inside the checkpoint store" in outcome.err
    assert not (run / "seg" / "inner").exists()
    assert ckpt("import", run, tmp_path / "step_9.safetensors").code == 0
