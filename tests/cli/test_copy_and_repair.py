"""`ckpt copy` and `ckpt repair`."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import ckptstore
from tests.cli.conftest import Run, assert_documented, documented
from tests.maintenance.test_pruning import CHAIN


def test_copy(ckpt: Run, run: Path, tmp_path: Path) -> None:
    done = ckpt("copy", run, tmp_path / "copy", "tag:best", "3@1", "--json").json
    assert_documented(done, documented("ckpt copy")[0])
    assert (done["checkpoints"], done["segments"], done["went_on"]) == (["3@1", "5@3"], 2, False)
    assert ckpt("verify", tmp_path / "copy", "--deep").code == 0
    text = ckpt("copy", run, tmp_path / "all")
    assert text.out.splitlines()[0] == "copied 7 checkpoints: 1..4@1, 3@2, 4@2, 5@3"
    assert text.out.splitlines()[1].startswith("7 segments, ")
    again = ckpt("copy", run, tmp_path / "all").out.splitlines()
    assert again[1:] == ["0 segments, 0 B written and verified", "7 segments were there already"]
    full = ckpt("copy", run, tmp_path / "full", 4, "--as", "full")
    assert full.code == 0
    assert ckptstore.open(tmp_path / "full").checkpoint("latest").ref == "4@2"


def test_copy_mistakes(ckpt: Run, run: Path, tmp_path: Path) -> None:
    assert ckpt("copy", run, tmp_path / "copy", "99").code == 3
    assert ckpt("copy", tmp_path / "nothing", tmp_path / "copy").code == 3
    assert ckpt("copy", run, run / "inside").code == 2
    assert ckpt("copy", run).code == 2


def test_repair(ckpt: Run, run: Path, tmp_path: Path) -> None:
    store = ckptstore.open(run)
    key = store.describe("5@3")[0][0].key
    (run / key).unlink()
    (run / "FORMAT").unlink()
    done = ckpt("repair", run, tmp_path / "new", "--json")
    assert done.code == 4
    assert_documented(done.json, documented("ckpt repair")[0])
    assert [one["ref"] for one in done.json["lost"]] == ["5@3"]
    assert done.json["latest"] == "4@2"
    assert ckpt("verify", tmp_path / "new", "--deep").code == 0
    text = ckpt("repair", run, tmp_path / "text")
    assert text.code == 4
    assert text.out.splitlines()[-4:-1] == [
        f"lost     5@3: {key}: the segment is committed but missing",
        "lost     tag best, which named 5@3",
        "kept     6 checkpoints: 1..4@1, 3@2, 4@2",
    ]


def test_a_segment_of_unknown_origin_is_a_loss(ckpt: Run, run: Path, tmp_path: Path) -> None:
    (run / ckptstore.open(run).describe("5@3")[0][0].key).write_bytes(b"cut")
    shutil.rmtree(run / "log")
    shutil.rmtree(run / "fold", ignore_errors=True)
    done = ckpt("repair", run, tmp_path / "new", "--json")
    assert (done.code, done.json["lost"]) == (4, [])


def test_repair_of_an_intact_store(ckpt: Run, run: Path, tmp_path: Path) -> None:
    outcome = ckpt("repair", run, tmp_path / "new")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.splitlines()[0].startswith("kept     7 checkpoints")
    assert ckpt("repair", run, tmp_path / "new").code == 2
    assert ckpt("repair", tmp_path / "nothing", tmp_path / "other").code == 3


def test_losses_of_one_cause_are_one_line(ckpt: Run, tmp_path: Path) -> None:
    with ckptstore.open(tmp_path / "chain") as store, store.writer(deltas=CHAIN, poll_seconds=None) as writer:
        weights = np.random.default_rng(1).integers(0, 2**31, 20000).astype(np.int32)
        for step in range(1, 8):
            weights[:20] += 1  # none can be restored without the one before
            writer.save({"weights": weights.copy()}, step)
        key = next(iter(store.checkpoint("2@1").segments))
    next((tmp_path / "chain").rglob(f"{key}.safetensors")).unlink()
    done = ckpt("repair", tmp_path / "chain", tmp_path / "new")
    lost = [line for line in done.out.splitlines() if line.startswith("lost")]
    assert len(lost) == 2, done.out
    assert lost[0].startswith("lost     2@1: seg/")
    assert lost[1] == "lost     3..7@1: they build on 2@1"


def test_lost_checkpoints_are_grouped_by_what_they_build_on_in_whatever_words(
    monkeypatch: pytest.MonkeyPatch, ckpt: Run, run: Path, tmp_path: Path
) -> None:
    done = ckptstore.repair(run, tmp_path / "new")
    lost = {"2@1": "a", "3@1": "b", "4@1": "c", "6@1": "d", "9@1": "e"}
    done = replace(done, lost=lost, lost_bases={"3@1": "2@1", "4@1": "3@1", "9@1": "6@1"})
    monkeypatch.setattr(ckptstore, "repair", lambda *_, **__: done)
    told = ckpt("repair", run, tmp_path / "other").out.splitlines()
    assert [line for line in told if line.startswith("lost")] == [
        "lost     2@1: a",
        "lost     3@1, 4@1: they build on 2@1",
        "lost     6@1: d",
        "lost     9@1: what it builds on is lost: 6@1",
    ]
