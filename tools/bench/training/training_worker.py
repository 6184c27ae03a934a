"""One run of the training benchmark, in its own process.

``python -m tools.bench.training.training_worker TASK STRATEGY`` has these tasks.

``loop`` trains, saves, measures, restores and compares; ``turns`` does so for as many steps at a time as it reads;
``kill`` trains until it is killed, and reports each step; ``live`` does so from the newest checkpoint on, perhaps up to
a step, and tells when its model exists (``begun``), what it has restored, and when each step was done; ``digests``
trains without saves, and notes the digest of every step; ``restore`` reports the newest restorable checkpoint,
``recover`` continues to a step. Each prints JSON; `training` starts them.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch

from tools.baselines import medium
from tools.baselines.catalog import BASELINES
from tools.bench.measure import Measurement
from tools.bench.training.pccheck_settings import PCCHECK
from tools.bench.training.step_profile import PHASES, StepParts, means
from tools.bench.training.training_checkpointers import CHECKPOINTERS, Checkpointed
from tools.bench.training.training_loop import Shape, Trainer, digest, divide_cores, pin
from tools.bench.training.training_strategies import STRATEGIES, AbsentError, Ledger, Options, Strategy

ALL: Final = {**STRATEGIES, **CHECKPOINTERS, **BASELINES, **PCCHECK}
WARM_STEPS: Final = 3
DIGESTS: Final = "digests.txt"
LIVED: Final = "lived"
"""A file that a job makes in its first life."""


@dataclass(slots=True)
class Run:
    """A trainer with a strategy, and the times of its steps.

    Attributes:
        iterations: seconds of every step, saves included.
        threads: processor seconds of the training thread, likewise.
        stalls: seconds for which the strategy blocked the loop, by interval: waits, calls, gates.
        phases: of every step, the wall and processor seconds of `PHASES`.
        parts: likewise of `StepParts`, if they are measured.
    """

    trainer: Trainer
    strategy: Strategy
    ledger: Ledger
    interval: int
    iterations: list[float] = field(default_factory=list)
    threads: list[float] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)
    phases: list[dict[str, tuple[float, float]]] = field(default_factory=list)
    parts: list[dict[str, tuple[float, float]]] = field(default_factory=list)
    measured: StepParts | None = None
    _stalled: float = 0.0

    def take(self, told: Callable[[int], None] = lambda _step: None) -> None:
        """One step of the loop. `told` is called before each save."""
        trainer, strategy = self.trainer, self.strategy
        began, busy = time.perf_counter(), time.thread_time()
        marks = [(began, busy)]
        trainer.backward()
        marks.append((time.perf_counter(), time.thread_time()))
        waiting = time.perf_counter()
        strategy.before_update()
        stalled = time.perf_counter() - waiting
        hidden = strategy.hidden_wait()
        trainer.update()
        stalled += strategy.hidden_wait() - hidden
        marks.append((time.perf_counter(), time.thread_time()))
        at_interval = trainer.step % self.interval == 0
        if at_interval or strategy.every_step:
            told(trainer.step)
            saving = time.perf_counter()
            self.ledger.begin(trainer.step)
            strategy.save(trainer.step)
            stalled += time.perf_counter() - saving
        marks.append((time.perf_counter(), time.thread_time()))
        trainer.clear()
        marks.append((time.perf_counter(), time.thread_time()))
        self.iterations.append(marks[-1][0] - began)
        self.threads.append(marks[-1][1] - busy)
        spans = pairwise(marks)
        self.phases.append(
            {name: (end[0] - start[0], end[1] - start[1]) for name, (start, end) in zip(PHASES, spans, strict=True)}
        )
        if self.measured is not None:
            self.parts.append(self.measured.take())
        self._stalled += stalled
        if at_interval:
            self.stalls.append(self._stalled)
            self._stalled = 0.0

    def until(self, step: int) -> None:
        """Train up to a step."""
        while self.trainer.step < step:
            self.take()


def begin(asked: argparse.Namespace, shape: Shape, measurement: Measurement | None = None) -> Run:
    """A trainer that has taken its first steps, and then the strategy."""
    trainer = Trainer(shape, asked.device)
    trainer.step = asked.first
    for _ in range(WARM_STEPS):
        trainer.take()
    gc.collect()
    if measurement is not None:
        measurement.__enter__()  # from here on memory is the strategy's
    ledger = Ledger()
    options = Options(asked.interval, asked.full_every, asked.batch)
    strategy = ALL[asked.strategy](asked.dir, trainer, options, ledger)
    return Run(trainer, strategy, ledger, asked.interval)


def loop(asked: argparse.Namespace, shape: Shape) -> dict[str, Any]:
    """Measure `asked.steps` steps, after enough saves for buffers to be warm."""
    measurement = Measurement()
    run = begin(asked, shape, measurement)
    warm = -(-(WARM_STEPS + 1) // asked.interval) * asked.interval
    run.until(warm)
    run.strategy.settle()
    first = run.stalls[0]
    run.until(warm + 2 * asked.interval if asked.interval <= 2 else warm + asked.interval)
    run.strategy.settle()
    os.sync()  # earlier writes do not count in the measurement
    start = run.trainer.step
    run.iterations.clear()
    run.stalls.clear()
    began, busy = time.perf_counter(), time.thread_time()
    run.until(start + asked.steps)
    wall, busy = time.perf_counter() - began, time.thread_time() - busy
    run.strategy.settle()
    drain = time.perf_counter() - began - wall
    measurement.__exit__(None, None, None)
    trained = digest(run.trainer.state())
    step = run.trainer.step
    run.strategy.close()
    files = [path for path in asked.dir.rglob("*") if path.is_file()]
    saves = step // asked.interval - WARM_STEPS // asked.interval  # of a strategy that saves every step: intervals
    durable = run.ledger.seconds(start)
    result = {
        "iterations_per_s": asked.steps / wall,
        "iteration_s": wall / asked.steps,
        "thread_s": busy / asked.steps,
        "median_iteration_s": statistics.median(run.iterations),
        "stall_s": statistics.median(run.stalls) if run.stalls else 0.0,
        "worst_stall_s": max(run.stalls, default=0.0),
        "first_stall_s": first,
        "drain_s": drain,
        "peak_rss": measurement.peak_rss,
        "bytes_per_save": sum(path.stat().st_size for path in files) / max(1, saves),
        "saves": len(durable),
        "state_bytes": 12 * run.trainer.parameters,
    }
    if durable:
        result |= {"durable_s": statistics.median(durable), "worst_durable_s": max(durable)}
    if not asked.strategy.startswith("none"):
        result |= restored(asked, shape, step, trained)
    return result


def turns(asked: argparse.Namespace, shape: Shape) -> dict[str, Any]:
    """Train as many steps as each line of the standard input says, and report their times; 0: restore, and compare.

    Between two turns no save is in flight.
    """
    run = begin(asked, shape)
    if asked.profile:
        run.measured = StepParts()
        run.measured.install()
    run.until(run.trainer.step + WARM_STEPS + 1)
    run.until(_whole(run))  # its first save is not measured
    run.strategy.settle()
    os.sync()
    say({"ready": True})
    for line in sys.stdin:
        if not (steps := int(line)):
            break
        for one in (run.iterations, run.threads, run.phases, run.parts):
            one.clear()  # type: ignore[attr-defined]  # lists of several kinds
        pid = getattr(run.strategy, "agent_pid", None)
        before = 0.0 if pid is None else _processor(pid)
        run.until(run.trainer.step + steps)
        run.strategy.settle()
        agent = {} if pid is None else {"agent": (_processor(pid) - before) / steps}
        counted = {"phases": means(run.phases[1:] or run.phases), "parts": means(run.parts[1:] or run.parts)}
        say({"iterations": run.iterations, "threads": run.threads} | counted | agent)
    run.until(_whole(run))
    run.strategy.settle()
    trained, step = digest(run.trainer.state()), run.trainer.step
    run.strategy.close()
    return {} if asked.strategy.startswith("none") else restored(asked, shape, step, trained)


def _whole(run: Run) -> int:
    """The next step that is saved, or the present one."""
    return -(-run.trainer.step // run.interval) * run.interval


def _processor(pid: int) -> float:
    """The processor seconds of a process so far."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")


def restored(asked: argparse.Namespace, shape: Shape, step: int, trained: str) -> dict[str, float]:
    """Restore into another trainer, and compare. Raises `RuntimeError` if a bit differs; a lossy one has a distance."""
    found = restore(asked, shape)
    if found["step"] != step:
        raise RuntimeError(f"restored step {found['step']}, trained to step {step}")
    if found["digest"] != trained and not ALL[asked.strategy].lossy:
        raise RuntimeError(f"the restored state of step {step} differs from the one that was trained")
    return {"restore_s": found["seconds"]} | {name: found[name] for name in ("distance",) if name in found}


def restore(asked: argparse.Namespace, shape: Shape) -> dict[str, Any]:
    """The newest complete checkpoint: its step, the digest of its state, seconds to load it (files may be cached)."""
    other = Trainer(shape, asked.device, seed=2)
    other.take()  # so that there are moments to load into
    began = time.perf_counter()
    kind = ALL[asked.strategy]
    step = kind.restore(asked.dir, other)
    seconds = time.perf_counter() - began
    found = {"step": step, "digest": None if step is None else digest(other.state()), "seconds": seconds}
    return found | lost(other, Trainer(shape, asked.device), asked.first) if kind.lossy and step is not None else found


def lost(restored: Trainer, trained: Trainer, first: int) -> dict[str, Any]:
    """What a lossy checkpoint has lost: `trained` takes the steps of the restored one again.

    Returns:
        ``loss`` and ``loss_trained``: of the next step's data, with the restored and with the trained weights;
        ``distance``: of the weights from the trained ones, relative to these; ``differing``: the part of the weights
        that differ.
    """
    trained.step = first
    while trained.step < restored.step:
        trained.take()
    mine = torch.cat([one.detach().flatten() for one in restored.model.parameters()])
    its = torch.cat([one.detach().flatten() for one in trained.model.parameters()])
    with torch.no_grad():
        losses = {"loss": restored.loss().item(), "loss_trained": trained.loss().item()}
    distance = ((mine - its).norm() / its.norm()).item()
    return losses | {"distance": distance, "differing": (mine != its).double().mean().item()}


def recover(asked: argparse.Namespace, shape: Shape) -> dict[str, Any]:
    """Restore the newest state, and train to step `asked.steps`: the steps that a killed trainer has lost.

    Times are `time.monotonic`'s, which all processes of a machine share.
    """
    if asked.strategy in CHECKPOINTERS:
        importlib.import_module("ckptstore.training.checkpointer")  # among the first lines of a script
    other = Trainer(shape, asked.device, seed=2)
    began = time.monotonic()
    step = ALL[asked.strategy].restore(asked.dir, other)
    restored = time.monotonic()
    while other.step < asked.steps:
        other.take()
    ended = time.monotonic()
    return {
        "began_at": began,
        "ended_at": ended,
        "step": step,
        "reached": other.step,
        "digest": digest(other.state()),
        "restore_s": restored - began,
        "recompute_s": ended - restored,
    }


def kill(asked: argparse.Namespace, shape: Shape) -> None:
    """Train until killed. Each save is noted first, so that the restored state can be compared."""
    run = begin(asked, shape)
    pid = getattr(run.strategy, "agent_pid", None)
    agent = {} if pid is None else {"agent": pid}
    with (asked.dir / DIGESTS).open("w") as notes:

        def told(step: int) -> None:
            notes.write(f"{step} {digest(run.trainer.state())}\n")
            notes.flush()

        noted: set[int] = set()

        def once(step: int) -> None:
            if step not in noted:
                noted.add(step)
                told(step)

        while True:
            run.take(once)
            if asked.strategy in CHECKPOINTERS:
                once(run.trainer.step)  # where lost steps are trained again, unsaved steps count, too
            if asked.strategy == "fulls-50" and run.trainer.step % asked.interval == 0:
                run.strategy.settle()  # this full is restored, however soon after it the trainer is killed
            say({"step": run.trainer.step, "seconds": run.iterations[-1]} | agent)


def live(asked: argparse.Namespace, shape: Shape) -> None:
    """One life of a job: restore what an earlier one left, and train until killed, or up to `asked.until`.

    SIGTERM preempts a life that has an end: it makes its latest step durable, and ends. Times are `time.monotonic`'s,
    which all processes of a machine share. No measurement counts what digests take (``spent``).
    """
    kind = ALL[asked.strategy]
    trainer = Trainer(shape, asked.device)
    say({"begun": time.monotonic()})
    resumes = issubclass(kind, Checkpointed)  # it restores as it is made
    if (asked.dir / LIVED).exists() and not resumes:
        trainer.take()  # so that there are moments to load into
        if kind.restore(asked.dir, trainer) is None:
            trainer = Trainer(shape, asked.device)
    options = Options(asked.interval, asked.full_every, asked.batch)
    ledger = Ledger()
    strategy = kind(asked.dir, trainer, options, ledger)
    (asked.dir / LIVED).touch()

    def told(**members: Any) -> None:
        now = time.monotonic()
        state = digest(trainer.state()) if trainer.step else ""
        say({"state": state, "spent": time.monotonic() - now} | members)

    pid = getattr(strategy, "agent_pid", None)
    told(restored=time.monotonic(), step=trainer.step, agent=pid)
    run = Run(trainer, strategy, ledger, asked.interval)
    preempted: list[int] = []
    if asked.until is not None:
        signal.signal(signal.SIGTERM, lambda number, _frame: preempted.append(number))

    def noted(step: int) -> None:
        """Before a save: a killed life may have saved what it has not printed."""
        if asked.note:
            told(noted=step)

    while (asked.until is None or trainer.step < asked.until) and not preempted:
        run.take(noted)
        say({"step": trainer.step, "at": time.monotonic()})
    done = time.monotonic()
    if preempted and trainer.step % asked.interval and not strategy.every_step:
        strategy.save(trainer.step)  # its latest step is not saved yet
    strategy.settle()
    say({"digest": digest(trainer.state()), "trained": done, "step": trainer.step})
    strategy.close()


def digests(asked: argparse.Namespace, shape: Shape) -> dict[str, Any]:
    """Train `asked.steps` steps without saves -> the digest of each, which every life of a job has to reach.

    At the steps of `asked.restarts` the compression of gradients begins anew, as it does in a life that restored them.
    """
    trainer = Trainer(shape, asked.device)
    kind = ALL[asked.strategy]
    kind(asked.dir, trainer, Options(), Ledger())  # it may compress gradients
    found = {}
    while trainer.step < asked.steps:
        if trainer.step in asked.restarts:
            kind(asked.dir, trainer, Options(), Ledger())
        trainer.take()
        found[str(trainer.step)] = digest(trainer.state())
    return {"digests": found}


def say(document: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=["loop", "turns", "kill", "live", "digests", "restore", "recover"])
    parser.add_argument("strategy", choices=list(ALL))
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--tokens", type=int, nargs=2, required=True, metavar=("BATCH", "CONTEXT"))
    parser.add_argument("--interval", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="the step before the first one")
    parser.add_argument("--restarts", type=int, nargs="*", default=[], help="of `digests`: steps that lives restored")
    parser.add_argument("--until", type=int, help="of live: the last step; default: it trains until it is killed")
    parser.add_argument("--note", action="store_true", help="of live: tell the digest of each state before its save")
    parser.add_argument("--full-every", type=int, default=100)
    parser.add_argument("--batch", type=int, help="step diffs in one write; default: the interval")
    parser.add_argument("--profile", action="store_true", help="of turns: measure parts of ckptstore, too")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--no-pin", action="store_true")
    asked = parser.parse_args()
    medium.limit()
    pinning = pin(*divide_cores(not asked.no_pin))
    torch.use_deterministic_algorithms(asked.device == "cpu")
    shape = Shape(asked.width, asked.layers, *asked.tokens)
    asked.dir.mkdir(parents=True, exist_ok=True)
    try:
        if asked.task == "kill":
            kill(asked, shape)
        if asked.task == "live":
            live(asked, shape)
            return
        tasks = {"loop": loop, "digests": digests, "turns": turns, "restore": restore, "recover": recover}
        say(tasks[asked.task](asked, shape) | {"pinning": pinning})
    except AbsentError as error:
        say({"absent": str(error)})


if __name__ == "__main__":
    main()
