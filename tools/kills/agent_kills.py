"""SIGKILL of trainers and their agents at random moments: nothing acknowledged is lost, every bit is restored.

    python -m tools.kills.agent_kills --kills 200

Each life is a process that trains and saves every step through an agent. At a random moment the trainer, the agent, or
both are killed. Then:

- the next life continues with a state that is, bit for bit, the result of training at its step;
- no acknowledged step is beyond it;
- if only the trainer was killed, at most the step in flight is lost, and the agent and its term continue;
- if only the agent was killed, training continues in the same life, and the lost saves raise errors;
- in the end every acknowledged checkpoint is in the store, and loads with the right bits.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

import ckptstore
import ckptstore.agent
from ckptstore.agent import AgentRestartWarning
from ckptstore.errors import AgentError, AgentLostError
from ckptstore.formats.history.checkpoint_ref import node_of
from ckptstore.formats.optim import AdamW, Step, advance
from ckptstore.formats.sources import NumpySource
from ckptstore.host.caller_warnings import LostStepsWarning
from tools.crash.scenario import Violation

__all__ = ["MODES", "Campaign", "Truth", "campaign"]

MODES: Final[dict[str, dict[str, Any]]] = {
    "full": {"max_in_flight": 2},
    "delta": {"deltas": ckptstore.DeltaOptions(interval=5), "max_in_flight": 2},
    "gradient": {"diffs": ckptstore.DiffOptions(full_every=20, batch=4, seconds=None), "max_in_flight": 3},
}
VICTIMS: Final = ("trainer", "agent", "both")
_RULE: Final = AdamW(beta1=0.9, beta2=0.95, weight_decay=0.1)
_SHAPE: Final = (200, 333)
_LONGEST: Final = 0.6
"""Longest duration of a life in seconds, from its first save."""


class Training:
    """Training as far as a store can tell: one parameter that AdamW updates."""

    def __init__(self, state: dict[str, Any] | None = None) -> None:
        chance = np.random.default_rng(0)
        self.state = state or {
            "weight": chance.normal(0, 0.02, _SHAPE).astype("<f4"),
            "m": np.zeros(_SHAPE, "<f4"),
            "v": np.zeros(_SHAPE, "<f4"),
            "step": 0,
        }

    def train(self) -> list[ckptstore.Update]:
        """One step -> the update of the optimizer. All numbers depend only on the step."""
        step = self.state["step"] = self.state["step"] + 1
        gradient = np.random.default_rng(step).normal(0, 1e-3, _SHAPE).astype("<f4")
        numbers = Step(step, 1e-3)
        slots = ("weight", "m", "v")
        advance(_RULE.rule(numbers), [self.state[slot] for slot in slots], gradient.copy())
        return [ckptstore.Update(slots, _RULE, numbers, NumpySource(gradient))]

    def digest(self) -> str:
        """The digest of every bit."""
        found = hashlib.sha256(str(self.state["step"]).encode())
        for slot in ("weight", "m", "v"):
            found.update(self.state[slot].tobytes())
        return found.hexdigest()


class Truth:
    """The digests of the training states, by step; each computed once."""

    def __init__(self) -> None:
        self._training = Training()
        self._digests = [self._training.digest()]

    def __getitem__(self, step: int) -> str:
        while len(self._digests) <= step:
            self._training.train()
            self._digests.append(self._training.digest())
        return self._digests[step]


def _live(url: str, mode: str, say: Callable[[str], None]) -> None:
    """One life of a trainer, in its own process, until it is killed."""
    writer = ckptstore.agent.writer(url, linger_seconds=120, **MODES[mode])
    state = writer.load(framework="numpy")
    training = Training(state)
    kept = int(writer.inherited is not None)
    say(f"up {writer.agent_pid} {writer.term} {writer.step} {kept} {training.digest()}")
    pending: list[ckptstore.PendingSave] = []
    agent = writer.agent_pid
    while True:
        updates = training.train()
        step = training.state["step"]
        say(f"begin {step}")
        try:
            pending.append(writer.save_async(training.state, step, updates=updates if mode == "gradient" else None))
        except AgentLostError:
            say(f"lost {step}")
        else:
            say(f"given {step}")
        if writer.agent_pid != agent:
            agent = writer.agent_pid
            say(f"agent {agent} {writer.term}")
        for one in [one for one in pending if one.done()]:
            pending.remove(one)
            try:
                say(f"durable {one.result().ref}")
            except AgentError:
                say(f"lost {one.step}")


@dataclass(slots=True)
class Campaign:
    """Lives of one run, one after another.

    Attributes:
        url: the store.
        mode: one of `MODES`.
        kills: how often each victim was killed.
        kept: how many lives continued from an agent's memory.
        durable: refs that were acknowledged.
        newest: the highest step of those.
    """

    url: str
    mode: str
    kills: Counter[str] = field(default_factory=Counter)
    kept: int = 0
    durable: set[str] = field(default_factory=set)
    newest: int = 0
    _truth: Truth = field(default_factory=Truth)
    _given: int = 0
    _began: int = 0
    _victim: str = "both"
    _agent: int | None = None
    _term: int = 0

    def life(self, chance: random.Random) -> None:
        """Run one life, and kill it. Raises `Violation`."""
        reading, writing = os.pipe()
        trainer = os.fork()
        if trainer == 0:
            os.close(reading)
            code = 1
            try:
                warnings.simplefilter("error")
                for expected in (AgentRestartWarning, LostStepsWarning):
                    warnings.simplefilter("ignore", expected)
                _live(self.url, self.mode, lambda text: os.write(writing, f"{text}\n".encode()) and None)
            except BaseException as error:  # noqa: BLE001  # the parent says so
                with contextlib.suppress(OSError):
                    os.write(writing, f"died {type(error).__name__}: {error}\n".replace("\r", " ").encode())
            finally:
                os._exit(code)
        os.close(writing)
        with os.fdopen(reading) as lines:
            try:
                self.begin(lines.readline())
                self._strike(trainer, chance)
            finally:
                _kill(trainer, signal.SIGKILL)
                os.waitpid(trainer, 0)
            for line in lines:
                self._hear(line.split())

    def expect(self, victim: str, *, agent: int, term: int, given: int, newest: int) -> None:
        """Tell the campaign how the previous life ended."""
        self._victim, self._agent, self._term, self._given, self.newest = victim, agent, term, given, newest

    def begin(self, line: str) -> None:
        """Judge the first message of a life. Raises `Violation`."""
        words = line.split()
        if not words or words[0] != "up":
            raise Violation(f"a life did not begin: {line!r}")
        agent, term, step, kept = map(int, words[1:5])
        if words[5] != self._truth[step]:
            raise Violation(f"step {step} was restored with wrong bits (kept: {kept})")
        if step < self.newest:
            raise Violation(f"step {self.newest} was acknowledged, and the next life begins with {step}")
        if self._victim == "trainer":
            if (agent, term) != (self._agent, self._term):
                raise Violation(f"the agent {self._agent} of term {self._term} should continue, not {agent} of {term}")
            if not kept and self._given > self._began + 1:  # whether its first step was handed over is unknown
                raise Violation(f"step {self._given} was handed over, and the agent kept nothing")
            if step < self._given - 1:
                raise Violation(f"step {self._given} was handed over, and the next life begins with {step}")
        self.kept += kept
        self._agent, self._term, self._began, self._given = agent, term, step, step

    def _strike(self, trainer: int, chance: random.Random) -> None:
        victim = chance.choice(VICTIMS)
        time.sleep(chance.random() * _LONGEST)
        if victim != "trainer":
            _kill(self._agent, signal.SIGKILL)
            if victim == "agent":
                time.sleep(2.0 + chance.random())  # a new agent starts
                victim = "agent, then trainer"
        _kill(trainer, signal.SIGKILL)
        self.kills[victim] += 1
        self._victim = "trainer" if victim == "trainer" else "both"

    def _hear(self, words: list[str]) -> None:
        match words:
            case ["given", step]:
                self._given = int(step)
            case ["durable", ref]:
                self.durable.add(ref)
                self.newest = max(self.newest, node_of(ref)[1])
            case ["agent", agent, term]:
                self._agent, self._term = int(agent), int(term)
            case ["begin" | "lost", _]:
                pass
            case _:
                raise Violation(f"a life ended without a kill: {' '.join(words)}")

    def close(self) -> None:
        """End the last agent, and check every checkpoint. Raises `Violation`."""
        _kill(self._agent, signal.SIGTERM)
        store = ckptstore.open(self.url)
        there = {info.ref: info for info in store.checkpoints()}
        if missing := self.durable - set(there):
            raise Violation(f"acknowledged, and not in the store: {sorted(missing)}")
        for ref, info in there.items():
            if Training(store.load(ref, framework="numpy")).digest() != self._truth[info.step]:
                raise Violation(f"{ref} loads with other bits")


def _kill(pid: int | None, number: int) -> None:
    """Send a signal to one process; never to a group of them, as numbers below 1 would."""
    if pid is not None and pid > 1:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def campaign(folder: Path, mode: str, kills: int, seed: int) -> Campaign:
    """Kill `kills` times. Raises `Violation`."""
    chance = random.Random(seed)
    Training().train()  # imports and compilation happen once, not in every life
    one = Campaign(str(folder / mode), mode)
    try:
        for _ in range(kills):
            one.life(chance)
    finally:
        one.close()
    return one


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60, help="over all modes")
    parser.add_argument("--mode", choices=sorted(MODES), action="append", help="default: every one")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    modes = options.mode or sorted(MODES)
    with tempfile.TemporaryDirectory(prefix="agent-kills-") as folder:
        os.environ["CKPTSTORE_RUNTIME_DIR"] = str(Path(folder) / "runtime")
        for number, mode in enumerate(modes):
            done = campaign(Path(folder), mode, options.kills // len(modes), options.seed + number)
            killed = ", ".join(f"{victim} {count}" for victim, count in sorted(done.kills.items()))
            print(f"{mode}: killed {killed}; {done.kept} lives continued from an agent's memory; newest {done.newest}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
