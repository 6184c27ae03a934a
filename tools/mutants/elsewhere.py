"""Records the checks that a test's other processes reach: agents, ranks, commands, writers that are killed.

Each process writes the number of the site and the running test to a file; pytest passes the test's name to the
processes that it starts.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

__all__ = ["STARTUP", "VARIABLE", "note", "noted"]

VARIABLE: Final = "CKPTSTORE_MUTANTS_REACHED"
"""Name of the environment variable that names the file they write to."""

STARTUP: Final = "import builtins\n\nfrom tools.mutants.elsewhere import note\n\nbuiltins.__reach__ = note\n"
"""``sitecustomize.py`` of the copy."""

_told: set[tuple[int, ...]] = set()


def note(*numbers: int) -> bool:
    """Note that this process has reached these sites. Returns False, so that each condition keeps its value."""
    place, test = os.environ.get(VARIABLE), os.environ.get("PYTEST_CURRENT_TEST")
    if place and test and numbers not in _told:
        _told.add(numbers)
        line = f"{' '.join(map(str, numbers))}\t{test.rpartition(' (')[0]}\n"
        try:
            descriptor = os.open(place, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        except OSError:  # no descriptor left, another user: some tests go that far
            return False
        try:
            os.write(descriptor, line.encode())  # atomic, also beside others
        except OSError:
            pass
        finally:
            os.close(descriptor)
    return False


def noted(place: Path) -> Iterable[tuple[int, str]]:
    """Each site's number, with a test during which another process reached it."""
    if place.exists():
        for line in place.read_text().splitlines():
            numbers, _, test = line.partition("\t")
            for number in numbers.split():
                yield int(number), test
