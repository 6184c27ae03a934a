"""Ranks that save together apply the store's rules: rank 0 retires in the very record that commits a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore import DeltaOptions, DiffOptions, RankOptions, RestoreBound
from ckptstore.write.ranks.messages.key_value_store import Group
from tests.write.rank_states import assert_same, state
from tests.write.rank_threads import as_ranks
from tests.write.test_rank_diffs import replicas, truths

PATIENT = RankOptions(timeout=120, per_rank="rng.*")
CHAIN = DeltaOptions(interval=1, bound=RestoreBound(times=None, depth=6))
RULES = ("last:2", "every:5", "best:loss:1")
STEPS = range(1, 18)
KEPT = [5, 7, 10, 15, 16, 17]


def loss(step: int) -> float:
    """Lowest at step 7."""
    return abs(step - 7) + 0.25


@pytest.mark.parametrize("deltas", [None, CHAIN], ids=["full", "chain"])
@pytest.mark.parametrize("how", ["save", "save_async"])
def test_only_the_promised_checkpoints_are_left(tmp_path: Path, deltas: DeltaOptions | None, how: str) -> None:
    def work(group: Group) -> None:
        keep: Any = {"keep": RULES} if group.rank == 0 else {}
        store = ckptstore.open(tmp_path / "store")
        with store.writer(group=group, ranks=PATIENT, deltas=deltas, **keep) as writer:
            for step in STEPS:
                getattr(writer, how)(state(group.rank, step), step, metadata={"loss": loss(step)})

    assert as_ranks(2, work) == [None, None]
    store = ckptstore.open(tmp_path / "store")
    assert store.rules() == RULES
    assert [info.step for info in store.checkpoints()] == KEPT
    before = len(store.backend.list("seg/"))
    store.gc()
    assert len(store.backend.list("seg/")) < before
    for step in KEPT:
        for rank in range(2):
            assert_same(store.load(step, rank=rank), state(rank, step))
    assert store.verify(deep=True).ok


def test_gradient_diffs_and_a_later_writer_of_one_process(tmp_path: Path) -> None:
    ckptstore.open(tmp_path, create=True).keep("last:2", "every:5", take_over=True)
    found = as_ranks(2, replicas(tmp_path, DiffOptions(full_every=6, batch=4, seconds=None), 13))
    assert not [one for one in found if isinstance(one, BaseException)], found
    store = ckptstore.open(tmp_path)
    assert [info.step for info in store.checkpoints()] == [5, 10, 12, 13]
    store.gc()
    wanted = truths(13)
    for step in (5, 10, 12, 13):
        assert_same(store.load(step, framework="numpy"), wanted[step])
    with store.writer(poll_seconds=None) as writer:
        writer.save({"n": 14}, 14)
    assert [info.step for info in store.checkpoints()] == [5, 10, 13, 14]
    assert store.verify(deep=True).ok
