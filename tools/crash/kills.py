"""Kills a writer (SIGKILL) at every named crash point: acknowledged data is there, and the next writer continues.

    python -m tools.crash.kills --kills 200
    python -m tools.crash.kills --kills 200 --medium s3     # ministack; s3-memory: a server that is faster

Each victim is its own process, forked from one that has imported everything, so that a kill costs milliseconds.

In a bucket every other victim dies while one of its requests is in flight. The victims of every other store use a proxy
that loses, repeats, refuses and delays requests: requests of dead victims may arrive while their successors work.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import threading
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ckptstore.backends.base import Backend
from ckptstore.backends.memory import MemoryBackend
from ckptstore.errors import CkptError
from ckptstore.host import crash_points
from tools.crash.grounds import BUCKETS, Ground, Place, ground
from tools.crash.lives import LIVES, POINTS
from tools.crash.media import MEDIA, obstacle
from tools.crash.scenario import Violation, check, warm_up

__all__ = ["REQUEST", "Kills", "kill_at", "points_of", "sweep"]

REQUEST: Final = "a request"
"""Not a crash point: the instant after a given number of requests to a bucket, or a moment later."""
_MOMENT: Final = 0.01
"""Approximate duration of a request in seconds."""
_FAILED: Final = 3


@dataclass(frozen=True, slots=True)
class Kills:
    """Counts of a sweep.

    Attributes:
        kills: victims that died by SIGKILL.
        completed: victims that ended before they passed the point often enough.
        points: crash point -> kills there.
        restored: checkpoints restored and compared afterwards.
        failed: victims that ended with an error of their medium, where it has any.
        acknowledged: checkpoints that victims were promised.
    """

    kills: int
    completed: int
    points: dict[str, int]
    restored: int
    failed: int = 0
    acknowledged: int = 0


@dataclass(slots=True)
class _Tally:
    done: Counter[str] = field(default_factory=Counter)
    completed: int = 0
    failed: int = 0
    restored: int = 0
    acknowledged: int = 0


def points_of(life: str, medium: str) -> Sequence[str]:
    """The crash points that a life passes: in a bucket nothing is linked, and no file is reused."""
    if medium not in BUCKETS:
        return POINTS[life]
    return [point for point in POINTS[life] if not point.startswith(("create.", "recycle."))]


def kill_at(place: Place, point: str, count: int, life: str = "whole") -> tuple[str, list[str]]:
    """Let a process live in the store at `place` until it passes `point` for the `count`-th time.

    Args:
        point: a crash point, or `REQUEST`.
        life: one of `lives.LIVES`.

    Returns:
        ``killed``, ``completed`` or, in a faulty place, ``failed``; and the REFs that were promised to it.
    """
    reading, writing = os.pipe()
    victim = os.fork()
    if victim == 0:
        status = 1
        try:
            os.close(reading)
            status = _live(place, point, count, life, writing)
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        acknowledged = pipe.read().split()
    _, status = os.waitpid(victim, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return "killed", acknowledged
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
        return "completed", acknowledged
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == _FAILED:
        return "failed", acknowledged
    raise Violation(f"the victim at {point}:{count} ended with status {status}")


def _live(place: Place, point: str, count: int, life: str, writing: int) -> int:
    make: Callable[[], Backend] = place.tormented
    if point == REQUEST:
        make = _killed_at_request(make, count)
    else:
        crash_points.arm(point, count)
    try:
        with place.small_uploads():
            # The pipe keeps the acknowledgements even if the victim dies right after them.
            LIVES[life](make, lambda ref: os.write(writing, f"{ref}\n".encode()) and None)
    except CkptError:
        if not place.faulty:
            raise
        return _FAILED
    return 0


def _killed_at_request(make: Callable[[], Backend], count: int) -> Callable[[], Backend]:
    """Call `make`; once its backend has sent `count` requests, this process dies, at once or a moment later."""
    made: list[Backend] = []
    moment = random.Random(count).random() * _MOMENT

    def one() -> Backend:
        made.append(make())
        return made[-1]

    def watch() -> None:
        while sum(one.costs.spent.total for one in list(made) if one.costs is not None) < count:
            time.sleep(_MOMENT / 20)
        time.sleep(moment)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    return one


def sweep(
    kills: int, *, seed: int = 0, folder: Path | None = None, medium: str = "folder", life: str = "whole"
) -> Kills:
    """Kill at every crash point in turn, with growing counts, until `kills` victims have died.

    A store survives several kills, so that recoveries are killed too; every few kills a new store begins.

    Raises:
        Violation: a promise is broken; names the point, the count and the seed.
    """
    chance = random.Random(seed)  # not a secret
    warm_up()
    if life != "whole":
        _warm_up(life)
    tally = _Tally()
    with ground(medium, folder, seed) as stores:
        choose = _Choice(chance, points_of(life, medium), _requests_of(stores, life) if medium in BUCKETS else 0)
        for number in range(10 * kills):
            if tally.done.total() >= kills:
                break
            point, count = choose(number)
            if number % 4 == 0:
                promised: set[str] = set()
            # Every other folder recycles files. Writers that recycle and writers that do not may share a store.
            recycles = bool(number // 4 % 2) or point.startswith("recycle.")
            place = stores.place(number // 4, recycles=recycles)
            ended, acknowledged = kill_at(place, point, count, life)
            promised |= set(acknowledged)
            tally.done[point] += ended == "killed"
            tally.completed += ended == "completed"
            tally.failed += ended == "failed"
            tally.acknowledged += sum(not ref.startswith("-") for ref in acknowledged)
            try:
                tally.restored += _checked(place, promised, number)
            except Exception as error:
                raise Violation(f"seed {seed}, kill {number} at {point}:{count}: {error}") from error
            if number % 4 == 3:
                place.remove()
    return Kills(
        tally.done.total(), tally.completed, dict(tally.done), tally.restored, tally.failed, tally.acknowledged
    )


def _checked(place: Place, promised: set[str], number: int) -> int:
    """Every other check does not write, so that the next victim meets the state that this one left."""
    # Waiting for requests in flight has a different period, so that both choices meet.
    settled = number // 2 % 2 == 0
    return int(place.judged(lambda backend: check(backend, promised, write=number % 2 == 0), settled=settled))


class _Choice:
    """Chooses the crash point of a victim, and at which pass it dies."""

    def __init__(self, chance: random.Random, points: Sequence[str], requests: int) -> None:
        """Args:
        requests: requests of one life; 0: its medium has none.
        """
        self._chance = chance
        self._points = points
        self._requests = requests

    def __call__(self, number: int) -> tuple[str, int]:
        points = self._points
        if self._requests:
            if number % 4 in (1, 2):  # alternate: a victim that is checked, a victim that a writer follows at once
                return REQUEST, self._chance.randint(1, self._requests)
            number //= 2
        if number < 2 * len(points):
            return points[number % len(points)], 1 + number // len(points)
        return self._chance.choice(points), self._chance.randint(1, 12)


def _requests_of(stores: Ground, life: str) -> int:
    """The number of requests of an undisturbed life."""
    place, made = stores.place(-2, recycles=False), list[Backend]()

    def make() -> Backend:
        made.append(place.backend())
        return made[-1]

    def look(_: Backend) -> int:
        LIVES[life](make, lambda _: None)
        return sum(one.costs.spent.total for one in made if one.costs is not None)

    return int(place.judged(look))


def _warm_up(life: str) -> None:
    name = f"warm-up-{uuid.uuid4().hex}"
    LIVES[life](lambda: MemoryBackend(name), lambda _: None)
    MemoryBackend.forget(name)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--dir", type=Path, default=None, help="where to make the stores (default: the temporary folder)"
    )
    parser.add_argument("--medium", choices=(*MEDIA, *BUCKETS), default="folder")
    parser.add_argument("--life", choices=LIVES, default="whole", help="the life of the store")
    options = parser.parse_args()
    if (why := obstacle(options.medium)) is not None:
        parser.error(why)
    begin = time.monotonic()
    done = sweep(options.kills, seed=options.seed, folder=options.dir, medium=options.medium, life=options.life)
    for point in done.points:
        print(f"{done.points[point]:6} {point}")
    if done.failed:
        print(f"{done.failed} ended with an error of the medium, {done.completed} before it was their turn")
    print(
        f"{done.kills} kills, {done.acknowledged} checkpoints acknowledged, {done.restored} restored, 0 violations, "
        f"{time.monotonic() - begin:.0f} s"
    )


if __name__ == "__main__":
    main()
