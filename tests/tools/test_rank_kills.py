"""Ranks that are killed: ``python -m tools.kills.rank_kills`` in short; its oracle notices a broken promise."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch.distributed")

import ckptstore
from tests.forms import short_or
from tools.crash.scenario import Violation
from tools.kills import rank_kills
from tools.kills.rank_kills import Doom, Life

pytestmark = pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="the harness forks its ranks")

PATIENT = ckptstore.RankOptions(timeout=100.0, per_rank="rng")
"""For ranks that wait for each other, and for no dead one."""


@pytest.mark.slow
def test_no_acknowledged_checkpoint_is_lost_and_all_ranks_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_kills, "OPTIONS", ckptstore.RankOptions(timeout=0.8, per_rank="rng"))
    done = rank_kills.sweep(short_or(5, 10), seed=5, folder=tmp_path)
    assert done.kills >= short_or(5, 10)
    assert done.restored


def test_ranks_that_nobody_kills_save_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_kills, "OPTIONS", PATIENT)
    life = rank_kills.live(tmp_path / "store", 3, Doom(()), steps=4)
    assert life.opened == dict.fromkeys(range(3), (1, None))
    assert life.acknowledged == {(1, step) for step in range(1, 5)}
    assert (life.failed, life.killed, dict(life.errors)) == (set(), {-1}, {})  # -1: the TCPStore, at the end
    assert rank_kills.check(tmp_path / "store", life, 3, set()) == 4


@pytest.mark.parametrize("point", ["ranks.ended", "ranks.states", "ranks.shared"])
def test_a_batch_of_gradient_diffs_is_there_whole_or_not_at_all(
    tmp_path: Path, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The number of steps is queried: neither a late rank nor the timeout may end a batch.
    monkeypatch.setattr(rank_kills, "OPTIONS", PATIENT)
    untimed = {"diffs": ckptstore.DiffOptions(full_every=4, batch=3, seconds=None)}
    monkeypatch.setattr(Doom, "writer", property(lambda _: untimed))
    life = rank_kills.live(tmp_path / "store", 3, Doom((0,), point, others=0.2, diffs=3))
    assert 0 in life.killed
    assert rank_kills.check(tmp_path / "store", life, 3, set()) == (5 if point == "ranks.ended" else 1)


def test_the_oracle_sees_what_is_lost_and_what_was_denied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_kills, "OPTIONS", PATIENT)
    life = rank_kills.live(tmp_path / "store", 2, Doom(()), steps=2)
    ckptstore.open(tmp_path / "store").retire(1, take_over=True)
    with pytest.raises(Violation, match=r"acknowledged and lost: \[\(1, 1\)\]"):
        rank_kills.check(tmp_path / "store", life, 2, set())
    with pytest.raises(Violation, match=r"reported as failed, but in the store: \[\(1, 2\)\]"):
        rank_kills.check(tmp_path / "store", Life(failed={(1, 2)}), 2, set())
    life = Life(given={1: {(1, step) for step in range(5)}}, failed={(1, 0)})
    rank_kills.check(tmp_path / "store", life, 2, set(), cost=3)
    with pytest.raises(Violation, match=r"rank 1 had given \[.*\(1, 3\), \(1, 4\)\], which are lost: more than 2"):
        rank_kills.check(tmp_path / "store", life, 2, set(), cost=2)
    with pytest.raises(Violation, match="different terms"):
        rank_kills.check(tmp_path / "store", Life({0: (1, None), 1: (2, None)}), 2, set())
