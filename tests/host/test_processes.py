"""The end of a process is known on its own host; of a process elsewhere nothing is known here."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckptstore.host import processes
from ckptstore.host.processes import has_ended, identity

NAMES = {"host", "pid", "boot", "namespaces", "began"}

pytestmark = pytest.mark.skipif("began" not in identity(), reason="this system does not say when a process began")


def other() -> subprocess.Popen[str]:
    """A living process that has printed its identity."""
    text = "import json, time; from ckptstore.host.processes import identity; print(json.dumps(identity()), flush=True)"
    return subprocess.Popen([sys.executable, "-c", f"{text}; time.sleep(600)"], stdout=subprocess.PIPE, text=True)


def said(process: subprocess.Popen[str]) -> dict[str, Any]:
    import json

    assert process.stdout is not None
    found: dict[str, Any] = json.loads(process.stdout.readline())
    return found


def test_a_process_says_who_it_is() -> None:
    found = identity()
    assert set(found) == NAMES
    assert (found["host"], found["pid"]) == (platform.node(), os.getpid())
    assert found == identity()
    assert not has_ended(found)


def test_a_killed_process_has_ended_and_a_living_one_has_not() -> None:
    process = other()
    try:
        who = said(process)
        assert set(who) == NAMES
        assert not has_ended(who)
        process.send_signal(signal.SIGSTOP)
        assert not has_ended(who), "a stopped one lives"
    finally:
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert has_ended(who), "a zombie has ended"
        process.communicate()
    assert has_ended(who)


def test_a_number_that_was_given_again_is_another_process() -> None:
    assert has_ended(identity() | {"began": identity()["began"] - 1})


@pytest.mark.parametrize(
    "change",
    [
        {"host": "elsewhere"},
        {"boot": "0" * 36},
        {"namespaces": "pid:[1] time:[1]"},
        {"host": None},
        {"pid": "1"},
        {"pid": -1},
        {"pid": -(2**22) - 7},
        {"pid": 0},
        {"pid": 10**30},
        {"pid": True},
        {"began": "1"},
        {"began": None},
    ],
)
def test_where_anything_differs_nobody_knows(change: dict[str, Any]) -> None:
    """Everything else is as for a process that has certainly ended."""
    process = other()
    who = said(process)
    process.kill()
    process.communicate()
    assert has_ended(who)
    assert not has_ended(who | change)
    for name in NAMES:
        assert not has_ended({key: value for key, value in who.items() if key != name})
    assert not has_ended({})


def test_a_proc_of_another_namespace_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host's /proc in a container: its numbers are not ours."""
    gone = identity() | {"pid": 2**22 + 1}
    assert has_ended(gone)
    link = Path.readlink
    monkeypatch.setattr(Path, "readlink", lambda path: Path("1") if str(path) == "/proc/self" else link(path))
    assert set(identity()) == {"host", "pid"}
    assert not has_ended(gone)


def test_without_a_boot_id_nobody_knows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gone = identity() | {"pid": 2**22 + 1}
    monkeypatch.setattr(processes, "_BOOT", tmp_path / "none")
    assert set(identity()) == {"host", "pid"}
    assert not has_ended(gone)


def test_another_users_process_is_not_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_pid: int, _signal: int) -> None:
        raise PermissionError

    me = identity()
    monkeypatch.setattr(processes.os, "kill", refused)
    monkeypatch.setattr(processes, "_fields", lambda _pid: [])
    monkeypatch.setattr(processes, "identity", lambda: me)
    assert not has_ended(me)
