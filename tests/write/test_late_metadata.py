"""Metadata that a function returns when everything but the record of a checkpoint is durable."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import DiffOptions, FailedRankError, Group, RankOptions, UsageError
from tests.write.rank_threads import as_ranks

FORMS: dict[str, dict[str, Any]] = {
    "fulls": {},
    "bounded": {"memory": 48 << 20},
    "deltas": {"deltas": 4},
    "diffs": {"diffs": DiffOptions(seconds=None)},
    "batches": {"diffs": DiffOptions(batch=2, seconds=None)},
}


@pytest.fixture
def store() -> ckptstore.Store:
    return ckptstore.open(f"memory://{uuid.uuid4().hex}")


def weights(step: int) -> dict[str, Any]:
    return {"w": np.full(1000, float(step))}


def uncommitted(store: ckptstore.Store) -> int:
    """Segments that no record names."""
    return len(store.backend.list("seg/")) - len(store.view().catalog.segments)


def never() -> dict[str, Any]:
    raise AssertionError("only rank 0 is asked")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_it_is_asked_for_once_when_everything_else_is_durable(store: ckptstore.Store, form: str, ranks: int) -> None:
    asked: list[tuple[int, bool, bool]] = []

    def late(step: int) -> Callable[[], dict[str, Any]]:
        def metadata() -> dict[str, Any]:
            other = ckptstore.open(store.url)
            asked.append((step, uncommitted(other) > 0, step in [one.step for one in other.checkpoints()]))
            return {"loss": 1 / step}

        return metadata

    def save(group: Group) -> None:
        how = {**FORMS[form], **({} if ranks == 1 else {"group": group, "ranks": RankOptions(100)})}
        with ckptstore.open(store.url).writer(**how) as writer:
            for step in range(1, 5):
                metadata = late(step) if group.rank == 0 else never
                writer.save_async({**weights(step), f"own{group.rank}": np.ones(5)}, step, metadata=metadata)

    assert as_ranks(ranks, save) == [None] * ranks
    assert sorted(asked) == [(step, True, False) for step in range(1, 5)]
    assert [(one.step, one.metadata) for one in store.checkpoints()] == [
        (step, {"loss": 1 / step}) for step in range(1, 5)
    ]
    assert store.checkpoint("best:loss").step == 4
    assert store.verify(deep=True).ok


def boxed(value: Any) -> Callable[[], Any]:
    return lambda: value


def failing() -> dict[str, Any]:
    raise ckptstore.FencedError("of another store")


FAILED = "the function failed, so nothing was committed: FencedError: of another store"


@pytest.mark.parametrize(
    ("form", "late", "why", "cause"),
    [
        *((form, failing, FAILED, ckptstore.FencedError) for form in FORMS),
        ("fulls", boxed([1]), "metadata: list; pass a mapping", type(None)),
        ("fulls", boxed({"loss": object()}), r"metadata\['loss'\]: object is not a JSON value", type(None)),
        ("fulls", boxed({"a": "x" * 16_400}), "16,408 bytes of JSON, at most 16,384", type(None)),
    ],
)
def test_or_nobody_commits(
    store: ckptstore.Store, form: str, late: Callable[[], Any], why: str, cause: type[object]
) -> None:
    """Nothing is left of the step but segments that the next record drops, and the writer goes on."""
    with store.writer(poll_seconds=None, **FORMS[form]) as writer:
        writer.save(weights(1), 1)
        pending = writer.save_async(weights(2), 2, metadata=late)
        with pytest.raises(UsageError, match=why) as met:
            pending.result()
        assert type(met.value.__cause__) is cause
        assert [one.step for one in ckptstore.open(store.url).checkpoints()] == [1]
        assert uncommitted(ckptstore.open(store.url)) == 1
        assert writer.save(weights(2), 2, metadata=boxed({"loss": 0.5})).metadata == {"loss": 0.5}
        assert writer.save(weights(3), 3, metadata=boxed(None)).metadata == {}
    store.gc()
    assert [one.step for one in store.checkpoints()] == [1, 2, 3]
    assert uncommitted(store) == 0
    assert store.load(2, framework="numpy")["w"][0] == 2.0
    assert store.verify(deep=True).ok


def test_later_fulls_of_a_process_do_not_wait_for_it(store: ckptstore.Store) -> None:
    known: Future[dict[str, Any]] = Future()
    with store.writer(max_in_flight=2) as writer:
        pending = writer.save_async(weights(1), 1, metadata=known.result)
        writer.save(weights(2), 2)
        assert not pending.done()
        assert store.latest_step() == 2
        known.set_result({"loss": 0.25})
        assert pending.result().metadata == {"loss": 0.25}
        late: Future[dict[str, Any]] = Future()
        pending = writer.save_async(weights(3), 3, metadata=late.result)
        assert pending.cancel()
        late.cancel()
        with pytest.raises(CancelledError):
            pending.result()
    assert [(one.step, one.metadata) for one in store.checkpoints()] == [(1, {"loss": 0.25}), (2, {})]


def test_no_rank_commits_if_it_fails_on_rank_0(store: ckptstore.Store) -> None:
    def save(group: Group) -> list[Any]:
        with ckptstore.open(store.url).writer(group=group, ranks=RankOptions(100)) as writer:
            lost = writer.save_async(weights(1), 1, metadata=failing if group.rank == 0 else never).exception()
            return [lost, writer.save(weights(1), 1, metadata=boxed({"rank": group.rank})).metadata]

    (own, first), (other, second) = as_ranks(2, save)
    assert first == second == {"rank": 0}
    assert (type(own), type(other)) == (UsageError, FailedRankError)
    for error in (own, other):
        assert FAILED in str(error)
    assert len(store.checkpoints()) == 1
