"""Cuts the power under a working writer at random instants, on real file systems with real journal replay.

    python -m tools.crash.powercut --cuts 200 --controls 40

A separate process saves fulls, deltas and step diffs, merges, collects, tags, folds, trims, resumes and forks without
end on a file system in a loop device; it reports each acknowledgement through a pipe. At random instants its disk is
cloned (`tools.crash.powercut_rig`) and the clone is mounted. Every checkpoint that was acknowledged before the cloning
began must be there, bit for bit; every other visible checkpoint must be whole; and the next writer must be able to
continue. Some cuts follow the SIGKILL of the writer and hit its successor. Then the same is done to backends that omit
one sync each (`tools.crash.forgetful`): the tool must catch these, or the file system is known to hide that omission,
and enumeration catches it.

``--medium pmem-msync`` is the same with segments that are written through file mappings and msync.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ckptstore.backends.local_disk.local import LocalBackend
from ckptstore.backends.local_disk.pmem import PmemBackend
from ckptstore.backends.local_disk.posix import SYSTEM
from ckptstore.errors import CkptError, UsageError
from ckptstore.host.caller_warnings import LostStepsWarning
from ckptstore.log import fold_writer
from ckptstore.log.journal import Journal
from ckptstore.maintenance.garbage_collection import collect
from ckptstore.maintenance.merge import merge
from ckptstore.store import Store
from ckptstore.write.policy.diff_options import DiffOptions
from ckptstore.write.saves.ledger import PendingSave
from tools.crash.forgetful import SITES, ForgetfulBackend, ForgetfulPosix
from tools.crash.media import no_library
from tools.crash.old_headers import files_below, mixed
from tools.crash.powercut_rig import FILE_SYSTEMS, Rig, isolated, obstacle
from tools.crash.scenario import CHAIN, Violation, check, create, state_of

__all__ = ["HIDDEN", "Control", "Cuts", "Victim", "campaign", "control", "hidden", "work"]

CUTS_PER_STORE: Final = 5
"""Then a new store begins: the time of a check grows with the store."""
SLOWEST: Final = 0.25
"""Seconds: the longest wait before a cut, and the longest pause of the writer, several times."""

_EVERYWHERE: Final = tuple(FILE_SYSTEMS)
_EITHER: Final = (True, False)
HIDDEN: Final[tuple[tuple[tuple[str, ...], tuple[str, ...], tuple[bool, ...], str], ...]] = (
    (
        ("ext4", "xfs"),
        ("segment bytes",),
        (True,),
        "O_DIRECT has put the blocks on the device, and the slot's fsync commits the journal with length and block map",
    ),
    (_EVERYWHERE, ("segment name",), _EITHER, "the fsync of a new file also saves its name"),
    (_EVERYWHERE, ("folder names",), _EITHER, "the fsync of a new file also saves the names of new folders above it"),
    (
        _EVERYWHERE,
        ("settle",),
        _EITHER,
        "the journal keeps the order of names, so a name that depends on another does not outlive it",
    ),
    (
        _EVERYWHERE,
        ("old header", "recycled data"),
        _EITHER,
        "the cut must hit a few milliseconds of a save, and both segments must have the same length",
    ),
)
"""(file systems, sites, O_DIRECT or not, why omitting that sync cannot show there). Enumeration catches them all."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """Counts of a campaign.

    Attributes:
        cuts: power cuts whose disk was mounted and checked.
        kills: writers killed shortly before.
        acknowledged: acknowledgements received before the cuts, summed.
        restored: checkpoints restored and compared.
    """

    cuts: int
    kills: int
    acknowledged: int
    restored: int


# ------------------------------------------------------------------------------------------------ the writer


def work(backend: LocalBackend, acknowledge: int, seed: int) -> None:
    """Work in the store without end; write a line for each acknowledgement (see `scenario`) to `acknowledge`."""
    chance = random.Random(seed)
    store = Store(backend)
    create(backend)
    warnings.simplefilter("ignore", LostStepsWarning)  # steps of a killed writer that were never acknowledged

    def tell(label: str) -> None:
        os.write(acknowledge, f"{label}\n".encode())

    while True:
        known = [info.ref for info in store.checkpoints()]
        parent = chance.choice(known) if known and chance.random() < 0.3 else "latest"
        kind = chance.choice(("fulls", "fulls", "deltas", "diffs"))
        written = _term(store, parent, kind, chance, tell)
        if kind == "deltas" and len(written) > 2 and chance.random() < 0.7:
            keep_steps = chance.random() < 0.5
            for ref in () if keep_steps else written[1:-1]:
                tell(f"-{ref}")
            with contextlib.suppress(UsageError):  # nothing to merge: after a jump every state was stored as a full
                merge(store.journal, f"{written[0]}..{written[-1]}", keep_steps=keep_steps, take_over=True)
            collect(store.journal)
        if chance.random() < 0.7:
            fold_writer.fold(Journal(backend, store.format), store.view())
            fold_writer.trim(Journal(backend, store.format), store.view())


def _term(store: Store, parent: str, kind: str, chance: random.Random, tell: Callable[[str], None]) -> list[str]:
    """One term of fulls, deltas or step diffs -> the REFs it wrote."""
    deltas = CHAIN if kind == "deltas" else None
    diffs = None
    if kind == "diffs":
        diffs = DiffOptions(batch=chance.randint(1, 3), seconds=None, flush_on_sigterm=False)
    pending: list[PendingSave] = []
    written: list[str] = []

    def told(everything: bool = False) -> None:
        while pending and (everything or pending[0].done()):
            written.append(pending.pop(0).result().ref)
            tell(written[-1])

    with store.writer(
        parent=parent, threads=1, staging_bytes=32 << 20, poll_seconds=None, deltas=deltas, diffs=diffs
    ) as writer:
        step = 0 if writer.parent is None else writer.parent.step
        for _ in range(chance.randint(1, 7)):
            # A jump makes the states of this run several hundred kilobytes large: several blocks.
            step += 8_000 if chance.random() < 0.01 and step < 8_000 else 1
            state = state_of(writer.term, step)
            if chance.random() < 0.5 and kind != "diffs":
                written.append(writer.save(state, step).ref)
                tell(written[-1])
            else:
                pending.append(writer.save_async(state, step))
                told(everything=diffs is None)
            if chance.random() < 0.3:  # otherwise the next save's fsync follows at once and hides much
                time.sleep(chance.random() * SLOWEST / 5)
        if diffs is not None:
            writer.wait()
            told(everything=True)
        writer.tag("newest", step)
    return written


class Victim:
    """A process that runs `work`, forked from this one."""

    def __init__(self, backend: LocalBackend, seed: int) -> None:
        self._reading, writing = os.pipe()
        os.set_blocking(self._reading, False)
        self._rest = b""
        self._dead = False
        self.process = os.fork()
        if self.process == 0:
            try:
                os.close(self._reading)
                work(backend, writing, seed)
            except BaseException:
                traceback.print_exc()
                raise
            finally:
                os._exit(1)  # it never ends without an error
        os.close(writing)

    def acknowledged(self) -> list[str]:
        """The REFs promised since the last call."""
        data = self._rest
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self._reading, 1 << 16):
                data += part
        lines = data.split(b"\n")
        self._rest = lines.pop()
        return [line.decode() for line in lines]

    def pause(self) -> None:
        """Stop the process after the cut, so that the check has the machine to itself."""
        os.kill(self.process, signal.SIGSTOP)

    def resume(self) -> None:
        """Resume the process."""
        os.kill(self.process, signal.SIGCONT)

    def kill(self) -> list[str]:
        """SIGKILL -> the acknowledgements since the last call. Does nothing the second time.

        Raises:
            Violation: it had already ended with an error.
        """
        if self._dead:
            return []
        self._dead = True
        os.kill(self.process, signal.SIGKILL)
        _, status = os.waitpid(self.process, 0)
        rest = self.acknowledged()
        os.close(self._reading)
        if os.WIFEXITED(status):
            raise Violation(f"the writer ended with status {os.WEXITSTATUS(status)}; its traceback is above")
        return rest


# ------------------------------------------------------------------------------------------------ the cuts


def _backend(root: Path, site: str | None, direct: bool, medium: str, recycle: str) -> LocalBackend:
    if medium == "pmem-msync":
        posix = SYSTEM if site is None else ForgetfulPosix(SYSTEM, str(root), site)
        return PmemBackend(root, posix, library=no_library)
    if site is None:
        return LocalBackend(root, direct=direct, recycle=recycle)
    return ForgetfulBackend(root, site, direct=direct, recycle=recycle)


def _cuts(
    rig: Rig, chance: random.Random, site: str | None, direct: bool, tally: Counter[str], medium: str = "folder"
) -> Generator[int, None, None]:
    """Endless power cuts, each checked before the next -> checkpoints restored after it.

    Raises:
        Violation, CkptError: a promise is broken.
    """
    while True:
        root = rig.disk / f"store-{tally['stores']}"
        tally["stores"] += 1
        # Every other store recycles files. Stores that omit one sync all do where only recycling can show the omission.
        recycle = "always" if tally["stores"] % 2 == 0 or site == "old header" else "never"
        backend = _backend(root, site, direct, medium, recycle)
        promised: set[str] = set()
        victim = Victim(backend, chance.getrandbits(32))
        try:
            for _ in range(CUTS_PER_STORE):
                time.sleep(chance.random() ** 2 * 2 * SLOWEST)
                if chance.random() < 0.25:
                    promised.update(victim.kill())
                    tally["kills"] += 1
                    victim = Victim(backend, chance.getrandbits(32))
                    time.sleep(chance.random() * SLOWEST / 5)
                # Acknowledgements in the pipe now came before the cut. Later ones may be on the disk or not.
                promised.update(victim.acknowledged())
                tally["acknowledged"] += len(promised)
                image = rig.cut()
                victim.pause()
                yield _check(rig, image, root.name, promised, recycle)
                victim.resume()
        finally:
            victim.kill()
        shutil.rmtree(root)  # the next store is written in the same blocks: unsynced data shows the old bytes


def _check(rig: Rig, image: Path, store: str, promised: set[str], recycle: str) -> int:
    """Mount the clone of a cut, and check it -> checkpoints restored."""
    with rig.after(image) as disk:
        if not (disk / store).is_dir() and promised:
            raise Violation(f"the store's folder is gone, and with it {sorted(promised)}")
        if found := mixed(files_below(disk / store)):
            raise Violation(f"old headers over new data: {found}")
        # Closed: its handles would keep the disk mounted.
        with contextlib.closing(LocalBackend(disk / store, recycle=recycle)) as backend:
            return check(backend, promised)


def campaign(inner: str, cuts: int, *, seed: int = 0, folder: Path | None = None, medium: str = "folder") -> Cuts:
    """Cut the power `cuts` times.

    Args:
        inner: the file system under the store, one of `FILE_SYSTEMS`.
        folder: where to make the images.
        medium: ``folder`` or ``pmem-msync``.

    Raises:
        Violation: a promise is broken; names the cut and the seed. The seed repeats the actions, not the instants.
    """
    tally: Counter[str] = Counter()
    # Every other store bypasses the page cache: the two kinds lose different things.
    with Rig(inner, folder) as rig:
        for direct in (True, False):
            source = _cuts(rig, random.Random(f"{seed} {inner} {direct}"), None, direct, tally, medium)
            with contextlib.closing(source):
                for _ in range(cuts // 2 if direct else cuts - cuts // 2):
                    try:
                        tally["restored"] += next(source)
                    except Exception as error:
                        raise Violation(f"{inner}, seed {seed}, power cut {tally['cuts'] + 1}: {error}") from error
                    tally["cuts"] += 1
    return Cuts(tally["cuts"], tally["kills"], tally["acknowledged"], tally["restored"])


@dataclass(frozen=True, slots=True)
class Control:
    """The outcome of a backend without one of its syncs.

    Attributes:
        inner: the file system.
        site: the omitted sync.
        direct: whether segments bypassed the page cache.
        cuts: the number of power cuts.
        caught: the violation that was found; empty: none.
    """

    inner: str
    site: str
    direct: bool
    cuts: int
    caught: str


def control(
    inner: str,
    site: str,
    tries: int,
    *,
    direct: bool = True,
    seed: int = 0,
    folder: Path | None = None,
    medium: str = "folder",
) -> Control:
    """Cut the power under a backend that omits one sync, until the omission is noticed, or `tries` times."""
    chance = random.Random(f"{seed} {inner} {site} {direct}")
    with Rig(inner, folder) as rig, contextlib.closing(_cuts(rig, chance, site, direct, Counter(), medium)) as source:
        for number in range(1, tries + 1):
            try:
                next(source)
            except (Violation, CkptError) as error:
                return Control(inner, site, direct, number, f"{type(error).__name__}: {error}")
    return Control(inner, site, direct, tries, "")


def hidden(inner: str, site: str, direct: bool) -> str | None:
    """Why omitting that sync cannot show on that file system; None: the tool must catch it."""
    return next(
        (why for kinds, sites, ways, why in HIDDEN if inner in kinds and site in sites and direct in ways), None
    )


# ------------------------------------------------------------------------------------------------ the command


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuts", type=int, default=200, help="power cuts, over all file systems")
    parser.add_argument("--controls", type=int, default=40, help="power cuts at most under each backend without a sync")
    parser.add_argument("--on", choices=FILE_SYSTEMS, action="append", help="only this file system (repeatable)")
    parser.add_argument("--site", choices=SITES, action="append", help="only this negative control (repeatable)")
    parser.add_argument("--medium", choices=("folder", "pmem-msync"), default="folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, default=None, help="where to make the images")
    options = parser.parse_args()
    chosen = options.on or list(FILE_SYSTEMS)
    for inner in chosen:
        if (why := obstacle(inner)) is not None:
            print(f"skipped: {inner}: {why}")
    kinds = [inner for inner in chosen if obstacle(inner) is None]
    if not kinds:
        return 0
    if (status := isolated(["-m", "tools.crash.powercut", *sys.argv[1:]])) is not None:
        return status
    for index, inner in enumerate(kinds):
        # ext4, which most users have, gets half of them.
        share = options.cuts if len(kinds) == 1 else options.cuts // (2 if index == 0 else 2 * (len(kinds) - 1))
        _report(inner, share, options)
    escaped = [
        done
        for inner in kinds
        for site in options.site or (SITES if options.medium == "folder" else ("segment bytes",))
        for direct in _ways(site, options.medium)
        if options.controls and _escaped(done := _controlled(inner, site, direct, options))
    ]
    return 1 if escaped else 0


def _ways(site: str, medium: str) -> tuple[bool, ...]:
    """With O_DIRECT or not: the variants in which a control of this site is tried."""
    if medium != "folder":
        return (False,)
    return (True, False) if site == "segment bytes" else (True,)


def _report(inner: str, cuts: int, options: argparse.Namespace) -> None:
    begin = time.monotonic()
    done = campaign(inner, cuts, seed=options.seed, folder=options.dir, medium=options.medium)
    print(
        f"{inner:5}: {done.cuts} power cuts ({done.kills} soon after a SIGKILL), {done.acknowledged} acknowledgements, "
        f"{done.restored} checkpoints restored, 0 violations, {time.monotonic() - begin:.0f} s",
        flush=True,
    )


def _controlled(inner: str, site: str, direct: bool, options: argparse.Namespace) -> Control:
    why = hidden(inner, site, direct)
    done = control(
        inner, site, options.controls, direct=direct, seed=options.seed, folder=options.dir, medium=options.medium
    )
    name = site if direct else f"{site}, through the page cache"
    if done.caught:
        verdict = f"caught at cut {done.cuts}: {done.caught.splitlines()[0][:90]}"
    else:
        verdict = f"not in {done.cuts} cuts: {why or 'IT SHOULD HAVE BEEN CAUGHT'}"
    print(f"{inner:5}: without {name}: {verdict}", flush=True)
    return done


def _escaped(done: Control) -> bool:
    return not done.caught and hidden(done.inner, done.site, done.direct) is None


if __name__ == "__main__":
    sys.exit(main())
