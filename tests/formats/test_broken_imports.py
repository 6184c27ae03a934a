"""A numba whose import fails, and signals that arrive meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

KIND = "from ckptstore.formats import kernel_choice; print(kernel_choice.kind())"


def run(folder: Path, numba: str, code: str = KIND, **variables: str) -> subprocess.CompletedProcess[str]:
    package = folder / "packages" / "numba"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(numba)
    environment = {**os.environ, "PYTHONPATH": str(package.parent), **variables}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("numba", "said"),
    [
        ("import sys; sys.exit(3)", "SystemExit(3)"),
        ("raise SystemExit", "SystemExit()"),
        ("raise KeyboardInterrupt('no such machine')", "KeyboardInterrupt(no such machine)"),
        ("class Odd(BaseException): pass\nraise Odd('x')", "Odd(x)"),
        ("raise GeneratorExit", "GeneratorExit()"),
    ],
)
def test_numba_that_ends_its_own_import_is_no_numba(tmp_path: Path, numba: str, said: str) -> None:
    done = run(tmp_path, numba)
    assert (done.returncode, done.stdout) == (0, "numpy\n"), done.stderr
    assert done.stderr.count("KernelWarning") == 1
    assert f"numba cannot be imported: it raises {said}. This process uses numpy's kernels" in done.stderr


def test_numba_that_is_insisted_on_is_an_error(tmp_path: Path) -> None:
    done = run(tmp_path, "import sys; sys.exit(3)", CKPTSTORE_KERNELS="compiled")
    assert done.returncode == 1
    assert "MissingDependencyError: numba is needed" in done.stderr


KILL = "import os, signal, time\nos.kill(os.getpid(), signal.{signal})\nfor _ in range(100): time.sleep(0.1)\n"


def test_ctrl_c_while_numba_is_imported_ends_the_process(tmp_path: Path) -> None:
    done = run(tmp_path, KILL.format(signal="SIGINT"))
    assert done.returncode == -signal.SIGINT
    assert done.stdout == ""
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")


@pytest.mark.parametrize(
    ("raised", "number", "handler"),
    [
        ("SystemExit(9)", "SIGTERM", "end"),
        ("SystemExit(9)", "SIGTERM", "Ending().end"),
        ("SystemExit(9)", "SIGTERM", "Ending()"),
        ("KeyboardInterrupt", "SIGINT", "end"),
    ],
)
def test_errors_of_the_scripts_handler_reach_the_script(tmp_path: Path, raised: str, number: str, handler: str) -> None:
    script = f"""
import signal
def end(number, frame):
    raise {raised}
class Ending:
    def end(self, number, frame):
        raise {raised}
    def __call__(self, number, frame):
        raise {raised}
signal.signal(signal.{number}, {handler})
"""
    done = run(tmp_path, KILL.format(signal=number), script + KIND)
    assert done.stdout == ""
    assert "KernelWarning" not in done.stderr
    assert done.returncode == (9 if raised != "KeyboardInterrupt" else -signal.SIGINT)


def test_in_another_thread_there_are_no_handlers(tmp_path: Path) -> None:
    code = """
import threading
from ckptstore.formats import kernel_choice
thread = threading.Thread(target=lambda: print(kernel_choice.kind()))
thread.start()
thread.join()
"""
    done = run(tmp_path, "raise KeyboardInterrupt", code)
    assert (done.returncode, done.stdout) == (0, "numpy\n"), done.stderr
    assert "numba cannot be imported" in done.stderr
