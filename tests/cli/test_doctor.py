"""The output of `ckpt doctor`; its findings are tested in tests/doctor."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Run, assert_documented, documented
from tests.cli.terminal import on_a_terminal


def test_json(ckpt: Run, pristine: Path) -> None:
    outcome = ckpt("doctor", pristine, "--quick", "--json")
    assert outcome.code == 0, outcome.out
    assert_documented(outcome.json, documented("ckpt doctor")[0])
    assert outcome.err == ""


def test_text(ckpt: Run, pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = ckpt("doctor", pristine, "--quick")
    assert outcome.code == 0
    assert "checkpoints, the newest 5@3" in outcome.out
    assert outcome.out.splitlines()[0].startswith("everything works")
    monkeypatch.chdir(tmp_path)
    here = ckpt("doctor", "--quick")
    assert f"medium ({tmp_path})" in here.out
    assert "\nstore\n" not in here.out
    monkeypatch.setenv("CKPT_STORE", str(pristine))
    assert f"medium ({pristine})" in ckpt("doctor", "--quick").out


def test_the_progress_line_is_cleared(pristine: Path) -> None:
    shown = on_a_terminal("doctor", pristine, "--quick")  # with NO_COLOR, which concerns colours
    assert "\r\x1b[Kexamining: software" in shown
    assert "\r\x1b[Keverything works" in shown


def test_a_failed_check_comes_with_a_remedy(ckpt: Run) -> None:
    outcome = ckpt("doctor", "/proc/nowhere", "--quick")
    assert outcome.code == 1
    lines = outcome.out.splitlines()
    (at,) = (number for number, line in enumerate(lines) if "fails" in line)
    assert lines[at + 1].lstrip().startswith("-> give this user the folder")
    assert lines[0] == "does not work: writing"
