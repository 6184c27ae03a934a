"""`ckpt restore`: files that are complete or absent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file

import ckptstore
from ckptstore.training import OptimizerStep
from tests.cli.conftest import Run, assert_documented, documented, state
from tests.write.test_deltas import fill, trajectory


def test_safetensors(ckpt: Run, pristine: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    outcome = ckpt("restore", pristine, "3@1", "--out", out)
    assert outcome.code == 0
    assert outcome.out.startswith(f"wrote {out}: checkpoint 3@1, 5 tensors, 11.8 KiB in ")
    assert list(tmp_path.iterdir()) == [out]
    tensors = load_file(out)
    assert tensors["model.embedding.weight"].tobytes() == state(3)["model"]["embedding.weight"].tobytes()
    assert tensors["odd.z"].tolist() == [1.0, 2.0]  # complex: reals with a trailing dimension of 2
    with safe_open(out, "numpy") as file:
        assert file.metadata()["format"] == "pt"
        assert file.metadata()["ckptstore.checkpoint"] == "3@1"


def test_the_newest_checkpoint_is_the_default(ckpt: Run, pristine: Path, tmp_path: Path) -> None:
    found = ckpt("restore", pristine, "--out", tmp_path / "x.safetensors", "--json").json
    assert_documented(found, documented("ckpt restore")[0])
    assert (found["ref"], found["tensors"], found["index"]) == ("5@3", 5, None)
    assert found["paths"] == [str(tmp_path / "x.safetensors")]


def test_select(ckpt: Run, pristine: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.safetensors"
    ckpt("restore", pristine, "--out", out, "--select", "model.*", "--select", "odd.half")
    assert set(load_file(out)) == {"model.embedding.weight", "model.frozen", "odd.half"}
    missing = ckpt("restore", pristine, "--out", tmp_path / "y", "--select", "nothing")
    assert missing.code == 3
    assert list(tmp_path.iterdir()) == [out]


def test_a_folder_of_dcp(ckpt: Run, pristine: Path, tmp_path: Path) -> None:
    out = tmp_path / "step-3"
    outcome = ckpt("restore", pristine, "3@1", "--format", "dcp", "--out", out)
    assert outcome.out.startswith(f"wrote {out}: checkpoint 3@1, ")
    back = ckpt("import", tmp_path / "back", out, "--json")
    assert back.json["checkpoints"][0]["step"] == 3
    again = ckpt("restore", pristine, "3@1", "--format", "dcp", "--out", out)
    assert (again.code, "exists" in again.err) == (2, True)
    found = ckpt("restore", pristine, "--format", "dcp", "--out", tmp_path / "json", "--json").json
    assert (found["format"], found["paths"]) == ("dcp", [str(tmp_path / "json" / "__0_0.distcp")])


@pytest.mark.parametrize(
    "options",
    [
        ["--format", "dcp", "--out", "-"],
        ["--format", "dcp", "--out", "x", "--force"],
        ["--layout", "hf", "--out", "x", "--format", "dcp"],
        ["--layout", "hf", "--out", "x", "--select", "*"],
        ["--layout", "lightning", "--out", "x", "--strip", "model."],
        ["--layout", "lightning", "--out", "x", "--force"],
        ["--layout", "hf-trainer", "--out", "x", "--config", "c"],
        ["--layout", "hf", "--out", "x", "--config", "no-such-folder"],
        ["--out", "x.pt", "--config", "c"],
        ["--layout", "lightning", "--out", "x"],
    ],
)
def test_options_that_do_not_go_together(
    ckpt: Run, pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert ckpt("restore", pristine, *options).code == 2
    assert list(tmp_path.iterdir()) == []


def test_strip(ckpt: Run, pristine: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.safetensors"
    assert ckpt("restore", pristine, "--out", out, "--strip", "model.").code == 0
    assert set(load_file(out)) == {"embedding.weight", "frozen"}
    missing = ckpt("restore", pristine, "--out", tmp_path / "y", "--strip", "net.")
    assert missing.code == 3
    assert "hint: `ckpt inspect" in missing.err
    assert ckpt("restore", pristine, "--out", tmp_path / "y", "--strip", "model").code == 2
    assert list(tmp_path.iterdir()) == [out]


def test_shards_with_an_index(ckpt: Run, pristine: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    outcome = ckpt("restore", pristine, "--out", out, "--max-shard-size", "100B", "--json")
    found = outcome.json
    assert_documented(found, documented("ckpt restore")[0])
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert found["index"] == str(tmp_path / "model.safetensors.index.json")
    assert index["metadata"]["total_size"] == found["bytes"]
    assert sorted(set(index["weight_map"].values())) == [Path(path).name for path in found["paths"]]
    assert len(found["paths"]) == 3
    merged = {name: load_file(tmp_path / file)[name] for name, file in index["weight_map"].items()}
    assert np.array_equal(merged["model.embedding.weight"], state(5)["model"]["embedding.weight"])
    assert "3 files and" in ckpt("restore", pristine, "--out", out, "--max-shard-size", "100", "--force").out


def test_an_existing_file_is_kept_unless_forced(ckpt: Run, pristine: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.safetensors"
    out.write_text("precious")
    outcome = ckpt("restore", pristine, "--out", out)
    assert outcome.code == 2
    assert outcome.err == f"error: {out} exists\nhint: --force replaces it\n"
    assert out.read_text() == "precious"
    assert ckpt("restore", pristine, "--out", out, "--force").code == 0
    assert "odd.z" in load_file(out)


def test_damage_leaves_nothing_behind(ckpt: Run, run: Path, tmp_path: Path) -> None:
    segment = next((run / "seg" / "0000000003").iterdir())
    data = bytearray(segment.read_bytes())
    data[-1] ^= 1
    segment.write_bytes(data)
    for name in ("x.safetensors", "x.pt"):
        outcome = ckpt("restore", run, "--out", tmp_path / name)
        assert outcome.code == 4
        assert segment.name in outcome.err
        assert "checksum" in outcome.err
    assert list(tmp_path.iterdir()) == [run]
    assert ckpt("restore", run, "4@2", "--out", tmp_path / "x.pt").code == 0


def test_bad_places(ckpt: Run, pristine: Path, tmp_path: Path) -> None:
    missing = ckpt("restore", pristine, "--out", tmp_path / "no" / "x.pt")
    assert missing.code == 2
    assert missing.err == f"error: the folder {tmp_path / 'no'} does not exist\n"
    assert ckpt("restore", pristine, "--out", tmp_path).code == 2
    assert ckpt("restore", pristine, "--out", tmp_path / "x.pt", "--max-shard-size", "1GB").code == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["x.pt", "x.pth", "x.bin", "x.ckpt", "x.safetensors", "x"])
def test_the_name_decides_the_format(ckpt: Run, pristine: Path, tmp_path: Path, name: str) -> None:
    found = ckpt("restore", pristine, "--out", tmp_path / name, "--json").json
    assert found["format"] == ("safetensors" if name in ("x.safetensors", "x") else "pt")
    assert (tmp_path / name).read_bytes()[:2] == (
        b"PK" if found["format"] == "pt" else (tmp_path / name).read_bytes()[:2]
    )
    forced = ckpt("restore", pristine, "--out", tmp_path / "y.dat", "--format", "pt", "--json").json
    assert forced["format"] == "pt"


def test_values_that_a_pt_file_cannot_hold_are_reported(ckpt: Run, pristine: Path, tmp_path: Path) -> None:
    outcome = ckpt("restore", pristine, "--out", tmp_path / "x.pt")
    assert outcome.code == 0
    assert "5 values have another type" in outcome.err  # numpy arrays are tensors in a .pt file


def test_the_mode_is_the_users(ckpt: Run, pristine: Path, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        ckpt("restore", pristine, "--out", tmp_path / "x.safetensors")
    finally:
        os.umask(before)
    assert (tmp_path / "x.safetensors").stat().st_mode & 0o777 == 0o640


def test_explain_shows_the_plan_and_writes_nothing(ckpt: Run, tmp_path: Path) -> None:
    store = tmp_path / "store"
    fill(store, trajectory(3), 1)
    shown = ckpt("restore", store, "--explain")
    assert shown.code == 0
    assert [line.split()[0] for line in shown.out.splitlines()[2:5]] == ["1@1", "2@1", "3@1"]
    assert shown.out.startswith("restoring 3@1 reads ")
    found = json.loads(ckpt("restore", store, "--explain", "--json").out)
    assert [step["base"] for step in found["steps"]] == [None, "1@1", "2@1"]
    assert found["bytes_read"] == sum(step["bytes_read"] for step in found["steps"])
    assert ckpt("restore", store).code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_of_a_long_chain_the_first_and_last_steps_are_explained(ckpt: Run, tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "store")
    weight = torch.nn.Parameter(torch.ones(40))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with store.writer(diffs=ckptstore.DiffOptions(full_every=100, batch=4), poll_seconds=None) as writer:
        for step in range(1, 25):
            weight.grad = torch.full_like(weight, step / 7)
            optimizer.step()
            state = {"model": {"w": weight.detach()}, "optimizer": optimizer.state_dict()}
            writer.save_async(state, step, updates=OptimizerStep(optimizer))
    for step, first in ((21, 21), (22, 10), (24, 10)):
        lines = ckpt("restore", store.url, str(step), "--explain").out.splitlines()
        assert len([line for line in lines if "seg/" in line]) == (21 if step == 21 else 20)
        assert [line.split()[0] for line in lines[2 : 2 + first]] == [f"{one}@1" for one in range(1, first + 1)]
        assert lines[-1].startswith(f"{step}@1 ")
        assert (f"... and {step - 20} more (--all)" in lines) is (step > 21)
    whole = ckpt("restore", store.url, "--explain", "--all").out.splitlines()
    assert len(whole) == 26
    assert ckpt("restore", store.url, "--out", tmp_path / "x.pt", "--all").code == 2


def test_never_into_a_store(ckpt: Run, run: Path) -> None:
    before = (run / "FORMAT").read_bytes()
    outcome = ckpt("restore", run, "--out", run / "FORMAT", "--force")
    assert outcome.code == 2
    assert f"is inside the checkpoint store {run}" in outcome.err
    assert (run / "FORMAT").read_bytes() == before


def test_tied_places_are_in_the_document(ckpt: Run, tmp_path: Path) -> None:
    weight = np.arange(4.0)
    store = ckptstore.open(tmp_path / "tied")
    with store.writer() as writer:
        writer.save({"wte": weight, "head": weight}, 1)
    found = ckpt("restore", store.url, "--out", tmp_path / "tied.safetensors", "--json").json
    assert_documented(found, documented("ckpt restore")[0])
    assert found["tied"] == [{"name": "head", "as": "wte"}]
    assert ckpt("restore", store.url, "--out", tmp_path / "tied.pt", "--json").json["tied"] == []
    (one,) = ckpt("diff", store.url, "1", "1", "--select", "head", "--all", "--json").json["tensors"]
    assert (one["name"], one["status"]) == ("head", "same")


def test_a_pipe_gets_the_file(run: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ckptstore", "restore", str(run), "5", "--out", "-"]
    done = subprocess.run(command, capture_output=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    ckptstore.open(run).export(5, tmp_path / "file.safetensors")
    assert done.stdout == (tmp_path / "file.safetensors").read_bytes()
    assert b"wrote to stdout: checkpoint 5@3" in done.stderr
    assert [path.name for path in tmp_path.iterdir() if path != run] == ["file.safetensors"]


def test_formats_that_cannot_go_to_a_pipe(ckpt: Run, run: Path) -> None:
    assert ckpt("restore", run, "--out", "-", "--json").code == 2
    assert ckpt("restore", run, "--out", "-", "--max-shard-size", "1MB").code == 2
