"""Starts workers, watches their steps, kills them, and restarts them until the run is done."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

from tools.demo.events import Event
from tools.demo.killing import Kill

_ROOT = Path(__file__).resolve().parents[2]
_CRASH_AT = "CKPTSTORE_CRASH_AT"
_WATCHDOG_SECONDS = 600.0


class DemoError(Exception):
    """The demo itself failed: a worker failed, or a planned kill did not happen."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One worker process from start to end, from its events. Times are `time.monotonic` seconds."""

    kill: Kill | None
    spawned: float
    ended: float
    status: int
    events: tuple[Event, ...]

    def first(self, kind: str) -> Event | None:
        """The first event of a kind."""
        return next((event for event in self.events if event.kind == kind), None)

    def require(self, kind: str) -> Event:
        """The first event of a kind, of a process that must have reached it. Raises `DemoError`."""
        found = self.first(kind)
        if found is None:
            raise DemoError(f"a worker ended, while {self.doing()}, before it reported {kind!r}")
        return found

    def steps(self, kind: str) -> dict[int, Event]:
        """The events of a kind by their step."""
        return {event.fields["step"]: event for event in self.events if event.kind == kind}

    @property
    def began(self) -> int:
        """The last step whose computation began; the resumed one if none did."""
        resumed = self.first("resumed")
        return max(self.steps("begin"), default=resumed.fields["step"] if resumed else 0)

    def doing(self) -> str:
        """The worker's activity when it ended, as far as its events show."""
        computed, durable = self.steps("computed"), self.steps("durable")
        saving = sorted(set(computed) - set(durable))
        doing = [f"saving {step}" for step in saving]
        if self.steps("begin") and self.began not in computed:
            doing.insert(0, f"computing {self.began}")
        if not self.first("resumed"):
            return "starting"
        return ", ".join(doing) or "between steps"


@dataclass(frozen=True, slots=True)
class Strike:
    """The cost of one kill."""

    number: int
    kill: Kill
    at: float
    """Seconds since the run began."""
    doing: str
    began: int
    """The last step that had begun."""
    acknowledged: int
    """The last step that the store had acknowledged, in this or an earlier process."""
    resumed: int
    """The step from which the next process continued."""
    build_seconds: float
    """Of the next process, from its start until python, torch and the untrained model are ready."""
    restore_seconds: float
    """Of the next process, to open the store, begin its term, load and restore the state."""
    restart_seconds: float
    """From the kill to the first step that begins again."""
    mode: str

    @property
    def lost(self) -> int:
        """Steps that had begun and had to be computed (again)."""
        return self.began - self.resumed

    def broken_promises(self) -> list[str]:
        """The promises that the store broke; empty when all is well."""
        broken = []
        if self.resumed < self.acknowledged:
            broken.append(
                f"kill {self.number}: step {self.acknowledged} was acknowledged, but {self.resumed} was found"
            )
        allowed = 1 if self.mode == "save" else 2
        if self.lost > allowed:
            broken.append(f"kill {self.number}: {self.lost} steps lost, at most {allowed} were in flight")
        return broken


class Supervisor:
    """Runs workers on one configuration; `watch` sees every event as it arrives."""

    def __init__(self, config: Path, log: Path, watch: Callable[[Event], None]) -> None:
        self._config = config
        self._log = log
        self._watch = watch

    def run(
        self, role: Literal["reference", "store"], folder: Path, kill: Kill | None = None, crash_at: str = ""
    ) -> Attempt:
        """Start one worker and wait for its end, without a kill or by `kill`. Raises `DemoError` for any other end."""
        environment = {**os.environ, _CRASH_AT: crash_at}
        command = [sys.executable, "-m", "tools.demo.worker", role, str(self._config), str(folder)]
        spawned = time.monotonic()
        with self._log.open("ab") as log:
            worker = subprocess.Popen(
                command, cwd=_ROOT, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
            )
            watchdog = threading.Timer(_WATCHDOG_SECONDS, worker.kill)
            watchdog.start()
            try:
                events = self._follow(worker, kill)
            finally:
                watchdog.cancel()
                if worker.poll() is None:  # the supervisor itself was interrupted: leave no worker behind
                    worker.kill()
                worker.wait()
        attempt = Attempt(kill, spawned, time.monotonic(), worker.returncode, events)
        if attempt.status != (-signal.SIGKILL if kill else 0):
            raise DemoError(self._explain(role, attempt))
        return attempt

    def _follow(self, worker: subprocess.Popen[str], kill: Kill | None) -> tuple[Event, ...]:
        """Read events until the worker's end, and kill it at the planned step."""
        assert worker.stdout is not None
        events: list[Event] = []
        timer: threading.Timer | None = None
        with worker.stdout:
            for line in worker.stdout:
                event = Event.parse(line)
                events.append(event)
                due = kill is not None and event.kind == "begin" and event.fields["step"] >= kill.step
                if kill is not None and due and not kill.point and timer is None:
                    timer = threading.Timer(kill.delay * _typical_step(events), worker.kill)
                    timer.start()
                self._watch(event)
        worker.wait()
        if timer is not None:
            timer.cancel()
        return tuple(events)

    def _explain(self, role: str, attempt: Attempt) -> str:
        tail = self._log.read_text(errors="replace").strip().splitlines()[-15:]
        wanted = f" (wanted: killed {attempt.kill.describe()} at step {attempt.kill.step})" if attempt.kill else ""
        return "\n".join(
            [f"the {role} worker ended with status {attempt.status}{wanted}, while {attempt.doing()}", *tail]
        )


def _typical_step(events: list[Event]) -> float:
    """Seconds from the start of one step to the start of the next, in this process so far."""
    begins = [event.at for event in events if event.kind == "begin"]
    gaps = [later - earlier for earlier, later in pairwise(begins)]
    return statistics.median(gaps) if gaps else 0.1


def run_with_kills(
    supervisor: Supervisor,
    folder: Path,
    plan: list[Kill],
    durable_step: Callable[[], int],
    announce: Callable[[Kill, Attempt], None],
) -> list[Attempt]:
    """Run the store's run to its end through all planned kills; `announce` is called after each killed attempt.

    `durable_step` reads from the store, while no worker lives, the step from which the next one will continue: a kill
    inside a commit is aimed by counting that worker's checkpoints. Raises `DemoError`.
    """
    attempts = []
    for kill in plan:
        crash_at = f"{kill.point}:{max(1, kill.step - durable_step())}" if kill.point else ""
        attempts.append(supervisor.run("store", folder, kill, crash_at))
        if kill.point and "saving" not in attempts[-1].doing():
            raise DemoError(f"the kill {kill.describe()} struck while {attempts[-1].doing()}")
        announce(kill, attempts[-1])
    attempts.append(supervisor.run("store", folder))
    return attempts


def strikes(attempts: list[Attempt]) -> list[Strike]:
    """The cost of each kill, from a finished run's attempts."""
    found = []
    acknowledged = 0
    for number, (killed, following) in enumerate(pairwise(attempts), 1):
        assert killed.kill is not None
        acknowledged = max([acknowledged, *killed.steps("durable")])
        built, resumed, begin = (following.require(kind) for kind in ("built", "resumed", "begin"))
        found.append(
            Strike(
                number=number,
                kill=killed.kill,
                at=killed.ended - attempts[0].spawned,
                doing=killed.doing(),
                began=killed.began,
                acknowledged=acknowledged,
                resumed=resumed.fields["step"],
                build_seconds=built.at - following.spawned,
                restore_seconds=resumed.at - built.at,
                restart_seconds=begin.at - killed.ended,
                mode=killed.require("resumed").fields["mode"],
            )
        )
    return found
