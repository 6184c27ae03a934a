"""Run the compiled kernels under the sanitizers of addresses and of undefined behaviour.

    python -m tools.sanitize [--seconds N]

The core is compiled with gcc or clang (``CC``) into a copy of the tree. There the tests of the kernels run, then the
fuzz targets of the decoders for N seconds each. An error of a sanitizer ends the process, and so the run fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from tools.mutants.copies import Copy, repository

TESTS: Final = (
    "tests/formats/test_core_hostile.py",
    "tests/formats/test_codecs_kernels.py",
    "tests/formats/test_codecs_batches.py",
    "tests/formats/test_codecs_literals.py",
    "tests/formats/test_codecs_exceptions_hostile.py",
    "tests/formats/test_optim_compiled.py",
    "tests/formats/test_digest.py",
    "tests/formats/test_uncached_copy.py",
)
TARGETS: Final = ("codec", "optimizer")


def runtime() -> str:
    """Return the path of the sanitizer's library, which has to be loaded first, because Python does not link it."""
    compiler = os.environ.get("CC", "cc").split()
    for name in ("libasan.so", "libclang_rt.asan-x86_64.so", "libclang_rt.asan.so"):
        command = [*compiler, f"-print-file-name={name}"]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        if Path(found).is_absolute():
            return found
    sys.exit(f"{compiler[0]} has no library of the address sanitizer")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(repository(), Path(folder) / "tree")
        output = copy.root / "ckptstore" / "formats" / "core.abi3.so"
        build = [sys.executable, repository() / "native" / "core_build.py", "--sanitize", "--output", output]
        subprocess.run(build, check=True)
        environment = copy.environment() | {
            "CKPTSTORE_KERNELS": "compiled",
            "LD_PRELOAD": runtime(),
            "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter frees little at its end
            "UBSAN_OPTIONS": "print_stacktrace=1",
            "HYPOTHESIS_STORAGE_DIRECTORY": str(Path(folder) / "hypothesis"),
        }
        for command in (
            ["pytest", "-q", "-s", "-p", "no:cacheprovider", "--timeout", "1200", *TESTS],
            *(
                ["tools.fuzz", "--seconds", str(given.seconds), "--target", target, "--engine", "plain", "--jobs", "1"]
                for target in TARGETS
            ),
        ):
            subprocess.run([sys.executable, "-m", *command], cwd=copy.root, env=environment, check=True)


if __name__ == "__main__":
    main()
