"""A term of many ranks that is over: nothing more of it is written except saves that were in flight."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore import DiffOptions, FencedError, StorageError
from ckptstore.log.log_reader import Patience
from ckptstore.write.ranks.messages.key_value_store import Group, LocalMailbox
from ckptstore.write.ranks.messages.step_messages import attempt_id
from tests.write.rank_states import PATIENT, state
from tests.write.rank_threads import as_ranks
from tests.write.test_rank_diffs import OPTIONS, trainer


def begin_a_term(path: Path) -> None:
    ckptstore.open(path).writer(poll_seconds=None).close()


def segments(path: Path) -> set[str]:
    return {key.rpartition("/")[2].partition(".")[0] for key in ckptstore.open(path).backend.list("seg/0000000001/")}


def test_shares_sent_when_the_term_ended_get_no_tree(tmp_path: Path) -> None:
    box = LocalMailbox()
    there = box.keys

    def work(group: Group) -> None:
        store = ckptstore.open(tmp_path)
        with store.writer(group=group, ranks=PATIENT, max_in_flight=2, poll_seconds=None) as writer:
            medium: Any = store.backend
            created = medium.create

            def late(key: str, data: bytes) -> None:
                """Step 1's slot: another term begins before it, when all of step 2 is there."""
                medium.create = created
                until = time.monotonic() + 120
                while sum("/2.0/part/" in one for one in there()) < 2:
                    assert time.monotonic() < until
                    time.sleep(0.001)
                begin_a_term(tmp_path)
                created(key, data)

            if group.rank == 0:
                medium.create = late
            pending = [writer.save_async(state(group.rank, step), step) for step in (1, 2)]
            for one in pending:
                with pytest.raises(FencedError):
                    one.result(60)

    assert as_ranks(2, work, box) == [None] * 2
    nonce = ckptstore.open(tmp_path).view().catalog.terms[1].nonce
    trees = [attempt_id(nonce, step, 0) in segments(tmp_path) for step in (1, 2)]
    assert trees == [True, False]


@pytest.mark.filterwarnings("ignore:term 1 ended without closing:ckptstore.LostStepsWarning")
def test_a_batch_is_not_written_once_the_term_is_known_to_be_over(tmp_path: Path) -> None:
    together = threading.Barrier(2, timeout=60)
    before: set[str] = set()

    def work(group: Group) -> None:
        model = trainer()
        options = DiffOptions(batch=9, seconds=None)
        with ckptstore.open(tmp_path).writer(group=group, ranks=OPTIONS, diffs=options, poll_seconds=None) as writer:
            pending = []
            for step in (1, 2, 3):
                model.train()
                pending.append(writer.save_async(model.state(), step, updates=model.updates()))
            pending[0].result()
            together.wait()
            if group.rank == 0:
                before.update(segments(tmp_path))
                begin_a_term(tmp_path)
                with pytest.raises(FencedError):
                    writer.tag("late", "1@1")
            together.wait()
            for one in pending[1:]:
                with pytest.raises(FencedError):
                    one.result(60)

    assert as_ranks(2, work) == [None] * 2
    assert segments(tmp_path) == before != set()


def test_a_term_whose_last_batch_was_not_committed_is_not_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The medium has space for the record that the writer was closed, and not for the batch."""
    monkeypatch.setattr(Patience, "pause", lambda _patience, _done: None)

    def work(group: Group) -> None:
        model, store = trainer(), ckptstore.open(tmp_path)
        options = DiffOptions(batch=9, seconds=None)
        writer = store.writer(group=group, ranks=OPTIONS, diffs=options, poll_seconds=None)
        pending = []
        for step in (1, 2, 3):
            model.train()
            pending.append(writer.save_async(model.state(), step, updates=model.updates()))
        pending[0].result()
        if group.rank == 0:
            medium: Any = store.backend
            created = medium.create

            def create(key: str, data: bytes) -> None:
                if key.startswith("log/") and b'"checkpoints"' in data:
                    error = StorageError(28, "no space left", key)
                    error.unsent = True
                    raise error
                created(key, data)

            medium.create = create
        with pytest.raises(StorageError, match="no space left"):
            writer.close()

    assert as_ranks(2, work) == [None] * 2
    with pytest.warns(ckptstore.LostStepsWarning, match="up to 9 steps after 1"):
        begin_a_term(tmp_path)


def test_the_tree_of_a_commit_that_failed_is_dropped_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Patience, "pause", lambda _patience, _done: None)

    def work(group: Group) -> None:
        store = ckptstore.open(tmp_path)
        with store.writer(group=group, ranks=PATIENT, poll_seconds=None) as writer:
            medium: Any = store.backend
            created = medium.create

            def full(key: str, data: bytes) -> None:
                if key.startswith("log/"):
                    error = StorageError(28, "no space left", key)
                    error.unsent = True
                    raise error
                created(key, data)

            medium.create = full
            with pytest.raises(StorageError, match="no space left"):
                writer.save(state(group.rank), 1)
            medium.create = created
            writer.save(state(group.rank, 2), 2)

    assert as_ranks(2, work) == [None] * 2
    catalog = ckptstore.open(tmp_path).view().catalog
    assert segments(tmp_path) <= set(catalog.segments) | set(catalog.dropped)
    assert len(catalog.dropped) == 3


def test_shares_missing_when_rank_0_checks_are_not_committed(tmp_path: Path) -> None:
    """As when another rank writes to its own disk: its share would be missing from the acknowledged checkpoint."""
    box = LocalMailbox()

    def work(group: Group) -> None:
        store = ckptstore.open(tmp_path)
        with store.writer(group=group, ranks=PATIENT, poll_seconds=None) as writer:
            medium: Any = store.backend
            begun, opened = [], medium.open_sink

            def open_sink(key: str, size: int) -> Any:
                begun.append(key)
                return opened(key, size)

            def deliver(key: str, value: bytes) -> None:
                if key.endswith("/1.0/part/1"):
                    for one in begun:
                        medium.delete(one)
                handed_in(key, value)

            if group.rank == 1:
                medium.open_sink = open_sink
                handed_in = box.set
                box.set = deliver  # type: ignore[method-assign]  # of this one mailbox
            with pytest.raises(StorageError, match=r"rank 1 wrote seg/.*, which rank 0 does not see"):
                writer.save(state(group.rank), 1)
            writer.save(state(group.rank, 2), 2)

    assert as_ranks(2, work, box) == [None] * 2
    assert [one.step for one in ckptstore.open(tmp_path).checkpoints()] == [2]
    assert ckptstore.verify(tmp_path).ok
