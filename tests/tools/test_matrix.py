"""The matrix of Pythons and torches: the planned installations, and that a skipped pair is not a success."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tools import matrix


def test_versions_are_those_of_pyproject() -> None:
    assert matrix.pythons() == ["3.11", "3.12", "3.13"]
    assert matrix.torches() == {"oldest": "torch==2.6.*", "newest": "torch>=2.6"}


def test_an_interpreter_is_the_version_that_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert matrix.interpreter(mine) == sys.executable
    # A shim of pyenv: it exists, and runs nothing.
    for name, said in (("python3.98", "exit 127"), ("python3.97", "echo 3.11")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{said}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert matrix.interpreter("3.98") is None
    assert matrix.interpreter("3.97") is None
    (tmp_path / "python3.98").write_text("#!/bin/sh\necho 3.98\n")
    assert matrix.interpreter("3.98") == str(tmp_path / "python3.98")


def test_dependencies_of_torch_keep_their_versions() -> None:
    freeze = (
        "filelock==4.3.1\nsympy==1.13.1\ntorch==2.6.0\nnvidia_nccl_cu12 @ file:///x\n-e git+https://x\n# a remark\n"
    )
    brought = matrix.pinned(freeze)
    assert brought == ["filelock", "sympy", "torch", "nvidia_nccl_cu12"]
    constraints = "# versions\nnumpy==2.4.6\nSymPy==1.14.0\ntorch==2.13.0\ntorchdata==0.11.0\nnvidia-nccl-cu12==1\n"
    assert matrix.without(constraints, brought) == "# versions\nnumpy==2.4.6\ntorchdata==0.11.0\n"


def test_a_pair_that_is_not_run_fails() -> None:
    told = CliRunner().invoke(matrix.main, ["--python", "3.99"])
    assert told.exit_code == 1
    last = told.output.splitlines()[-2:]
    assert [line.partition(":")[0] for line in last] == [
        "FAILED  Python 3.99, torch oldest",
        "FAILED  Python 3.99, torch newest",
    ]
    assert "there is no Python 3.99 here" in told.output


def test_the_selected_tests_exist() -> None:
    assert all((matrix.ROOT / path).exists() for path in matrix.SELECTION)
