"""Makes all golden files in their places; those of the frozen format are never changed."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import warnings
from pathlib import Path

from tools.golden import make_codecs, make_conformance, make_objects, make_segments, make_steps, make_store, make_texts

__all__ = ["FROZEN", "ROOT", "freeze", "main", "make"]

ROOT = Path(__file__).resolve().parents[2]
_FOLDERS = ("formats/golden", "tests/golden")
FROZEN = "tests/golden/frozen-1.json"
"""SHA-256 of every golden file of the frozen format, by path."""


def main(root: Path = ROOT) -> list[str]:
    """Make them in `root`: ``formats/golden`` and ``tests/golden`` -> the frozen ones that would have other bytes now.

    Those are not changed: this version (or its zstd) writes other bytes, and must read the old ones.
    """
    frozen = _frozen(root)
    differing = []
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch)
        make(made)
        for path in sorted(one for one in made.rglob("*") if one.is_file()):
            name = path.relative_to(made).as_posix()
            target = root / name
            if name in frozen:
                differing += [name] * (_hash(path) != frozen[name])
                if target.exists():
                    continue
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    return differing


def make(root: Path) -> None:
    """Make all of them in `root`, frozen or not; the two folders are emptied first."""
    warnings.simplefilter("ignore")
    files, stores = (root / name for name in _FOLDERS)
    for folder in (files, stores):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    for maker in (make_segments, make_codecs, make_steps, make_texts, make_objects):
        maker.main(files)
    make_store.main(stores / "store-1")
    make_conformance.main(stores / "conformance")
    for reserve in root.glob("tests/golden/**/.reserve"):
        reserve.unlink()  # a writer's own, no object of a store: zeros


def freeze(root: Path = ROOT) -> int:
    """Record every existing golden file as frozen -> how many. Earlier records stay."""
    frozen = _frozen(root)
    for folder in _FOLDERS:
        for one in (root / folder).rglob("*"):
            if one.is_file() and one != root / FROZEN:
                frozen.setdefault(one.relative_to(root).as_posix(), _hash(one))
    (root / FROZEN).write_text(json.dumps(dict(sorted(frozen.items())), indent=0) + "\n")
    return len(frozen)


def _frozen(root: Path) -> dict[str, str]:
    path = root / FROZEN
    found: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    return found


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
