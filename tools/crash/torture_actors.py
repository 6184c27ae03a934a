"""The actors of `tools.crash.torture`: each is a process with one job, without end.

To add a command, add an entry to `ACTORS`: a function of a `Stage` that does one thing per call. Through `Stage.note`
it reports each acknowledgement, and each removal *before* it asks for it.
"""

from __future__ import annotations

import errno
import os
import random
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from ckptstore.errors import (
    CheckpointNotFoundError,
    CkptError,
    CommitUnknownError,
    CorruptSegmentError,
    FencedError,
    RequestTimeoutError,
    StorageError,
    UsageError,
    WriterClosedError,
)
from ckptstore.formats.history.checkpoint_ref import node_of
from ckptstore.formats.history.commit_checks import droppable
from ckptstore.formats.history.records import Node
from ckptstore.log import fold_writer, requests
from ckptstore.log.change import CatalogChange
from ckptstore.log.partial_objects import exists
from ckptstore.log.pins import PinWatch, UnpinnedWarning, claim
from ckptstore.maintenance.garbage_collection import collect
from ckptstore.maintenance.merge import merge
from ckptstore.store import Store
from ckptstore.write.policy.diff_options import DiffOptions
from tools.crash import faults
from tools.crash.faults import Fault
from tools.crash.scenario import CHAIN, Violation, same_state, state_of
from tools.crash.stages import Acknowledged, BucketStage, FolderStage, Stage
from tools.crash.torture_buckets import bucket_mishap
from tools.crash.torture_mishaps import mishap

__all__ = ["ACTORS", "perform", "sample_faults"]

KEPT: Final = 30
"""Checkpoints that the requester keeps; it retires older ones."""
PIN_DEAD_AFTER: Final = 20.0
"""Seconds; a reader that took longer for one load may have lost its pin, and is not judged."""


# ------------------------------------------------------------------------------------------------ the actors


def train(stage: Stage) -> None:
    """One term: resume or fork, save some steps, answer requests, fold."""
    chance = stage.chance
    store = stage.store()
    known = [info.ref for info in store.checkpoints()]
    parent = chance.choice(known) if known and chance.random() < 0.2 else "latest"
    diffs = DiffOptions(full_every=chance.randint(2, 30), batch=chance.randint(1, 5), seconds=0.3)
    options = chance.choice([{}, {"deltas": 3}, {"deltas": CHAIN}, {"diffs": diffs}])
    with store.writer(parent=parent, threads=1, staging_bytes=32 << 20, poll_seconds=0.1, **options) as writer:
        step = 0 if writer.parent is None else writer.parent.step
        pending = []
        for _ in range(chance.randint(1, 60)):
            step += 1
            state = state_of(writer.term, step)
            if chance.random() < 0.5:
                stage.note(saved=writer.save(state, step).ref)
            else:
                pending.append(writer.save_async(state, step))
                for done in [save for save in pending if save.done() or len(pending) > 3]:
                    pending.remove(done)
                    stage.note(saved=done.result().ref)
            time.sleep(chance.random() * 0.05)
        for save in pending:
            stage.note(saved=save.result().ref)


def read(stage: Stage) -> None:
    """Load some checkpoints and compare every bit; hold a pin, and check that its checkpoint is still there."""
    store = stage.store()
    known = [info.ref for info in store.checkpoints()]
    for ref in stage.chance.sample(known, min(5, len(known))):
        begin = time.monotonic()
        try:
            if stage.chance.random() < 0.3:
                hold(stage, store, ref)
            else:
                term, step = node_of(ref)
                if not same_state(store.load(ref, framework="numpy"), state_of(term, step)):
                    raise Violation(f"{ref} was restored with other bits")
            stage.note(loaded=ref)
        except CheckpointNotFoundError:
            if ref not in stage.retiring():
                raise
        except CkptError:
            if time.monotonic() - begin < PIN_DEAD_AFTER / 2:
                raise
            stage.note(slow=ref)


def hold(stage: Stage, store: Store, ref: str) -> None:
    node = node_of(ref)

    def plan(catalog: Any) -> tuple[str, ...]:
        if node not in catalog.checkpoints:
            raise CheckpointNotFoundError(f"no checkpoint {ref}")
        edges = catalog.encodings[node]
        return tuple(segment for edge in edges for segment in edge.segments)

    with claim(store.journal, plan, lambda ids: ids, refresh_every=1.0) as (view, ids):
        keys = [view.catalog.segments[segment].key for segment in ids]
        time.sleep(stage.chance.random() * 2)
        for key in keys:
            if not exists(store.backend, key):
                raise Violation(f"{key} is pinned for {ref}, and is gone")


def audit(stage: Stage) -> None:
    """Every checkpoint that was acknowledged by now is visible now."""
    saved = {event["saved"] for event in Acknowledged.read(stage.notes) if "saved" in event}
    visible = {info.ref for info in stage.store().checkpoints()}
    if missing := saved - visible - stage.retiring():
        raise Violation(f"acknowledged and not visible: {sorted(missing)}")
    stage.note(audited=len(saved))
    time.sleep(stage.chance.random())


def request(stage: Stage) -> None:
    """Ask the live writer to retire old checkpoints, and to tag one."""
    store = stage.store()
    view = store.view()
    nodes = sorted(view.catalog.checkpoints, key=lambda node: view.catalog.slots[node])
    tagged = set(view.catalog.tags.values())
    old = [node for node in nodes[:-KEPT] if node not in tagged]
    retires: list[Node] = stage.chance.sample(old, min(len(old), stage.chance.randint(0, 10)))
    tags: Mapping[str, Node | None] = {}
    if nodes and stage.chance.random() < 0.5:
        tags = {f"tag-{stage.chance.randint(0, 3)}": stage.chance.choice(nodes[-KEPT:])}
    if not retires and not tags:
        time.sleep(0.1)
        return
    refs = [f"{step}@{term}" for term, step in retires]
    stage.note(retiring=refs)  # noted before the request: from here on they may be gone
    drops = droppable(view.catalog, retires)
    posted = requests.post(
        store.journal,
        view.catalog.term,
        "torture",
        CatalogChange(drops=tuple(drops), retires=tuple(retires), tags=tags),
    )
    answer = requests.wait(store.journal, posted, timeout=5, poll=0.05).answer
    stage.note(**{answer: 1}, **({"retired": refs} if answer == "accepted" else {}))


def fold_diffs(stage: Stage) -> None:
    """Merge a random range of a term beside its live writer, sometimes instead of it."""
    store = stage.store()
    nodes = sorted(store.view().catalog.checkpoints)
    term = stage.chance.choice(sorted({term for term, _ in nodes})[-3:]) if nodes else 0
    steps = [step for number, step in nodes if number == term]
    if len(steps) < 3:
        time.sleep(0.1)
        return
    first = stage.chance.randrange(len(steps) - 2)
    chosen = steps[first : first + stage.chance.randint(3, 12)]
    keep_steps = stage.chance.random() < 0.5
    if not keep_steps:  # noted before the request: from here on they may be gone
        stage.note(retiring=[f"{step}@{term}" for step in chosen[:-1]])
    begin = time.monotonic()
    try:
        done = merge(
            store.journal,
            f"{chosen[0]}@{term}..{chosen[-1]}@{term}",
            keep_steps=keep_steps,
            take_over=stage.chance.random() < 0.05,
            timeout=5,
        )
    except UsageError:  # nothing to merge
        stage.note(nothing_to_merge=1)
        time.sleep(0.1)
        return
    except RequestTimeoutError:  # the writer is known to be gone: no request was posted
        stage.note(nobody_to_ask=1)
        time.sleep(0.1)
        return
    except CorruptSegmentError:
        if time.monotonic() - begin < PIN_DEAD_AFTER / 2:
            raise
        stage.note(slow=f"{term}")
        return
    event = {f"merge {done.answer}": 1}
    if done.answer == "accepted":
        event |= {f"merge {done.method}": 1}
        stage.note(retired=list(done.retired), merged=list(done.merged))
    stage.note(**event)


def maintain(stage: Stage) -> None:
    """Fold and trim beside the writer."""
    store = stage.store()
    view = store.view()
    if view.end:
        fold_writer.fold(store.journal, view)
        trimmed = fold_writer.trim(store.journal, store.view())
        stage.note(trimmed=trimmed.slots)
    time.sleep(stage.chance.random())


def gather(stage: Stage) -> None:
    """Delete unneeded segments."""
    store = stage.store()
    if stage.watch is None:
        stage.watch = PinWatch(stage.plain(), dead_after=PIN_DEAD_AFTER)
    done = collect(store.journal, stage.watch)
    if done.unreadable_pins:
        raise Violation(f"unreadable pins: {done.unreadable_pins}")
    stage.note(collected=len(done.segments), spared=len(done.pinned), dead_pins=len(done.dead_pins))
    time.sleep(stage.chance.random())


def fill(stage: FolderStage) -> None:
    """Fill the disk to the last block for a while. Use it only where the store has the disk to itself."""
    hog = stage.root.parent / "hog"
    time.sleep(stage.chance.random() * 6)
    try:
        with hog.open("ab") as file:
            space = os.fstatvfs(file.fileno())
            # To the last block, or so that some writes succeed and some do not.
            take = space.f_bavail * space.f_frsize - stage.chance.choice([0, 4096, 40_000, 200_000])
            os.posix_fallocate(file.fileno(), 0, max(4096, take))
        stage.note(filled=take)
        time.sleep(stage.chance.random() * 1.5)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
    finally:
        hog.unlink(missing_ok=True)


def suffer(stage: Stage) -> None:
    """Inflict a mishap on a store of this actor's own."""
    if isinstance(stage, FolderStage):
        mishap(stage)
    elif isinstance(stage, BucketStage):
        bucket_mishap(stage)


ACTORS: Final[Mapping[str, tuple[Callable[[Any], None], int]]] = {
    "trainer": (train, 1),
    "rival": (train, 1),
    "reader": (read, 2),
    "auditor": (audit, 1),
    "requester": (request, 1),
    "merger": (fold_diffs, 1),
    "maintainer": (maintain, 1),
    "collector": (gather, 1),
    "filler": (fill, 1),
    "mishap": (suffer, 1),
}
"""Name -> (the function that it repeats, how many of them run at once). Add later commands here."""
RARE: Final = frozenset({"rival"})
"""Actors that wait long between two turns: a rival fences the trainer each time."""


# ------------------------------------------------------------------------------------------------ running an actor


def perform(stage: Stage, actor: str) -> int:
    """Do an actor's job until the process is killed; returns (an exit status) only after a violation."""
    turn = ACTORS[actor][0]
    warnings.simplefilter("error", UnpinnedWarning)  # on a full disk: gc may delete a segment during a read
    while True:
        if actor in RARE:
            time.sleep(stage.chance.random() * 20)
        try:
            turn(stage)
        except Violation as broken:
            stage.note(violation=f"{actor}: {broken}")
            return 3
        except UnpinnedWarning as error:
            stage.note(error=type(error).__name__)
            time.sleep(stage.chance.random() * 0.1)
        except CkptError as error:
            if not _excused(error, stage):
                stage.note(violation=f"{actor}: {type(error).__name__}: {error}; after {_chain(error)}")
                return 3
            stage.note(error=type(error).__name__)
            time.sleep(stage.chance.random() * 0.1)


def _excused(error: CkptError, stage: Stage) -> bool:
    """Whether any actor may meet this error here: a rival's fence, a full disk, injected faults."""
    if isinstance(error, FencedError | CommitUnknownError | WriterClosedError):
        return True
    if isinstance(error, StorageError):
        return stage.meets_faults or error.errno == errno.ENOSPC
    if isinstance(error, CheckpointNotFoundError):
        return "parent" in str(error) or any(ref in str(error) for ref in stage.retiring())
    return False


def _chain(error: BaseException | None) -> str:
    seen = []
    while (error := error.__cause__ or error.__context__ if error else None) is not None:
        seen.append(f"{type(error).__name__}: {error}")
    return " / ".join(seen) or "nothing"


def sample_faults(chance: random.Random) -> tuple[Fault, ...]:
    """Some faults for an actor's system calls, at random places."""

    def place(most: int) -> int:
        return 1 + int(most * chance.random() ** 2)

    kinds: Iterable[Callable[[], Fault]] = (
        lambda: faults.sync_fails(place(400)),
        lambda: faults.read_fails(place(2000)),
        lambda: faults.short_reads(place(500), 100),
        lambda: faults.short_writes(place(200), 100),
        lambda: faults.interrupted(place(500), 20),
        lambda: faults.acknowledgement_lost(place(60)),
        lambda: Fault(frozenset({"pwrite", "fallocate"}), place(300), 40, errno.ENOSPC),
        lambda: Fault(frozenset({"unlink"}), place(100), 5, errno.EIO),
    )
    chosen = [chance.choice(list(kinds))() for _ in range(chance.randint(1, 6))]
    return tuple(chosen)
