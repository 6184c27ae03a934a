"""A copy of the tree in which code may be broken, laid out so that ``import ckptstore`` finds it.

``cli/`` and ``formats/`` are ``ckptstore.cli`` and ``ckptstore.formats`` by a mapping in pyproject.toml, which an
editable install resolves to the repository. The copy has the layout of a real install: both folders lie inside
``ckptstore/``, and links beside it keep the paths that tests use. With the copy in front of ``PYTHONPATH``, also for
the processes that tests start, nothing of the repository itself is imported.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

__all__ = ["Copy", "repository"]

_ROOMS: Final = ("ckptstore", "formats", "cli", "tools", "tests", "docs", "examples")
_INSIDE: Final = ("formats", "cli")
_LOOSE: Final = ("pyproject.toml", "README.md", "Makefile", "CHANGELOG.md", "constraints.txt")


def repository() -> Path:
    """The root of the tree that this module is part of."""
    return Path(__file__).resolve().parents[2]


class Copy:
    """A copy of the tree below `folder`, which must not exist yet."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.root = folder
        folder.mkdir()
        for path in _files(source):
            room = path.parts[0]
            target = folder / "ckptstore" / path if room in _INSIDE else folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / path, target)
        for room in _INSIDE:
            (folder / room).symlink_to(Path("ckptstore") / room)
        self._now = max((path.stat().st_mtime_ns for path in folder.rglob("*.py")), default=0)

    def environment(self) -> dict[str, str]:
        """Environment variables of processes that import the copy."""
        # Kernels in numpy, which mutants change. Tests of compiled kernels request them.
        own = {"PYTHONPATH": str(self.root), "CKPTSTORE_MUTANTS": "1", "CKPTSTORE_KERNELS": "numpy"}
        ours = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
        return ours | own

    def write(self, path: str, data: bytes) -> None:
        """Write one file. Python notices the change: cached byte code is checked by the time of the file."""
        target = self.root / path
        target.write_bytes(data)
        self._now += 2_000_000_000
        os.utime(target, ns=(self._now, self._now))


def _files(source: Path) -> list[Path]:
    """The files of the tree, relative to it: from git, or every file of its rooms."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=source,
            check=True,
            capture_output=True,
        ).stdout.decode()
        paths = [Path(name) for name in listed.split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        paths = [path.relative_to(source) for room in _ROOMS for path in (source / room).rglob("*")]
        paths += [Path(name) for name in _LOOSE]
    paths.append(Path("formats/core.abi3.so"))  # which git ignores
    wanted = [path for path in dict.fromkeys(paths) if path.parts[0] in _ROOMS or path.name in _LOOSE]
    return [path for path in wanted if (source / path).is_file() and "__pycache__" not in path.parts]
