"""Durations of the test files in seconds: recorded with ``pytest --record``, read to run the longest files first."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("durations.json")


def recorded() -> dict[str, float]:
    """``{file: seconds}`` of the last recorded run; files below a second are left out."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}


class Recorder:
    """A pytest plugin of the controlling process: adds up set-up, call and tear-down of all tests of a file.

    A file that this run did not touch keeps its earlier record, so the parts of the suite may be recorded one after the
    other.
    """

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        seconds = recorded() | {name: round(spent, 1) for name, spent in self._seconds.items()}
        there = {name: spent for name, spent in seconds.items() if spent >= 1 and (FILE.parents[1] / name).exists()}
        FILE.write_text(json.dumps(dict(sorted(there.items(), key=lambda item: -item[1])), indent=1) + "\n")
