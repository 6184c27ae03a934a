"""Runs everything at once, from a seed: writers, readers, requests, folds, gc, SIGKILLs, faults, a full disk.

    python -m tools.crash.torture --seconds 600 --seed 7
    python -m tools.crash.torture --seconds 600 --medium s3     # ministack, or s3-memory: a server that is faster

Real processes (`tools.crash.torture_actors`) work on one store until they are killed at random instants. Another
incarnation follows each at once, some with faults in its system calls. From time to time all are killed and the store
is checked: every acknowledged checkpoint that nobody asked to retire is there, bit for bit; retired checkpoints are
gone; everything visible is whole; no byte is damaged; the next writer continues. Meanwhile actors check whatever they
read.

The seed decides the schedule (which process is killed when, the seed and faults of its successor) and every choice of
every actor; it cannot decide how the system interleaves them. With root the store lives on its own small ext4 image,
which an actor fills to the last block again and again; without root a full disk is only among the injected faults. In a
bucket three in ten incarnations use a proxy that loses, repeats, refuses and delays requests (`grounds.mishaps`):
requests of dead processes arrive while others work.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ckptstore.backends.base import Backend
from ckptstore.formats.checksums import header_hash
from ckptstore.host.caller_warnings import LostStepsWarning
from ckptstore.maintenance.garbage_collection import collect
from ckptstore.store import Store
from tools.crash.grounds import BUCKETS, bucket
from tools.crash.powercut_rig import isolated, make_image, mounted, obstacle
from tools.crash.scenario import Violation, check, create, warm_up
from tools.crash.scenes import KILL_EVERY, BucketScene, FolderScene, Scene
from tools.crash.stages import Acknowledged
from tools.crash.torture_actors import ACTORS, perform

__all__ = ["Action", "Torture", "schedule", "torture"]

DISK: Final = 96 << 20
"""Size of the small disk in bytes: room for some hundred checkpoints."""
CHECK_EVERY: Final = 30.0
"""Seconds between two checks of the whole store."""


@dataclass(frozen=True, slots=True)
class Action:
    """One entry of the schedule.

    Attributes:
        at: seconds after the start.
        part: which process is killed and followed by the next incarnation (``reader-1``); empty: all, and a check.
        seed: of the incarnation that follows (of all of them).
    """

    at: float
    part: str
    seed: int


@dataclass(frozen=True, slots=True)
class Torture:
    """Counts of a run.

    Attributes:
        seconds: how long the actors worked.
        kills: processes killed.
        checks: checks of the whole store.
        restored: checkpoints restored and compared in these.
        events: events that actors noted -> counts: ``saved``, ``loaded``, ``accepted``, ``collected``, ``error X`` ...
        terms: terms of the store at the end.
        slots: log slots ever written.
        disk_full: whether the store had its own small disk.
    """

    seconds: float
    kills: int
    checks: int
    restored: int
    events: dict[str, int]
    terms: int
    slots: int
    disk_full: bool


def parts(*, disk_full: bool) -> list[str]:
    """The names of the processes that run at once."""
    names = [f"{name}-{index}" for name, (_, count) in ACTORS.items() for index in range(count)]
    return names if disk_full else [name for name in names if not name.startswith("filler")]


def schedule(seed: int, seconds: float, names: Sequence[str], kill_every: float = KILL_EVERY) -> list[Action]:
    """The schedule of kills; the last action is a check."""
    chance = random.Random(seed)
    actions, now, last_check = [], 0.0, 0.0
    while (now := now + chance.expovariate(1 / kill_every)) < seconds:
        if now - last_check > CHECK_EVERY:
            last_check = now
            actions.append(Action(now, "", chance.getrandbits(32)))
        else:
            # All others depend on the trainer: it gets a third of the kills.
            part = "trainer-0" if chance.random() < 0.33 else chance.choice(names)
            actions.append(Action(now, part, chance.getrandbits(32)))
    return [*actions, Action(seconds, "", chance.getrandbits(32))]


class _Company:
    """The processes that work on one store."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.processes: dict[str, int] = {}
        self.kills = 0
        self._incarnations = 0

    def start(self, part: str, seed: int) -> None:
        """Start the next incarnation of `part`."""
        self._incarnations += 1
        journal = self.scene.notes / f"{self._incarnations:06d}-{part}.jsonl"
        process = os.fork()
        if process == 0:
            status = 1
            warnings.simplefilter("ignore", LostStepsWarning)
            try:
                stage = self.scene.stage(random.Random(seed), Acknowledged(journal))
                with stage.conditions():
                    status = perform(stage, part.rpartition("-")[0])
            except BaseException:
                Acknowledged(journal).note(
                    violation=f"{part} raised an error that is not ours:\n{traceback.format_exc()}"
                )
                raise
            finally:
                os._exit(status)
        self.processes[part] = process

    def start_all(self, seed: int) -> None:
        for index, part in enumerate(self.scene.names):
            self.start(part, seed + index)

    def kill(self, part: str) -> None:
        """SIGKILL. A process that has already ended has left a violation in its journal."""
        process = self.processes.pop(part)
        os.kill(process, signal.SIGKILL)
        _, status = os.waitpid(process, 0)
        self.kills += os.WIFSIGNALED(status)

    def kill_all(self) -> None:
        for part in list(self.processes):
            self.kill(part)

    def look(self) -> None:
        """Raises `Violation` if a process has ended: they end only after one."""
        for part, process in self.processes.items():
            if os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                raise Violation(f"{part} ended without a kill")


def torture(seconds: float, *, seed: int = 0, folder: Path | None = None, medium: str = "folder") -> Torture:
    """Run the torture of a store for `seconds`.

    Args:
        folder: where to make it, and the journals.
        medium: ``folder``, or one of `grounds.BUCKETS`.

    Raises:
        Violation: a promise is broken; names the seed and says when.
    """
    with _scene(folder, medium, seed) as scene:
        scene.judged(create)
        warm_up()
        company = _Company(scene)
        plan = schedule(seed, seconds, scene.names, scene.kill_every)
        restored = checks = 0
        begin, paused = time.monotonic(), 0.0
        try:
            company.start_all(seed * 1000)
            for action in plan:
                while (now := time.monotonic() - begin - paused) < action.at:
                    time.sleep(min(0.1, action.at - now))
                    company.look()
                if action.part:
                    company.kill(action.part)
                    company.start(action.part, action.seed)
                    continue
                company.kill_all()
                since = time.monotonic()
                restored += _check(scene, last=action is plan[-1])
                checks += 1
                paused += time.monotonic() - since
                if action is not plan[-1]:
                    company.start_all(action.seed)
        except Exception as error:
            company.kill_all()
            told = [event["violation"] for event in Acknowledged.read(scene.notes) if "violation" in event]
            when = time.monotonic() - begin - paused
            raise Violation(f"seed {seed}, after {when:.1f} s: " + "\n".join([str(error), *told])) from error
        finally:
            company.kill_all()
        terms, slots = scene.judged(_ended)
        events = _count(scene.notes) | dict(scene.told())
        return Torture(seconds, company.kills, checks, restored, events, terms, slots, disk_full=scene.disk_full)


def _ended(backend: Backend) -> tuple[int, int]:
    view = Store(backend).view()
    return view.catalog.term, view.end


@contextlib.contextmanager
def _scene(folder: Path | None, medium: str, seed: int) -> Iterator[Scene]:
    with tempfile.TemporaryDirectory(prefix="ckptstore-torture-", dir=folder) as name, contextlib.ExitStack() as stack:
        work = Path(name)
        notes = work / "notes"
        notes.mkdir()
        if medium in BUCKETS:
            yield BucketScene(stack.enter_context(bucket(medium, seed)), notes, parts(disk_full=False))
            return
        disk_full = obstacle("ext4") is None
        if disk_full:
            make_image("ext4", work / "disk.img", DISK)
            stack.enter_context(mounted(work / "disk.img", work / "disk"))
        yield FolderScene(work / "disk" / "store", notes, parts(disk_full=disk_full), disk_full=disk_full)


def _check(scene: Scene, *, last: bool) -> int:
    """While no actor works, compare the store with the journals -> checkpoints restored."""
    events = Acknowledged.read(scene.notes)
    if told := [event["violation"] for event in events if "violation" in event]:
        raise Violation("\n".join(told))
    saved = {event["saved"] for event in events if "saved" in event}
    retiring = {ref for event in events for ref in event.get("retiring", ())}
    retired = {ref for event in events for ref in event.get("retired", ())}
    return int(scene.judged(lambda backend: _compared(Store(backend), saved, retiring, retired, last=last)))


def _compared(store: Store, saved: set[str], retiring: set[str], retired: set[str], *, last: bool) -> int:
    backend = store.backend
    if back := retired & {info.ref for info in store.checkpoints()}:
        raise Violation(f"retired and still there: {sorted(back)}")
    catalog = store.view().catalog
    if astray := {name for name, node in catalog.tags.items() if node not in catalog.checkpoints}:
        raise Violation(f"tags of checkpoints that are gone: {sorted(astray)}")
    if last:
        # Their readers are dead; without this the check would wait until the pins expire.
        for key in backend.list("pins/"):
            backend.delete(key)
    collect(store.journal)
    restored = check(backend, saved - retiring)
    if last:
        _check_nothing_is_left(store)
    return restored


def _check_nothing_is_left(store: Store) -> None:
    """Once nobody reads, every object below seg/ is needed, or belongs to the newest term."""
    collect(store.journal)
    catalog = store.view().catalog
    live = {entry.key for entry in catalog.segments.values()}
    for key in store.backend.list("seg/"):
        term, name = int(key.split("/")[1]), key.rpartition("/")[2].partition(".")[0]
        if key not in live and name not in catalog.manifests and term < catalog.term:
            raise Violation(f"nothing needs {key}, but gc keeps it")


def _count(notes: Path) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for event in Acknowledged.read(notes):
        for name, value in event.items():
            counts[f"{name} {value}" if name == "error" else name] += _amount(name, value)
    return dict(counts)


def _amount(name: str, value: Any) -> int:
    if isinstance(value, list):
        return len(value)
    return value if name in ("collected", "spared", "trimmed", "dead_pins") else 1


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=None, help="default: a new one each time")
    parser.add_argument("--dir", type=Path, default=None, help="where to make the store")
    parser.add_argument("--medium", choices=("folder", *BUCKETS), default="folder")
    parser.add_argument("--show", action="store_true", help="print the schedule, and do nothing")
    options = parser.parse_args()
    seed = random.SystemRandom().getrandbits(31) if options.seed is None else options.seed
    why = obstacle("ext4") if options.medium == "folder" else "the store is in a bucket"
    every = KILL_EVERY if options.medium == "folder" else BucketScene.kill_every
    plan = schedule(seed, options.seconds, parts(disk_full=why is None), every)
    if options.show:
        for action in plan:
            print(f"{action.at:8.2f} {'kill ' + action.part if action.part else 'check':20} {action.seed}")
        return 0
    if why is None:
        arguments = ["--seconds", str(options.seconds), "--seed", str(seed)]
        arguments += ["--dir", str(options.dir)] if options.dir else []
        if (status := isolated(["-m", "tools.crash.torture", *arguments])) is not None:
            return status
    else:
        print(f"no small disk to fill: {why}")
    text = "".join(f"{action.at:.6f} {action.part} {action.seed}\n" for action in plan)
    print(f"seed {seed}, schedule {header_hash(text.encode())}: {len(plan)} actions", flush=True)
    done = torture(options.seconds, seed=seed, folder=options.dir, medium=options.medium)
    for name, count in sorted(done.events.items()):
        print(f"{count:8} {name}")
    print(
        f"{done.seconds:.0f} s, {done.kills} kills, {done.checks} checks, {done.restored} checkpoints restored, "
        f"{done.terms} terms, {done.slots} slots, 0 violations"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
