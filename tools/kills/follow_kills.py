"""Kills a follower again and again; it ends with the bits of the run.

    python -m tools.kills.follow_kills --kills 50            # a folder
    python -m tools.kills.follow_kills --kills 50 --s3       # ministack on loopback

A writer process saves fulls, deltas and step diffs, rolls back, is opened again from an earlier checkpoint, and retires
and collects old checkpoints. Beside it followers run and die by SIGKILL at random times: ``ckpt follow --out``, whose
file must be whole after every death, and a process that follows into its own tensors. Whatever either shows is a
checkpoint of the run, bit for bit: the states are a function of term, step and parent, known to both sides. In the end
both reach the newest checkpoint.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import click
import numpy as np

import ckptstore
from ckptstore import Update
from ckptstore.exchange.weight_files import CHECKPOINT_MEMBER
from ckptstore.formats import optim
from ckptstore.formats.sources import NumpySource
from tools.objects.server import serving

__all__ = ["Result", "WrongError", "check", "run"]

_ADAM: Final = optim.AdamW(weight_decay=0.1)
_SHAPE: Final = (120, 50)
_PATIENCE: Final = 120.0


class WrongError(AssertionError):
    """A follower shows something that is not a checkpoint of the run."""


@dataclass(slots=True)
class Result:
    """Counts of a run.

    Attributes:
        kills: followers that were killed, by kind.
        checkpoints: the number that the run saved.
        seen: REFs of checkpoints that were whole after a death, by the kind of follower.
        bases: how often a checkpoint was made from one in memory, or read whole (``from the store``).
    """

    kills: Counter[str] = field(default_factory=Counter)
    checkpoints: int = 0
    seen: set[str] = field(default_factory=set)
    bases: Counter[str] = field(default_factory=Counter)
    branches: int = 0
    terms: int = 0


def first_state() -> dict[str, Any]:
    rng = np.random.default_rng(5)
    adam = {
        "weight": rng.standard_normal(_SHAPE).astype("<f4"),
        "m": np.zeros(_SHAPE, "<f4"),
        "v": np.zeros(_SHAPE, "<f4"),
    }
    return {"adam": adam, "table": rng.integers(0, 9, (300, 20)).astype("<i4"), "step": 0}


def advance(state: dict[str, Any], term: int, step: int) -> list[Update]:
    """Take one step of training, in place -> the tensors that changed."""
    rng = np.random.default_rng([term, step])
    gradient = rng.standard_normal(_SHAPE).astype("<f4")
    numbers = optim.Step(count=step, lr=1e-3)
    adam = state["adam"]
    optim.advance(_ADAM.rule(numbers), [adam["weight"], adam["m"], adam["v"]], gradient)
    state["table"][step % 300] += 1
    state["step"] = step
    return [Update(("adam.weight", "adam.m", "adam.v"), _ADAM, numbers, NumpySource(gradient))]


def digest(state: dict[str, Any]) -> str:
    arrays = [*(state["adam"][name] for name in ("weight", "m", "v")), state["table"]]
    return hashlib.sha256(b"".join(np.ascontiguousarray(one).tobytes() for one in arrays)).hexdigest()


# -- the writer


def write(url: str, told: Path, stop: Path, pause: float, seed: int) -> None:
    """Save until `stop` exists; every checkpoint's digest is written to `told` before it is saved."""
    numbers = random.Random(seed)
    store = ckptstore.open(url, create=True)
    state, parent, life = first_state(), None, 0
    with told.open("a") as log:
        while not stop.exists():
            forms: list[dict[str, Any]] = [
                {},
                {"deltas": 5},
                {"diffs": ckptstore.DiffOptions(full_every=12, batch=1 + numbers.randrange(3), seconds=0.1)},
            ]
            with store.writer(parent, poll_seconds=None, keep=["last:12"], **forms[life % 3]) as writer:
                _saves(writer, store, state, numbers, log, stop, pause)
            life += 1
            parent = "latest"
            if numbers.random() < 0.5:
                parent = numbers.choice(store.checkpoints()).ref
            state = store.load(parent, framework="numpy")
            if numbers.random() < 0.3:
                store.gc()


def _saves(
    writer: Any,
    store: ckptstore.Store,
    state: dict[str, Any],
    numbers: random.Random,
    log: Any,
    stop: Path,
    pause: float,
) -> None:
    pending = []
    for _ in range(4 + numbers.randrange(12)):
        step = state["step"] + 1
        updates = advance(state, writer.term, step)
        log.write(f"{step}@{writer.term} {digest(state)}\n")
        log.flush()
        pending.append(writer.save_async(state, step, updates=updates))
        time.sleep(pause * numbers.random() * 2)
        if stop.exists():
            break
        if numbers.random() < 0.08:
            for one in pending:
                one.result()
            pending.clear()
            back = numbers.choice(store.checkpoints()).ref
            writer.rollback(back)
            state.update(store.load(back, framework="numpy"))
    for one in pending:
        one.result()


# -- followers


def follow_in_memory(url: str, shown: Path) -> None:
    """Follow into tensors of this process; report each checkpoint before the next, so that a kill loses no report."""
    state = first_state()
    with shown.open("a") as log:
        for found in ckptstore.open(url).follow(into=state, poll=0.02):
            log.write(f"{found.info.ref} {digest(state)} {found.base or '-'} {int(found.branched)}\n")
            log.flush()


def _spawned(*words: str, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, *words],
        env=os.environ | environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )


def _killed(process: subprocess.Popen[bytes]) -> None:
    code = process.poll()
    if code is not None:
        assert process.stderr is not None
        raise WrongError(f"a process ended with {code}: {process.stderr.read().decode()[-2000:]}")
    process.send_signal(signal.SIGKILL)
    process.communicate()


def run(url: str, environment: dict[str, str], kills: int, folder: Path, seed: int = 0, pause: float = 0.03) -> Result:
    """Run and kill followers. Raises `WrongError`."""
    numbers, result = random.Random(seed), Result()
    told, shown, stop, file = folder / "told", folder / "shown", folder / "stop", folder / "followed.safetensors"
    shown.touch()
    words = ["-m", "tools.kills.follow_kills", "--role"]
    writer = _spawned(*words, "write", url, str(told), str(stop), str(pause), str(seed), environment=environment)
    try:
        _wait_for(lambda: told.exists() and len(told.read_text().splitlines()) > 3, writer)
        for kill in range(kills):
            kind = "file" if kill % 2 else "memory"
            before = _progress(shown, file)
            follower = _follower(kind, url, file, shown, environment)
            if numbers.random() < 0.8:  # the others die at any moment of their start
                wanted = 1 + numbers.randrange(3)
                _wait_for(lambda: _progress(shown, file) - before >= wanted, follower)  # noqa: B023  # called here
            time.sleep(numbers.random() * 0.8)
            _killed(follower)
            result.kills[kind] += 1
            check(told, shown, file, result)
        stop.touch()
        writer.wait(_PATIENCE)
        assert writer.stderr is not None
        if writer.returncode:
            raise WrongError(f"the writer ended with {writer.returncode}: {writer.stderr.read().decode()[-2000:]}")
        _finish(url, environment, told, shown, file, result)
    finally:
        writer.kill()
        writer.communicate()
    return result


def _follower(kind: str, url: str, file: Path, shown: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    if kind == "memory":
        return _spawned("-m", "tools.kills.follow_kills", "--role", "follow", url, str(shown), environment=environment)
    return _spawned(
        "-m", "ckptstore", "follow", url, "--out", str(file), "--every", "0.02", "--debug", environment=environment
    )


def _progress(shown: Path, file: Path) -> int:
    """A number that grows with each checkpoint that a follower shows."""
    return shown.read_bytes().count(b"\n") + _replaced(file)


_files: dict[int, int] = {}


def _replaced(file: Path) -> int:
    """How many different files have had this name."""
    with contextlib.suppress(FileNotFoundError):
        _files.setdefault(file.stat().st_ino, len(_files))
    return len(_files)


def _wait_for(done: Any, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + _PATIENCE
    while not done():
        if time.monotonic() > end or process.poll() not in (None, 0):
            assert process.stderr is not None
            process.kill()
            raise WrongError(f"timed out: {process.stderr.read().decode()[-2000:]}")
        time.sleep(0.02)


def _digests(told: Path) -> dict[str, set[str]]:
    """REF -> its possible digests: a step that was rolled back before its save is taken again."""
    found: dict[str, set[str]] = {}
    for line in told.read_text().splitlines():
        ref, text = line.split()
        found.setdefault(ref, set()).add(text)
    return found


def _file_digest(file: Path) -> tuple[str, str]:
    from safetensors import safe_open

    with safe_open(file, "numpy") as opened:
        names = ("adam.weight", "adam.m", "adam.v", "table")
        data = b"".join(np.ascontiguousarray(opened.get_tensor(name)).tobytes() for name in names)
        return opened.metadata()[CHECKPOINT_MEMBER], hashlib.sha256(data).hexdigest()


def check(told: Path, shown: Path, file: Path, result: Result) -> None:
    wanted = _digests(told)
    for line in shown.read_text().splitlines():
        if len(words := line.split()) != 4:
            continue  # killed while it wrote the line
        if words[1] not in wanted.get(words[0], ()):
            raise WrongError(f"followed into memory: {words[0]} is not what the run saved")
    if file.exists():
        ref, found = _file_digest(file)
        if found not in wanted.get(ref, ()):
            raise WrongError(f"{file.name} is not {ref} as the run saved it")
        result.seen.add(ref)


def _finish(url: str, environment: dict[str, str], told: Path, shown: Path, file: Path, result: Result) -> None:
    """Both kinds of follower reach the newest checkpoint."""
    with _environment(environment):
        store = ckptstore.open(url)
        newest = store.checkpoint()
        truth = digest(store.load(newest.ref, framework="numpy"))
        result.checkpoints, result.terms = len(_digests(told)), len(store.terms())
    if truth not in _digests(told)[newest.ref]:
        raise WrongError(f"the store's {newest.ref} is not what the run saved")
    for kind in ("memory", "file"):
        follower = _follower(kind, url, file, shown, environment)
        try:
            if kind == "memory":
                _wait_for(lambda: shown.read_text().endswith("\n") and newest.ref in _last(shown), follower)
            else:
                _wait_for(lambda: file.exists() and _file_digest(file)[0] == newest.ref, follower)
        finally:
            follower.kill()
            follower.communicate()
    check(told, shown, file, result)
    if _file_digest(file) != (newest.ref, truth) or _last(shown)[:2] != [newest.ref, truth]:
        raise WrongError(f"a follower did not end with {newest.ref}")
    for line in shown.read_text().splitlines():
        if len(words := line.split()) == 4:
            result.seen.add(words[0])
            result.bases["from the store" if words[2] == "-" else "from what was held"] += 1
            result.branches += words[3] == "1"


def _last(shown: Path) -> list[str]:
    lines = shown.read_text().splitlines()
    return lines[-1].split() if lines else []


@contextlib.contextmanager
def _environment(more: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(more)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--kills", default=50, help="How often a follower is killed.")
@click.option("--s3", is_flag=True, help="In a bucket of ministack (or CKPTSTORE_TEST_S3_URL), not in a folder.")
@click.option("--seed", default=0)
@click.option("--role", hidden=True)
@click.argument("words", nargs=-1)
def main(kills: int, s3: bool, seed: int, role: str | None, words: tuple[str, ...]) -> None:
    """Kill followers of a run, and compare their checkpoints with it."""
    if role == "write":
        write(words[0], Path(words[1]), Path(words[2]), float(words[3]), int(words[4]))
        return
    if role == "follow":
        with contextlib.suppress(KeyboardInterrupt):
            follow_in_memory(words[0], Path(words[1]))
        return
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        if s3:
            (Path(folder) / "server").mkdir()
            server = stack.enter_context(serving(Path(folder) / "server"))
            result = run(server.url(), server.environment(), kills, Path(folder), seed)
        else:
            result = run(f"{folder}/store", {}, kills, Path(folder), seed)
    document = {
        "kills": dict(result.kills),
        "checkpoints": result.checkpoints,
        "terms": result.terms,
        "handed over": dict(result.bases),
        "branches": result.branches,
        "different checkpoints": len(result.seen),
        "seconds": round(time.monotonic() - began, 1),
    }
    click.echo(json.dumps(document))


if __name__ == "__main__":
    main()
