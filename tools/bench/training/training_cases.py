"""The cases of the training benchmark, their processes, and rounds in which every case has its turn."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, Final

from tools.bench.storage.rounds import WorkerError
from tools.warm import Script, Warm

ROOT: Final = Path(__file__).resolve().parents[3]
_DIGESTS: Final = "digests.txt"
SPIN: Final = "CKPTSTORE_BENCH_SPIN_SECONDS"
"""An environment variable: seconds a step, of `training_checkpointers.Spinning`."""

RANK: Final = "CKPTSTORE_BENCH_RANK"
"""An environment variable: ``rank,ranks,port`` of one of several trainers, of `pccheck_settings.Ranked`."""

STRATEGIES: Final = (
    *("none", "torch.save", "dcp-async", "checkfreq", "naive-diff", "ckptstore-1", "ckptstore-2", "ckptstore-4"),
    *("layer-host", "layer-device", "layer-direct", "gradient-diffs"),
)
"""As in `training_strategies`, which imports torch; a test compares the two."""


BASELINES: Final = {
    "torch.save": "torch.save + fsync",
    "dcp-sync": "DCP save",
    "dcp-async": "DCP async_save",
    "checkfreq": "CheckFreq-like",
    "gemini": "Gemini-like",
    "gpm": "GPM-like",
    "naive-diff": "naive differences",
    "naive-topk": "naive DC, top-k",
}
"""Names and labels of `tools.baselines.catalog`, which imports torch; a test compares the two."""
LOSSY: Final = frozenset({"naive-topk"})
"""Those whose restored state differs from the trained one."""


@dataclass(frozen=True, slots=True)
class Case:
    """One line of a table.

    Attributes:
        kind: ``loop``: what a strategy costs; ``kill``: what it loses; ``table``: step diffs by (1/f, b).
        strategy: its name.
        interval: iterations from one save to the next; of a ``table`` checkpoints from one full to the next.
        batch: of a ``table``: diffs in one write. 0 elsewhere.
    """

    kind: str
    strategy: str
    interval: int
    batch: int = 0

    @property
    def name(self) -> str:
        """What ``--only`` matches: ``loop/torch.save/10``, ``table/20/2``."""
        if self.kind == "table" and self.batch:
            return f"table/{self.interval}/{self.batch}"
        return f"{self.kind}/{self.strategy}/{self.interval}"


@dataclass(frozen=True, slots=True)
class Plan:
    """The common settings of all processes of a run.

    Attributes:
        width, layers, batch, context: see `training_loop.Shape`.
        steps: fewest measured steps of a loop.
        full_every: checkpoints from one full to the next, of differences.
        device: ``cpu`` or ``cuda``.
        pinned: trainer and savers have separate cores.
        scratch: where checkpoints are written.
        first: the loop's count of steps begins there, and with it the training data.
        profile: measure parts of ckptstore in the training thread, too (`step_profile`).
        warm: forks the workers; None: each is an interpreter that imports everything.
    """

    width: int
    layers: int
    batch: int
    context: int
    steps: int
    full_every: int
    device: str
    pinned: bool
    scratch: Path
    first: int = 0
    profile: bool = False
    warm: Warm | None = None

    def measured_steps(self, case: Case) -> int:
        """A multiple of the interval, at least two intervals; of a ``table`` it ends between two fulls."""
        if case.kind == "table" and case.batch:
            whole = max(1, self.steps // case.interval) * case.interval
            amid = whole + case.interval // 2
            return max(case.batch, amid // case.batch * case.batch)
        return max(2, -(-self.steps // case.interval)) * case.interval

    def command(self, task: str, case: Case, folder: Path) -> list[str]:
        """The worker's command line."""
        table = case.kind == "table" and case.batch > 0
        words = [sys.executable, "-W", "ignore", "-m", "tools.bench.training.training_worker", task, case.strategy]
        words += ["--dir", str(folder.resolve()), "--width", str(self.width), "--layers", str(self.layers)]
        words += ["--tokens", str(self.batch), str(self.context), "--device", self.device]
        # In the table's cases every step is a save: the interval between writes is the batch.
        words += ["--interval", str(case.batch if table else case.interval)]
        words += ["--full-every", str(case.interval if table else self.full_every)]
        words += ["--steps", str(self.measured_steps(case)), "--first", str(self.first)]
        words += ["--profile"] if self.profile else []
        return words if self.pinned else [*words, "--no-pin"]

    def begun(self, task: str, case: Case, folder: Path, trouble: IO[str]) -> subprocess.Popen[str] | Script:
        """A worker that prints a line each time, with its errors in a file."""
        start: Callable[..., Any] = subprocess.Popen if self.warm is None else self.warm.start
        how = {"cwd": ROOT, "env": environment(), "stdout": subprocess.PIPE, "stderr": trouble, "text": True}
        found: subprocess.Popen[str] | Script = start(self.command(task, case, folder), **how)
        return found


@dataclass(slots=True)
class Results:
    """Samples of each case by round, why a case was given up, and why one is absent from this build or this device."""

    samples: dict[Case, list[dict[str, Any]]]
    errors: dict[Case, str] = field(default_factory=dict)
    absent: dict[Case, str] = field(default_factory=dict)

    def take(self, case: Case, measure: Callable[[], dict[str, Any]]) -> None:
        """Take one measurement, unless the case was given up before."""
        if case in self.errors or case in self.absent:
            return
        try:
            found = measure()
        except WorkerError as error:
            self.errors[case] = str(error)
            self.samples[case].clear()
            return
        if "absent" in found:
            self.absent[case] = str(found["absent"])
        else:
            self.samples[case].append(found)


def rotated(cases: Sequence[Case], turn: int) -> Iterator[Case]:
    """Each round begins with another case, so that drift of the machine affects all alike."""
    for place in range(len(cases)):
        yield cases[(place + 5 * turn) % len(cases)]


def run_round(plan: Plan, results: Results, turn: int, begun: Callable[[str], None], end: float = float("inf")) -> None:
    """Measure every case once. The round's number seeds the kills. Starts nothing after `end`."""
    for case in rotated(list(results.samples), turn):
        if time.monotonic() >= end:
            return
        begun(case.name)
        folder = plan.scratch / "run"
        try:
            if case.kind == "kill":
                chance = random.Random(f"{turn} {case.name}")
                results.take(case, partial(killed, plan, case, folder, chance))
            else:
                results.take(case, partial(finished, plan, "loop", case, folder))
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def environment() -> dict[str, str]:
    """A worker's environment: torch computes with as many threads as the trainer has cores."""
    cores = len(os.sched_getaffinity(0))
    return {**os.environ, "OMP_NUM_THREADS": str(max(1, cores // 2))}


def finished(plan: Plan, task: str, case: Case, folder: Path, words: Sequence[str] = ()) -> dict[str, Any]:
    """Run a worker to its end, with further words of its command line -> its output. Raises `WorkerError`."""
    command = [*plan.command(task, case, folder), *words]
    if plan.warm is None:
        done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    else:
        done = plan.warm.run(command, cwd=ROOT, env=environment())
    last = (done.stdout.strip().splitlines() or [""])[-1]
    if done.returncode or not last.startswith("{"):
        raise WorkerError((done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"])[-1])
    return dict(json.loads(last))


def noted_digests(folder: Path) -> dict[int, str]:
    """The digests of states that a killed worker had noted, by step."""
    lines = (folder / _DIGESTS).read_text().splitlines()
    return {int(line.split()[0]): line.split()[1] for line in lines if line.count(" ") == 1}


def killed(plan: Plan, case: Case, folder: Path, chance: random.Random) -> dict[str, Any]:
    """Train, SIGKILL at a random moment after the second save, restore in another process -> steps lost.

    Raises:
        WorkerError: it ended without a kill, nothing can be restored, or the restored state is not the trained one.
    """
    target = chance.randint(2 * case.interval + 4, 4 * case.interval + 8)
    with tempfile.TemporaryFile("w+", dir=plan.scratch) as trouble:
        with plan.begun("kill", case, folder, trouble) as process:
            assert process.stdout is not None
            last: dict[str, Any] = {}
            for line in process.stdout:
                last = json.loads(line)
                if last.get("step", 0) == target:
                    time.sleep(chance.uniform(0, last["seconds"]))
                    process.send_signal(signal.SIGKILL)
            status = process.wait()
        if "absent" in last:
            return last
        if status != -signal.SIGKILL:
            trouble.seek(0)
            raise WorkerError((trouble.read().strip().splitlines() or [f"it ended with status {status}"])[-1])
    noted = noted_digests(folder)
    found = finished(plan, "restore", case, folder)
    step, trained = found["step"], last["step"]
    if step is None and case.strategy != "none":
        raise WorkerError(f"killed after step {trained}: nothing can be restored")
    equal = step is not None and found["digest"] == noted.get(step)
    if step is not None and not equal and case.strategy not in LOSSY:
        raise WorkerError(f"the restored state of step {step} differs from the one that was trained")
    lost = max(0, trained - (step or 0))
    numbers = {"trained": trained, "restored": step, "lost": lost, "restore_s": found["seconds"]}
    lossy = {name: found[name] for name in ("loss", "loss_trained", "distance", "differing") if name in found}
    return numbers | lossy | {"equal": equal, "pinning": found["pinning"]}
