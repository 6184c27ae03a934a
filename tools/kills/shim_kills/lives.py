"""One life of the script: a process or a group of ranks, its reports, and its death."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tools.kills.shim_kills.script import LONGEST
from tools.objects.server import free_port
from tools.warm import Script

__all__ = ["AGENT", "ALL", "Doom", "Job", "Life", "Start", "Violation", "agent_of", "cold", "kill_agent", "live"]

ALL: Final = -1
AGENT: Final = 1
"""The agent as a victim: with an agent there is one process, and so no rank 1."""
_AGENTS: Final = -2
_AGENTS_SCRIPT: Final = b"ckptstore/agent/startup.py"
_BUSY: Final = "EADDRINUSE"

Start = Callable[..., "Script | subprocess.Popen[bytes]"]
"""Starts a command: ``cwd``, ``env``, ``stdout`` and ``stderr`` as for `subprocess.Popen`."""
_ROOT: Final = Path(__file__).resolve().parents[3]


def cold(command: list[str], **how: Any) -> subprocess.Popen[bytes]:
    """Start a cold interpreter, which imports everything."""
    return subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL, **how)


class Violation(Exception):  # noqa: N818  # no error of the project: a broken promise
    """A promise that was broken."""


@dataclass(frozen=True, slots=True)
class Job:
    """The script's configuration.

    Attributes:
        strategy: how it saves.
        ranks: how many processes: one, or of DDP, or of FSDP2.
        by_agent: an agent saves.
        sharded: FSDP2, in shards of different sizes.
        compressed: the gradients are compressed by a `TopKHook`.
        broken: how the checkpointer is wrong on purpose; see `broken`.
    """

    strategy: str
    ranks: int = 1
    by_agent: bool = False
    sharded: bool = False
    compressed: bool = False
    broken: str | None = None

    def __str__(self) -> str:
        how = (" of FSDP2" if self.sharded else "") + (" with an agent" if self.by_agent else "")
        how += ", compressed" if self.compressed else ""
        return f"{self.strategy}, {self.ranks} rank{'s' if self.ranks > 1 else ''}{how}"

    def command(self, store: Path, rank: int, port: int) -> list[str]:
        """The command line of one rank."""
        words = [sys.executable, "-W", "default", "-m", "tools.kills.shim_kills.script", "--store", str(store)]
        words += ["--strategy", self.strategy, "--ranks", str(self.ranks), "--rank", str(rank), "--port", str(port)]
        words += ["--agent"] * self.by_agent + ["--sharded"] * self.sharded + ["--compressed"] * self.compressed
        return words + (["--broken", self.broken] if self.broken else [])


@dataclass(frozen=True, slots=True)
class Doom:
    """Which process is killed, and when.

    Attributes:
        losses: after how many losses of rank 0.
        seconds: and how many seconds later.
        victim: a rank, which the others follow soon, as under a scheduler, or `ALL`. With an agent: 0 the trainer,
            `AGENT`, or `ALL`: both. With ranks that have agents also one of those, `agent_of`.
    """

    losses: int
    seconds: float
    victim: int

    def named(self, job: Job) -> str:
        """The victim's name."""
        if job.by_agent and job.ranks == 1:
            return {ALL: "both", AGENT: "agent"}.get(self.victim, "trainer")
        if self.victim <= _AGENTS:
            return f"agent {_AGENTS - self.victim}"
        return "trainer" if job.ranks == 1 else "all ranks" if self.victim == ALL else f"rank {self.victim}"


def agent_of(rank: int) -> int:
    """The agent of one of several ranks, as a victim."""
    return _AGENTS - rank


@dataclass(slots=True)
class Life:
    """The reports of one process, or group.

    Attributes:
        losses: by step and rank, as hexadecimal text.
        acknowledged: the highest step that was reported as durable.
        resumed: the step where it began.
        digests: of the last state, by rank.
        errors: the errors of ranks that died without a kill.
        notes: the files with what its ranks wrote to standard error: warnings, and the log of ckptstore.
        agents: the processes that saved, one after the other; with ranks those of rank 0.
        saving: the process that saves now, by rank.
        given: the highest step that the writer had accepted.
        struck: whether a process of the script was killed.
        killed: whether a process of the script, or its agent, was killed.
    """

    losses: dict[tuple[int, int], str] = field(default_factory=dict)
    acknowledged: int = 0
    resumed: int | None = None
    digests: dict[int, str] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    notes: list[Path] = field(default_factory=list)
    agents: list[int] = field(default_factory=list)
    saving: dict[int, int] = field(default_factory=dict)
    given: int = 0
    struck: bool = False
    killed: bool = False

    def note(self, rank: int, line: str) -> None:
        """Note a line of a rank's output."""
        what, _, rest = line.partition(" ")
        if what == "loss":
            step, _, loss = rest.partition(" ")
            self.losses[int(step), rank] = loss
        elif what == "durable":
            self.acknowledged = max(self.acknowledged, int(rest))
        elif what == "resumed":
            self.resumed = int(rest)
        elif what == "given":
            self.given = max(self.given, int(rest))
        elif what == "agent":
            self.saving[rank] = int(rest)
            if rank == 0 and int(rest) not in self.agents[-1:]:
                self.agents.append(int(rest))
        elif what == "end":
            self.digests[rank] = rest
        else:
            self.errors.append(f"rank {rank} said {line[:500]}")

    @property
    def reached(self) -> int:
        """Losses of rank 0."""
        return sum(1 for _, rank in self.losses if rank == 0)


def live(start: Start, folder: Path, job: Job, doom: Doom | None) -> Life:
    """Run one life, whose store and diagnostics are in `folder`. Raises `Violation`: it does not end."""
    while True:
        life = _Living(start, folder, job, doom).lived()
        if not any(_BUSY in one for one in life.errors):  # another process took the port first
            return life


class _Living:
    """A running life."""

    def __init__(self, start: Start, folder: Path, job: Job, doom: Doom | None) -> None:
        self._job, self._doom = job, doom
        self._life = Life()
        self._over = False
        self._strike: float | None = None
        port = free_port() if job.ranks > 1 else 0
        folder.mkdir(parents=True, exist_ok=True)
        number = len(list(folder.glob("stderr-*-0.txt")))
        self._notes = self._life.notes = [folder / f"stderr-{number}-{rank}.txt" for rank in range(job.ranks)]
        self._scripts: list[Script | subprocess.Popen[bytes]] = []
        for rank, notes in enumerate(self._notes):
            command = job.command(folder / "store", rank, port)
            with notes.open("w") as errors:
                how = {"cwd": _ROOT, "env": dict(os.environ), "stdout": subprocess.PIPE, "stderr": errors}
                self._scripts.append(start(command, **how))

    def lived(self) -> Life:
        """Read the script's output to its end, and kill its victim."""
        texts = dict.fromkeys(range(len(self._scripts)), "")
        pipes = {script.stdout.fileno(): rank for rank, script in enumerate(self._scripts) if script.stdout}
        until = time.monotonic() + LONGEST
        try:
            while pipes:
                if time.monotonic() > until:
                    self._hangs()
                self._kill()
                ready, _, _ = select.select(list(pipes), [], [], 0.05 if self._strike is None else 0.002)
                for pipe in ready:
                    rank = pipes[pipe]
                    data = os.read(pipe, 1 << 16)
                    if not data:
                        del pipes[pipe]
                    *lines, texts[rank] = (texts[rank] + data.decode()).split("\n")
                    for line in lines:
                        self._life.note(rank, line)
        finally:
            self._end()
        return self._life

    def _kill(self) -> None:
        """Kill, if it is time."""
        life, doom = self._life, self._doom
        if doom is None or self._over:
            return
        by_agent = self._job.by_agent and self._job.ranks == 1
        if (by_agent and doom.victim != 0 and not life.agents) or (
            doom.victim <= _AGENTS and _AGENTS - doom.victim not in life.saving
        ):
            return  # the victim's process is not known yet
        now = time.monotonic()
        if self._strike is None and life.reached >= doom.losses:
            self._strike = now + doom.seconds
        if self._strike is None or now < self._strike:
            return
        self._over, self._strike = True, None
        if doom.victim <= _AGENTS:  # the trainers get an error, and end
            life.struck = life.killed = kill_agent(life.saving[_AGENTS - doom.victim])
            return
        if not by_agent or doom.victim != AGENT:
            life.struck = True
            self._strike_down(doom.victim)
        if by_agent and doom.victim != 0:
            life.killed = kill_agent(life.agents[-1])

    def _strike_down(self, victim: int) -> None:
        if victim >= 0:
            self._scripts[victim].kill()
            if len(self._scripts) > 1:
                time.sleep(0.05)
        for script in self._scripts:
            script.kill()

    def _hangs(self) -> None:
        """Make every rank print its stack. Raises `Violation`."""
        for script in self._scripts:
            script.send_signal(signal.SIGUSR2)
        time.sleep(1.0)
        said = "\n".join(f"{notes.name}: {notes.read_text()[-3000:]}" for notes in self._notes)
        raise Violation(f"{self._job}: a life takes more than {LONGEST} s\n{said}")

    def _end(self) -> None:
        for rank, script in enumerate(self._scripts):
            if not self._life.struck and sys.exc_info()[0] is None:
                try:
                    script.wait(LONGEST / 5)  # it has closed its standard output, and is about to end
                except subprocess.TimeoutExpired:
                    self._life.errors.append(f"rank {rank} has finished its output, and does not end")
            script.kill()
            status = script.wait()
            self._life.killed |= self._life.struck and status == -signal.SIGKILL
            if script.stdout is not None:
                script.stdout.close()
            if status not in (0, -signal.SIGKILL):
                notes = self._notes[rank].read_text()[-3000:]
                self._life.errors.append(f"rank {rank} ended with status {status}: {notes}")


def kill_agent(pid: int) -> bool:
    """SIGKILL of an agent -> whether it was alive. A process that has reused its pid is left alone."""
    with contextlib.suppress(OSError):
        if pid > 1 and _AGENTS_SCRIPT in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
            return True
    return False
