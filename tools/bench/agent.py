"""An agent beside thread mode: what a Python-bound training loop loses, and how fast a killed one is back.

    python -m tools.bench.agent --megabytes 64 --steps 40

A loop that is busy in Python (which a GIL makes every other thread wait for) saves after every step: not at all, by a
`Writer` in its own process, by an agent. Recovery is timed in a new process from its first line after the imports to
the loaded state: from the agent that the killed trainer has left, and from the store.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

import ckptstore
import ckptstore.agent

__all__ = ["Loop", "measure", "recover"]

_TENSORS: Final = 64


class Loop:
    """What trains: Python work for so long, and arrays that change.

    Attributes:
        state: what is saved.
    """

    def __init__(self, megabytes: int) -> None:
        each = megabytes * (1 << 20) // 4 // _TENSORS
        self.state: dict[str, Any] = {f"w{number}": np.full(each, number, np.float32) for number in range(_TENSORS)}
        self.state["step"] = 0

    def step(self, rounds: int) -> None:
        """One step; the number of rounds says how long it takes."""
        total = 0
        for number in range(rounds):
            total += number & 7
        for number in range(_TENSORS):
            self.state[f"w{number}"][0] += total
        self.state["step"] += 1


def measure(mode: str, url: Path, megabytes: int, steps: int, rounds: int) -> dict[str, float]:
    """One run -> seconds of a step (median), of the whole loop, that `save_async` took (median, greatest).

    Args:
        mode: ``none``, ``thread`` or ``agent``.
    """
    loop = Loop(megabytes)
    writer: Any = None
    if mode == "thread":
        writer = ckptstore.open(url).writer(max_in_flight=2, poll_seconds=None)
    elif mode == "agent":
        writer = ckptstore.agent.writer(url, max_in_flight=2, poll_seconds=None, linger_seconds=5)
    if writer is not None:
        writer.prepare(loop.state)
        for step in (1, 2, 3):  # buffers and files are warm, as in a long run
            writer.save(loop.state, step)
    stalls: list[float] = []
    laps: list[float] = []
    began = time.perf_counter()
    for step in range(10, 10 + steps):
        lap = time.perf_counter()
        loop.step(rounds)
        if writer is not None:
            saving = time.perf_counter()
            writer.save_async(loop.state, step)
            stalls.append(time.perf_counter() - saving)
        laps.append(time.perf_counter() - lap)
    whole = time.perf_counter() - began
    if writer is not None:
        writer.close()
    return {
        "step": statistics.median(laps),
        "loop": whole,
        "stall": statistics.median(stalls) if stalls else 0.0,
        "stall_max": max(stalls, default=0.0),
    }


_TRAINER: Final = """
import os, sys, time
from pathlib import Path
import ckptstore, ckptstore.agent
from tools.bench.agent import Loop
writer = ckptstore.agent.writer(sys.argv[1], max_in_flight=2, linger_seconds=60)
loop = Loop(int(sys.argv[2]))
writer.save(loop.state, 1)
print(writer.agent_pid, flush=True)
os.kill(os.getpid(), 9)
"""
_SUCCESSOR: Final = """
import json, sys, time
import ckptstore, ckptstore.agent, ckptstore.restore.load
import ckptstore.agent.client.agent_writer, ckptstore.agent.client.open_agent_writer
began = time.perf_counter()
if sys.argv[2] == "agent":
    writer = ckptstore.agent.writer(sys.argv[1], max_in_flight=2, linger_seconds=60)
    assert writer.inherited is not None
    opened = time.perf_counter()
    writer.load()
else:
    store = ckptstore.open(sys.argv[1])
    opened = time.perf_counter()
    store.load()
ended = time.perf_counter()
print(json.dumps({"opened": opened - began, "loaded": ended - opened}))
if sys.argv[2] == "agent":
    writer.close()
"""


def _cold(folder: Path) -> None:
    """Drop the store's pages from the page cache, as on a machine that has done other things since."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def recover(source: str, url: Path, megabytes: int) -> dict[str, float]:
    """Kill a trainer -> seconds that its successor takes to connect or open, and to load.

    Args:
        source: ``agent`` or ``store``; for the latter the agent is ended, and the page cache is cold.
    """
    command = [sys.executable, "-c", _TRAINER, str(url), str(megabytes)]
    trainer = subprocess.run(command, capture_output=True, text=True, check=False)
    agent = int(trainer.stdout.split()[0])
    if source == "store":
        death = os.pidfd_open(agent)
        signal.pidfd_send_signal(death, signal.SIGTERM)
        os.close(death)
        time.sleep(1.0)
    _cold(url)
    command = [sys.executable, "-c", _SUCCESSOR, str(url), source]
    found: dict[str, float] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return found


def main() -> int:
    """What ``python -m`` runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=64, help="the state (default 64)")
    parser.add_argument("--steps", type=int, default=40, help="of each run (default 40)")
    parser.add_argument("--milliseconds", type=int, default=150, help="of Python in a step (default 150)")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions, interleaved (default 3)")
    parser.add_argument("--folder", help="where the stores go (default: a temporary folder)")
    options = parser.parse_args()
    loop = Loop(1)
    began = time.perf_counter()
    loop.step(1_000_000)
    rounds = int(1_000_000 * options.milliseconds / 1000 / (time.perf_counter() - began))
    rows: dict[str, list[dict[str, float]]] = {"none": [], "thread": [], "agent": []}
    back: dict[str, list[dict[str, float]]] = {"store": [], "agent": []}
    with tempfile.TemporaryDirectory(prefix="bench-agent-", dir=options.folder) as folder:
        os.environ["CKPTSTORE_RUNTIME_DIR"] = str(Path(folder) / "runtime")
        for turn in range(options.rounds):
            for mode, found in rows.items():
                url = Path(folder) / f"{mode}{turn}"
                found.append(measure(mode, url, options.megabytes, options.steps, rounds))
            for source, times in back.items():
                times.append(recover(source, Path(folder) / f"back-{source}{turn}", options.megabytes))
    base = statistics.median(one["loop"] for one in rows["none"])
    print(f"{options.megabytes} MB, {options.steps} steps, every step saved; medians of {options.rounds}, milliseconds")
    print("mode     step  stall  greatest  loop lost")
    for mode, found in rows.items():
        step, stall, most = (
            1000 * statistics.median(one[name] for one in found) for name in ("step", "stall", "stall_max")
        )
        lost = statistics.median(one["loop"] for one in found) / base - 1
        print(f"{mode:7} {step:5.0f}  {stall:5.1f}  {most:8.1f}  {lost:8.1%}")
    print("recovery  connect or open  load")
    for source, times in back.items():
        opened, loaded = (1000 * statistics.median(one[name] for one in times) for name in ("opened", "loaded"))
        print(f"{source:8}  {opened:15.1f}  {loaded:5.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
