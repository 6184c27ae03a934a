"""All golden files, made in their places."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

from tools.golden import make_codecs, make_conformance, make_segments, make_steps, make_store, make_texts

__all__ = ["main"]

_ROOT = Path(__file__).resolve().parents[2]


def main(root: Path = _ROOT) -> None:
    """Make them in `root`: ``formats/golden`` and ``tests/golden``, which are emptied first."""
    warnings.simplefilter("ignore")
    files, stores = root / "formats" / "golden", root / "tests" / "golden"
    for folder in (files, stores):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    for maker in (make_segments, make_codecs, make_steps, make_texts):
        maker.main(files)
    make_store.main(stores / "store-1")
    make_conformance.main(stores / "conformance")
