"""Runs test scripts as processes that start warm (`tools.warm`), from one nursery for each pytest worker, made on
demand.

A test about the start of an interpreter, about imports or about memory starts a cold process.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tools.warm import Script, Warm

__all__ = ["borrow", "close", "nursery", "run", "start", "warm_starts"]

# Let OpenMP threads sleep while they wait for each other. By default they spin, and where more processes train than
# there are cores they did little else (4.2 s of a core for a test that takes 0.5). torch reads the setting at import:
# here, after this line (conftest.py imports this module), and in every process that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

_AT_FIRST = dict(os.environ)
"""The environment before any test has changed it."""


_MADE: list[Warm] = []
_MAKING = threading.Lock()
"""Two threads that ask first would make two nurseries. The one that nobody keeps would stop and kill its scripts."""


def nursery() -> Warm:
    """The nursery of this process. It has imported torch, which saves seconds for each script."""
    with _MAKING:
        if not _MADE:
            _MADE.append(Warm(env=_AT_FIRST))
        return _MADE[0]


def borrow() -> None:
    """Start scripts in the nursery of the test that started this process with ``stdin=nursery().lent``."""
    with _MAKING:
        _MADE.append(Warm.borrowed())


def close() -> None:
    """Stop the nursery, if there is one, and the processes that it started."""
    with _MAKING:
        while _MADE:
            _MADE.pop().close()


def start(command: Sequence[str], *, cwd: Path | None = None, **streams: Any) -> Script:
    """Start a script as `subprocess.Popen` does: in this process's folder, with its present environment."""
    return nursery().start(command, cwd=cwd or Path.cwd(), env=os.environ, **streams)


def run(
    command: Sequence[str], *, cwd: Path | None = None, timeout: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a script to its end -> its exit status and its output."""
    return nursery().run(command, cwd=cwd or Path.cwd(), env=os.environ, timeout=timeout)


def warm_starts(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    """Let `subprocess.Popen` and `subprocess.run` in modules of the tools start warm scripts until the test ends.

    A cold one imports torch, two seconds of a core each.
    """
    replaced = SimpleNamespace(**{**vars(subprocess), "Popen": _popen, "run": _run})
    for module in modules:
        monkeypatch.setattr(module, "subprocess", replaced)


def _popen(
    command: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None, **streams: Any
) -> Script:
    return nursery().start(command, cwd=cwd or Path.cwd(), env=os.environ if env is None else env, **streams)


def _run(
    command: Sequence[str],
    *,
    input: str | None = None,
    capture_output: bool = False,
    check: bool = False,
    timeout: float | None = None,
    **how: Any,
) -> subprocess.CompletedProcess[Any]:
    if capture_output:
        how |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with tempfile.TemporaryFile("w+") as given:
        if input is not None:
            given.write(input)
            given.flush()
            os.lseek(given.fileno(), 0, os.SEEK_SET)
            how["stdin"] = given
        script = _popen(command, **how)
    try:
        out, err = script.communicate(timeout)
    except BaseException:
        script.kill()
        script.wait()
        raise
    done = subprocess.CompletedProcess(list(command), script.returncode or 0, out, err)
    if check:
        done.check_returncode()
    return done
