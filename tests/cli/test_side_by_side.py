"""`ckpt log A B`: two runs, step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore.reports.run_comparison import side_by_side
from tests.cli.conftest import Run, assert_documented, documented
from tests.cli.terminal import on_a_terminal


def saved(store: ckptstore.Store, steps: range, factor: float, **options: Any) -> None:
    with store.writer(poll_seconds=None, **options) as writer:
        for step in steps:
            state = {"weight": np.full(100, factor * step, "f4")}
            writer.save(state, step, metadata={"metrics": {"loss": factor / step}} if step != 4 else {})


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """a: steps 1 to 6, of which 5 and 6 were rolled back and taken again. b: a's first three, then others."""
    a = ckptstore.open(tmp_path / "a")
    saved(a, range(1, 7), 1.0)
    a.copy(tmp_path / "b", ["1@1", "2@1", "3@1"])
    saved(a, range(5, 9), 2.0, parent=4)
    saved(ckptstore.open(tmp_path / "b"), range(4, 7), 0.5)
    return tmp_path / "a", tmp_path / "b"


def test_which_is_lower_and_where_they_part(ckpt: Run, runs: tuple[Path, Path]) -> None:
    a, b = runs
    lines = ckpt("log", a, b).out.splitlines()
    assert lines[0].startswith(f"A  {a}: 10 checkpoints, ")
    assert lines[1].endswith(", steps 1 to 6, latest 6@2")
    assert lines[2:5] == [
        "loss at step 6: A 0.3333, B 0.08333 (B is lower by 0.25)",
        "lowest loss: A 0.25 at 8@2, B 0.08333 at 6@2",
        "states: the same up to step 3, not at step 4",
    ]
    rows = {int(words[0]): words for line in lines[7:] if (words := line.split())}
    assert list(rows) == [8, 7, 6, 5, 4, 3, 2, 1]
    assert rows[8][1:4] == ["0.25", "-", "-"]
    assert rows[8][-2:] == ["only", "one"]
    assert rows[4][1:4] == ["-", "-", "-"]
    assert (rows[6][3], rows[6][-1]) == ("-0.25", "differ")
    assert rows[5][1] == "0.4"  # of the continued line, not of the abandoned branch
    assert rows[3][-1] == "same"
    assert ckpt("log", a, b, "-n", 2).out.splitlines()[-1] == "... 2 of 8 steps; --all shows every one"


def test_as_json(ckpt: Run, runs: tuple[Path, Path]) -> None:
    a, b = runs
    found = ckpt("log", a, b, "--json").json
    assert_documented(found, documented("ckpt log")[1])
    assert (found["common"], found["same_until"], found["differ_from"]) == (6, 3, 4)
    assert [one["step"] for one in found["steps"]] == list(range(1, 9))
    assert found["steps"][7]["b"] is None
    assert found["steps"][7]["same"] is None
    assert found["steps"][5]["a"]["ref"] == "6@2"
    assert found["steps"][3]["a"]["value"] is None
    assert len(ckpt("log", a, b, "--json", "-n", 3).json["steps"]) == 3


def test_the_same_run_and_others(ckpt: Run, runs: tuple[Path, Path], tmp_path: Path) -> None:
    a, b = runs
    assert "states: the same at 8 steps that both have" in ckpt("log", a, a).out
    assert "no accuracy in either; --metric takes: loss" in ckpt("log", a, b, "--metric", "accuracy").out
    ckptstore.open(tmp_path / "empty", create=True)
    empty = ckpt("log", a, tmp_path / "empty")
    assert "states: no step is in both" in empty.out
    assert empty.code == 0
    both = ckptstore.open(tmp_path / "empty")
    assert side_by_side(both.journal, both.journal).last_common is None


def test_invalid_arguments(ckpt: Run, runs: tuple[Path, Path]) -> None:
    a, b = runs
    assert ckpt("log", a, b, "--term", 1).code == 2
    assert ckpt("log", a, "--metric", "loss").code == 2
    assert ckpt("log", a, b.parent / "none").code == 3
    mistaken = ckpt("log", a, "3")
    assert mistaken.code == 2
    assert mistaken.err.splitlines()[-1] == f"hint: `ckpt inspect {a} 3` shows that checkpoint"


def test_a_terminal_shows_a_dozen(tmp_path: Path) -> None:
    for name in ("a", "b"):
        saved(ckptstore.open(tmp_path / name), range(10, 60), 1.0)
    text = on_a_terminal("log", tmp_path / "a", tmp_path / "b")
    assert "12 of 50 steps" in text
    assert len([line for line in text.splitlines() if line.endswith("same")]) == 12
    text = on_a_terminal("log", tmp_path / "a", tmp_path / "b", "--all")
    assert len([line for line in text.splitlines() if line.endswith("same")]) == 50
