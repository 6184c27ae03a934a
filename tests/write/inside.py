"""What the tests of this room reach inside a writer for; every access to a private name of its classes is here.

Each function says which names it relies on, and why nothing public would do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

import ckptstore
from ckptstore.formats.records import CheckpointId
from ckptstore.host.arenas import Arenas
from ckptstore.restore.stored_base import StoredBase
from ckptstore.write.deltas import MemoryBase
from ckptstore.write.feeding import Feed
from ckptstore.write.ranks.writer import RankWriter

__all__ = [
    "bases",
    "copies_late",
    "fed_memory",
    "interrupt_after_submit",
    "interrupt_before_submit",
    "interrupt_feeding",
    "interrupt_lane",
    "interrupt_last_line_of_save_async",
    "interrupt_succession",
    "interrupt_waits_of_save",
    "memory",
    "rank_bases",
    "rank_memory",
    "snapshots_held",
]


def _interrupted(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


def memory(writer: ckptstore.Writer) -> Arenas:
    """Where plain fulls are copied to: `Writer._fulls`.

    How much of it is held and used is a promise of `WriterOptions.memory` that no figure for users tells: a process's
    size says too little, and too late.
    """
    assert writer._fulls is not None
    return writer._fulls.memory


def fed_memory(writer: ckptstore.Writer) -> Arenas:
    """What deltas and step diffs are copied to unit by unit: `Writer._fed`. As `memory`."""
    assert writer._fed is not None
    return writer._fed.feeding.memory


def rank_memory(writer: RankWriter) -> Arenas:
    """What a rank copies its share to under a budget: `RankWriter._means`. As `memory`."""
    bounded = writer._means.bounded
    assert bounded is not None
    return bounded.memory


def rank_bases(writer: RankWriter) -> list[CheckpointId]:
    """What this rank has in memory for deltas: `RankWriter._work`, `Work._deltas`. As `bases`."""
    deltas = writer._work._deltas
    assert deltas is not None
    return deltas.bases()


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

    def interrupted(feed: Feed) -> float:
        feed._wanted = Interrupted()  # type: ignore[assignment]
        return run(feed)

    patch.setattr(Feed, "run", interrupted)


def bases(writer: ckptstore.Writer) -> list[MemoryBase | StoredBase]:
    """What the next delta may be coded against: `Writer._deltas`, `Deltas._bases`.

    Where a base is kept (memory, medium) changes no stored byte, so nobody who uses a store can tell.
    """
    return list(writer._deltas._bases.values())


def interrupt_waits_of_save(writer: ckptstore.Writer, patch: pytest.MonkeyPatch, known: threading.Event) -> None:
    """Have `Writer.save` be interrupted while it waits for its future, and `known` be set once it knows.

    Names: `Writer._submit`, `Writer._fulls`. A real signal reaches the same line; when the writer has noted it nobody
    outside can tell, and what is written before that may be committed rightly.
    """
    submit = writer._submit
    _submit_through(writer, patch, lambda work: _Interrupted(submit(work), known))
    if (fulls := writer._fulls) is not None:
        save = fulls.save
        patch.setattr(fulls, "save", lambda *what, **how: _Interrupted(save(*what, **how), known))


def _submit_through(writer: ckptstore.Writer, patch: pytest.MonkeyPatch, submit: Callable[..., Any]) -> None:
    """Names: `Writer._submit`, `Writer._coded`, `Coded._submit`."""
    patch.setattr(writer, "_submit", submit)
    patch.setattr(writer._coded, "_submit", submit)


class _Interrupted:
    """What a caller waits for who presses Ctrl-C; `known` is set once the writer knows that he does not wait."""

    def __init__(self, future: Future[Any], known: threading.Event) -> None:
        self._future = future
        self._known = known

    def result(self) -> Any:
        raise KeyboardInterrupt

    def exception(self, _timeout: float | None = None) -> BaseException | None:
        self._known.set()
        return self._future.exception(60)


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


def interrupt_after_submit(writer: ckptstore.Writer, patch: pytest.MonkeyPatch, when: Callable[[], object]) -> None:
    """Have every wait for what the committer's thread was given be interrupted, as soon as `when` has returned.

    Names: `Writer._submit`. Two Ctrl-C in a row; the second falls into the wait that the first one begins, a moment
    that a signal from outside does not meet for certain.
    """
    submit = writer._submit

    class Impatient:
        """A future of which every wait is interrupted."""

        def result(self, _timeout: float | None = None) -> Any:
            when()
            raise KeyboardInterrupt

        exception = result

    _submit_through(writer, patch, lambda work: (submit(work), Impatient())[1])


def interrupt_before_submit(writer: ckptstore.Writer, patch: pytest.MonkeyPatch) -> None:
    """Ctrl-C where work is about to be handed to the committer's thread, which never hears of it: `Writer._submit`.

    Between two lines, where no medium and no clock reaches.
    """
    _submit_through(writer, patch, _interrupted)


def interrupt_last_line_of_save_async(writer: ckptstore.Writer, patch: pytest.MonkeyPatch) -> None:
    """Ctrl-C after a full was given to its lane, and before `save_async` returns: `Writer._fulls`, `Fulls._touch`.

    Between two lines: the lane has the copy, and its caller not yet the future.
    """
    patch.setattr(writer._fulls, "_touch", _interrupted)


def interrupt_lane(writer: ckptstore.Writer, patch: pytest.MonkeyPatch) -> None:
    """Ctrl-C after a full was copied, and before it is given to a lane: `Writer._fulls`.

    Between two lines, as above.
    """
    patch.setattr(writer._fulls, "submit", _interrupted)


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
