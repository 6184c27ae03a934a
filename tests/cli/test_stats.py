"""`ckpt stats`."""

from __future__ import annotations

import shutil
from pathlib import Path

import ckptstore
from tests.cli.conftest import Run, assert_documented, documented


def test_text_json_and_picture(ckpt: Run, run: Path, tmp_path: Path) -> None:
    ckptstore.open(run).keep("last:1", take_over=True)
    found = ckpt("stats", run, "--json").json
    assert_documented(found, documented("ckpt stats")[0])
    store = ckptstore.open(run).stats()
    assert (found["checkpoints"], found["latest"], found["bytes"]) == (7, "5@3", store.nbytes)
    assert [(one["term"], one["checkpoints"]) for one in found["terms"]] == [(1, 4), (2, 2), (3, 1), (4, 0)]
    assert found["rules"] == ["last:1"]
    assert found["prune_frees"] > 0
    text = ckpt("stats", run, "--plot", tmp_path / "x.svg")
    lines = text.out.splitlines()
    assert lines[0].startswith("7 checkpoints, the newest 5@3: ")
    assert "KIND  CHECKPOINTS" in text.out
    assert [line.split()[:2] for line in lines if line.strip()[:1].isdigit()][1:] == [
        ["1", "4"],
        ["2", "2"],
        ["3", "1"],
    ]
    assert "rules: last:1; `ckpt prune` would leave " in text.out
    assert lines[-1] == "`ckpt gc` would free 0 B"
    assert (tmp_path / "x.svg").read_text().startswith("<?xml")
    assert "wrote the plot" in text.err


def test_mistakes(ckpt: Run, run: Path, tmp_path: Path) -> None:
    assert ckpt("stats", run, "--plot", tmp_path / "x.doc").code == 2
    assert ckpt("stats", tmp_path / "nothing").code == 3
    assert ckpt("stats", run, "--plot", tmp_path / "no" / "x.svg").code != 0


def test_a_lost_log_is_damage(ckpt: Run, run: Path) -> None:
    for part in ("log", "fold"):
        shutil.rmtree(run / part, ignore_errors=True)
    outcome = ckpt("stats", run)
    assert (outcome.code, ckpt("verify", run).code) == (4, 4)
    assert outcome.out.startswith("0 checkpoints: 0 B")
    assert "note: there are segments of term 3, but the log ends in term 0" in outcome.err
    assert f"`ckpt repair {run} DST` makes a store of what is intact" in outcome.err
    found = ckpt("stats", run, "--json")
    assert found.code == 4
    assert_documented(found.json, documented("ckpt stats")[0])
    assert "its end is lost" in found.json["damage"][0]
