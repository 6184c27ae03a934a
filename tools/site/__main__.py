"""``python -m tools.site``: build/site and build/man. Needs `pip install -e '.[docs]'`, and no network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

from tools.site.assembling import assemble, public_names
from tools.site.manuals import write

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build"


def main() -> int:
    """Build both. Any warning, and any broken link, is an error."""
    import ckptstore

    training = import_module("ckptstore.training").__all__
    manuals = write(BUILD / "man", ckptstore.__version__)
    print(f"{len(manuals)} man pages in build/man: man -l build/man/ckpt.1")
    assemble(ROOT, BUILD / "docs", public_names(), training)
    _lay_out(BUILD / "api")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "-f",
        str(Path(__file__).with_name("mkdocs.yml")),
    ]
    done = subprocess.run(command, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=False)
    if not done.returncode:
        print("the site is in build/site: open build/site/index.html")
    return done.returncode


def _lay_out(target: Path) -> None:
    """Lay out the sources as in an installation: folders in place of links to them."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(ROOT / "ckptstore", target / "ckptstore", ignore=shutil.ignore_patterns("__pycache__"))


if __name__ == "__main__":
    sys.exit(main())
