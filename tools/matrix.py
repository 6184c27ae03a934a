"""Install and test every pair of a Python and a torch: ``python -m tools.matrix [--python 3.12] [--torch oldest]``.

The Pythons are those that ``pyproject.toml`` classifies. There are two torches: the oldest that it admits and the
newest that pip finds. Each pair gets its own virtual environment under ``.cache/matrix``. pip installs torch there (on
Linux a CUDA build of several gigabytes), then ckptstore with its extras ``torch``, ``fast`` and ``test``. The tests of
`SELECTION` run there. The environment is deleted afterwards.

With the oldest torch come the oldest `FRAMEWORKS` that ``pyproject.toml`` admits, but not torchao, which transformers
imports and which fails with a torch as old; else the newest that pip finds. A test skips itself where torch is too old.

A Python that this machine does not have is not installed: the pair is reported as not run. The exit code is 0 only if
every pair was run and passed.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click

__all__ = ["Pair", "Result", "interpreter", "main", "pinned", "pythons", "torches", "without"]

ROOT: Final = Path(__file__).resolve().parents[1]
FOLDER: Final = ROOT / ".cache" / "matrix"
SELECTION: Final = (
    "tests/formats/test_codecs.py",
    "tests/formats/test_state.py",
    "tests/frameworks",
    "tests/store/test_store.py",
    "tests/training/test_torch_optimizers.py",
    "tests/training/test_checkpointer.py",
    "tests/training/test_resume_changes.py",
    "tests/integrations/test_dcp.py",
    "tests/integrations/test_huggingface.py",
    "tests/integrations/test_accelerate.py",
    "tests/integrations/test_lightning_callback.py",
    "tests/integrations/test_lightning_io.py",
    "tests/integrations/test_adapters.py",
)
"""The tests that depend most on Python, torch and the frameworks: bits of every dtype, torch's tensors and optimizers,
a whole training loop, alone and in each framework."""
FRAMEWORKS: Final = ("lightning", "transformers", "accelerate", "peft", "schedulefree", "torchao", "bitsandbytes")
"""Packages of the extra ``test`` whose oldest and newest versions are tested."""

_PINNED_WITH_FRAMEWORKS: Final = (
    *FRAMEWORKS,
    *("pytorch-lightning", "lightning-utilities", "torchmetrics", "tokenizers", "huggingface-hub", "hf-xet"),
)
"""Without these in ``constraints.txt`` pip chooses what a framework's version needs."""
_ASK: Final = f"""
import platform
from importlib.metadata import version
named = ", ".join(f"{{name}} {{version(name)}}" for name in ("torch", *{FRAMEWORKS[:4]!r}))
print(f"Python {{platform.python_version()}}, {{named}}")
"""


@dataclass(frozen=True, slots=True)
class Pair:
    """The installed versions: a Python (``3.12``), and ``oldest`` or ``newest`` or a version of torch."""

    python: str
    torch: str


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a pair.

    Attributes:
        installed: the versions of Python and torch that ran; empty if none did.
        outcome: pytest's last line, or why no test ran.
        ok: whether tests ran and passed.
        seconds: installation and tests.
    """

    pair: Pair
    installed: str
    outcome: str
    ok: bool
    seconds: float


def pythons() -> list[str]:
    """The versions that ``pyproject.toml`` classifies, oldest first."""
    found = [re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", one) for one in _project()["classifiers"]]
    return [one[1] for one in found if one]


def torches() -> dict[str, str]:
    """``oldest`` and ``newest`` -> pip's requirement."""
    (wanted,) = (one for one in _project()["optional-dependencies"]["torch"] if one.startswith("torch"))
    oldest = re.fullmatch(r"torch>=(\d+\.\d+)", wanted)
    assert oldest, f"pyproject.toml asks for {wanted}, not for torch>=MAJOR.MINOR"
    return {"oldest": f"torch=={oldest[1]}.*", "newest": wanted}


def oldest_frameworks() -> list[str]:
    """pip's requirements of the oldest version of each of the `FRAMEWORKS`, as constraints."""
    found = {}
    for one in _project()["optional-dependencies"]["test"]:
        name, _, version = one.partition(">=")
        found[name] = version.partition(",")[0]
    return [f"{name}=={found[name]}.*" for name in FRAMEWORKS]


def _project() -> dict[str, list[str] | dict[str, list[str]]] | dict:  # type: ignore[type-arg]
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def interpreter(version: str) -> str | None:
    """The path of a Python of this version: this one, on the PATH, of pyenv or of uv; None: there is none."""
    names = [sys.executable, shutil.which(f"python{version}")]
    names += [str(one) for one in sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))]
    if shutil.which("uv"):
        told = subprocess.run(["uv", "python", "find", version], capture_output=True, text=True, check=False)
        names.append(told.stdout.strip())
    # pyenv puts a shim on the PATH for every version, and most shims fail: so each Python is asked for its version.
    return next((name for name in names if name and _version_of(name) == version), None)


def _version_of(python: str) -> str | None:
    ask = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        told = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return told.stdout.strip() if told.returncode == 0 else None


def without(constraints: str, names: Iterable[str]) -> str:
    """Constraints without these packages: torch, and the dependencies whose versions torch chose."""
    left_out = {_normal(name) for name in names}
    return "".join(
        f"{line}\n" for line in constraints.splitlines() if _normal(line.partition("==")[0].strip()) not in left_out
    )


def pinned(freeze: str) -> list[str]:
    """The names in the output of ``pip freeze``."""
    return [re.split(r"==| @ ", line)[0] for line in freeze.splitlines() if line and not line.startswith(("-", "#"))]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def run(pair: Pair, tests: Sequence[str], keep: bool) -> Result:
    """Install a pair, and test it."""
    began = time.monotonic()

    def done(outcome: str, installed: str = "", ok: bool = False) -> Result:
        return Result(pair, installed, outcome, ok, time.monotonic() - began)

    found = interpreter(pair.python)
    if found is None:
        return done(f"not run: there is no Python {pair.python} here; pyenv or uv can install it")
    folder = FOLDER / f"python{pair.python}-torch-{pair.torch}"
    shutil.rmtree(folder, ignore_errors=True)
    python = folder / "bin" / "python"
    try:
        _call([found, "-m", "venv", str(folder)])
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
        _call([*pip, torches().get(pair.torch, f"torch=={pair.torch}")])
        brought = pinned(_call([str(python), "-m", "pip", "freeze"]))
        constraints = folder / "constraints.txt"
        pins = without((ROOT / "constraints.txt").read_text(), [*brought, *_PINNED_WITH_FRAMEWORKS])
        oldest = oldest_frameworks() if pair.torch == "oldest" else []
        constraints.write_text(pins + "".join(f"{one}\n" for one in oldest))
        _call([*pip, "-c", str(constraints), "-e", f"{ROOT}[torch,test]"])
        if oldest:
            _call([str(python), "-m", "pip", "uninstall", "--yes", "--quiet", "torchao"])
        installed = _call([str(python), "-c", _ASK]).strip()
        command = [str(python), "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", *tests]
        told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        last = (told.stdout.strip() or told.stderr.strip()).splitlines()[-1].strip("= ")
        if told.returncode:
            click.echo(told.stdout[-6000:] + told.stderr[-2000:])
        return done(last, installed, told.returncode == 0)
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or error.stdout or "").strip().splitlines()
        return done(f"not run: {lines[-1] if lines else f'{error.cmd[0]} ended with {error.returncode}'}")
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def _call(command: Sequence[str]) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout


@click.command()
@click.option("--python", "chosen", multiple=True, help="Test this Python only (3.12); may be repeated.")
@click.option("--torch", "versions", multiple=True, help="oldest, newest or a version; may be repeated.")
@click.option("--keep", is_flag=True, help="Leave the environments in .cache/matrix.")
@click.argument("tests", nargs=-1)
def main(chosen: tuple[str, ...], versions: tuple[str, ...], keep: bool, tests: tuple[str, ...]) -> None:
    """Install every pair of a Python and a torch, and run TESTS there."""
    # A shell makes a background job ignore Ctrl-C, and then the tests that press it would, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    pairs = [Pair(python, torch) for python in chosen or pythons() for torch in versions or torches()]
    results = []
    for pair in pairs:
        click.echo(f"Python {pair.python}, torch {pair.torch} ...")
        results.append(result := run(pair, tests or SELECTION, keep))
        click.echo(f"  {'passed' if result.ok else 'FAILED'} in {result.seconds:.0f} s: {result.outcome}")
    click.echo()
    for result in results:
        name = result.installed or f"Python {result.pair.python}, torch {result.pair.torch}"
        click.echo(f"{'passed' if result.ok else 'FAILED'}  {name}: {result.outcome}")
    raise SystemExit(0 if all(result.ok for result in results) else 1)


if __name__ == "__main__":
    main()
