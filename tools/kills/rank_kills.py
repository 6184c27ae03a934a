"""SIGKILL of ranks that save together, at every named crash point and at random: acknowledged checkpoints survive.

    python -m tools.kills.rank_kills --kills 200

Each life is a group of 2 to 4 processes over a TCPStore. The TCPStore is hosted by a separate process, as under
torchrun, or by rank 0, as under mpirun. One rank is killed, or rank 0, or all, or the TCPStore's host. Then:

- a checkpoint that was acknowledged to any rank is in the store, and every rank's own state of it is restored bit for
  bit; a process that is not a rank restores the states of all ranks, though their keys come in different orders;
- a checkpoint that was reported to a rank as failed is not in the store (unless the outcome was reported as unknown);
- a kill costs a rank at most the saves in flight (`max_in_flight`), and the steps of one batch;
- no rank hangs, and each surviving rank gets an error of ours;
- the next group, of any size, agrees on one term and one parent, the newest checkpoint, and continues.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np

import ckptstore
from ckptstore import Update
from ckptstore.errors import CkptError, CommitUnknownError, FencedError
from ckptstore.formats import optim
from ckptstore.formats.sources import BoxSource, NumpySource
from ckptstore.formats.states.rank_trees import rank_count
from ckptstore.formats.states.state import FlatState, flatten
from ckptstore.host import crash_points
from ckptstore.host.arenas import LEAST
from ckptstore.write.ranks.messages.key_value_store import Group
from ckptstore.write.ranks.rank_options import RankOptions
from tools.crash.scenario import Violation

__all__ = ["POINTS", "Life", "Sweep", "live", "sweep"]

OPTIONS: Final = RankOptions(timeout=2.0, per_rank="rng")
_PATIENCE: Final = 150.0
"""Timeout of a whole life in seconds: long, because the machine may be busy."""
_STEPS: Final = 6
_IN_FLIGHT: Final = 2
_CONNECT: Final = timedelta(seconds=15)
_ANY: Final = (
    "ranks.divided",
    "save.begin",
    "save.before-header",
    "save.sealed",
    "ranks.before-part",
    "ranks.part-sent",
)
_ANY_OF_DIFFS: Final = ("ranks.coded", "ranks.shared")
_COMMITTER_OF_DIFFS: Final = ("ranks.ordered", "ranks.ended", "ranks.states")
"""Crash points that are passed only if steps are stored as step diffs."""
_COMMITTER: Final = (
    "open.created",
    "ranks.opened",
    "ranks.heard",
    "ranks.gathered",
    "commit.before-create",
    "create.linked",
    "commit.created",
    "commit.acknowledged",
    "ranks.committed",
    "ranks.told",
)
_RANK_0: Final = (*_ANY, *_ANY_OF_DIFFS, *_COMMITTER, *_COMMITTER_OF_DIFFS)
POINTS: Final = ("ranks.joined", *_RANK_0, *_ANY, *_ANY_OF_DIFFS)
"""Each crash point of any rank comes twice: once rank 0 dies there, once another."""
_ONCE: Final = ("ranks.joined", "ranks.opened", "ranks.heard", "open.created")
"""Crash points that are passed once in a life."""
_ADAM: Final = optim.AdamW(weight_decay=0.1)
_MOVED: Final = (37, 11)


@cache
def _trained(term: int, step: int) -> tuple[tuple[np.ndarray[Any, Any], ...], np.ndarray[Any, Any]]:
    """A parameter and its moments after `step` steps, and the gradient of the last; do not change them."""
    if not step:
        start = np.random.default_rng([term, 77]).standard_normal(_MOVED).astype("<f4")
        return (start, np.zeros(_MOVED, "<f4"), np.zeros(_MOVED, "<f4")), np.zeros(_MOVED, "<f4")
    before, _ = _trained(term, step - 1)
    slots = tuple(array.copy() for array in before)
    gradient = np.random.default_rng([term, step, 78]).standard_normal(_MOVED).astype("<f4")
    optim.advance(_ADAM.rule(_numbers(step)), list(slots), gradient)
    return slots, gradient


def _numbers(step: int) -> optim.Step:
    return optim.Step(count=step, lr=1e-3)


def state_of(term: int, step: int, rank: int) -> dict[str, Any]:
    """The state of `rank` after `step`, shards whole."""
    chance = np.random.default_rng([term, step])
    (weight, m, v), _ = _trained(term, step)
    return {
        "alike": {"weight": weight, "m": m, "v": v},
        "rows": {"weight": weight, "m": m, "v": v},
        "replica": {f"w{number}": chance.integers(0, 256, 1000 + 77 * number, dtype=np.uint8) for number in range(5)},
        "shard": chance.standard_normal((11, 3)),
        "step": step,
        "rng": np.arange(4) + 10 * rank,
        "rank": rank,
        "stages": {f"stage{rank}": _stage(term, step, rank)},
    }


def _stage(term: int, step: int, rank: int) -> np.ndarray[Any, Any]:
    """The tensors that only this rank has."""
    return np.full(7 + rank, 1000 * term + step)


def _rows(whole: np.ndarray[Any, Any], rank: int, size: int) -> tuple[int, np.ndarray[Any, Any]]:
    rows = [len(whole) * place // size for place in range(size + 1)]
    return rows[rank], np.ascontiguousarray(whole[rows[rank] : rows[rank + 1]])


def _parts_of(state: dict[str, Any], rank: int, size: int) -> FlatState:
    state = {**state, "rows": {name: array.copy() for name, array in state["rows"].items()}}
    flat = flatten(dict(reversed(state.items())) if rank % 2 else state)
    for name, whole in (("shard", state["shard"]), *((f"rows.{key}", array) for key, array in state["rows"].items())):
        first, part = _rows(whole, rank, size)
        flat.tensors[name] = BoxSource(NumpySource(part), part.shape, 0, whole.shape, (first, 0))
    return flat


def _updates_of(term: int, step: int, rank: int, size: int) -> list[Update]:
    _, gradient = _trained(term, step)
    gradients = {"alike": gradient, "rows": _rows(gradient, rank, size)[1]}
    return [
        Update((f"{name}.weight", f"{name}.m", f"{name}.v"), _ADAM, _numbers(step), NumpySource(own))
        for name, own in gradients.items()
    ]


@dataclass(slots=True)
class Life:
    """The outcome of one group.

    Attributes:
        opened: (term, parent) by rank.
        acknowledged, failed: (term, step) that was acknowledged to some rank, or reported to it as surely failed.
        doubted: (term, step) whose outcome was reported to some rank as unknown.
        given: by rank: (term, step) whose `save_async` had returned.
        killed: ranks that died by SIGKILL.
        errors: the errors of the others, by name.
    """

    opened: dict[int, tuple[int, int | None]] = field(default_factory=dict)
    acknowledged: set[tuple[int, int]] = field(default_factory=set)
    failed: set[tuple[int, int]] = field(default_factory=set)
    doubted: set[tuple[int, int]] = field(default_factory=set)
    given: dict[int, set[tuple[int, int]]] = field(default_factory=dict)
    killed: set[int] = field(default_factory=set)
    errors: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Doom:
    """Which ranks die, and when.

    Attributes:
        victims: ranks; -1 is the TCPStore's host.
        point: where, the `count`-th time; None: `seconds` after the beginning.
        hosted: rank 0 hosts the TCPStore.
        others: all others are killed so many seconds after the first death, as by a scheduler; None: they survive.
        deltas: the writers' option.
        diffs: how many step diffs are written at once; None: none are made.
        bounded: with the smallest memory budget.
    """

    victims: tuple[int, ...]
    point: str | None = None
    count: int = 1
    seconds: float = 0.0
    hosted: bool = False
    others: float | None = None
    deltas: int | None = None
    diffs: int | None = None
    bounded: bool = False

    @property
    def writer(self) -> dict[str, Any]:
        """The options of the writers."""
        diffs = None if self.diffs is None else ckptstore.DiffOptions(full_every=4, batch=self.diffs, seconds=0.2)
        memory = LEAST if self.bounded else None
        return {"deltas": self.deltas, "diffs": diffs, "memory": memory, "max_in_flight": _IN_FLIGHT}

    @property
    def cost(self) -> int:
        """How many saves a kill may cost a rank."""
        return _IN_FLIGHT + (self.diffs or 0)


def _forked(work: Callable[[int], None]) -> tuple[int, int]:
    """Run `work(pipe)` in a process -> its pid, and the reading end of the pipe."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    status = 1
    try:
        os.close(reading)
        signal.alarm(int(_PATIENCE) + 20)  # even if the harness dies
        work(writing)
        status = 0
    except BaseException:  # noqa: BLE001
        os.write(writing, f"bug {traceback.format_exc()!r}\n".encode())
    finally:
        os._exit(status)


def _host(pipe: int) -> None:
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(pipe, f"{store.port}\n".encode())
    time.sleep(_PATIENCE)


def _rank(root: Path, rank: int, size: int, port: int, doom: Doom, steps: int) -> Callable[[int], None]:
    """One rank's life: it opens, saves, and reports every outcome."""

    def work(pipe: int) -> None:
        import torch.distributed as dist

        from ckptstore.frameworks.torch_ranks import StoreMailbox

        def say(text: str) -> None:
            os.write(pipe, f"{text}\n".encode())

        warnings.simplefilter("ignore")
        if doom.point is not None and rank in doom.victims:
            crash_points.arm(doom.point, doom.count)
        if port:
            try:  # torch itself retries the connection until the timeout
                store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=_CONNECT)
            except RuntimeError as error:
                say(f"error {type(error).__name__}")
                return
        else:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            say(f"port {store.port}")
        group = Group(rank, size, StoreMailbox(store))
        try:
            writer = ckptstore.open(root).writer(group=group, ranks=OPTIONS, **doom.writer)
        except CkptError as error:
            say(f"error {type(error).__name__}")
            return
        say(f"opened {writer.term} {-1 if writer.parent is None else writer.parent.step}")
        first = 0 if writer.parent is None else writer.parent.step
        pending = []
        for number in range(steps):
            step = first + 1 + number
            flat = _parts_of(state_of(writer.term, step, rank), rank, size)
            updates = None if doom.diffs is None else _updates_of(writer.term, step, rank, size)
            try:
                if number % 4:
                    pending.append(writer.save_async(flat, step, updates=updates))
                    say(f"given {writer.term} {step}")
                    continue
                writer.save(flat, step, updates=updates)
                say(f"saved {writer.term} {step}")
            except CkptError as error:
                _say_failure(say, writer.term, step, error)
                break
        for one in pending:
            try:
                one.result()
                say(f"saved {writer.term} {one.step}")
            except CkptError as error:
                _say_failure(say, writer.term, one.step, error)
        with contextlib.suppress(CkptError):
            writer.close()
        say("done")

    return work


def _say_failure(say: Callable[[str], None], term: int, step: int, error: CkptError) -> None:
    say(f"error {type(error).__name__}")
    # The error that stopped the writer may be raised again for a step that was never tried.
    known = not isinstance(error, CommitUnknownError | FencedError)
    say(f"{'failed' if known else 'doubted'} {term} {step}")


def live(root: Path, size: int, doom: Doom, steps: int = _STEPS) -> Life:
    """Run one group's life in the store at `root`.

    Raises:
        Violation: a rank hangs, or ends with an error that is not one of ours.
    """
    pids: dict[int, int] = {}
    pipes: dict[int, int] = {}
    port = 0
    if not doom.hosted:
        pids[-1], pipes[-1] = _forked(_host)
        port = int(os.read(pipes[-1], 100))
    texts = dict.fromkeys(range(size), b"")
    for rank in range(size):
        pids[rank], pipes[rank] = _forked(_rank(root, rank, size, port, doom, steps))
        if doom.hosted and rank == 0:
            texts[0] = os.read(pipes[0], 100)
            port = int(texts[0].split()[1])
    began, struck, dead = time.monotonic(), doom.point is not None, float("inf")
    waiting = set(range(size))
    while waiting:
        now = time.monotonic()
        if not struck and now - began > doom.seconds:
            struck = True
            for victim in doom.victims:
                if victim in pids:
                    os.kill(pids[victim], signal.SIGKILL)
        dead = min(dead, now) if len(waiting) < size and struck else dead
        if doom.others is not None and now - dead > doom.others:
            for rank in waiting:
                os.kill(pids[rank], signal.SIGKILL)
        if now - began > _PATIENCE:
            for pid in pids.values():
                os.kill(pid, signal.SIGKILL)
            raise Violation(f"ranks {sorted(waiting)} hang: {texts}")
        ready, _, _ = select.select([pipes[rank] for rank in waiting], [], [], 0.005)
        for rank in [rank for rank in waiting if pipes[rank] in ready]:
            data = os.read(pipes[rank], 1 << 16)
            texts[rank] += data
            if not data:
                waiting.discard(rank)
    if -1 in pids:
        os.kill(pids[-1], signal.SIGKILL)
    life = Life()
    for rank, pid in pids.items():
        os.close(pipes[rank])
        _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            life.killed.add(rank)
        elif rank >= 0 and status:
            raise Violation(f"rank {rank} ended with status {status}: {texts[rank].decode()[-3000:]}")
        if rank >= 0:
            _note(life, rank, texts[rank].decode())
    return life


def _note(life: Life, rank: int, text: str) -> None:
    for line in text.splitlines():
        what, *rest = line.split(maxsplit=1)
        if what == "opened":
            term, parent = map(int, rest[0].split())
            life.opened[rank] = (term, None if parent < 0 else parent)
        elif what in ("saved", "failed", "doubted", "given"):
            term, step = map(int, rest[0].split())
            given = life.given.setdefault(rank, set())
            told = {"saved": life.acknowledged, "failed": life.failed, "doubted": life.doubted, "given": given}
            told[what].add((term, step))
        elif what == "error":
            life.errors[rest[0]] += 1
        elif what == "bug":
            raise Violation(f"rank {rank}: {rest[0]}")


def check(root: Path, life: Life, size: int, promised: set[tuple[int, int]], cost: int | None = None) -> int:
    """Compare a store with the reports of its ranks -> how many checkpoints were restored.

    Args:
        cost: how many saves a kill may cost a rank; None: any number.

    Raises:
        Violation: a promise is broken.
    """
    if len({opened[0] for opened in life.opened.values()}) > 1 or len(set(life.opened.values())) > 1:
        raise Violation(f"the ranks opened different terms: {life.opened}")
    store = ckptstore.open(root)
    try:
        found = {(info.term, info.step): info for info in store.checkpoints()}
    except ckptstore.StoreNotFoundError:
        found = {}
    promised |= life.acknowledged
    if lost := promised - found.keys():
        raise Violation(f"acknowledged and lost: {sorted(lost)}")
    if lied := life.failed & found.keys():
        raise Violation(f"reported as failed, but in the store: {sorted(lied)}")
    for rank, given in life.given.items():
        if cost is not None and len(lost := given - found.keys() - life.failed - life.doubted) > cost:
            raise Violation(f"rank {rank} had given {sorted(lost)}, which are lost: more than {cost}")
    for (term, step), info in found.items():
        for rank in range(size if life.opened and term == next(iter(life.opened.values()))[0] else 1):
            loaded = store.load(info.ref, framework="numpy", rank=rank)
            _compare(loaded, state_of(term, step, rank), f"{info.ref} of rank {rank}")
        stages = store.load(info.ref, framework="numpy")["stages"]
        expected = {f"stage{rank}": _stage(term, step, rank) for rank in range(rank_count(store.tree(info.ref)) or 1)}
        if stages.keys() != expected.keys():
            raise Violation(f"{info.ref}: a process that is not a rank has {sorted(stages)}, not {sorted(expected)}")
        _compare(stages, expected, info.ref)
    if found and not (report := store.verify()).ok:
        raise Violation(f"damage: {report}")
    return len(found)


def _compare(one: Any, other: Any, where: str) -> None:
    for key, expected in other.items():
        value = one[key]
        if isinstance(expected, dict):
            _compare(value, expected, where)
        elif isinstance(expected, np.ndarray):
            if (value.dtype, value.shape, value.tobytes()) != (expected.dtype, expected.shape, expected.tobytes()):
                raise Violation(f"{where}: {key} differs")
        elif value != expected:
            raise Violation(f"{where}: {key} is {value!r}, saved was {expected!r}")


@dataclass(slots=True)
class Sweep:
    """Counts of a sweep.

    Attributes:
        kills: ranks that died by SIGKILL, and hosts of the TCPStore; without those killed because another had died.
        lives: groups.
        points: crash point, or ``random`` -> how many died there.
        acknowledged: checkpoints that were acknowledged to some rank.
        restored: checkpoints restored and compared.
        errors: errors of the survivors.
    """

    kills: int = 0
    lives: int = 0
    points: Counter[str] = field(default_factory=Counter)
    acknowledged: int = 0
    restored: int = 0
    errors: Counter[str] = field(default_factory=Counter)


def _doom(chance: random.Random, number: int, size: int) -> Doom:
    doom = _any_doom(chance, number, size)
    # Every other group has a memory budget; deltas and diffs together cannot have one.
    return replace(doom, bounded=number % 2 == 1 and (doom.deltas is None or doom.diffs is None))


def _any_doom(chance: random.Random, number: int, size: int) -> Doom:
    hosted, others = chance.random() < 0.25, chance.choice([None, None, 0.0, 0.02, 0.2])
    deltas = chance.choice([None, 1, 2])
    diffs = chance.choice([None, 1, 3])
    if number % 4 == 3:
        victims = chance.choice([(0,), (size - 1,), tuple(range(size)), (-1,), tuple(range(1, size))])
        return Doom(victims, None, 1, chance.uniform(0.0, 0.4), hosted and victims != (-1,), others, deltas, diffs)
    place = (number - number // 4) % len(POINTS)
    point = POINTS[place]
    victim = 0 if 0 < place <= len(_RANK_0) else chance.randrange(1, size)
    if point in _ANY_OF_DIFFS or point in _COMMITTER_OF_DIFFS:
        diffs = 3 if point in ("ranks.states", "ranks.ended") else chance.choice([1, 3])
    # A full batch needs no end between two steps, and few batches are written in a life.
    most = 1 if point in _ONCE or point in ("ranks.ended", "ranks.states") else 3 if point == "ranks.shared" else 5
    return Doom((victim,), point, chance.randint(1, most), 0.0, hosted, others, deltas, diffs)


def sweep(
    kills: int, *, seed: int = 0, folder: Path | None = None, told: Callable[[Sweep], None] = lambda _: None
) -> Sweep:
    """Kill ranks until `kills` have died; each store lives on over several groups.

    Args:
        told: called after every life.

    Raises:
        Violation: a promise is broken; names seed and life.
    """
    import torch.distributed  # noqa: F401  # once, before the forks; includes the modules of a rank

    import ckptstore.frameworks.torch_ranks
    import ckptstore.write.ranks.rank_writer_factory

    chance = random.Random(seed)  # not a secret
    done = Sweep()
    work = Path(tempfile.mkdtemp(prefix="ckptstore-ranks-", dir=folder))
    try:
        promised: set[tuple[int, int]] = set()
        root = work / "store-0"
        newest: int | None = None
        while done.kills < kills and done.lives < 10 * kills:
            number = done.lives
            if number % 5 == 0:
                shutil.rmtree(root, ignore_errors=True)
                root, promised, newest = work / f"store-{number}", set(), None
            size = chance.randint(2, 4)
            doom = _doom(chance, number, size)
            try:
                life = live(root, size, doom)
                if any(parent != newest for _, parent in life.opened.values()):
                    raise Violation(f"the newest checkpoint was {newest}, the ranks continue from {life.opened}")
                done.restored += check(root, life, size, promised, doom.cost)
                newest = ckptstore.open(root).latest_step() if life.opened or (root / "FORMAT").exists() else newest
            except Exception as error:
                raise Violation(f"seed {seed}, life {number} ({size} ranks, {doom}): {error}") from error
            done.lives += 1
            struck = life.killed & set(doom.victims)
            done.kills += len(struck)
            done.points[doom.point or "random"] += len(struck)
            done.acknowledged += len(life.acknowledged)
            done.errors += life.errors
            told(done)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return done


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, default=None, help="where to make the stores (default: temporary folder)")
    asked = parser.parse_args()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    began = time.monotonic()

    def tell(done: Sweep) -> None:
        if done.lives % 20 == 0:
            print(f"... {done.kills} kills, {done.acknowledged} acknowledged", file=sys.stderr, flush=True)

    done = sweep(asked.kills, seed=asked.seed, folder=asked.dir, told=tell)
    print(f"{done.kills} kills in {done.lives} groups, {time.monotonic() - began:.0f} s")
    print(f"{done.acknowledged} checkpoints acknowledged, none lost; {done.restored} restored and compared")
    for point, count in sorted(done.points.items()):
        print(f"  {point:24} {count}")
    print("errors of the others: " + ", ".join(f"{name} {count}" for name, count in done.errors.most_common()))


if __name__ == "__main__":
    main()
