"""Builds the frozen version from the history of this clone, as a wheel, and unpacks it into a separate folder."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

__all__ = ["FrozenVersionError", "frozen", "present", "revision"]

ROOT: Final = Path(__file__).resolve().parents[2]
_PLACE: Final = ROOT / ".cache" / "frozen"
_SOURCES: Final = ("ckptstore", "cli", "formats", "pyproject.toml", "README.md", "LICENSE")


class FrozenVersionError(Exception):
    """The frozen version cannot be built here; the text says why."""


def revision() -> str:
    """The commit of the frozen version, 40 hex digits. Raises `FrozenVersionError` before there is one."""
    try:
        return (Path(__file__).parent / "REVISION").read_text().strip()
    except FileNotFoundError as error:
        raise FrozenVersionError("format 1 is not frozen yet: tools/frozen/REVISION names no commit") from error


def frozen() -> Path:
    """The folder from which the frozen version is imported; it is built if it is missing.

    Raises:
        FrozenVersionError: this is not a clone, its history is too short, or pip cannot build the wheel.
    """
    commit = revision()
    folder = _PLACE / commit[:12]
    if not (folder / "ckptstore").is_dir():
        _build(commit, folder)
    return folder


def present() -> Path:
    """The folder from which the working tree's version is imported: its three parts, linked together as installed."""
    folder = _PLACE / "present"
    package = folder / "ckptstore"
    package.mkdir(parents=True, exist_ok=True)
    parts = {one.name: one for one in (ROOT / "ckptstore").iterdir() if one.name != "__pycache__"}
    parts |= {"cli": ROOT / "cli", "formats": ROOT / "formats"}
    for link in package.iterdir():
        if link.is_symlink() and link.name not in parts:
            link.unlink()
    for name, target in parts.items():
        with contextlib.suppress(FileExistsError):
            (package / name).symlink_to(target)
    return folder


def _build(commit: str, folder: Path) -> None:
    _PLACE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_PLACE, prefix="building-") as scratch:
        sources, made = Path(scratch, "sources"), Path(scratch, "made")
        sources.mkdir()
        archive = Path(scratch, "sources.tar")
        _run("git", "-C", str(ROOT), "archive", "--output", str(archive), commit, *_SOURCES)
        shutil.unpack_archive(archive, sources, filter="data")
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
        _run(*pip, "wheel", "--no-deps", "--wheel-dir", scratch, str(sources))
        (wheel,) = Path(scratch).glob("*.whl")
        _run(*pip, "install", "--no-deps", "--target", str(made), str(wheel))
        shutil.move(wheel, _PLACE / f"{commit[:12]}-{wheel.name}")
        try:
            made.rename(folder)  # atomically: two test workers may build at once
        except OSError:
            if not (folder / "ckptstore").is_dir():
                raise


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    except FileNotFoundError as error:
        raise FrozenVersionError(f"the frozen version needs {command[0]}, which is not installed") from error
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or [f"exit status {error.returncode}"])[-1]
        raise FrozenVersionError(f"the frozen version cannot be built here: {last}") from error
