"""Kills a writer, lets a successor continue from the visible state, then cuts the power: nothing promised is lost.

    python -m tools.crash.killcuts --every 1 --limit 60

A process that is killed between naming an object and syncing the folder leaves an object that everybody sees and that a
power cut may still remove. A successor must make it durable before it builds on it (`Backend.settle`). Here a writer
dies at every single call that changes the disk, in a file system in memory; a successor opens the store, or only folds
it; and the tool checks every state in which a power cut at any later instant may leave the disk.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ckptstore.backends.base import Backend
from ckptstore.backends.local_disk.posix import Posix
from ckptstore.errors import StoreNotFoundError
from ckptstore.formats.history.records import slot_of
from ckptstore.log import fold_writer
from ckptstore.log.log_reader import anchor_above
from ckptstore.store import Store
from tools.crash import faults
from tools.crash.enumerate import crash_states
from tools.crash.faults import Fault, FaultyPosix
from tools.crash.forgetful import SITES, ForgetfulBackend
from tools.crash.media import MEDIA, backend_on
from tools.crash.old_headers import files_of, mixed
from tools.crash.recording import RecordingPosix
from tools.crash.scenario import Violation, check, live, state_of

__all__ = ["CHANGES", "LINKS", "KillCuts", "Killed", "MortalPosix", "explore", "kill_then_cut"]

CHANGES: Final = faults.CHANGES | faults.SYNCS
LINKS: Final = frozenset({"link"})
"""The most critical instant is after one of these calls and before the sync that follows."""


class Killed(BaseException):
    """The process is dead. Not an `Exception`: nothing may handle it."""


class MortalPosix(FaultyPosix):
    """Passes `life` of these calls to `inner`; from then on every call raises `Killed`."""

    def __init__(self, inner: Posix, life: int, calls: frozenset[str] = CHANGES) -> None:
        super().__init__(inner)
        self.lives(life, calls)

    def lives(self, life: int, calls: frozenset[str]) -> None:
        """Allow `life` more of these calls from now on."""
        self._left = life
        self._calls = calls

    def _fault(self, *names: str) -> Fault | None:
        with self._lock:
            if self._left <= 0:
                raise Killed
            self._left -= not self._calls.isdisjoint(names)
        return super()._fault(*names)

    def close(self, fd: int) -> None:
        self.inner.close(fd)  # the kernel closes the files of a dead process


@dataclass(frozen=True, slots=True)
class KillCuts:
    """Counts of an exploration.

    Attributes:
        kills: writers that died.
        states: distinct states after power cuts, counted for each kill.
        restored: checkpoints restored and compared in them.
    """

    kills: int
    states: int
    restored: int


def kill_then_cut(
    life: int,
    *,
    limit: int,
    seed: int = 0,
    calls: frozenset[str] = CHANGES,
    site: str | None = None,
    folds: bool = False,
    medium: str = "folder",
) -> tuple[bool, int, int]:
    """Let a writer die after `life` calls, let a successor continue, and cut the power wherever it works.

    Args:
        calls: the calls that count.
        site: omit these syncs (`tools.crash.forgetful.SITES`), for negative controls.
        medium: one of `MEDIA`; with `site` one of the folders.
        folds: the successor folds and trims before it opens the store, as a maintenance process would.

    Returns:
        whether the writer died; states checked; checkpoints restored.

    Raises:
        Violation: a promise is broken; explains the crash.
    """
    disk = RecordingPosix()
    died = False

    def backend(posix: Posix) -> Backend:
        if site is None:
            return backend_on(medium, "/store", posix, disk)
        return ForgetfulBackend("/store", site, posix, recycle="always" if medium == "recycled" else "never")

    try:
        live(backend(MortalPosix(disk, life, calls)), disk.acknowledge)
    except Killed:
        died = True
    begin = len(disk.history)
    _go_on(Store(backend(disk)), disk.acknowledge, folds)
    states = restored = 0
    for state in crash_states(disk, limit=limit, seed=seed, begin=begin):
        after = state.mount()
        survivor = backend_on(medium, "/store", after, after)
        try:
            if found := mixed(files_of(state.image)):
                raise Violation(f"old headers over new data: {found}")
            restored += check(survivor, map(str, state.acknowledged), write=states % 5 == 0)
            _check_anchors(survivor)
        except Exception as error:
            raise Violation(f"killed after {life} calls, seed {seed}: {error}\n{state.explain()}") from error
        states += 1
    return died, states, restored


def _go_on(store: Store, acknowledge: Callable[[str], None], folds: bool) -> None:
    if folds:
        try:
            _maintain(store)
        except StoreNotFoundError:
            return
    with store.writer(threads=1, staging_bytes=32 << 20, poll_seconds=None) as writer:
        step = 1 + (0 if writer.parent is None else writer.parent.step)
        acknowledge(writer.save(state_of(writer.term, step), step=step).ref)
    _maintain(store)


def _maintain(store: Store) -> None:
    view = store.view()
    if view.end:
        fold_writer.fold(store.journal, view)
        fold_writer.trim(store.journal, store.view())


def _check_anchors(backend: Backend) -> None:
    """SPEC 7, ANCHORS: a slot may be missing only where the next anchor above it exists."""
    store = Store(backend)
    try:
        every, end = store.format.anchor_every, store.view().end
    except StoreNotFoundError:
        return
    there = {seq for key in backend.list("log/") if (seq := slot_of(key)) is not None}
    for seq in set(range(end)) - there:
        if seq % every == 0 or anchor_above(seq, every) not in there:
            raise Violation(f"slot {seq} is gone, and so is the anchor that would say it was deleted")


def explore(
    every: int = 1,
    *,
    limit: int,
    seed: int = 0,
    start: int = 0,
    calls: frozenset[str] = CHANGES,
    site: str | None = None,
    medium: str = "folder",
) -> KillCuts:
    """Kill after `start`, `start` + `every` ... calls, until a writer survives to its end.

    Raises:
        Violation: names the place and explains the state.
    """
    kills = states = restored = 0
    life, died = start, True
    while died:
        folds = (life - start) // every % 2 == 1
        died, cut, found = kill_then_cut(
            life, limit=limit, seed=seed, calls=calls, site=site, folds=folds, medium=medium
        )
        kills, states, restored = kills + died, states + cut, restored + found
        life += every
    return KillCuts(kills, states, restored)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="kill after every N-th call only")
    parser.add_argument("--links", action="store_true", help="count only the calls that give an object its name")
    parser.add_argument("--limit", type=int, default=60, help="states per instant at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--without", choices=SITES, help="leave these syncs out: must end in a Violation")
    parser.add_argument("--medium", choices=MEDIA, default="folder")
    options = parser.parse_args()
    begin = time.monotonic()
    calls = LINKS if options.links else CHANGES
    done = explore(
        options.every,
        limit=options.limit,
        seed=options.seed,
        calls=calls,
        site=options.without,
        medium=options.medium,
    )
    print(
        f"{done.kills} kills, {done.states} post-crash states, {done.restored} checkpoints restored, 0 violations, "
        f"{time.monotonic() - begin:.0f} s"
    )


if __name__ == "__main__":
    main()
