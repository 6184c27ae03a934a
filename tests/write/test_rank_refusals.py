"""Refusals of ranks: other stores, other groups, other steps, invalid combinations, a closed writer."""

from __future__ import annotations

import multiprocessing
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import (
    FailedRankError,
    MissingRankError,
    RankError,
    RankMismatchError,
    RankOptions,
    StepOrderError,
    UnsupportedStateError,
    UsageError,
    WriterClosedError,
)
from ckptstore.write.ranks.messages.key_value_store import Group, LocalMailbox
from tests.write.rank_states import PATIENT, state
from tests.write.rank_threads import as_ranks


def test_a_rank_with_another_store_is_refused(tmp_path: Path) -> None:
    def work(group: Group) -> None:
        ckptstore.open(tmp_path / str(group.rank), create=True)
        expected = FailedRankError if group.rank == 0 else RankMismatchError
        with pytest.raises(expected, match="another store"):
            ckptstore.open(tmp_path / str(group.rank)).writer(group=group, ranks=PATIENT)

    assert as_ranks(2, work) == [None] * 2


@pytest.mark.parametrize(
    ("own", "why"), [(False, "is not there"), (True, r"slot \d+ is not the one that rank 0 wrote")]
)
def test_a_rank_with_a_copy_of_the_store_is_refused(tmp_path: Path, own: bool, why: str) -> None:
    """The copy has the same run, and perhaps its own term where rank 0 has opened one."""
    ckptstore.open(tmp_path / "0").writer().close()
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    if own:
        ckptstore.open(tmp_path / "1").writer().close()

    def work(group: Group) -> None:
        expected = FailedRankError if group.rank == 0 else RankMismatchError
        with pytest.raises(expected, match=why):
            ckptstore.open(tmp_path / str(group.rank)).writer(group=group, ranks=PATIENT)

    assert as_ranks(2, work) == [None] * 2


def test_ranks_of_groups_of_two_sizes_are_refused(tmp_path: Path) -> None:
    def work(group: Group) -> None:
        if group.rank == 0:
            while not box.keys():  # until the other one is there
                time.sleep(0.001)
            with pytest.raises(MissingRankError, match="rank 1 of 2 did not join"):
                ckptstore.open(tmp_path).writer(group=group, ranks=RankOptions(timeout=0.2))
            return
        with pytest.raises(RankMismatchError, match="not of one group: rank 1 is of a group of 3, rank 0 of one of 2"):
            ckptstore.open(tmp_path).writer(group=Group(1, 3, group.mailbox), ranks=PATIENT)

    box = LocalMailbox()
    assert as_ranks(2, work, box) == [None] * 2
    assert ckptstore.open(tmp_path).latest_step() is None


def test_no_term_is_opened_until_every_rank_is_there(tmp_path: Path) -> None:
    ckptstore.open(tmp_path).writer().close()
    with pytest.raises(MissingRankError, match=r"rank 1 of 2 did not join within 0\.2 s"):
        ckptstore.open(tmp_path).writer(group=Group(0, 2, LocalMailbox()), ranks=RankOptions(timeout=0.2))
    with pytest.raises(MissingRankError, match="rank 0"):
        ckptstore.open(tmp_path).writer(group=Group(1, 2, LocalMailbox()), ranks=RankOptions(timeout=0.2))
    assert len(ckptstore.open(tmp_path).terms()) == 1


def test_rank_0s_error_on_opening_reaches_all(tmp_path: Path) -> None:
    def work(group: Group) -> None:
        expected = ckptstore.CheckpointNotFoundError if group.rank == 0 else FailedRankError
        with pytest.raises(expected, match="77"):
            ckptstore.open(tmp_path).writer(77, group=group, ranks=PATIENT)

    assert as_ranks(2, work) == [None] * 2


def test_steps_ascend_and_what_cannot_be_combined_is_refused(tmp_path: Path) -> None:
    def work(group: Group) -> None:
        store = ckptstore.open(tmp_path)
        with store.writer(group=group, ranks=PATIENT) as writer:
            writer.save(state(group.rank, 2), 2)
            with pytest.raises(StepOrderError):
                writer.save(state(group.rank, 1), 1)
            if group.rank:
                with pytest.raises(UsageError, match="only rank 0"):
                    writer.tag("mine")
            else:
                assert writer.tag("mine").tags == ("mine",)
                writer.untag("mine")

    assert as_ranks(2, work) == [None] * 2
    with pytest.raises(UsageError, match="give group="):
        ckptstore.open(tmp_path).writer(ranks=PATIENT)
    with pytest.raises(UsageError, match="process group"):
        ckptstore.open(tmp_path).writer(group="all")  # type: ignore[call-overload]
    with pytest.raises(UsageError, match="timeout"):
        RankOptions(timeout=0)
    with pytest.raises(UsageError, match="diverged"):
        RankOptions(diverged="maybe")  # type: ignore[arg-type]


def test_values_that_are_too_much_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptstore.formats.states.state.TREE_LIMIT", 1500)  # two ranks' texts are longer, one is not

    def work(group: Group) -> None:
        with ckptstore.open(tmp_path).writer(group=group, ranks=PATIENT) as writer:
            with pytest.raises((RankError, UnsupportedStateError), match="as text"):
                writer.save({"w": np.ones(3), "said": str(group.rank) * 1000}, 1)
            writer.save({"w": np.ones(3), "said": str(group.rank)}, 2)

    assert as_ranks(2, work) == [None] * 2
    assert [info.step for info in ckptstore.open(tmp_path).checkpoints()] == [2]


def everything(writer: Any) -> list[Any]:
    """Every call that only an open writer accepts."""
    return [
        lambda: writer.save(state(0), 2),
        lambda: writer.save_async(state(0), 2),
        lambda: writer.forgo(2, ckptstore.UsageError("no state")),
        writer.poll,
        writer.wait,
        lambda: writer.tag("late", 1),
        lambda: writer.untag("late"),
        lambda: writer.rollback(1),
    ]


def test_a_writer_that_is_closed_takes_nothing(tmp_path: Path) -> None:
    def work(group: Group) -> None:
        writer = ckptstore.open(tmp_path).writer(group=group, ranks=PATIENT)
        writer.save(state(group.rank), 1)
        writer.close()
        for call in everything(writer):
            with pytest.raises(WriterClosedError, match="is closed"):
                call()

    assert as_ranks(2, work) == [None] * 2
    assert [info.ref for info in ckptstore.open(tmp_path).checkpoints()] == ["1@1"]


def _misuse(writer: Any) -> None:
    for call in everything(writer):
        with pytest.raises(WriterClosedError, match="not to its fork"):
            call()


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_fork_does_not_wait_for_threads_that_it_does_not_have(tmp_path: Path) -> None:
    with ckptstore.open(tmp_path).writer(group=Group(0, 1, LocalMailbox()), ranks=PATIENT) as writer:
        writer.save(state(0), 1)
        child = multiprocessing.get_context("fork").Process(target=_misuse, args=(writer,), daemon=True)
        child.start()
        child.join(120)
        if child.exitcode is None:
            child.kill()
        assert child.exitcode == 0
