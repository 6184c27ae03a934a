"""Every state in which a power cut may leave a store: from each, it opens and keeps its promises.

python -m tools.crash.states --limit 2000
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

from ckptstore.backends.local import LocalBackend
from tools.crash.enumerate import crash_states
from tools.crash.faults import Fault, FaultyPosix
from tools.crash.recording import RecordingPosix
from tools.crash.scenario import Violation, check, live

__all__ = ["Campaign", "explore"]


@dataclass(frozen=True, slots=True)
class Campaign:
    """What was explored.

    Attributes:
        states: distinct post-crash states.
        restored: checkpoints restored and compared in them.
        operations: system calls recorded.
    """

    states: int
    restored: int
    operations: int


def explore(
    limit: int, *, seed: int = 0, rounds: int = 1, stop_after: float | None = None, broken: Fault | None = None
) -> Campaign:
    """Record one life of a store and check every state that a crash may leave, `limit` at each instant at most.

    Args:
        stop_after: seconds after which to stop early.
        broken: a fault of the disk during the recording, for negative controls.

    Raises:
        Violation: a promise is broken; the message explains the crash.
    """
    posix = RecordingPosix()
    disk = posix if broken is None else FaultyPosix(posix, broken)
    live(LocalBackend("/store", disk), posix.acknowledge, rounds=rounds)
    states = restored = 0
    begin = time.monotonic()
    for state in crash_states(posix, limit=limit, seed=seed):
        try:
            # Going on to write doubles the work: every third state does.
            restored += check(
                LocalBackend("/store", state.mount()), map(str, state.acknowledged), write=states % 3 == 0
            )
        except Exception as error:
            raise Violation(f"seed {seed}: {error}\n{state.explain()}") from error
        states += 1
        if stop_after is not None and time.monotonic() - begin > stop_after:
            break
    return Campaign(states, restored, len(posix.history))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=500, help="states per instant at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=1, help="lives of the store, one after the other")
    parser.add_argument("--seconds", type=float, default=None, help="stop after so many seconds")
    options = parser.parse_args()
    begin = time.monotonic()
    done = explore(options.limit, seed=options.seed, rounds=options.rounds, stop_after=options.seconds)
    print(
        f"{done.states} post-crash states of {done.operations} recorded calls, {done.restored} checkpoints restored, "
        f"0 violations, {time.monotonic() - begin:.0f} s"
    )


if __name__ == "__main__":
    main()
