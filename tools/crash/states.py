"""Checks every state in which a power cut may leave a store: the store opens and keeps its promises.

python -m tools.crash.states --limit 2000 --medium pmem
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

from ckptstore.backends.local_disk.local import LocalBackend
from ckptstore.errors import StoreNotFoundError
from ckptstore.restore.restore_plan import plan
from ckptstore.store import Store
from tools.crash.enumerate import CrashState, crash_states
from tools.crash.faults import Fault, FaultyPosix
from tools.crash.lives import LIVES
from tools.crash.media import MEDIA, backend_on
from tools.crash.old_headers import mixed
from tools.crash.recording import RecordingPosix
from tools.crash.scenario import Violation, check, compare, promised

__all__ = ["Campaign", "Known", "explore"]

FULL_EVERY = 20
"""In one of so many states all bytes are read and the next writer continues; the others reuse earlier comparisons."""


@dataclass(frozen=True, slots=True)
class Campaign:
    """Counts of an exploration.

    Attributes:
        states: distinct post-crash states.
        restored: checkpoints restored and compared in them.
        operations: system calls recorded.
    """

    states: int
    restored: int
    operations: int


class Known:
    """Checks states fast: each check reads the log and looks up every promise, but compares bytes only once.

    Whether a checkpoint restores to the right bits depends on its segment's bytes and on its header hash in the
    catalog. Most states of one recording share both.
    """

    def __init__(self) -> None:
        self._right: set[tuple[str, bytes, str]] = set()
        self._unmixed: set[tuple[str, bytes]] = set()

    def check(self, state: CrashState) -> int:
        """Check one state without writing; returns the number of checkpoints that are there and correct.

        Raises:
            Violation: a promise is broken.
        """
        self.check_headers(state)
        wanted = promised(map(str, state.acknowledged))
        posix = state.mount()
        store = Store(LocalBackend("/store", posix))
        try:
            catalog = store.view().catalog
        except StoreNotFoundError:
            if wanted:
                raise Violation(f"the store is gone, and with it {sorted(wanted)}") from None
            return 0
        if catalog.damage:
            raise Violation(f"slots {catalog.damage} are damaged or missing")
        refs = {entry.ref: entry for entry in catalog.checkpoints.values()}
        if missing := wanted - refs.keys():
            raise Violation(f"acknowledged and gone: {sorted(missing)}")
        files = {path: blob for path, blob in state.image.walk() if blob is not None}
        for ref, entry in refs.items():
            for segment in plan(catalog, entry.id).segments:
                found = catalog.segments[segment]
                blob = files.get(f"/store/{found.key}")
                if blob is None:
                    raise Violation(f"{ref} is listed, and its segment {found.key} is gone")
                if (ref, blob.digest, found.hash) not in self._right:
                    compare(store, ref)
                    self._right.add((ref, blob.digest, found.hash))
        return len(refs)

    def check_headers(self, state: CrashState) -> None:
        """No file has the header of one segment and bytes of another. Raises `Violation`."""
        fresh = {
            (path, blob.digest): blob.data
            for path, blob in state.image.walk()
            if blob is not None and (path, blob.digest) not in self._unmixed
        }
        if found := mixed((path, data) for (path, _), data in fresh.items()):
            raise Violation(f"old headers over new data: {found}")
        self._unmixed.update(fresh)


def explore(
    limit: int,
    *,
    seed: int = 0,
    rounds: int = 1,
    stop_after: float | None = None,
    broken: Fault | None = None,
    medium: str = "folder",
    forgets: frozenset[str] = frozenset(),
    life: str = "whole",
) -> Campaign:
    """Record one life of a store and check every state that a crash may leave, `limit` at each instant at most.

    Args:
        stop_after: seconds after which to stop early.
        broken: a fault of the disk during the recording, for negative controls.
        medium: one of `MEDIA`; on ``pmem`` lines of 64 bytes are pending from one fence to the next.
        forgets: ``drain`` or ``flush``, which then do nothing there, for negative controls.
        life: one of `lives.LIVES`.

    Raises:
        Violation: a promise is broken; the message explains the crash.
    """
    posix = RecordingPosix()
    disk = posix if broken is None else FaultyPosix(posix, broken)
    for _ in range(rounds):
        LIVES[life](lambda: backend_on(medium, "/store", disk, posix, forgets), posix.acknowledge)
    return _checked(posix, limit, seed, stop_after, medium)


def _checked(posix: RecordingPosix, limit: int, seed: int, stop_after: float | None, medium: str) -> Campaign:
    states = restored = 0
    begin = time.monotonic()
    known = Known()
    for state in crash_states(posix, limit=limit, seed=seed):
        try:
            if states % FULL_EVERY:
                restored += known.check(state)
            else:
                known.check_headers(state)
                disk = state.mount()
                restored += check(backend_on(medium, "/store", disk, disk), map(str, state.acknowledged))
        except Exception as error:
            raise Violation(f"seed {seed}: {error}\n{state.explain()}") from error
        states += 1
        if stop_after is not None and time.monotonic() - begin > stop_after:
            break
    return Campaign(states, restored, len(posix.history))


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=500, help="states per instant at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=1, help="lives of the store, one after the other")
    parser.add_argument("--medium", choices=MEDIA, default="folder")
    parser.add_argument("--life", choices=LIVES, default="whole", help="the life of the store")
    parser.add_argument("--seconds", type=float, default=None, help="stop after so many seconds")
    options = parser.parse_args()
    begin = time.monotonic()
    done = explore(
        options.limit,
        seed=options.seed,
        rounds=options.rounds,
        stop_after=options.seconds,
        medium=options.medium,
        life=options.life,
    )
    print(
        f"{options.life} on {options.medium}: {done.states} post-crash states of {done.operations} recorded calls, "
        f"{done.restored} checkpoints restored, 0 violations, {time.monotonic() - begin:.0f} s"
    )


if __name__ == "__main__":
    main()
