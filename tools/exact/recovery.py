"""Train and save every step; restore steps; resume from them in a new process; compare bits all the way."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import ckptstore
from tools.exact.training import Recipe, Training, fingerprint

HORIZON = 20
"""Steps of a resumed run that are compared with the first one."""


@dataclass(frozen=True, slots=True)
class Trained:
    """The results of a run: the state's fingerprint after each step (by step), the store's contents, seconds."""

    fingerprints: Mapping[int, str]
    parameters: int
    first_loss: float
    last_loss: float
    stored_bytes: int
    seconds: float
    seconds_in_saves: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """How many steps were compared, which differed, and the average time of a step in seconds."""

    compared: int
    wrong: tuple[int, ...]
    seconds: float


def train(url: str, recipe: Recipe, options: ckptstore.DiffOptions) -> Trained:
    """Train `recipe` to its end, every step a checkpoint in a new store at `url`."""
    store = ckptstore.open(url)
    run = Training(recipe)
    fingerprints: dict[int, str] = {}
    saving, first = 0.0, 0.0
    began = time.monotonic()
    with store.writer(parent=None, diffs=options, poll_seconds=None) as writer:
        for step in range(1, recipe.steps + 1):
            updates = run.run_step()
            state = run.state()
            fingerprints[step] = fingerprint(state)
            before = time.monotonic()
            writer.save_async(state, step, updates=updates)
            saving += time.monotonic() - before
            first = first or run.loss
    return Trained(
        fingerprints,
        sum(parameter.numel() for parameter in run.model.parameters()),
        first,
        run.loss,
        sum(path.stat().st_size for path in Path(url).rglob("*.safetensors")),
        time.monotonic() - began,
        saving,
    )


def restore(url: str, steps: Sequence[int], fingerprints: Mapping[int, str]) -> Outcome:
    """Load each of `steps` and compare all of its state."""
    store = ckptstore.open(url)
    wrong, seconds = [], 0.0
    for step in steps:
        began = time.monotonic()
        state = store.load(step)
        seconds += time.monotonic() - began
        if fingerprint(state) != fingerprints[step]:
            wrong.append(step)
    return Outcome(len(steps), tuple(wrong), seconds / max(1, len(steps)))


def resume(url: str, recipe: Recipe, steps: Sequence[int], fingerprints: Mapping[int, str]) -> Outcome:
    """Continue from each of `steps` in a new process, and compare the next steps with the first run's."""
    began = time.monotonic()
    request = json.dumps({"url": url, "recipe": asdict(recipe), "steps": list(steps)})
    command = [sys.executable, "-m", "tools.exact.recovery"]
    done = subprocess.run(command, input=request, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the resuming process failed: {done.stderr}")
    wrong = []
    for step, found in json.loads(done.stdout).items():
        wanted = [fingerprints[later] for later in range(int(step), int(step) + 1 + len(found)) if later > int(step)]
        if not found or found != wanted:
            wrong.append(int(step))
    return Outcome(len(steps), tuple(wrong), (time.monotonic() - began) / max(1, len(steps)))


def choose(recipe: Recipe, count: int, horizon: int = 0, seed: int = 1) -> list[int]:
    """`count` different random steps that are followed by at least `horizon` steps of the run."""
    last = recipe.steps - horizon
    return sorted(random.Random(seed).sample(range(1, last + 1), min(count, last)))


def _resumed(url: str, recipe: Recipe, step: int) -> list[str]:
    run = Training(recipe)
    run.load(ckptstore.open(url).load(step))
    found = []
    for _ in range(HORIZON):
        run.run_step()
        found.append(fingerprint(run.state()))
    return found


def _main() -> None:
    request = json.loads(sys.stdin.read())
    recipe = Recipe(**request["recipe"])
    found = {step: _resumed(request["url"], recipe, step) for step in request["steps"]}
    print(json.dumps(found))


if __name__ == "__main__":
    _main()
