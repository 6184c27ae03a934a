"""`ckpt log`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore.log import checkpoint_info
from tests.cli.conftest import Run, assert_documented, documented
from tests.cli.terminal import on_a_terminal
from tests.write.trainer import Trainer


def columns(text: str) -> list[str]:
    """Graph and REF of each line."""
    return [line.split("full")[0].rstrip() for line in text.splitlines()[2:]]


def test_newest_first_with_the_fork_as_a_graph(ckpt: Run, pristine: Path) -> None:
    outcome = ckpt("log", pristine)
    assert outcome.code == 0
    assert outcome.err == ""
    assert columns(outcome.out) == [
        "*    5@3",
        "*    4@2",
        "*    3@2",
        "| *  4@1",
        "| *  3@1",
        "|/",
        "*    2@1",
        "*    1@1",
    ]
    assert outcome.out.splitlines()[2].endswith("latest tag:best")
    assert re.fullmatch(r"7 checkpoints, [\d.]+ KiB, 3 terms, steps 1 to 5, latest 5@3", outcome.out.splitlines()[0])


def test_limit_and_term(ckpt: Run, pristine: Path) -> None:
    limited = ckpt("log", pristine, "-n", "2")
    assert columns(limited.out) == ["*  5@3", "*  4@2", "... and 5 more"]
    assert columns(ckpt("log", pristine, "--term", "1", "--limit", "3").out) == ["| *  4@1", "| *  3@1", "*    2@1"]
    none = ckpt("log", pristine, "-n", "0")
    assert (none.code, len(none.out.splitlines()), none.err) == (0, 1, "")
    nothing = ckpt("log", pristine, "--term", "9")
    assert (nothing.code, nothing.out, nothing.err) == (0, "", "note: no checkpoint in term 9\n")


def test_json(ckpt: Run, pristine: Path) -> None:
    outcome = ckpt("log", pristine, "--json")
    found = outcome.json
    assert_documented(found, documented("ckpt log")[0])
    assert [entry["ref"] for entry in found["checkpoints"]] == ["5@3", "4@2", "3@2", "4@1", "3@1", "2@1", "1@1"]
    assert [entry["parent"] for entry in found["checkpoints"]] == ["4@2", "3@2", "2@1", "3@1", "2@1", "1@1", None]
    assert found["latest"] == "5@3"
    assert found["checkpoints"][0]["tags"] == ["best"]
    assert found["terms"][1] | {"time": 0} == {"term": 2, "parent": "2@1", "time": 0, "checkpoints": 2}
    assert found["damage"] == []


def test_an_empty_store(ckpt: Run, tmp_path: Path) -> None:
    ckptstore.open(tmp_path / "new", create=True)
    outcome = ckpt("log", tmp_path / "new")
    assert (outcome.code, outcome.out, outcome.err) == (0, "", "note: no checkpoint yet\n")
    assert ckpt("log", tmp_path / "new", "--json").json["checkpoints"] == []


def test_a_term_without_checkpoints_is_shown(ckpt: Run, run: Path) -> None:
    with ckptstore.open(run).writer(parent="3@2"):
        pass
    outcome = ckpt("log", run)
    assert outcome.out.splitlines()[-1].startswith("term 4 was opened ")
    assert outcome.out.splitlines()[-1].endswith("from 3@2; nothing saved in it yet")
    assert "latest" in next(line for line in outcome.out.splitlines()[1:] if "3@2 " in line)


def test_no_store(ckpt: Run, tmp_path: Path) -> None:
    outcome = ckpt("log", tmp_path / "nothing")
    assert outcome.code == 3
    assert not (tmp_path / "nothing").exists()
    assert ckpt("log", tmp_path).code == 3


def test_damage_is_noted_and_the_rest_is_listed(ckpt: Run, run: Path) -> None:
    slots = sorted((run / "log").iterdir())
    slots[3].write_bytes(b"garbage")  # OPEN, step 1, step 2, step 3 of term 1
    outcome = ckpt("log", run)
    assert outcome.code == 0
    assert "note: log slot 3 is damaged" in outcome.err
    assert "3@1" not in outcome.out
    assert "4@1" in outcome.out
    assert ckpt("log", run, "--json").json["damage"] == ["log slot 3 is damaged or missing"]
    slots[-2].write_bytes(b"garbage")  # the last save, before the tag: latest is unknown
    worse = ckpt("log", run, "--json").json
    assert worse["latest"] is None
    assert any("newest checkpoint is not known" in sentence for sentence in worse["damage"])


@pytest.mark.parametrize("term", [None, 1, 3])
def test_the_newest_ones_are_drawn_as_in_the_whole_graph(ckpt: Run, tmp_path: Path, term: int | None) -> None:
    store = ckptstore.open(tmp_path / "forks", create=True)
    for parent, steps in (("latest", (1, 2, 3)), ("2@1", (3, 9)), ("1@1", (5,)), ("9@2", (10,)), (None, (1,))):
        with store.writer(parent=parent, poll_seconds=None) as writer:
            for step in steps:
                writer.save({"step": step}, step=step)
    only = [] if term is None else ["--term", str(term)]
    whole = [line for line in ckpt("log", tmp_path / "forks", *only).out.splitlines()[1:] if "@" in line]
    assert len(whole) == {None: 8, 1: 3, 3: 1}[term]
    columns = [line.split("@")[0] for line in whole]
    for limit in range(1, len(whole) + 1):
        shown = [
            line
            for line in ckpt("log", tmp_path / "forks", "-n", str(limit), *only).out.splitlines()[1:]
            if "@" in line
        ]
        assert [line.split("@")[0].split() for line in shown] == [line.split() for line in columns[:limit]]


def test_only_what_is_shown_is_described(ckpt: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ckptstore.open(tmp_path / "many", create=True)
    with store.writer(poll_seconds=None) as writer:
        for step in range(1, 31):
            writer.save({"step": step}, step=step)
    described: list[int] = []
    one = checkpoint_info.described

    def counted(*args: Any) -> ckptstore.CheckpointInfo:
        described.append(args[1].step)
        return one(*args)

    monkeypatch.setattr(checkpoint_info, "described", counted)
    assert "... and 27 more" in ckpt("log", tmp_path / "many", "-n", 3).out
    assert described == [30, 29, 28]


def test_metadata_is_shown(ckpt: Run, tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "said")
    with store.writer() as writer:
        writer.save({"lr": 0.5}, 1, metadata={"loss": float("nan"), "run": "a"})
    shown = {"loss": None, "run": "a"}  # JSON has no NaN
    assert ckpt("log", store.url, "--json").json["checkpoints"][0]["metadata"] == shown
    assert ckpt("inspect", store.url, "--json").json["metadata"] == shown
    assert "\nloss: nan\nrun: a\n" in ckpt("inspect", store.url).out


def test_the_best_first(ckpt: Run, tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "said")
    said = {
        1: {"loss": 2.5, "run": "a b"},
        2: {"metrics": {"loss": 1.25}},
        3: {},
        4: {"loss": float("nan")},
        5: {"loss": 7},
    }
    with store.writer(poll_seconds=None) as writer:
        for step, metadata in said.items():
            writer.save({"step": step, "x": np.ones(3)}, step, metadata=metadata)
    found = [entry["step"] for entry in ckpt("log", store.url, "--sort", "loss", "--json").json["checkpoints"]]
    assert found == [2, 1, 5, 4, 3]
    same = ckpt("log", store.url, "--sort", "metrics.loss:min", "--json").json["checkpoints"]
    assert [entry["step"] for entry in same] == found
    misspelt = ckpt("log", store.url, "--sort", "lss")
    assert (misspelt.code, misspelt.out) == (3, "")
    assert misspelt.err == "error: no checkpoint has the number 'lss'; there are: loss\n"
    inspected = ckpt("inspect", store.url, 2).out
    assert "\nloss 1.25\n" in inspected
    assert re.search(r"stored in .* \([\d.]+x larger\)\n", inspected)
    highest = ckpt("log", store.url, "--sort", "loss:max", "-n", 2)
    lines = highest.out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["CHECKPOINT", "5@1", "1@1", "..."]
    assert "METADATA" in lines[1]
    assert lines[2].split()[-3:] == ["latest", "loss", "7"]
    assert lines[3].endswith("loss 2.5, run a b")
    drawn = ckpt("log", store.url).out.splitlines()
    assert drawn[5].startswith("*  2@1")
    assert "loss 1.25" in drawn[5]
    assert [info.step for info in store.lineage(3, by="loss").checkpoints] == [2, 1, 5]
    with pytest.raises(ckptstore.NotFoundError, match="no checkpoint has the number 'nothing'; there are: loss"):
        store.lineage(by="nothing")


@pytest.fixture
def stepped(tmp_path: Path) -> Path:
    """Term 1: a full and step diffs 2 to 20, of which 9 is tagged. Term 2 continues from 12@1: 13 to 16."""
    trainer, store = Trainer(sizes={"w": (40,)}), ckptstore.open(tmp_path / "stepped", create=True)
    for parent, steps in ((None, range(1, 21)), ("12@1", range(13, 17))):
        with store.writer(parent, diffs=ckptstore.DiffOptions(batch=5), poll_seconds=None) as writer:
            for step in steps:
                trainer.step = step - 1
                trainer.train()
                writer.save_async(trainer.state(), step, updates=trainer.updates(), metadata={"loss": 1 / step})
            if parent is None:
                writer.tag("best", 9)
                writer.tag("a-name-that-is-as-long-as-half-a-screen", 9)
    return tmp_path / "stepped"


def test_a_terminal_gets_step_diffs_in_one_line(ckpt: Run, stepped: Path) -> None:
    screen = on_a_terminal("log", stepped).splitlines()
    assert screen[0].startswith("24 checkpoints, ")
    assert screen[0].endswith(", 2 terms, steps 1 to 20, latest 16@2")
    assert all(len(line) <= 80 for line in screen)
    assert any(line.startswith("| *  13..20@1    8 step diffs") for line in screen)
    assert any(line.split()[1:5] == ["2..8@1", "7", "step", "diffs"] for line in screen)
    assert any(line.startswith("*    10@1        step diff") for line in screen)  # two in a row are two lines
    assert [line for line in screen if "tag:" in line] == ["|  tag:a-name-that-is-as-long-as-half-a-screen tag:best"]
    wide = on_a_terminal("log", stepped, columns=140).splitlines()
    assert next(line for line in wide if "tag:best" in line).split()[1] == "9@1"
    for listed in (on_a_terminal("log", stepped, "--all"), ckpt("log", stepped).out):
        assert sum("@" in line for line in listed.splitlines()[2:]) >= 24
        assert "..2" not in listed


def test_the_pager_is_for_what_does_not_fit(stepped: Path) -> None:
    pager = "sed 1iPAGED"
    assert "PAGED" in on_a_terminal("log", stepped, lines=6, PAGER=pager)
    assert "PAGED" not in on_a_terminal("log", stepped, lines=60, PAGER=pager)
    assert "PAGED" not in on_a_terminal("log", stepped, "--no-pager", lines=6, PAGER=pager)


def test_terms_and_tags_are_coloured(stepped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b[" not in on_a_terminal("log", stepped, lines=60)
    monkeypatch.delenv("NO_COLOR", raising=False)
    lines = on_a_terminal("log", stepped, lines=60, NO_COLOR=None).splitlines()
    assert re.search("\x1b\\[3[0-9]m16@2\x1b", next(line for line in lines[1:] if "16@2" in line))
    assert any("\x1b[33m" in line and "tag:best" in line for line in lines)


def test_a_terminal_shows_the_writer(run: Path) -> None:
    store = ckptstore.open(run)
    with store.writer(poll_seconds=None):
        said = on_a_terminal("log", run, columns=120).splitlines()[1]
        assert said.startswith(f"writer: process {os.getpid()} is writing; last sign of it ")
        assert said in on_a_terminal("inspect", run, columns=120) or "last sign of it" in said
    store.tag("best", 4, take_over=True)
    lines = on_a_terminal("log", run, columns=120).splitlines()
    assert lines[1].startswith("no writer: taken over ")
    assert lines[1].endswith(" ago to tag; the run was closed")
    assert lines[-1].endswith(" from 5@3 by a take-over, to tag")
    script = "import os, sys, ckptstore as c\nc.open(sys.argv[1]).writer().save({'x': 1}, 9)\nos.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", script, str(run)], check=False).returncode == -9
    assert " is gone without closing (killed?); last sign of it " in on_a_terminal("log", run, columns=120)
    store.tag("other", 4, take_over=True)
    assert on_a_terminal("log", run, columns=120).splitlines()[1].endswith("; the run had not closed (killed?)")
