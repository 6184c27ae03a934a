"""`ckpt diff`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

import ckptstore
from tests.cli.conftest import Run, assert_documented, documented
from tests.cli.terminal import on_a_terminal


def test_text(ckpt: Run, pristine: Path) -> None:
    outcome = ckpt("diff", pristine, "2@1", "4@1")
    assert outcome.code == 0
    lines = outcome.out.splitlines()
    assert lines[0] == "2@1 -> 4@1  tensors: 2 changed, 3 same"
    weight = next(line for line in lines if line.startswith("model.embedding.weight")).split()
    assert weight[1:4] == ["changed", "F32", "100x30"]
    assert weight[-2:] == ["1", "2"]  # doubled: the difference is as large as A; at most 2
    assert "model.frozen" not in outcome.out
    assert "~ step: 2 -> 4" in lines
    assert "~ lr: 0.05 -> 0.025" in lines
    assert any(line.startswith("~ python.1: (") for line in lines)


def test_json(ckpt: Run, pristine: Path) -> None:
    found = ckpt("diff", pristine, "2", "4@1", "--json").json
    assert_documented(found, documented("ckpt diff")[0])
    assert found["counts"] == {"same": 3, "changed": 2, "added": 0, "removed": 0, "replaced": 0}
    assert [tensor["name"] for tensor in found["tensors"]] == ["model.embedding.weight", "odd.half"]
    assert {"path": "step", "status": "changed", "before": 2, "after": 4} in found["state"]


def test_all_sort_and_select(ckpt: Run, pristine: Path) -> None:
    def names(*options: str) -> list[str]:
        found = ckpt("diff", pristine, "2", "4@1", "--json", *options).json
        return [tensor["name"] for tensor in found["tensors"]]

    assert names("--all") == [*["model.embedding.weight", "model.frozen", "odd.half", "odd.empty", "odd.z"]]
    assert names("--all", "--sort", "name") == sorted(names("--all"))
    assert names("--sort", "bits")[0] == "odd.half"
    assert names("--sort", "norm")[0] == "model.embedding.weight"
    assert names("--select", "odd.*") == ["odd.half"]
    assert ckpt("diff", pristine, "2", "5", "--select", "odd.*", "--json").json["state"] == []


def test_the_largest_changes_come_first_counters_and_random_states_last(ckpt: Run, tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "run")
    with store.writer(poll_seconds=None) as writer:
        for step in (1, 2):
            weights = {name: np.full(10, 1 + (step - 1) * change) for name, change in (("a", 0.1), ("b", 0.5))}
            counters = {"step": np.array(float(step)), "rng": np.full(50, step, np.uint8)}
            extra = {"new": np.zeros(3)} if step == 2 else {}
            writer.save({"optimizer": counters, "model": weights, **extra}, step)
    url = store.url
    rows = [line.split()[0] for line in ckpt("diff", url, "1", "2").out.splitlines()[3:]]
    assert rows == ["new", "model.b", "model.a", "optimizer.step", "optimizer.rng"]
    in_order = [one["name"] for one in ckpt("diff", url, "1", "2", "--json").json["tensors"]]
    assert in_order == ["optimizer.step", "optimizer.rng", "model.a", "model.b", "new"]
    assert [line.split()[0] for line in ckpt("diff", url, "1", "2", "--sort", "state").out.splitlines()[3:]] == in_order
    screen = on_a_terminal("diff", url, "1", "2", errors=False).splitlines()
    assert screen[2].split() == ["TENSOR", "DTYPE", "SHAPE", "RELATIVE", "BITS", "MAX"]
    assert screen[3].split()[:4] == ["new", "F64", "3", "added"]
    assert max(map(len, screen)) <= 80


def test_exit_code(ckpt: Run, pristine: Path) -> None:
    assert ckpt("diff", pristine, "2@1", "4@1").code == 0
    assert ckpt("diff", pristine, "2@1", "4@1", "--exit-code").code == 1
    assert ckpt("diff", pristine, "2@1", "4@1", "--exit-code", "--json").code == 1
    assert ckpt("diff", pristine, "5", "latest", "--exit-code").code == 0
    assert ckpt("diff", pristine, "2@1", "4@1", "--exit-code", "--select", "model.frozen").code == 0


def test_added_and_removed(ckpt: Run, pristine: Path) -> None:
    outcome = ckpt("diff", pristine, "1", "2")
    assert "1 removed" in outcome.out
    assert next(line for line in outcome.out.splitlines() if line.startswith("extra")).split()[1:4] == [
        "removed",
        "F64",
        "3",
    ]
    assert ckpt("diff", pristine, "2", "1", "--json").json["counts"]["added"] == 1


def test_a_checkpoint_and_itself(ckpt: Run, pristine: Path) -> None:
    outcome = ckpt("diff", pristine, "5", "latest")
    assert outcome.out == "5@3 -> 5@3  tensors: 5 same\n"
    assert ckpt("diff", pristine, "5", "tag:best", "--json").json["identical"] is True


def test_errors(ckpt: Run, pristine: Path) -> None:
    assert ckpt("diff", pristine, "5").code == 2
    assert ckpt("diff", pristine, "5", "6").code == 3
    assert ckpt("diff", pristine, "5", "4", "--select", "nothing").code == 3


def test_two_stores(ckpt: Run, pristine: Path, tmp_path: Path) -> None:
    ckptstore.open(pristine).copy(tmp_path / "copy", ["4@1"])
    assert ckpt("diff", pristine, "4@1", "latest", "--in", tmp_path / "copy").out == (
        f"{pristine} 4@1 -> {tmp_path / 'copy'} 4@1  tensors: 5 same\n"
    )
    done = ckpt("diff", pristine, "5", "latest", "--in", tmp_path / "copy", "--json").json
    assert done["identical"] is False
    assert [one["name"] for one in done["tensors"]] == ["model.embedding.weight", "odd.half"]
    assert {"path": "step", "status": "changed", "before": 5, "after": 4} in done["state"]
    assert ckpt("diff", pristine, "5", "5", "--in", tmp_path / "copy").code == 3


def test_two_runs_say_what_explains_them_before_the_tensors(ckpt: Run, tmp_path: Path) -> None:
    for name, lr in (("a", 0.1), ("b", 0.2)):
        with ckptstore.open(tmp_path / name).writer(poll_seconds=None) as writer:
            metadata = {"metrics": {"loss": lr * 2}, "lr": lr, "same": 1, "note": name}
            writer.save({"weight": np.full(3, lr), "lr": lr}, 60, metadata=metadata)
    a, b = tmp_path / "a", tmp_path / "b"
    lines = ckpt("diff", a, "60", "60", "--in", b).out.splitlines()
    assert lines[:6] == [
        f"{a} 60@1 -> {b} 60@1  tensors: 1 changed",
        "",
        "lr 0.1 -> 0.2",
        "loss 0.2 -> 0.4",
        "",
        "~ lr: 0.1 -> 0.2",
    ]
    assert lines[8].startswith("weight")


def test_two_stores_as_arguments(ckpt: Run, pristine: Path, tmp_path: Path) -> None:
    assert ckpt("copy", pristine, tmp_path / "b").code == 0
    newest = ckpt("diff", pristine, tmp_path / "b").out
    assert newest == f"{pristine} 5@3 -> {tmp_path / 'b'} 5@3  tensors: 5 same\n"
    named = ckpt("diff", pristine, "5", tmp_path / "b", "latest").out
    assert named == newest == ckpt("diff", pristine, "5", "5", "--in", tmp_path / "b").out


def test_other_arguments_than_two_checkpoints_get_the_usage() -> None:
    for words in (["latest", "runs/b"], ["60", "runs/b", "61", "62"], ["runs/b", "60", "61"]):
        code, said = main_says("diff", "runs/a", *words)
        assert (code, said[:5]) == (2, "hint:") or words == ["latest", "runs/b"]
    assert main_says("diff", "runs/a", "60", "61", "runs/b") == (2, "hint: two runs: ckpt diff runs/a REF runs/b REF")
    assert main_says("diff", "runs/a", "60") == (2, "hint: two runs: ckpt diff runs/a REF STORE REF")


def main_says(*words: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-m", "ckptstore", *words], capture_output=True, text=True, check=False)
    return done.returncode, done.stderr.splitlines()[-1]
