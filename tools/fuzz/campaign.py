"""Fuzzes the targets, each in its own process, so that even a crash of the interpreter is only a finding."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

__all__ = ["Engine", "Result", "campaign", "preferred_engine"]

Engine = Literal["plain", "atheris"]
_WORTH_INSTRUMENTING: Final = 10.0
"""Seconds per target below which loading with instrumentation takes too large a part."""
_GRACE: Final = 60.0
_SLOWEST: Final = 30
"""Seconds of wall time for each of CPU time, on a busy machine."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of fuzzing one target.

    Attributes:
        runs: inputs run; `accepted` of them were valid.
        kinds: different outcomes seen.
        cpu: seconds of CPU time.
        found: regression files written.
        messages: the violation of each.
    """

    target: str
    engine: Engine
    runs: int
    accepted: int
    kinds: int
    cpu: float
    found: tuple[Path, ...]
    messages: tuple[str, ...]


def preferred_engine(seconds: float) -> Engine:
    """``atheris`` if it is installed and there is time to load it."""
    return "atheris" if seconds >= _WORTH_INSTRUMENTING and importlib.util.find_spec("atheris") else "plain"


def campaign(
    targets: Sequence[str],
    seconds: float,
    *,
    jobs: int = 2,
    seed: int = 0,
    engine: Engine | None = None,
    cpu: bool = False,
    keep: Path,
    tell: Callable[[Result], None] = lambda _: None,
) -> list[Result]:
    """Fuzz each of `targets` for its share of `seconds`.

    Args:
        seconds: of wall time in all, with `jobs` processes at once.
        engine: None: `preferred_engine`.
        cpu: `seconds` are seconds of CPU time in all: for busy machines.
        keep: folder for findings, one folder per target.
        tell: called with each result.
    """
    share = seconds * (1 if cpu else jobs) / len(targets)

    def one(target: str) -> Result:
        result = _fuzz(target, share, seed, engine or preferred_engine(share), keep, cpu)
        tell(result)
        return result

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, targets))


def _fuzz(target: str, seconds: float, seed: int, engine: Engine, keep: Path, cpu: bool) -> Result:
    with tempfile.TemporaryDirectory(prefix="ckptstore-fuzz-") as name:
        folder = Path(name)
        command = [sys.executable, "-m", "tools.fuzz.worker", target, f"--seconds={seconds}", f"--seed={seed}"]
        command += [f"--engine={engine}", f"--folder={folder}"]
        command += ["--cpu"] if cpu else []
        limit = seconds * (_SLOWEST if cpu else 1) + _GRACE
        died = ""
        with (folder / "log").open("wb") as log:
            try:
                done = subprocess.run(command, stdout=log, stderr=log, timeout=limit, check=False)
                if done.returncode:
                    died = f"the process ended with {done.returncode}"
            except subprocess.TimeoutExpired:
                died = f"did not end within {limit:.0f} s"
        messages = {path: path.with_suffix(".txt").read_text() for path in _findings(folder)}
        if died:
            messages |= _last_input(folder, died)
        kept = tuple(_keep(path, keep / target) for path in messages)
        numbers = json.loads((folder / "stats.json").read_text()) if (folder / "stats.json").exists() else {}
        return Result(
            target,
            engine,
            numbers.get("runs", 0),
            numbers.get("accepted", 0),
            numbers.get("kinds", 0),
            numbers.get("cpu", 0.0),
            kept,
            tuple(messages.values()),
        )


def _findings(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("found-*") if path.suffix != ".txt")


def _last_input(folder: Path, died: str) -> dict[Path, str]:
    """The input that the process was running when it died, as a finding; its log if it never ran anything."""
    tail = (folder / "log").read_text(errors="replace")[-1500:]
    current = folder / "current"
    if not current.exists():
        raise RuntimeError(f"fuzzing did not start: {died}\n{tail}")
    data = current.read_bytes()
    path = folder / "found-last"
    path.write_bytes(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return {path: f"{died}\n{tail}"}


def _keep(path: Path, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    data = path.read_bytes()
    target = folder / hashlib.blake2b(data, digest_size=6).hexdigest()
    target.write_bytes(data)
    return target
