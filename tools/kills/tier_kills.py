"""SIGKILL of writers and drains of a store with two tiers, lost disks, and machines that take over from each other.

    python -m tools.kills.tier_kills --kills 200
    python -m tools.kills.tier_kills --kills 60 --remote s3        # ministack; s3-memory: a server that is faster

Each life is a process on one of two machines (folders). It continues the run and saves every step, with a drain to one
remote; or it runs ``sync`` on a machine whose writer is dead. It is killed at a random moment, or at one of the crash
points that it passes. Then the machine's disk may be deleted, or the other machine continues. Always:

- a life continues with a state that is, bit for bit, the result of training at its step;
- that state is not behind the acknowledgements of the remote; on the machine that wrote last it is not behind that
  machine's own acknowledgements either;
- a machine whose disk is deleted restores a checkpoint from the remote alone, bit for bit; it is behind the machine's
  last acknowledged one by no more than the lag that was reported before;
- in the end the remote has every checkpoint that it acknowledged, its history is whole, and every checkpoint that a
  machine acknowledged, and whose disk was not deleted, can be loaded there.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import uuid
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

import ckptstore
from ckptstore.formats.history.checkpoint_ref import node_of
from ckptstore.host.crash_points import TIER_POINTS, arm
from tools.crash.scenario import Violation
from tools.objects.fast_server import serving_fast
from tools.objects.server import serving

Work: TypeAlias = Callable[[str, str, dict[str, Any], Callable[[str], None]], None]
"""A process of a life: folder, remote, its options, and the function that reports."""

__all__ = ["POINTS", "Campaign", "campaign", "state_at"]

POINTS: Final = (*TIER_POINTS, "commit.created", "commit.acknowledged", "save.sealed", "open.created", "open.verified")
_LONGEST: Final = 0.5
"""Longest duration of a life in seconds, from its first save."""
_OUT_OF_TIME: Final = 60.0


def state_at(step: int) -> dict[str, Any]:
    """The training state at a step."""
    chance = np.random.default_rng(step)
    return {"weight": chance.normal(0, 1, 3000).astype("<f4"), "step": step}


def _same(state: dict[str, Any]) -> bool:
    wanted = state_at(state["step"])
    return bool(np.array_equal(state["weight"].view("u4"), wanted["weight"].view("u4")))


def _train(folder: str, remote: str, options: dict[str, Any], say: Callable[[str], None]) -> None:
    """One life of a writer, until it is killed."""
    store = ckptstore.open(folder, remote=remote, remote_options=options)
    with store.writer(deltas=4) as writer:
        step = 0
        if writer.parent is not None:
            state = store.load(writer.parent.ref, framework="numpy")
            step = state["step"]
            if not _same(state):
                say(f"died step {step} has other bits")
        say(f"up {writer.term} {step}")
        pending: list[ckptstore.PendingSave] = []
        for _ in range(10_000):
            step += 1
            pending.append(writer.save_async(state_at(step), step))
            for one in [one for one in pending if one.done()]:
                info = one.result()
                say(f"local {info.ref}")
                pending.remove(one)
                threading.Thread(target=_await, args=(one, say), daemon=True).start()
            time.sleep(0.002)


def _await(one: ckptstore.PendingSave, say: Callable[[str], None]) -> None:
    say(f"remote {one.result(tier='remote').ref}")


def _sync(folder: str, remote: str, options: dict[str, Any], say: Callable[[str], None]) -> None:
    done = ckptstore.open(folder).sync(remote, remote_options=options)
    say(f"synced {done.checkpoints}")


def _lag(folder: str, remote: str, options: dict[str, Any], say: Callable[[str], None]) -> None:
    lag = ckptstore.open(folder, remote=remote, remote_options=options).lag()
    assert lag is not None
    say(f"lag {lag.steps} {lag.checkpoints}")


def _restore(folder: str, remote: str, options: dict[str, Any], say: Callable[[str], None]) -> None:
    """On an empty machine: restore from the remote."""
    store = ckptstore.open(folder, remote=remote, remote_options=options)
    newest = store.latest_step()
    if newest is not None and not _same(store.load(framework="numpy")):
        say(f"died step {newest} is restored with other bits")
    say(f"restored {newest or 0}")


@dataclass(slots=True)
class Campaign:
    """Lives of one run on two machines.

    Attributes:
        root: contains their folders.
        remote, options: the remote store.
        seen: how often each kind of event happened.
        local: refs that each machine acknowledged and has not lost with its disk.
        drained: refs that the remote acknowledged.
        kills: lives that were killed.
        behind: of each lost disk, how many steps the remote was behind that machine's acknowledgements.
    """

    root: Path
    remote: str
    options: dict[str, Any]
    seen: Counter[str] = field(default_factory=Counter)
    local: dict[str, set[str]] = field(default_factory=lambda: {"a": set(), "b": set()})
    drained: set[str] = field(default_factory=set)
    behind: list[int] = field(default_factory=list)
    kills: int = 0
    _last: str = ""
    _told: Counter[str] = field(default_factory=Counter)

    def life(self, chance: random.Random) -> None:
        """Run one life, and kill it. Raises `Violation`."""
        machine = self._last if self._last and chance.random() < 0.75 else chance.choice("ab")
        folder = self.root / machine
        syncs = self._last == machine and (folder / "FORMAT").exists() and chance.random() < 0.25
        point, count = (chance.choice(POINTS), chance.randint(1, 3)) if chance.random() < 0.6 else ("", 0)
        work = _sync if syncs else _train
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            self._child(lambda say: work(str(folder), self.remote, self.options, say), writing, point, count)
        os.close(writing)
        with os.fdopen(reading) as lines:
            try:
                timer = threading.Timer(_OUT_OF_TIME, os.kill, (child, signal.SIGKILL))
                timer.start()
                first = lines.readline().split()
                if first[:1] == ["up"]:
                    self._begin(machine, int(first[2]))
                    if not point:
                        time.sleep(chance.random() * _LONGEST)
                        os.kill(child, signal.SIGKILL)
                elif first:
                    self._hear(machine, first)
                for line in lines:
                    self._hear(machine, line.split())
            finally:
                timer.cancel()
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
                _, status = os.waitpid(child, 0)
        killed = os.WIFSIGNALED(status)
        self.kills += killed
        self.seen[
            ("sync " if syncs else "writer ") + (f"at {point}" if point else "at random") if killed else "ended"
        ] += 1
        if first[:1] == ["up"] or not syncs:
            self._last = machine
        if killed and chance.random() < 0.15 and folder.exists():
            self._lose(machine)

    def _lose(self, machine: str) -> None:
        """Delete a machine's disk, and restore it from the remote alone. Raises `Violation`."""
        folder = self.root / machine
        newest = max((node_of(ref)[1] for ref in self._reachable(machine)), default=0)
        last = self._last == machine
        reported = self._asked(_lag, machine, "lag") if (folder / "FORMAT").exists() else None
        shutil.rmtree(folder)
        self.local[machine].clear()
        self.seen["disk lost"] += 1
        (found,) = self._asked(_restore, machine, "restored") or (0,)
        if last and reported is not None:
            self.behind.append(max(0, newest - found))
            if found < newest - reported[0]:
                raise Violation(f"step {newest} was acknowledged, the lag was {reported[0]}, and {found} came back")

    def _asked(self, work: Work, machine: str, word: str) -> tuple[int, ...] | None:
        """The numbers that an undisturbed process reports; None: it reports none."""
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            folder = str(self.root / machine)
            self._child(lambda say: work(folder, self.remote, self.options, say), writing, "", 0)
        os.close(writing)
        with os.fdopen(reading) as lines:
            said = [line.split() for line in lines]
        os.waitpid(child, 0)
        for words in said:
            if words[:1] != [word]:
                raise Violation(f"{machine}: {' '.join(words)}")
        return tuple(int(one) for one in said[0][1:]) if said else None

    def _child(self, work: Callable[[Callable[[str], None]], None], writing: int, point: str, count: int) -> None:
        code = 1
        try:
            warnings.simplefilter("error")
            warnings.simplefilter("ignore", ckptstore.BranchWarning)
            if point:
                arm(point, count)
                # A slow drain passes few points; endless training would pass none.
                threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
            work(lambda text: os.write(writing, f"{text}\n".encode()) and None)
            code = 0
        except BaseException as error:  # noqa: BLE001  # the parent says so
            with contextlib.suppress(OSError):
                os.write(writing, f"died {type(error).__name__}: {error}\n".replace("\r", " ").encode())
        finally:
            os._exit(code)

    def _begin(self, machine: str, step: int) -> None:
        newest = max((node_of(ref)[1] for ref in self._reachable(machine)), default=0)
        if step < newest:
            raise Violation(f"step {newest} was acknowledged, and a life on {machine} begins with {step}")

    def _reachable(self, machine: str) -> set[str]:
        """The step that a life on a machine must reach: of the newest term that was reported."""
        known = self.drained | (self.local[machine] if self._last == machine else set())
        newest = max((node_of(ref)[0] for ref in known), default=0)
        return {ref for ref in known if node_of(ref)[0] == newest}

    def _hear(self, machine: str, words: list[str]) -> None:
        match words:
            case ["local", ref]:
                self.local[machine].add(ref)
                self.seen["acknowledged locally"] += 1
            case ["remote", ref]:
                self.drained.add(ref)
            case ["synced", count]:
                self.seen["drained by sync"] += int(count)
            case _:
                raise Violation(f"a life on {machine} ended without a kill: {' '.join(words)}")

    def close(self) -> None:
        """Check every checkpoint. Raises `Violation`."""
        theirs = ckptstore.open(self.remote, storage_options=self.options or None)
        there = {info.ref for info in theirs.checkpoints()}
        if missing := self.drained - there:
            raise Violation(f"the remote acknowledged, and does not have: {sorted(missing)}")
        report = theirs.verify(deep=True)
        if not report.ok:
            raise Violation(f"the remote is damaged: {report}")
        for machine, refs in self.local.items():
            if not (self.root / machine).exists():
                continue
            ours = ckptstore.open(self.root / machine, remote=False)
            here = {info.ref for info in ours.checkpoints()}
            if lost := refs - here - there:
                raise Violation(f"{machine} acknowledged, and no tier has: {sorted(lost)}")
            self.seen["kept as a branch"] += len(here - there)
            for ref in here:
                if not _same(ours.load(ref, framework="numpy")):
                    raise Violation(f"{ref} of {machine} loads with other bits")
        for ref in there:
            if not _same(theirs.load(ref, framework="numpy")):
                raise Violation(f"{ref} of the remote loads with other bits")


def _warm_up() -> None:
    """Do the one-time work (imports, compiled kernels), so that lives do not repeat it."""
    # A store of its own: that of an earlier campaign of this process already has these steps.
    with ckptstore.open(f"memory://tier-kills-{uuid.uuid4().hex}").writer(deltas=4) as writer:
        for step in range(1, 4):
            writer.save(state_at(step), step)


def campaign(root: Path, remote: str, options: dict[str, Any], kills: int, seed: int) -> Campaign:
    """Kill `kills` times. Raises `Violation`."""
    chance = random.Random(seed)
    _warm_up()
    one = Campaign(root, remote, options)
    while one.kills < kills:  # some lives pass their point less often than planned
        one.life(chance)
    one.close()
    return one


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--remote", choices=("local", "s3", "s3-memory"), default="local")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tier-kills-") as folder, contextlib.ExitStack() as stack:
        remote, words = f"{folder}/remote", {}
        if options.remote != "local":
            (Path(folder) / "server").mkdir()
            fast = options.remote == "s3-memory"
            server = stack.enter_context(serving_fast() if fast else serving(Path(folder) / "server"))
            remote, words = server.url(), server.options
        done = campaign(Path(folder), remote, words, options.kills, options.seed)
        for what, count in sorted(done.seen.items()):
            print(f"{count:5}  {what}")
        print(f"{len(done.drained)} checkpoints were acknowledged by the remote, none is lost")
        if done.behind:
            behind = ", ".join(map(str, sorted(done.behind)))
            print(f"{done.kills} kills; of {len(done.behind)} newest disks that were lost the remote was behind by")
            print(f"{behind} steps, as was reported before")
    return 0


if __name__ == "__main__":
    sys.exit(main())
