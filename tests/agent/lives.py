"""Trainers and agents as processes with an end, for the tests of this room."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tests import warmth
from tools.warm import Script

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).resolve().parents[2]

BEGIN = """
import os, signal, sys, time
import numpy as np
import ckptstore
import ckptstore.agent
from ckptstore.formats.states.state import FlatState
from tests.agent.lives import advance, begun, truth

url = sys.argv[1]
kill = lambda: os.kill(os.getpid(), signal.SIGKILL)
"""


def begun() -> dict[str, Any]:
    """The state of step 0."""
    chance = np.random.default_rng(7)
    return {
        "weights": chance.normal(size=(300, 700)).astype("<f4"),
        "moments": {"m": np.zeros((300, 700), "<f4"), "count": np.zeros((), "<i8")},
        "small": np.arange(5, dtype="<i2"),
        "empty": np.zeros((0, 3), "<f8"),
        "step": 0,
        "chance": chance.bit_generator.state,
        "nothing": [None, float("nan"), ("a", 1)],
    }


def advance(state: dict[str, Any]) -> dict[str, Any]:
    """The state one step later, the tensors changed in place."""
    chance = np.random.default_rng()
    chance.bit_generator.state = state["chance"]
    gradient = chance.normal(size=state["weights"].shape).astype("<f4")
    moments = state["moments"]
    moments["m"] *= np.float32(0.9)
    moments["m"] += gradient
    moments["count"] += 1
    state["weights"] -= np.float32(0.01) * moments["m"]
    state["small"] += 1
    return state | {"step": state["step"] + 1, "chance": chance.bit_generator.state}


def truth(step: int) -> dict[str, Any]:
    """The result of training after so many steps."""
    state = begun()
    for _ in range(step):
        state = advance(state)
    return state


def run(script: str, *arguments: object, code: int = 0) -> list[str]:
    """Run a trainer in its own process to its end -> the words that it printed."""
    command = [sys.executable, "-c", BEGIN + script, *map(str, arguments)]
    done = warmth.run(command, cwd=ROOT, timeout=120)
    assert done.returncode == code, f"{done.returncode}: {done.stderr}"
    return done.stdout.split()


@contextlib.contextmanager
def started(script: str, *arguments: object) -> Iterator[tuple[Script, str]]:
    """A trainer in its own process, and the first line that it has printed; it is killed at the end."""
    command = [sys.executable, "-c", f"{BEGIN}{script}", *map(str, arguments)]
    with warmth.start(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line
            yield process, line.strip()
        finally:
            process.kill()


def alive(pid: int) -> bool:
    """Whether a process exists, and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter: it ended between the opening and the reading
        return False


def until(what: Callable[[], bool], seconds: float = 200.0) -> None:
    """Wait until something is so."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.01)


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Kill a process, and wait until it is gone."""
    assert pid > 1, "one process, never a group of them"
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
    until(lambda: not alive(pid))


def agents(folder: Path) -> list[int]:
    """The living agents that were started with this runtime folder."""
    wanted = f"CKPTSTORE_RUNTIME_DIR={folder}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (process / "cmdline").read_bytes()
            is_agent = b"agent/startup.py" in command or b"ckptstore.agent.process" in command
            if is_agent and wanted in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
    return [pid for pid in found if alive(pid)]


@contextlib.contextmanager
def own_runtime(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime folder for the agents of a test; none of them is left behind."""
    monkeypatch.setenv("CKPTSTORE_RUNTIME_DIR", str(folder))
    yield folder
    for pid in agents(folder):
        kill(pid)
