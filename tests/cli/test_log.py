"""`ckpt log`."""

from __future__ import annotations

from pathlib import Path

import ckptstore
from tests.cli.conftest import Run, assert_documented, documented


def columns(text: str) -> list[str]:
    """Graph and REF of each line."""
    return [line.split("full")[0].rstrip() for line in text.splitlines()[1:]]


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
    assert outcome.out.splitlines()[1].endswith("latest tag:best")
    assert "KiB" in outcome.out


def test_limit_and_term(ckpt: Run, pristine: Path) -> None:
    limited = ckpt("log", pristine, "-n", "2")
    assert columns(limited.out) == ["*  5@3", "*  4@2", "... and 5 more"]
    assert columns(ckpt("log", pristine, "--term", "1", "--limit", "3").out) == ["| *  4@1", "| *  3@1", "*    2@1"]
    none = ckpt("log", pristine, "-n", "0")
    assert (none.code, none.out, none.err) == (0, "7 checkpoints\n", "")
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


def test_a_term_without_checkpoints_is_told(ckpt: Run, run: Path) -> None:
    with ckptstore.open(run).writer(parent="3@2"):
        pass
    outcome = ckpt("log", run)
    assert outcome.out.splitlines()[-1].startswith("term 4 was opened ")
    assert outcome.out.splitlines()[-1].endswith("from 3@2; nothing saved in it yet")
    assert "latest" in next(line for line in outcome.out.splitlines() if "3@2 " in line)


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
