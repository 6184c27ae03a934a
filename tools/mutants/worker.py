"""Runs tests on request, each time in a fresh fork: modules that all runs need are imported once.

Reads JSON lines from stdin: ``files`` to collect tests from; ``tests``, name -> usual seconds, of them to run in this
order (null: all of them); ``seconds`` that the run may take; ``first``: stop at the first failure. Answers each with
``outcome`` (passed, failed, timeout; broken: pytest could not run), ``failures`` in order, ``tests`` (name -> seconds),
``reached`` (site -> names of tests), ``seconds``.
"""

from __future__ import annotations

import builtins
import importlib
import json
import math
import mmap
import os
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tools.mutants import elsewhere

# All large modules that tests import, except torch: loading behaves differently once a process has imported it.
for _name in ("numpy", "ml_dtypes", "zstandard", "xxhash", "safetensors.numpy", "click", "rich.console", "fsspec"):
    importlib.import_module(_name)
for _name in ("hypothesis", "hypothesis.strategies", "hypothesis.stateful", "hypothesis.extra.numpy", "psutil"):
    importlib.import_module(_name)

_BROKEN = 3
_PULSE = struct.Struct("<Qd")
_PATIENCE = 20.0
"""Seconds that a test may take beyond five times its duration without a mutant."""


class _Watch:
    """Chooses the tests, and notes their outcomes and the sites that they reached."""

    def __init__(self, tests: dict[str, float] | None, pulse: mmap.mmap) -> None:
        self.process = os.getpid()
        self.tests = tests
        self.pulse = pulse
        self.current = ""
        self.failures: list[str] = []
        self.took: dict[str, float] = {}
        self.reached: dict[int, set[str]] = {}

    def reach(self, *numbers: int) -> bool:
        if os.getpid() != self.process:  # a fork of the tests: it does not share this memory
            return elsewhere.note(*numbers)
        for number in numbers:
            self.reached.setdefault(number, set()).add(self.current)
        return False

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.tests is not None:
            order = {name: place for place, name in enumerate(self.tests)}
            items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.current = nodeid
        begun, _ = _PULSE.unpack(self.pulse[:])
        usual = math.inf if self.tests is None else _PATIENCE + 5 * self.tests[nodeid]
        self.pulse[:] = _PULSE.pack(begun + 1, usual)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.took[report.nodeid] = self.took.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.failures.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failures.append(report.nodeid)

    def as_json(self, elsewhere_noted: Iterable[tuple[int, str]]) -> dict[str, Any]:
        for number, test in elsewhere_noted:
            self.reached.setdefault(number, set()).add(test)
        reached = {number: sorted(names) for number, names in self.reached.items()}
        return {"failures": self.failures, "tests": self.took, "reached": reached}


def main() -> None:
    from hypothesis import HealthCheck, Phase, settings

    # The same examples every time, no shrinking of failures, no failure because the machine is busy.
    settings.register_profile(
        "mutants",
        phases=(Phase.explicit, Phase.generate),
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    settings.load_profile("mutants")
    answers = os.dup(1)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    for line in sys.stdin:
        answer = _attempt(json.loads(line))
        os.write(answers, json.dumps(answer).encode() + b"\n")


def _attempt(request: dict[str, Any]) -> dict[str, Any]:
    begin = time.monotonic()
    reading, writing = os.pipe()
    pulse = mmap.mmap(-1, _PULSE.size)  # shared with the child: tests begun, and how long this one may take
    pulse[:] = _PULSE.pack(0, request["seconds"])
    child = os.fork()
    if child == 0:
        os.close(reading)
        _child(request, writing, pulse)
    os.close(writing)
    told: list[str] = []
    reader = threading.Thread(target=lambda: told.append(_everything(reading)))  # a pipe has limited capacity
    reader.start()
    timed_out = not _ended(child, request["seconds"], pulse)
    if timed_out:
        os.killpg(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    reader.join()
    outcome = "failed"
    if timed_out:
        outcome = "timeout"
    elif os.WIFEXITED(status) and os.WEXITSTATUS(status) in (0, _BROKEN):
        outcome = "broken" if os.WEXITSTATUS(status) else "passed"
    noted = json.loads(told[0]) if told and told[0] else {"failures": [], "tests": {}, "reached": {}}
    return {"outcome": outcome, "seconds": round(time.monotonic() - begin, 2), **noted}


def _everything(descriptor: int) -> str:
    with os.fdopen(descriptor) as file:
        return file.read()


def _ended(child: int, seconds: float, pulse: mmap.mmap) -> bool:
    """Wait until the child ends; False if it or one test takes too long.

    Only time in which this process ran counts: both may be stopped for a while, or the machine be busy.
    """
    pause, last, before = 0.01, time.monotonic(), -1
    spent = alone = 0.0
    while spent < seconds:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return True
        begun, usual = _PULSE.unpack(pulse[:])
        alone = 0.0 if begun != before else alone
        if alone > usual:
            return False
        time.sleep(pause)
        pause, before = min(0.2, pause * 1.3), begun
        now = time.monotonic()
        spent, alone, last = spent + min(now - last, 1.0), alone + min(now - last, 1.0), now
    return False


def _child(request: dict[str, Any], writing: int, pulse: mmap.mmap) -> None:
    code = _BROKEN
    try:
        os.setpgid(0, 0)
        far = Path(elsewhere.VARIABLE).absolute()
        far.unlink(missing_ok=True)
        os.environ[elsewhere.VARIABLE] = str(far)
        watch = _Watch(request["tests"], pulse)
        builtins.__dict__["__reach__"] = watch.reach
        options = ["-q", "--no-header", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist"]
        options += ["-o", "addopts=", "-o", "timeout=0", "--import-mode=importlib"]
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        options += ["-x"] if request["first"] else []
        result = pytest.main([*options, *request["files"]], plugins=[watch])
        with os.fdopen(writing, "w") as file:
            json.dump(watch.as_json(elsewhere.noted(far)), file)
        if result in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            code = 0
        elif watch.failures or result == pytest.ExitCode.INTERNAL_ERROR:
            code = 1
    except BaseException:  # noqa: BLE001  # printed, and the process ends here
        traceback.print_exc()  # into the worker's log
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
