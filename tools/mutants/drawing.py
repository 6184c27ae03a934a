"""Chooses the ordinary mutants to try: a seeded draw from given modules, or from changed ones."""

from __future__ import annotations

import fnmatch
import hashlib
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tools.mutants.equivalents import EQUIVALENTS, Equivalent, without_equivalents
from tools.mutants.ordinary import ROOMS, find_ordinary
from tools.mutants.sites import Site

__all__ = ["changed_since", "draw", "modules_of"]


def modules_of(root: Path, patterns: Sequence[str]) -> list[str]:
    """The Python files of the rooms, relative to `root`, that match some of `patterns`.

    Raises:
        LookupError: a pattern matches none.
    """
    every = [path.relative_to(root).as_posix() for room in ROOMS for path in sorted((root / room).rglob("*.py"))]
    for pattern in patterns:
        if not fnmatch.filter(every, pattern):
            raise LookupError(f"no module of {', '.join(ROOMS)} is called {pattern}")
    return [path for path in every if any(fnmatch.fnmatch(path, pattern) for pattern in patterns)]


def changed_since(root: Path, revision: str) -> list[str]:
    """The Python files of the rooms that differ from git's `revision`, including uncommitted changes.

    Raises:
        LookupError: git does not know the revision, or the tree is not a git repository.
    """
    commands = (
        ["git", "diff", "--name-only", "-z", "--end-of-options", revision, "--", *ROOMS],
        ["git", "ls-files", "-z", "--others", "--exclude-standard", "--", *ROOMS],
    )
    named: set[str] = set()
    for command in commands:
        try:
            answer = subprocess.run(command, cwd=root, check=True, capture_output=True).stdout.decode()
        except (OSError, subprocess.CalledProcessError) as error:
            told = getattr(error, "stderr", b"") or str(error).encode()
            raise LookupError(f"git cannot say what changed since {revision}: {told.decode().strip()}") from error
        named |= set(answer.split("\0"))
    return sorted(name for name in named if name.endswith(".py") and (root / name).is_file())


def draw(
    root: Path, modules: Sequence[str], count: int, seed: int, known: Sequence[Equivalent] = EQUIVALENTS
) -> list[Site]:
    """At most `count` mutants of `modules`, by file and place; the same ones for the same seed.

    A mutant's lot depends only on its own name, so a change elsewhere does not draw others.
    """
    sites = without_equivalents(find_ordinary(root, modules), known)
    drawn = sorted(sites, key=lambda site: hashlib.sha256(f"{seed} {site.name}".encode()).digest())[:count]
    return sorted(drawn, key=lambda site: (site.path, site.begin, site.end, site.text))
