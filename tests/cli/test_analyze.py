"""`ckpt analyze`."""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import ckptstore
from ckptstore.analysis import Options, analyze, write_csv, write_report
from ckptstore.errors import UsageError
from tests.cli.conftest import Run, assert_documented, documented
from tests.cli.terminal import on_a_terminal

QUICK = ("--codecs", "planes,xor,sub")


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("series")
    rng = np.random.default_rng(0)
    weight = rng.normal(0, 0.02, 60_000).astype(np.float32)
    paths = []
    for step in (10, 20, 30, 40):
        weight = (weight + rng.normal(0, 1e-5, weight.shape)).astype(np.float32)
        moment = (rng.normal(0, 1e-3, weight.shape) ** 2).astype(np.float32)
        state: dict[str, Any] = {"model.weight": weight, "optimizer.state.0.exp_avg_sq": moment, "thing": moment.copy()}
        if step == 40:
            state["late.weight"] = weight.copy()
        paths.append(folder / f"step_{step}.safetensors")
        save_file(state, paths[-1])
    return paths


def test_text(ckpt: Run, series: list[Path]) -> None:
    outcome = ckpt("analyze", *series)
    assert outcome.code == 0
    lines = outcome.out.splitlines()
    assert re.match(r"Deltas with interval T = \d+: \d\.\d\d× smaller, [\d.]+ KiB per checkpoint", lines[0])
    assert "every byte of the compared checkpoints was measured" in lines[2]
    assert lines[3] == "left out: late.weight (in 1 of 4 checkpoints only)"
    assert any(line.split()[:3] == ["second", "moments", "2"] for line in lines)
    for method in ("gzip", "zstd", "planes", "prefix", "xor", "sub", "sub-context", "bound-sub"):
        assert any(line.startswith(method) for line in lines), method
    assert "distinct prefixes by length, at step 40:" in lines
    said = next(line for line in lines if ": prefixes " in line)
    assert re.fullmatch(r"second moments[^:]*: prefixes 1\.\d+×, byte planes 1\.\d+×: planes take [\d.]+% less", said)
    assert any("1 Gbit/s" in line and "100 Gbit/s" in line for line in lines)
    said = lines[lines.index("to copy:") - 1]
    assert re.match(r"What to do: save every 10 steps, as here, with store\.writer\(deltas=DeltaOptions\(", said)
    copied = [line.strip() for line in lines[lines.index("to copy:") + 1 :]]
    assert copied[0] == "from ckptstore import DeltaOptions"
    names: dict[str, object] = {"store": ckptstore.open("memory://analyzed", create=True)}
    exec("\n".join(copied), names)  # noqa: S102  # copied functions still work
    names["writer"].close()  # type: ignore[attr-defined]


def test_json_is_as_documented(ckpt: Run, series: list[Path]) -> None:
    found = ckpt("analyze", *series, *QUICK, "--json").json
    (shown,) = documented("ckpt analyze")
    params = [row.pop("params") for row in found["steps"]]
    shown["steps"][0].pop("params")
    assert_documented(found, shown)
    assert {"word": 4} in params
    assert [one["step"] for one in found["checkpoints"]] == [10, 20, 30, 40]
    assert found["spacing"] == 10
    assert {row["class"] for row in found["classes"]} == {"weight", "second_moment"}
    decided = {row["class"]: row["decided_by"] for row in found["classes"]}
    assert decided["second_moment"] == {"name": 1, "values": 1, "override": 0}
    best = min(found["intervals"], key=lambda row: row["bytes_per_checkpoint"])
    assert found["recommendation"]["bytes_per_checkpoint"] <= best["bytes_per_checkpoint"] * 1.001
    assert found["recommendation"]["restore_times"] <= 4


def test_options_reach_the_engine(ckpt: Run, series: list[Path]) -> None:
    options = ("--gaps", "1,3", "--class", "thing=gradient", "--link", "2Gbit", "--max-restore-cost", "1.01x")
    found = ckpt("analyze", *series, *QUICK, *options, "--steps", "2", "--sample", "50%", "--json").json
    assert found["gaps"] == [1, 3]
    assert {row["class"] for row in found["classes"]} == {"weight", "second_moment", "gradient"}
    assert {row["link_bits_per_second"] for row in found["shipping"]} == {2e9}
    assert found["recommendation"]["interval"] == 0
    assert {row["codec"] for row in found["codecs"]} == {
        "raw",
        *QUICK[1].split(","),
        "bound",
        "bound-xor",
        "bound-sub",
    }
    small = ckpt("analyze", *series, *QUICK, "--compress-fulls", "--json").json["recommendation"]
    assert small["full_bytes"] < found["recommendation"]["full_bytes"]


def test_csv(ckpt: Run, series: list[Path], tmp_path: Path) -> None:
    target = tmp_path / "all.csv"
    outcome = ckpt("analyze", *series, *QUICK, "--csv", target, "--json")
    rows = list(csv.DictReader(target.read_text().splitlines()))
    steps = outcome.json["steps"]
    assert len(rows) == len(steps) > 0
    for row, step in zip(rows, steps, strict=True):
        assert list(row) == list(step)
        assert (row["class"], row["codec"], int(row["step"])) == (step["class"], step["codec"], step["step"])
        assert float(row["ratio"]) == step["ratio"]
    began = ckpt("analyze", tmp_path / "nothing.pt", "--csv", tmp_path / "no" / "x.csv")  # before it reads anything
    assert (began.code, "/no does not exist" in began.err) == (2, True)


def test_report(ckpt: Run, series: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    outcome = ckpt("analyze", *series, *QUICK, "--report", tmp_path / "report")
    assert outcome.code == 0
    assert f"note: wrote {tmp_path / 'report' / 'index.html'}" in outcome.err
    assert (tmp_path / "report" / "index.html").read_text().startswith("<!doctype html>")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    missing = ckpt("analyze", *series, "--report", tmp_path / "other")
    assert missing.code == 9
    assert "pip install 'ckptstore[plot]'" in missing.err


def test_a_store(ckpt: Run, pristine: Path) -> None:
    found = ckpt("analyze", pristine, *QUICK, "--json").json
    assert [one["label"] for one in found["checkpoints"]] == ["1@1", "2@1", "3@2", "4@2", "5@3"]
    found = ckpt("analyze", pristine, "--ref", "3@1", "--ref", "tag:best", *QUICK, "--json").json
    assert [one["label"] for one in found["checkpoints"]] == ["3@1", "5@3"]


def test_errors(ckpt: Run, series: list[Path], tmp_path: Path) -> None:
    alone = ckpt("analyze", series[0])
    assert alone.code == 2
    assert "at least two checkpoints are needed to compare, found only step_10.safetensors" in alone.err
    assert "hint: give several files" in alone.err
    save_file({"other": np.ones(3)}, tmp_path / "step_50.safetensors")
    assert "no tensor in common" in ckpt("analyze", series[0], tmp_path / "step_50.safetensors").err
    assert ckpt("analyze", tmp_path / "nothing.pt", series[0]).code == 2
    assert "is not a share" in ckpt("analyze", *series, "--sample", "0%").err
    assert "--exact measures every byte" in ckpt("analyze", *series, "--exact", "--sample", "1MB").err
    assert "write numbers" in ckpt("analyze", *series, "--gaps", "1,x").err
    assert "GLOB=CLASS" in ckpt("analyze", *series, "--class", "thing").err
    assert "link speed" in ckpt("analyze", *series, "--link", "fast").err
    assert "restore cost" in ckpt("analyze", *series, "--max-restore-cost", "much").err


@pytest.mark.parametrize("option", ["--csv", "--report"])
def test_reports_do_not_go_into_a_store(
    ckpt: Run, run: Path, series: list[Path], option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    with monkeypatch.context() as patched:
        patched.setattr("ckptstore.analysis.analyze", lambda *_a, **_o: pytest.fail("measured, although refused"))
        outcome = ckpt("analyze", *series, option, run / "seg" / "out")
    assert outcome.code == 2
    assert "is inside the checkpoint store" in outcome.err
    found = analyze([str(path) for path in series], Options(methods=("raw", "xor")))
    for write, path in ((write_csv, run / "FORMAT"), (write_report, run / "log")):
        with pytest.raises(UsageError, match="is inside the checkpoint store"):
            write(found, path)


def test_phases_have_names_on_a_terminal(pristine: Path) -> None:
    shown = on_a_terminal("analyze", pristine, "--steps", "2")
    assert "planning" in shown
    assert "/4 checkpoints" in shown
    assert "MiB" in shown
    assert "? bytes" not in shown
