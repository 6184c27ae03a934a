"""Checks the promises to a script that is killed again and again."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from tools.kills.shim_kills.lives import AGENT, ALL, Doom, Job, Life, Start, Violation, agent_of, kill_agent, live
from tools.kills.shim_kills.script import STEPS

__all__ = ["Sweeper", "Tally"]

_SOON: Final = (0.01, 0.1)
"""Delays of a kill after a loss in seconds: during a step and its save, or some steps later."""
_QUOTED_LIVES: Final = 2
_QUOTED: Final = 3000
"""Most characters of each file that a violation quotes."""


@dataclass(slots=True)
class Tally:
    """Counts of a sweep.

    Attributes:
        kills: by victim.
        lives: how many there were.
        resumed: lives that began beyond step 0.
        kept: lives that continued with the agent of a killed trainer.
        ends: runs that ended with the bits of the uninterrupted run.
        seconds: the duration.
    """

    kills: Counter[str] = field(default_factory=Counter)
    lives: int = 0
    resumed: int = 0
    kept: int = 0
    ends: int = 0
    seconds: float = 0.0

    def form(self) -> dict[str, Any]:
        """The counts as JSON."""
        return asdict(self) | {"kills": dict(sorted(self.kills.items())), "seconds": round(self.seconds, 1)}


class Sweeper:
    """Kills runs, and compares them with the uninterrupted run.

    Args:
        start: starts a script.
        evidence: the folder for the files of a broken promise; None: they are deleted.
    """

    def __init__(self, start: Start, evidence: Path | None = None) -> None:
        self._start = start
        self._evidence = evidence
        self._references: dict[tuple[int, bool, bool], Life] = {}

    def sweep(self, kills: int, job: Job, seed: str, tally: Tally) -> None:
        """Kill a run `kills` times, and further runs; `tally` counts.

        Raises:
            Violation: a promise is broken. It quotes what the last lives and their agents have said, and its last words
                name the folder of the evidence.
        """
        reference = self._reference(job)
        draw = random.Random(f"{seed} {job}")
        began = time.monotonic()
        with _folder() as folder:
            while tally.kills.total() < kills:
                run = _Run(self._start, folder / f"run-{tally.ends + 1}", job, reference, draw, tally)
                try:
                    run.through(kills)
                except Violation as error:
                    raise Violation(f"{error}{run.said()}{self._keep(run, seed)}") from error
                finally:
                    tally.seconds = time.monotonic() - began
                    run.close()
                shutil.rmtree(run.folder)

    def _reference(self, job: Job) -> Life:
        """The uninterrupted run: it saves fulls without an agent, whatever the strategy. The bits must be the same."""
        key = job.ranks, job.sharded, job.compressed
        if key not in self._references:
            with _folder() as folder:
                plain = Job("full", job.ranks, sharded=job.sharded, compressed=job.compressed)
                life = live(self._start, folder, plain, None)
            if life.errors or len(life.digests) != job.ranks:
                raise Violation(f"the uninterrupted run of {job} failed: {life.errors}")
            self._references[key] = life
        return self._references[key]

    def _keep(self, run: _Run, seed: str) -> str:
        if self._evidence is None:
            return ""
        self._evidence.mkdir(parents=True, exist_ok=True)
        kept = Path(tempfile.mkdtemp(prefix="run-", dir=self._evidence))
        shutil.copytree(run.folder, kept / "run", symlinks=True)
        for log in Path(os.environ["CKPTSTORE_RUNTIME_DIR"]).glob("*.log"):
            shutil.copy(log, kept)
        story = {"seed": seed, "job": str(run.job), "lives": run.story}
        (kept / "story.json").write_text(json.dumps(story, indent=1, default=str) + "\n")
        return f"\n(evidence: {kept})"


class _Run:
    """One run, from nothing to its end, over as many lives as it takes.

    Attributes:
        folder: contains its store.
        story: the planned death and the reports of each life.
    """

    def __init__(
        self, start: Start, folder: Path, job: Job, reference: Life, draw: random.Random, tally: Tally
    ) -> None:
        self.folder, self.job = folder, job
        self.story: list[dict[str, Any]] = []
        self._start, self._reference, self._draw, self._tally = start, reference, draw, tally
        self._acknowledged = 0
        self._given = 0
        self._agent = 0
        self._agents: set[int] = set()
        self._widowed = False

    def through(self, kills: int) -> None:
        """Run lives until the end; after the given number of kills nothing is killed any more. Raises `Violation`."""
        while True:
            doom = self._doom() if self._tally.kills.total() < kills else None
            life = live(self._start, self.folder, self.job, doom)
            self.story.append({"doom": doom and asdict(doom), "life": {**asdict(life), "losses": _listed(life)}})
            self._tally.lives += 1
            self._judge(life)
            if doom is not None and life.killed:
                self._tally.kills[doom.named(self.job)] += 1
            self._agent = life.agents[-1] if life.agents else self._agent
            self._agents |= {*life.saving.values()}
            self._widowed = life.killed and doom is not None and self._spares_agents(doom)
            self._given = life.given if self._widowed else 0
            self._acknowledged = max(self._acknowledged, life.acknowledged)
            if not life.struck or len(life.digests) == self.job.ranks:
                if life.digests != self._reference.digests:
                    raise Violation(f"{self._about()}: the last state differs ({life.digests})")
                self._tally.ends += 1
                return

    def said(self) -> str:
        """What the last lives have written to standard error, and their agents to their logs."""
        notes = [note for story in self.story[-_QUOTED_LIVES:] for note in story["life"]["notes"]]
        logs = sorted(Path(os.environ["CKPTSTORE_RUNTIME_DIR"]).glob("*.log"))
        texts = {path: path.read_text(errors="replace").strip()[-_QUOTED:] for path in (*notes, *logs)}
        return "".join(f"\n-- {path.name}:\n{text}" for path, text in texts.items() if text)

    def close(self) -> None:
        """End the agents of an aborted run."""
        for pid in self._agents:
            kill_agent(pid)

    def _spares_agents(self, doom: Doom) -> bool:
        return self.job.by_agent and (doom.victim == 0 if self.job.ranks == 1 else doom.victim >= ALL)

    def _doom(self) -> Doom:
        ranks = range(self.job.ranks)
        victims = [ALL, 0, AGENT] if self.job.by_agent else [ALL, *ranks]
        if self.job.by_agent and len(ranks) > 1:
            victims = [ALL, *ranks, *map(agent_of, ranks)]
        victim = self._draw.choice(victims)
        return Doom(self._draw.randrange(STEPS // 2), self._draw.random() * self._draw.choice(_SOON), victim)

    def _judge(self, life: Life) -> None:
        """Compare a life with the acknowledgements to earlier lives. Raises `Violation`."""
        if life.resumed is not None:
            self._tally.resumed += life.resumed > 0
            if life.resumed < self._acknowledged:
                words = f"step {self._acknowledged} was acknowledged, and the run resumed at {life.resumed}"
                raise Violation(f"{self._about()}: {words}")
            if life.resumed < self._given - self.job.ranks:  # messages may be in flight, and a rank a step behind
                words = f"step {self._given} was given to the agent, and the run resumed at {life.resumed}"
                raise Violation(f"{self._about()}: {words}")
            self._tally.kept += self._widowed and life.agents[:1] == [self._agent]
        for key, loss in life.losses.items():
            if loss != self._reference.losses[key]:
                raise Violation(f"{self._about()}: the loss of step {key[0]} on rank {key[1]} is another")
        if life.errors and not life.struck:  # ranks whose peer is dead report errors until they are killed as well
            raise Violation(f"{self._about()}: it ended without a kill: {life.errors}")

    def _about(self) -> str:
        return f"{self.job}, after {self._tally.kills.total()} kills"


def _listed(life: Life) -> dict[str, str]:
    return {f"{step} of rank {rank}": loss for (step, rank), loss in sorted(life.losses.items())}


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A folder that is deleted afterwards; its agents are found by its path."""
    with tempfile.TemporaryDirectory(prefix="shim-kills-", ignore_cleanup_errors=True) as name:
        before = os.environ.get("CKPTSTORE_RUNTIME_DIR")
        os.environ["CKPTSTORE_RUNTIME_DIR"] = f"{name}/runtime"
        try:
            yield Path(name)
        finally:
            if before is None:
                del os.environ["CKPTSTORE_RUNTIME_DIR"]
            else:
                os.environ["CKPTSTORE_RUNTIME_DIR"] = before
