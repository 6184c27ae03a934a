"""What the tests of this room reach inside a writer for; every access to a private name of its classes is here.

Each function says which names it relies on, and why nothing public would do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

import ckptstore
from ckptstore.formats.history.records import CheckpointId
from ckptstore.host import sigterm
from ckptstore.host.arenas import Arenas
from ckptstore.restore.stored_base import StoredBase
from ckptstore.write.capture.bounded_capture import Feed
from ckptstore.write.compressed_saves import CompressedSaves
from ckptstore.write.full_saves import FullSaves
from ckptstore.write.ranks.rank_writer import RankWriter
from ckptstore.write.resident_bases import MemoryBase
from ckptstore.write.saves.job import Job

__all__ = [
    "bases",
    "copies_late",
    "fed_memory",
    "forget_open_writers",
    "interrupt_after_submit",
    "interrupt_before_submit",
    "interrupt_feeding",
    "interrupt_lane",
    "interrupt_last_line_of_save_async",
    "interrupt_succession",
    "interrupt_turn",
    "interrupt_waits_of_save",
    "memory",
    "rank_base_kinds",
    "rank_bases",
    "rank_memory",
    "snapshots_held",
]


def _interrupted(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


def memory(writer: ckptstore.Writer) -> Arenas:
    """Where plain fulls are copied to: `Writer._path`.

    How much of it is held and used is a promise of `WriterOptions.memory` that no figure for users tells: a process's
    size says too little, and too late.
    """
    assert isinstance(writer._path, FullSaves)
    return writer._path.memory.arenas


def fed_memory(writer: ckptstore.Writer) -> Arenas:
    """What deltas and step diffs are copied to unit by unit: `Writer._path`. As `memory`."""
    assert isinstance(writer._path, CompressedSaves)
    assert writer._path.feeding is not None
    return writer._path.feeding.arenas


def forget_open_writers() -> None:
    """SIGTERM flushes none of the writers that earlier tests left open: `sigterm._writers`.

    While there is one, a test that replaces the handler finds that a new writer does not install it again.
    """
    for writer in list(sigterm._writers):
        sigterm.forget(writer)


def rank_memory(writer: RankWriter) -> Arenas:
    """What a rank copies its share to under a budget: `RankWriter._resources`. As `memory`."""
    bounded = writer._resources.bounded
    assert bounded is not None
    return bounded.arenas


def rank_bases(writer: RankWriter) -> list[CheckpointId]:
    """What this rank has in memory for deltas: `RankWriter._work`, `Work._bases`. As `bases`."""
    bases = writer._work._bases
    assert bases is not None
    return bases.ids()


def rank_base_kinds(writer: RankWriter) -> list[str]:
    """Where this rank has its bases: names of classes of `ResidentBases._bases`. As `bases`."""
    bases = writer._work._bases
    assert bases is not None
    return [type(base).__name__ for base in bases._bases.values()]


def snapshots_held(writer: ckptstore.Writer) -> int:
    """Whole states in memory, used and kept for use: `Writer._snapshots`, `SnapshotPool._out`, `_free`. As `memory`."""
    return writer._snapshots._out + len(writer._snapshots._free)


def interrupt_feeding(patch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while a save waits for its turn to be copied: `Feed.run`, `Feed._wanted`.

    A signal reaches the same wait, but not for certain.
    """
    run = Feed.run

    class Interrupted:
        """A future of which the wait is interrupted."""

        result = staticmethod(_interrupted)

        def done(self) -> bool:
            return False

        def set_result(self, units: object) -> None:
            """Nobody waits for it."""

    def interrupted(feed: Feed, begin: Callable[[], None]) -> float:
        feed._wanted = Interrupted()  # type: ignore[assignment]
        return run(feed, begin)

    patch.setattr(Feed, "run", interrupted)


def bases(writer: ckptstore.Writer) -> list[MemoryBase | StoredBase]:
    """What the next delta may be coded against: `Writer._deltas`, `Deltas._bases`, `ResidentBases._bases`.

    Where a base is kept (memory, medium) changes no stored byte, so nobody who uses a store can tell.
    """
    return list(writer._deltas._bases._bases.values())


def interrupt_waits_of_save(patch: pytest.MonkeyPatch, known: threading.Event) -> None:
    """Have every `Writer.save` be interrupted while it waits, and `known` be set once its job knows.

    Names: `Job.result`, `Job.wait_over`. A real signal reaches the same line; when the job has noted it nobody outside
    can tell, and what is written before that may be committed rightly.
    """
    wait_over = Job.wait_over

    def knows(job: Job, _timeout: float | None = None) -> bool:
        known.set()
        return wait_over(job, 60)

    patch.setattr(Job, "result", _interrupted)
    patch.setattr(Job, "wait_over", knows)


def copies_late(
    writer: ckptstore.Writer, patch: pytest.MonkeyPatch, wait: Callable[[], object], *, writes: bool = False
) -> None:
    """Have what the committer's thread copies for itself (a base) `wait` first, and with `writes` what it writes, too.

    Names: `Writer._snapshots`, `Writer._deltas`. The copy follows the commit: no medium sees it.
    """

    def late(what: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            wait()
            return what(*arguments, **options)

        return call

    patch.setattr(writer._snapshots, "copy", late(writer._snapshots.copy))
    if writes:
        patch.setattr(writer._deltas, "write", late(writer._deltas.write))


def interrupt_after_submit(patch: pytest.MonkeyPatch, when: Callable[[], object]) -> None:
    """Have every wait of `Writer.save` be interrupted, as soon as `when` has returned.

    Names: `Job.result`, `Job.wait_over`. Two Ctrl-C in a row; the second falls into the wait that the first one begins,
    a moment that a signal from outside does not meet for certain.
    """

    def interrupted(_job: Job, _timeout: float | None = None) -> Any:
        when()
        raise KeyboardInterrupt

    patch.setattr(Job, "result", interrupted)
    patch.setattr(Job, "wait_over", interrupted)


def interrupt_before_submit(writer: ckptstore.Writer, patch: pytest.MonkeyPatch) -> None:
    """Ctrl-C where a save is about to be handed to the committer's thread, which never hears of it: `Writer._path`.

    Between two lines, where no medium and no clock reaches.
    """
    patch.setattr(writer._path, "submit", _interrupted)


def interrupt_last_line_of_save_async(writer: ckptstore.Writer, patch: pytest.MonkeyPatch) -> None:
    """Ctrl-C after a full was given to its lane, and before `save_async` returns: `Writer._path`, `FullSaves.memory`.

    Between two lines: the lane has the copy, and its caller not yet the future.
    """
    patch.setattr(writer._path.memory, "touch", _interrupted)


def interrupt_lane(writer: ckptstore.Writer, patch: pytest.MonkeyPatch) -> None:
    """Ctrl-C after a full was copied, and before it is given to a lane: `Writer._path`.

    Between two lines, as above.
    """
    patch.setattr(writer._path, "submit", _interrupted)


def interrupt_turn(writer: RankWriter, patch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while a save waits for the copy of another thread's: `RankWriter._turn`.

    Signals reach the main thread alone, and no rank of a test has it.
    """

    class Interrupted:
        """A lock of which the wait is interrupted."""

        __enter__ = _interrupted

        def __exit__(self, *_: object) -> None:
            """It is never entered."""

    patch.setattr(writer, "_turn", Interrupted())


def interrupt_succession(writer: ckptstore.Writer, patch: pytest.MonkeyPatch) -> threading.Event:
    """Ctrl-C once a rollback has begun its term, and before the writer serves it -> set then: `Writer._succeed`.

    Between two lines: the medium has the new term, and the writer the old one.
    """
    reached = threading.Event()

    def interrupted(*_: Any) -> None:
        reached.set()
        raise KeyboardInterrupt

    patch.setattr(writer, "_succeed", interrupted)
    return reached
