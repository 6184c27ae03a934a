"""SIGKILL at every named crash point, on a real disk: what was acknowledged is there, and the next writer goes on.

    python -m tools.crash.kills --kills 200

Each victim is a process of its own, forked from one that has imported everything, so that a kill costs milliseconds.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import tempfile
import time
import uuid
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from ckptstore.backends.memory import MemoryBackend
from ckptstore.host import crash_points
from tools.crash.lives import LIVES, POINTS
from tools.crash.media import MEDIA, backend_on, obstacle
from tools.crash.old_headers import files_below, mixed
from tools.crash.scenario import Violation, check, warm_up

__all__ = ["Kills", "kill_at", "sweep"]


@dataclass(frozen=True, slots=True)
class Kills:
    """What was killed.

    Attributes:
        kills: victims that died by SIGKILL.
        completed: victims that ended before the point was passed so often.
        points: crash point -> kills there.
        restored: checkpoints restored and compared afterwards.
    """

    kills: int
    completed: int
    points: dict[str, int]
    restored: int


def kill_at(root: Path, point: str, count: int, medium: str = "folder", life: str = "whole") -> tuple[bool, list[str]]:
    """Let a process live in the store at `root` until it passes `point` for the `count`-th time.

    Args:
        medium: one of `MEDIA`. `life`: one of `lives.LIVES`.

    Returns:
        whether it was killed, and the REFs that it had been promised.
    """
    reading, writing = os.pipe()
    victim = os.fork()
    if victim == 0:
        status = 1
        try:
            os.close(reading)
            crash_points.arm(point, count)
            # The pipe holds what was promised even if the victim dies right after.
            LIVES[life](lambda: backend_on(medium, root), lambda ref: os.write(writing, f"{ref}\n".encode()) and None)
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        acknowledged = pipe.read().split()
    _, status = os.waitpid(victim, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return True, acknowledged
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
        return False, acknowledged
    raise Violation(f"the victim at {point}:{count} ended with status {status}")


def sweep(
    kills: int, *, seed: int = 0, folder: Path | None = None, medium: str = "folder", life: str = "whole"
) -> Kills:
    """Kill at every crash point in turn, with growing counts, until `kills` victims have died.

    A store lives on over several kills, so that recoveries are killed too; every few kills a new one begins.

    Raises:
        Violation: a promise is broken; names the point, the count and the seed.
    """
    chance = random.Random(seed)  # not a secret
    warm_up()
    if life != "whole":
        _warm_up(life)
    done: Counter[str] = Counter()
    completed = restored = 0
    work = Path(tempfile.mkdtemp(prefix="ckptstore-kills-", dir=folder))
    try:
        for number in range(10 * kills):
            if done.total() >= kills:
                break
            root = work / f"store-{number // 4}"
            if number % 4 == 0:
                promised: set[str] = set()
            points = POINTS[life]
            point = points[number % len(points)] if number < 2 * len(points) else chance.choice(points)
            count = 1 + number // len(points) if number < 2 * len(points) else chance.randint(1, 12)
            # Every other folder recycles; and one may be used by writers that do, and others that do not.
            recycles = medium == "folder" and (number // 4 % 2 or point.startswith("recycle."))
            chosen = "recycled" if recycles else medium
            killed, acknowledged = kill_at(root, point, count, chosen, life)
            promised |= set(acknowledged)
            done[point] += killed
            completed += not killed
            try:
                # Checked without writing every other time, so that the next victim meets what this one left.
                restored += check(backend_on(chosen, root), promised, write=number % 2 == 0)
                if found := mixed(files_below(root)):
                    raise Violation(f"old headers over new data: {found}")
            except Exception as error:
                raise Violation(f"seed {seed}, kill {number} at {point}:{count}: {error}") from error
            if number % 4 == 3:
                shutil.rmtree(root)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return Kills(done.total(), completed, dict(done), restored)


def _warm_up(life: str) -> None:
    name = f"warm-up-{uuid.uuid4().hex}"
    LIVES[life](lambda: MemoryBackend(name), lambda _: None)
    MemoryBackend.forget(name)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--dir", type=Path, default=None, help="where to make the stores (default: the temporary folder)"
    )
    parser.add_argument("--medium", choices=MEDIA, default="folder")
    parser.add_argument("--life", choices=LIVES, default="whole", help="what is done with the store")
    options = parser.parse_args()
    if (why := obstacle(options.medium)) is not None:
        parser.error(why)
    begin = time.monotonic()
    done = sweep(options.kills, seed=options.seed, folder=options.dir, medium=options.medium, life=options.life)
    for point in POINTS[options.life]:
        print(f"{done.points.get(point, 0):6} {point}")
    print(f"{done.kills} kills, {done.restored} checkpoints restored, 0 violations, {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
