"""Ctrl-C while the command is still importing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import builtins, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
real, when = builtins.__import__, sys.argv.pop(1)
def imported(name, *arguments, **named):
    if name == when:
        builtins.__import__ = real
        os.kill(os.getpid(), signal.SIGINT)
    return real(name, *arguments, **named)
builtins.__import__ = imported
from ckptstore.cli.entry import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    "when", ["ckptstore.cli.main", "click", "ckptstore.cli.closed_pipe", "ckptstore.reports.store_stats"]
)
def test_ctrl_c_while_importing(when: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, when, "ls"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 130, done.stderr
    assert done.stdout == ""
    assert done.stderr.strip() in ("", "error: interrupted")


def test_a_script_in_the_background_ignores_it(tmp_path: Path) -> None:
    script = "import signal, ckptstore.cli.entry; print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        env={**os.environ},
    )
    assert done.stdout == "True\n"
