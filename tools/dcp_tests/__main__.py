"""Run torch's own tests of its distributed checkpoint with our writer and reader in the place of its own.

    python -m tools.dcp_tests PYTORCH/test/distributed/checkpoint/test_file_system_checkpoint_cpu.py ...

The files come from a checkout of PyTorch at the version that is installed. Each is copied to a temporary folder, with
one line before its imports, and run by pytest. Tests that need several GPUs skip themselves, as on any such machine.
torch's tests need the package ``expecttest``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import click

__all__ = ["main", "patched", "run"]

_FIRST_IMPORT = re.compile(r"^(?:import|from) (?!__future__)", re.MULTILINE)
_LINE = "import tools.dcp_tests.storage; tools.dcp_tests.storage.install()  # before torch's classes are imported\n"


def patched(text: str) -> str:
    """The text of a test file that uses our storage."""
    found = _FIRST_IMPORT.search(text)
    if found is None:
        raise click.ClickException("a file imports nothing: it is not a test of torch")
    return text[: found.start()] + _LINE + text[found.start() :]


def run(files: list[Path], seconds: int) -> int:
    """Run copies of the files -> pytest's exit status."""
    root = Path(__file__).parents[2]
    with tempfile.TemporaryDirectory() as folder:
        for file in files:
            (Path(folder) / file.name).write_text(patched(file.read_text()))
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]))
        command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-n", "0", folder]
        command += ["--rootdir", folder, "-c", os.devnull, "--timeout", str(seconds)]
        return subprocess.run(command, env=environment, check=False, cwd=folder).returncode


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--seconds", default=300, show_default=True, help="Limit of one test.")
def main(files: tuple[Path, ...], seconds: int) -> None:
    """Run torch's own test FILES with our storage."""
    raise SystemExit(run(list(files), seconds))


if __name__ == "__main__":
    main()
