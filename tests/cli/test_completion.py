"""`ckpt completion`, and what it completes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from ckptstore.cli.main import COMMANDS, cli
from tests.cli.conftest import Run, assert_documented, documented


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts(ckpt: Run, shell: str) -> None:
    outcome = ckpt("completion", shell)
    assert outcome.code == 0
    assert f"_CKPT_COMPLETE={shell}_complete" in outcome.out
    found = ckpt("completion", shell, "--json").json
    assert_documented(found, documented("ckpt completion")[0])
    assert found["script"] == outcome.out[:-1]
    if shutil.which(shell):
        subprocess.run([shell, "-n", "-c", outcome.out], check=True)  # it parses


def test_an_unknown_shell(ckpt: Run) -> None:
    assert ckpt("completion", "tcsh").code == 2


def completions(*words: object, incomplete: str = "") -> list[str]:
    completer = ShellComplete(cli, {}, "ckpt", "_CKPT_COMPLETE")
    return [item.value for item in completer.get_completions([str(word) for word in words], incomplete)]


def test_commands_and_options() -> None:
    assert completions() == list(COMMANDS)
    assert completions(incomplete="in") == ["inspect"]
    assert "--json" in completions("log", "x", incomplete="--")
    assert completions("tune") == ["interval", "wasted-time"]
    assert "--iteration-time" in completions("tune", "interval", "x", incomplete="--i")


def test_refs_and_tensors_come_from_the_store(pristine: Path) -> None:
    assert completions("inspect", pristine) == ["latest", "tag:best", "5@3", "4@2", "3@2", "4@1", "3@1", "2@1", "1@1"]
    assert completions("tag", pristine, incomplete="b") == ["best"]
    assert completions("tag", pristine, "best", incomplete="5") == ["5@3"]
    assert completions("retire", pristine, "1@1", incomplete="5") == ["5@3"]
    assert completions("restore", pristine, incomplete="4") == ["4@2", "4@1"]
    assert completions("diff", pristine, "1", incomplete="5") == ["5@3"]
    assert completions("tune", "interval", pristine, "--like", incomplete="5") == ["5@3"]
    assert completions("inspect", pristine, "--tensor", incomplete="odd") == ["odd.half", "odd.empty", "odd.z"]
    assert completions("inspect", pristine, "1@1", "--tensor", incomplete="ex") == ["extra"]


def test_a_broken_store_completes_nothing(tmp_path: Path) -> None:
    assert completions("inspect", tmp_path / "nothing") == []
    assert completions("inspect", tmp_path, "--tensor") == []


def test_the_command_answers_the_shell(pristine: Path) -> None:
    environment = os.environ | {
        "_CKPT_COMPLETE": "bash_complete",
        "COMP_WORDS": f"ckpt restore {pristine} 3",
        "COMP_CWORD": "3",
    }
    done = subprocess.run(
        [sys.executable, "-c", "from ckptstore.cli.main import main; main()"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["plain,3@2", "plain,3@1"]
