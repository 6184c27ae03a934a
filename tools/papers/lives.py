"""Training under failures: a real run, killed with SIGKILL at given times and started again until it has all its steps.

The wasted time is what the run took beyond its iterations without saves and failures: saving, restoring, and training
again what was lost. The start of a process (fork, model) is the same for all ways, and is reported apart: a scaled run
is killed every few seconds, so that it would hide the rest.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tools.bench.training.training_cases import ROOT, environment
from tools.goodput.life import Start, begun
from tools.warm import Script, Warm

__all__ = ["Life", "Way", "lived", "moments", "starting"]


@dataclass(frozen=True, slots=True)
class Way:
    """How a run saves.

    Attributes:
        strategy: a name of `tools.bench.training.training_worker.ALL`.
        interval: iterations from one save to the next.
        full_every, batch: of ways with differences.
        hardware: a failure takes the agent, too; else it survives the trainer.
        label: for tables.
    """

    strategy: str
    interval: int
    label: str
    full_every: int = 100
    batch: int | None = None
    hardware: bool = True


@dataclass(slots=True)
class Life:
    """A run of one or more lives. Seconds.

    Attributes:
        seconds: of training, saving and restoring until the last step. Starts of processes, and the opening of the
            store in the first life, are left out.
        starts: from each kill (or the beginning) to the new process's model.
        restores: from the model to the restored state.
        failures: how many kills.
        lost: iterations trained again.
        restored, equal: restored states, and how many of them were what an earlier life had at that step.
        digest: of the last state.
    """

    way: Way
    steps: int
    seconds: float = 0.0
    starts: list[float] = field(default_factory=list)
    restores: list[float] = field(default_factory=list)
    failures: int = 0
    lost: int = 0
    restored: int = 0
    equal: int = 0
    digest: str = ""

    def wasted(self, iteration: float) -> float:
        """Seconds beyond the iterations themselves."""
        return self.seconds - self.steps * iteration

    def effective(self, iteration: float) -> float:
        """The share of the time that trained (the papers' effective training time ratio)."""
        return self.steps * iteration / self.seconds

    def numbers(self) -> dict[str, Any]:
        """For the JSON."""
        names = ("steps", "seconds", "starts", "restores", "failures", "lost", "restored", "equal")
        found = {name: getattr(self, name) for name in names}
        return found | {"strategy": self.way.strategy, "interval": self.way.interval, "hardware": self.way.hardware}


def moments(mtbf: float, seed: int, most: float) -> list[float]:
    """Moments of failures, exponential with a mean of `mtbf` iterations, up to `most` iterations."""
    chance, now, found = random.Random(seed), 0.0, []
    while (now := now + chance.expovariate(1 / mtbf)) < most:
        found.append(now)
    return found


def lived(warm: Warm, way: Way, shape: Sequence[int], steps: int, kills: Sequence[float], folder: Path) -> Life:
    """Train `steps` steps in as many lives as it takes.

    Args:
        kills: when the living process is killed, in iterations that the run has computed, those again included: 3.5 is
            in the middle of the fourth. So all ways fail equally often, however busy the machine is.

    Raises:
        WorkerError: a life failed.
    """
    found, folder = Life(way, steps), folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    waiting, computed, reached, died = list(kills), 0, 0, time.monotonic()
    states: dict[int, str] = {}
    while True:
        said = _Said()
        with begun(starting(warm, way, shape, steps, folder), folder.parent) as life:
            for document in life.says():
                computed += said.take(document)
                due = waiting and computed >= int(waiting[0])
                if due and not life.killed and said.restored and not said.trained:
                    time.sleep(waiting.pop(0) % 1 * said.iteration)
                    life.kill()  # what it has printed until then still counts
                    if way.hardware and said.agent is not None:
                        _kill_agent(said.agent)
            life.done = bool(said.digest)
        killed = 0.0 if said.digest else life.killed  # it may have been faster than the signal
        if said.began:
            found.starts.append(said.began - died)
            since = said.began if found.failures else said.restored  # opening a new store recovers nothing
            found.seconds += (said.trained or killed or said.last) - since - said.spent
        if said.restored:
            found.restores.append(said.restored - said.began)
            found.lost += max(0, reached - said.first)
            if said.first:
                found.restored += 1
                found.equal += said.state == states.get(said.first)
        states |= said.states
        reached = max(reached, said.step)
        if said.digest:
            found.digest = said.digest
            return found
        found.failures += 1
        died = killed


@dataclass(slots=True)
class _Said:
    """What a life has printed so far; moments of the monotonic clock, 0: not yet."""

    began: float = 0.0
    restored: float = 0.0
    last: float = 0.0
    trained: float = 0.0
    iteration: float = 0.0
    first: int = 0
    step: int = 0
    agent: int | None = None
    digest: str = ""
    state: str = ""
    states: dict[int, str] = field(default_factory=dict)
    spent: float = 0.0

    def take(self, document: dict[str, Any]) -> int:
        """Note a line -> the iterations that it reports."""
        self.spent += document.get("spent", 0.0)
        if "begun" in document:
            self.began = self.last = document["begun"]
        elif "restored" in document:
            self.restored = self.last = document["restored"]
            self.first = self.step = document["step"]
            self.agent, self.state = document["agent"], document["state"]
        elif "noted" in document:
            self.states[document["noted"]] = document["state"]
        elif "digest" in document:
            self.digest, self.trained = document["digest"], document["trained"]
        elif "at" in document:
            self.step, now = document["step"], document["at"]
            self.iteration, self.last = now - self.last, now
            return 1
        return 0


def _kill_agent(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    while Path(f"/proc/{pid}").exists() and _running(pid):
        time.sleep(0.002)


def _running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def starting(warm: Warm, way: Way, shape: Sequence[int], steps: int, folder: Path) -> Start:
    """What starts the process of a life that trains up to a step. `shape`: width, layers, batch, context."""
    width, layers, batch, context = map(str, shape)
    words = [sys.executable, "-W", "ignore", "-m", "tools.bench.training.training_worker", "live", way.strategy]
    words += ["--dir", str(folder), "--width", width, "--layers", layers, "--tokens", batch, context]
    words += ["--until", str(steps), "--note", "--interval", str(way.interval), "--full-every", str(way.full_every)]
    words += [] if way.batch is None else ["--batch", str(way.batch)]

    def start(_rank: int, trouble: IO[str]) -> Script:
        return warm.start(words, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=trouble, text=True)

    return start
