"""Build the source distribution, and from it one wheel for each platform: ``make wheels``, or

    python native/wheels.py [FOLDER]

The package ``ziglang`` compiles for all of them on any machine. A wheel is for every CPython from 3.11 on (stable ABI).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLATFORMS = {
    "manylinux_2_17_x86_64": "x86_64-linux-gnu.2.17",
    "manylinux_2_17_aarch64": "aarch64-linux-gnu.2.17",
    "musllinux_1_2_x86_64": "x86_64-linux-musl",
    "musllinux_1_2_aarch64": "aarch64-linux-musl",
}
"""Tag of the platform -> target of the compiler."""
_HOOK = "import sys; sys.path.insert(0, 'native'); import backend; print(backend.{hook}({arguments}))"


def _built(source: Path, hook: str, arguments: str, target: str = "") -> str:
    """Call a hook of the build backend in `source`. Returns the name of the file that it made."""
    environment = os.environ | {"CKPTSTORE_TARGET": target}
    command = [sys.executable, "-c", _HOOK.format(hook=hook, arguments=arguments)]
    done = subprocess.run(command, cwd=source, env=environment, text=True, stdout=subprocess.PIPE, check=True)
    return done.stdout.splitlines()[-1]


def main() -> None:
    """Run the command."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "wheels").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    archive = folder / _built(ROOT, "build_sdist", repr(str(folder)))
    print(f"{archive.stat().st_size:10,} {archive}")
    for tag, target in PLATFORMS.items():
        with tempfile.TemporaryDirectory() as unpacked:  # what an earlier build left would become part of a wheel
            with tarfile.open(archive) as sources:
                sources.extractall(unpacked, filter="data")
            (source,) = Path(unpacked).iterdir()
            settings = repr({"--build-option": [f"--plat-name={tag}"]})
            wheel = folder / _built(source, "build_wheel", f"{str(folder)!r}, {settings}", target)
            print(f"{wheel.stat().st_size:10,} {wheel}")


if __name__ == "__main__":
    main()
