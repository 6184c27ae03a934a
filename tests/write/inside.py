"""Private parts of a writer that the tests of this room use; every access to a private name of its classes is here.

Each function states which names it uses, and why no public name would do.
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
from ckptstore.write.saves.job import SaveJob

__all__ = [
    "bases",
    "bounded_memory",
    "copies_late",
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
    """The memory to which plain fulls are copied: `Writer._path`.

    How much of it is held and used is a promise of `WriterOptions.memory` that no public figure shows: a process's size
    is too coarse, and too late.
    """
    assert isinstance(writer._path, FullSaves)
    return writer._path.memory.arenas


def bounded_memory(writer: ckptstore.Writer) -> Arenas:
    """The memory to which deltas and step diffs are copied unit by unit: `Writer._path`. See `memory`."""
    assert isinstance(writer._path, CompressedSaves)
    assert writer._path.feeding is not None
    return writer._path.feeding.arenas


def forget_open_writers() -> None:
    """Exclude the writers that earlier tests left open from SIGTERM: `sigterm._writers`."""
    for writer in list(sigterm._writers):
        sigterm.forget(writer)


def rank_memory(writer: RankWriter) -> Arenas:
    """The memory to which a rank copies its share with a budget: `RankWriter._resources`. See `memory`."""
    bounded = writer._resources.bounded
    assert bounded is not None
    return bounded.arenas


def rank_bases(writer: RankWriter) -> list[CheckpointId]:
    """This rank's bases of deltas in memory: `RankWriter._work`, `Work._bases`. See `bases`."""
    bases = writer._work._bases
    assert bases is not None
    return bases.ids()


def rank_base_kinds(writer: RankWriter) -> list[str]:
    """Where this rank has its bases: names of classes of `ResidentBases._bases`. See `bases`."""
    bases = writer._work._bases
    assert bases is not None
    return [type(base).__name__ for base in bases._bases.values()]


def snapshots_held(writer: ckptstore.Writer) -> int:
    """Whole states in memory, used and spare: `Writer._snapshots`, `SnapshotPool._out`, `_free`. See `memory`."""
    return writer._snapshots._out + len(writer._snapshots._free)


def interrupt_feeding(patch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while a save waits for its turn to be copied: `Feed.run`, `Feed._wanted`.

    A signal hits the same wait, but not reliably.
    """
    run = Feed.run

    class Interrupted:
        """A future whose wait is interrupted."""

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
    """The possible bases of the next delta: `Writer._deltas`, `Deltas._bases`, `ResidentBases._bases`.

    Where a base is kept (memory, medium) changes no stored byte, so no user of a store can tell.
    """
    return list(writer._deltas._bases._bases.values())


def interrupt_waits_of_save(patch: pytest.MonkeyPatch, known: threading.Event) -> None:
    """Interrupt every `Writer.save` while it waits, and set `known` once its job knows.

    Names: `SaveJob.result`, `SaveJob.wait_over`. A real signal hits the same line; nothing outside shows when the
    job noted it, and anything written before that may be committed rightly.
    """
    wait_over = SaveJob.wait_over

    def knows(job: SaveJob, _timeout: float | None = None) -> bool:
        known.set()
        return wait_over(job, 60)

    patch.setattr(SaveJob, "result", _interrupted)
    patch.setattr(SaveJob, "wait_over", knows)


def copies_late(
    writer: ckptstore.Writer, patch: pytest.MonkeyPatch, wait: Callable[[], object], *, writes: bool = False
) -> None:
    """Make the commit thread's own copies (of a base) `wait` first, and with `writes` its writes, too.

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
    """Interrupt every wait of `Writer.save` as soon as `when` has returned.

    Names: `SaveJob.result`, `SaveJob.wait_over`. Two Ctrl-C in a row; the second falls into the wait that the first
    one begins, a moment that a signal from outside does not hit reliably.
    """

    def interrupted(_job: SaveJob, _timeout: float | None = None) -> Any:
        when()
        raise KeyboardInterrupt

    patch.setattr(SaveJob, "result", interrupted)
    patch.setattr(SaveJob, "wait_over", interrupted)


def interrupt_before_submit(writer: ckptstore.Writer, patch: pytest.MonkeyPatch) -> None:
    """Ctrl-C where a save is about to be passed to the commit thread, which never receives it: `Writer._path`.

    It comes between two lines, at no call of a medium or clock.
    """
    patch.setattr(writer._path, "submit", _interrupted)


def interrupt_last_line_of_save_async(writer: ckptstore.Writer, patch: pytest.MonkeyPatch) -> None:
    """Ctrl-C after a full was given to its lane, and before `save_async` returns: `Writer._path`, `FullSaves.memory`.

    It comes between two lines: the lane has the copy, and its caller not yet the future.
    """
    patch.setattr(writer._path.memory, "touch", _interrupted)


def interrupt_lane(writer: ckptstore.Writer, patch: pytest.MonkeyPatch) -> None:
    """Ctrl-C after a full was copied, and before it is given to a lane: `Writer._path`.

    It comes between two lines, as above.
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

    It comes between two lines: the medium has the new term, and the writer the old one.
    """
    reached = threading.Event()

    def interrupted(*_: Any) -> None:
        reached.set()
        raise KeyboardInterrupt

    patch.setattr(writer, "_succeed", interrupted)
    return reached
