"""Injects every kind of fault at every place of a store's life: the error surfaces, nothing acknowledged is lost.

    python -m tools.crash.faultsweep --every 5
    python -m tools.crash.faultsweep --every 50 --medium s3     # at the requests to a bucket: `bucket_faults`

For a fault at place n the store lives until the fault ends it (or not), then a healthy process checks the store. For
faults of the disk itself (a sync that fails, a full disk) the crash states that they leave are checked as well.
"""

from __future__ import annotations

import argparse
import errno
import itertools
import time
import warnings
from collections import Counter
from collections.abc import Callable

from ckptstore.errors import CkptError
from ckptstore.host.caller_warnings import UnpinnedWarning
from tools.crash import bucket_faults, faults
from tools.crash.disk import SyncFailed
from tools.crash.enumerate import crash_states
from tools.crash.faults import Fault, FaultyPosix
from tools.crash.grounds import BUCKETS, served
from tools.crash.lives import LIVES
from tools.crash.media import MEDIA, backend_on
from tools.crash.recording import RecordingPosix
from tools.crash.scenario import Violation, check, warm_up
from tools.crash.sweep import Sweep

__all__ = ["KINDS", "Sweep", "inject", "sweep"]

KINDS: dict[str, tuple[str, Callable[[int], tuple[Fault, ...]]]] = {
    "EIO on fsync": ("sync", lambda nth: (faults.sync_fails(nth),)),
    "every fsync fails from here": ("sync", lambda nth: (faults.sync_fails(nth, None),)),
    "disk full": ("pwrite", faults.disk_full),
    "nothing can be allocated": ("fallocate", lambda nth: (Fault(frozenset({"fallocate"}), nth, None, errno.ENOSPC),)),
    "short writes": ("pwrite", lambda nth: (faults.short_writes(nth),)),
    "short reads": ("read", lambda nth: (faults.short_reads(nth),)),
    "EIO on read": ("read", lambda nth: (faults.read_fails(nth),)),
    "EINTR": ("transfer", lambda nth: (faults.interrupted(nth),)),
    "link done, acknowledgement lost": ("link", lambda nth: (faults.acknowledgement_lost(nth),)),
}
"""Name -> (calls that count as its places, fault at the n-th place)."""

_COUNTED = {
    "sync": faults.SYNCS,
    "pwrite": frozenset({"pwrite"}),
    "fallocate": frozenset({"fallocate"}),
    "read": faults.READS,
    "transfer": faults.READS | {"pwrite"},
    "link": frozenset({"link", "rename_exclusive"}),
}


def inject(
    *chosen: Fault, cuts: int = 0, seed: int = 0, medium: str = "folder", life: str = "whole"
) -> tuple[str | None, int, int]:
    """Run one life with faults, then let a healthy process check it, and up to `cuts` crash states from the fault on.

    Returns:
        the class of the error that surfaced, or None; crash states checked; checkpoints restored.

    Raises:
        Violation: a promise is broken, or an error surfaced that is not one of ours.
    """
    disk = RecordingPosix()
    promised: list[str] = []

    def acknowledge(ref: str) -> None:
        promised.append(ref)
        disk.acknowledge(ref)

    surfaced = None
    try:
        faulty = FaultyPosix(disk, *chosen)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UnpinnedWarning)  # a full disk; nothing collects meanwhile
            LIVES[life](lambda: backend_on(medium, "/store", faulty, disk), acknowledge)
    except CkptError as error:
        surfaced = type(error).__name__
    # First judge the state without a power cut, on a copy, because the check writes. Of each cut visit only the states
    # that lose the most: the cuts must reach past the acknowledgements after the fault.
    states = restored = 0
    failed = (at for at, operation in enumerate(disk.history) if isinstance(operation, SyncFailed))
    begin = next(failed, max(0, len(disk.history) - cuts))
    for state in itertools.islice(crash_states(disk, limit=3, seed=seed, begin=begin), cuts):
        after = state.mount()
        restored += check(backend_on(medium, "/store", after, after), map(str, state.acknowledged), write=False)
        states += 1
    restored += check(backend_on(medium, "/store", disk, disk), promised)
    return surfaced, states, restored


def places(medium: str = "folder", life: str = "whole") -> dict[str, int]:
    """The number of places that a healthy life has for each kind of fault."""
    disk = RecordingPosix()
    healthy = FaultyPosix(disk)
    LIVES[life](lambda: backend_on(medium, "/store", healthy, disk), lambda _: None)
    return {kind: sum(healthy.calls[name] for name in _COUNTED[calls]) for kind, (calls, _) in KINDS.items()}


def sweep(
    every: int = 1, *, cuts: int = 0, seed: int = 0, start: int = 0, medium: str = "folder", life: str = "whole"
) -> Sweep:
    """Inject every kind of fault at every `every`-th place.

    Args:
        medium: one of `MEDIA`. `life`: one of `lives.LIVES`.

    Raises:
        Violation: names the kind, the place and the seed.
    """
    injected: Counter[str] = Counter()
    surfaced: Counter[str] = Counter()
    survived = states = restored = 0
    there = places(medium, life)
    for kind, (_, make) in KINDS.items():
        cut_short = cuts if kind.startswith(("EIO on f", "disk", "nothing")) else 0
        for nth in range(1 + start % every, there[kind] + 1, every):
            try:
                error, cut, found = inject(*make(nth), cuts=cut_short, medium=medium, life=life)
            except Exception as broken:
                raise Violation(f"{kind} at place {nth} (seed {seed}): {broken}") from broken
            injected[kind] += 1
            if error is None:
                survived += 1
            else:
                surfaced[error] += 1
            states += cut
            restored += found
    return Sweep(dict(injected), dict(surfaced), survived, states, restored)


def _done(options: argparse.Namespace) -> Sweep:
    if options.medium not in BUCKETS:
        return sweep(options.every, cuts=options.cuts, seed=options.seed, medium=options.medium, life=options.life)
    warm_up()  # compiling at the first call would let requests time out
    with served(options.medium) as server:
        return bucket_faults.sweep(
            server, options.every, start=options.seed, life=options.life, checks=options.medium == "s3"
        )


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="inject at every N-th place only")
    parser.add_argument("--cuts", type=int, default=20, help="crash states to check after each fault of the disk")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--medium", choices=(*MEDIA, *BUCKETS), default="folder")
    parser.add_argument("--life", choices=LIVES, default="whole", help="the life of the store")
    options = parser.parse_args()
    begin = time.monotonic()
    done = _done(options)
    for kind, count in done.injected.items():
        print(f"{count:6} {kind}")
    print(f"surfaced: {done.surfaced}; survived: {done.survived}")
    print(
        f"{sum(done.injected.values())} faults, {done.states} crash states, {done.restored} checkpoints restored, "
        f"0 violations, {time.monotonic() - begin:.0f} s"
    )


if __name__ == "__main__":
    main()
