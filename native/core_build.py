"""Compile the extension module ``ckptstore.formats.core``: one compiler call for one source file and its headers.

The compiler is the command in ``CC``, else ``cc``, ``gcc`` or ``clang``, else that of the package ``ziglang``, if it is
installed. ``CC=none`` compiles nothing, and numpy does the work. Without C headers of Python nothing is compiled.

    python native/core_build.py [--output FILE] [--sanitize]

compiles it in place, for a clone that is installed in editable mode. ``--sanitize`` adds checks of addresses and of
undefined behaviour (`make sanitize`).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

NATIVE = Path(__file__).resolve().parent
SOURCE = NATIVE / "module.c"
IN_PLACE = NATIVE.parent / "formats" / "core.abi3.so"
LEAST = 0x030B0000
"""The oldest version of CPython that the module runs on: it uses only the limited API of 3.11."""
FLAGS = (
    "-std=c11",
    "-O3",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    # No operation is fused or left out, so every instruction set computes the same bits. (Nothing reads
    # errno after `sqrtf` or uses traps; without these two options such loops would not use vectors.)
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-DNDEBUG",
    f"-DPy_LIMITED_API={LEAST:#x}",
)
SANITIZERS = ("-g", "-O1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
GLIBC = "gnu.2.17"
"""The oldest C library that modules of ``ziglang`` run on, which is that of manylinux2014."""
ZIG_MACHINES = ("x86_64", "aarch64")
"""Machines for which ``ziglang`` has a wheel and the loops are tested."""


class CannotCompileError(Exception):
    """There is no compiler, or it failed. The message says why."""


def compiler() -> list[str] | None:
    """Return the command of a C compiler that is installed, without ``ziglang``; None: there is none."""
    wanted = os.environ.get("CC")
    for name in [wanted] if wanted else ["cc", "gcc", "clang"]:
        command = shlex.split(name)
        if command and shutil.which(command[0]):
            return command
    return None


def zig_is_useful() -> bool:
    """Whether the package ``ziglang`` could compile the module here, and nothing else can."""
    if os.environ.get("CC") or compiler() is not None or _headers() is None:
        return False
    return sys.platform == "linux" and os.uname().machine in ZIG_MACHINES


def compile_core(output: Path, *, target: str | None = None, extra: Sequence[str] = ()) -> None:
    """Compile the module to `output`. If that fails, no older `output` stays: it would be used with other sources.

    Args:
        target: compile for another machine, with ``ziglang``; for example ``aarch64-linux-musl``.
        extra: further flags.

    Raises:
        CannotCompileError: it cannot be compiled here.
    """
    try:
        _compile(output, target, extra)
    except CannotCompileError:
        output.unlink(missing_ok=True)
        raise


def _compile(output: Path, target: str | None, extra: Sequence[str]) -> None:
    headers = _headers()
    if headers is None:
        raise CannotCompileError("this Python has no C headers (Python.h): install them, for example python3-dev")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise CannotCompileError("this Python has no stable ABI (it is free-threaded)")
    command = None if target else compiler()
    if command is None:
        if not target and os.environ.get("CC"):
            raise CannotCompileError(f"there is no C compiler {os.environ['CC']!r} (CC)")
        if importlib.util.find_spec("ziglang") is None:
            raise CannotCompileError("there is no C compiler (CC, cc, gcc, clang), and the package ziglang is missing")
        # Without a target it would use all of this processor's instructions, also in the loops for every processor.
        command = [sys.executable, "-m", "ziglang", "cc", "-target", target or _this_machine()]
    output.parent.mkdir(parents=True, exist_ok=True)
    made = output.with_name(f"{output.name}.{os.getpid()}.tmp")
    strip = () if extra else ("-s",)
    command += [*FLAGS, *extra, f"-I{headers}", str(SOURCE), "-lm", *strip, "-o", str(made)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CannotCompileError(f"{shlex.join(command)} failed:\n{done.stderr}")
        made.replace(output)
    except OSError as error:
        raise CannotCompileError(f"{shlex.join(command)}: {error}") from None
    finally:
        made.unlink(missing_ok=True)


def _this_machine() -> str:
    """Return this machine's target, as ``ziglang`` calls it."""
    musl = "musl" in (sysconfig.get_config_var("HOST_GNU_TYPE") or "")
    return f"{os.uname().machine}-linux-{'musl' if musl else GLIBC}"


def _headers() -> str | None:
    for name in ("include", "platinclude"):
        folder = sysconfig.get_path(name)
        if folder and (Path(folder) / "Python.h").is_file():
            return folder
    return None


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=IN_PLACE)
    parser.add_argument("--sanitize", action="store_true")
    given = parser.parse_args()
    try:
        compile_core(given.output, extra=SANITIZERS if given.sanitize else ())
    except CannotCompileError as error:
        print(f"the kernels run in numpy: {error}", file=sys.stderr)
        sys.exit(1 if given.sanitize else 0)


if __name__ == "__main__":
    main()
