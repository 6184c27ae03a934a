"""`ckpt completion`, and its completions."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from ckptstore.cli.main import COMMANDS, cli
from tests.cli.conftest import Run, assert_documented, documented
from tests.forms import LONG


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
    assert completions("merge", pristine, incomplete="4") == ["4@2..", "4@1.."]
    assert completions("merge", pristine, incomplete="1@1..t") == ["1@1..tag:best"]
    assert completions("merge", pristine, incomplete="1@1..l") == ["1@1..latest"]


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


# -- in real shells


def typed(shell: list[str], setting_up: str, keys: str, folder: Path) -> str:
    """The command line of a real shell on its own terminal, after `keys` were typed."""
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "TERM": "dumb", "HOME": str(folder)}
    main, other = pty.openpty()
    # The first process that opens a terminal in a new session is controlled by it, which fish requires.
    opened = ["sh", "-c", 'exec "$@" <>"$0" >&0 2>&0', os.ttyname(other), *shell]
    process = subprocess.Popen(opened, cwd=folder, env=environment, start_new_session=True)
    seen = b""

    def until(sign: bytes) -> None:
        nonlocal seen
        end = time.monotonic() + 60
        while sign not in seen:
            assert time.monotonic() < end, seen
            if select.select([main], [], [], 1)[0]:
                seen += os.read(main, 4096)

    try:
        os.write(main, f"{setting_up}\recho rea''dy\r".encode())
        until(b"\nready")
        # Then: a quote; to the beginning, `echo "<`. So the shell prints its line. (Moving to the end first would make
        # zsh remove the space.)
        os.write(main, keys.encode() + b'>"\x01echo "<\r')
        until(b"\n<")
        until(b">\r\n")
    finally:
        process.kill()
        process.wait()
        os.close(other)
        os.close(main)
    (line,) = re.findall(r"\n<(.*?)>\r\n", seen.decode())
    return str(line)


BASH = ["bash", "--norc", "--noprofile", "-i"]
QUIET = "PS1=; bind 'set enable-bracketed-paste off'; bind 'set bell-style none'; stty cols 500"


FOLDER = "ckpt inspect ru\tg\t"
LINES = [
    ("ckpt ins\t", "ckpt inspect "),
    (FOLDER, "ckpt inspect runs/gpt "),
    ("ckpt inspect runs/gpt tag:b\t", "ckpt inspect runs/gpt tag:best "),
    ("ckpt inspect runs/gpt tag:\t", "ckpt inspect runs/gpt tag:best "),
    ("ckpt inspect runs/gpt ta\t", "ckpt inspect runs/gpt tag:best "),
    ("ckpt restore runs/gpt 5@\t", "ckpt restore runs/gpt 5@3 "),
    ("ckpt restore runs/gpt 5@3\t", "ckpt restore runs/gpt 5@3 "),
    ("ckpt merge runs/gpt 1@1..5@\t", "ckpt merge runs/gpt 1@1..5@3 "),
    ("ckpt diff runs/gpt 1@1 tag:\t", "ckpt diff runs/gpt 1@1 tag:best "),
    ("ckpt merge runs/gpt 5\t", "ckpt merge runs/gpt 5@3.."),
    ("ckpt merge runs/gpt 1@1..tag:b\t", "ckpt merge runs/gpt 1@1..tag:best "),
    ("ckpt tag runs/gpt b\t", "ckpt tag runs/gpt best "),
    ("ckpt inspect runs/gpt --tensor=odd.h\t", "ckpt inspect runs/gpt --tensor=odd.half "),
    ("ckpt tune interval runs/gpt --like=5@\t", "ckpt tune interval runs/gpt --like=5@3 "),
]
"""Keys -> the resulting command line."""


@pytest.mark.slow
@pytest.mark.parametrize(("keys", "line"), LINES)
def test_in_bash(pristine: Path, tmp_path: Path, keys: str, line: str) -> None:
    (tmp_path / "runs/other").mkdir(parents=True)
    (tmp_path / "runs/gpt").symlink_to(pristine)
    assert typed(BASH, f'{QUIET}; eval "$(ckpt completion bash)"', keys, tmp_path) == line


ZSH = "PS1=; autoload -U compinit; compinit -u; stty cols 500; source <(ckpt completion zsh)"
FISH = "function fish_prompt; end; stty cols 500; ckpt completion fish | source"
OTHERS = {"zsh": (["zsh", "-f", "-i"], ZSH), "fish": (["fish", "--no-config", "-i"], FISH)}


@pytest.mark.slow
@pytest.mark.parametrize("shell", list(OTHERS))
@pytest.mark.parametrize(("keys", "line"), LINES if LONG else LINES[2:14:5])
def test_in_other_shells(pristine: Path, tmp_path: Path, shell: str, keys: str, line: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "runs/other").mkdir(parents=True)
    (tmp_path / "runs/gpt").symlink_to(pristine)
    if keys == FOLDER:
        line = "ckpt inspect runs/gpt/"  # these have their own rules for folders
    assert typed(*OTHERS[shell], keys, tmp_path) == line
