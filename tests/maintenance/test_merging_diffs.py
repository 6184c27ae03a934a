"""Merging step diffs: batches joined, steps retired, chains of steps encoded as one delta, all bit for bit."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore import DiffOptions
from ckptstore.errors import UsageError
from ckptstore.host.caller_warnings import LossyWarning
from ckptstore.log.journal import Journal
from ckptstore.maintenance.garbage_collection import collect
from ckptstore.maintenance.merge import merge
from ckptstore.reports.inspection import inspect
from ckptstore.store import Store
from tests.forms import in_turn
from tests.store.states import same
from tests.write.trainer import LARGE, fill

KINDS: dict[str, dict[str, Any]] = {"dense": {}, "none": {"gradients": False}, "sparse": {"keep": 0.02}}


Fill = Callable[..., tuple[Store, dict[int, Any]]]


@pytest.fixture(scope="module")
def origins(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[int, Any]]]:
    """Stores by what fills them. To be copied."""
    return {}


@pytest.fixture
def filled(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, origins: dict[str, tuple[Path, dict[int, Any]]]
) -> Fill:
    """`fill`, which trains once for each kind of store: the test gets a copy."""

    def made(steps: int, **how: Any) -> tuple[Store, dict[int, Any]]:
        kind = repr((steps, how))
        if kind not in origins:
            root = tmp_path_factory.mktemp("filled") / "store"
            _, truth = fill(root, DiffOptions(batch=4), steps, **how)
            origins[kind] = root, truth
        root, truth = origins[kind]
        return ckptstore.open(shutil.copytree(root, tmp_path / "store")), truth

    return made


def check(store: Store, truth: dict[int, Any], steps: list[int]) -> None:
    """Exactly these steps exist, they restore, and no byte is damaged; then once more after gc."""
    for _ in range(2):
        assert [info.step for info in store.checkpoints()] == steps
        for step in steps:
            same(truth[step], store.load(step))
        assert ckptstore.verify(store).ok
        collect(store.journal)


@pytest.mark.parametrize("how", KINDS.values(), ids=KINDS)
def test_batches_become_one_segment(filled: Fill, how: dict[str, Any]) -> None:
    store, truth = filled(14, **how)
    before = {info.step: info.stored for info in store.checkpoints()}
    described = store.describe(13)
    digests = {
        (step, name): entry.digest
        for _, doc in described[1:]
        for step, held in doc.tensors.items()
        for name, entry in held.items()
    }
    done = merge(store.journal, "1..13", keep_steps=True, take_over=True)
    assert (done.answer, done.method, done.fulls) == ("accepted", "concatenated", ("1@1",))
    assert len(done.dropped) == 3
    assert done.after.segments == 2
    check(store, truth, list(range(1, 15)))
    (_, full), (_, merged) = store.describe(13)
    assert (full.steps, merged.steps, merged.kind) == ((1,), tuple(range(2, 14)), "gradient")
    assert {(s, n): e.digest for s, held in merged.tensors.items() for n, e in held.items()} == digests
    bases = [encoding.base for encoding in merged.encodings.values()]
    assert [base and base.step for base in bases] == list(range(1, 13))
    after = {info.step: info.stored for info in store.checkpoints()}
    assert sum(after.values()) < sum(before.values())
    assert store.checkpoint(5).kind == "gradient"


def test_batches_across_the_ends_of_the_range_stay(filled: Fill) -> None:
    store, truth = filled(14)  # 1, 2-5, 6-9, 10-13, 14
    with pytest.raises(UsageError, match="share their segments with checkpoints outside"):
        merge(store.journal, "3..8", keep_steps=True, take_over=True)
    done = merge(store.journal, "4..14", keep_steps=True, take_over=True)
    assert done.merged == tuple(f"{step}@1" for step in range(6, 15))
    assert len(done.dropped) == 3
    check(store, truth, list(range(1, 15)))


@pytest.mark.parametrize(("kind", "last"), in_turn(list(KINDS), [5, 13, 14], each=2))
def test_the_end_of_the_range_stays(filled: Fill, kind: str, last: int) -> None:
    how = KINDS[kind]
    store, truth = filled(16, sizes=LARGE, **how)
    planned = merge(store.journal, f"1..{last}", dry_run=True)
    done = merge(store.journal, f"1..{last}", take_over=True)
    assert (done.answer, done.method) == ("accepted", planned.method)
    assert done.retired == tuple(f"{step}@1" for step in range(2, last))
    if "keep" in how:
        # Few bytes a step. Steps 15 and 16 need the segment of 14: a copy of it would only be more bytes.
        assert done.method == ("kept" if last == 14 else "concatenated")
        assert store.checkpoint(last).kind == "gradient"
    else:
        assert done.method == "materialized"
        assert (store.checkpoint(last).kind, store.checkpoint(last).base) == ("delta", "1@1")
        assert store.checkpoint(last).stored == done.written_nbytes
        assert done.after.links == 2
        assert done.after.nbytes < done.before.nbytes
    check(store, truth, [1, *range(last, 17)])


def test_a_segment_shared_with_later_steps_stays_until_they_go(filled: Fill) -> None:
    """The range ends within a batch: the steps after it need the segment."""
    store, truth = filled(14)
    shared = store.describe(8)[-1][0].key
    done = merge(store.journal, "2..8", take_over=True)
    assert done.method == "materialized"
    assert shared not in done.dropped
    check(store, truth, [1, *range(8, 15)])
    done = merge(store.journal, "8..14", take_over=True)
    assert shared in done.dropped
    check(store, truth, [1, 14])


def test_deltas_and_gradients_in_one_segment(filled: Fill) -> None:
    """Entries that were materialized before are copied beside steps: each entry names its encoding."""
    store, truth = filled(14)
    assert merge(store.journal, "2..9", take_over=True).method == "materialized"
    done = merge(store.journal, "1..14", keep_steps=True, take_over=True)
    assert done.merged == ("9@1", "10@1", "11@1", "12@1", "13@1", "14@1")
    assert [doc.kind for _, doc in store.describe(14)] == ["full", "mixed"]
    assert [info.kind for info in store.checkpoints()] == ["full", "delta", *["gradient"] * 5]
    assert {tensor.kind for tensor in inspect(store.journal, 9).tensors} == {"delta"}
    check(store, truth, [1, *range(9, 15)])


def test_beside_a_trainer(tmp_path: Path) -> None:
    from tests.write.trainer import Trainer

    trainer, truth = Trainer(), {}
    store = ckptstore.open(tmp_path / "store")
    with store.writer(diffs=DiffOptions(batch=3), poll_seconds=0.05) as writer:
        for step in range(1, 24):
            trainer.train()
            truth[step] = trainer.frozen()
            writer.save_async(trainer.state(), step, updates=trainer.updates())
            if step == 12:  # 1, 2-4, 5-7, 8-10; two steps wait
                writer.wait()
                assert merge(Journal(store.backend), "2..9", keep_steps=True, timeout=60).answer == "accepted"
            if step == 18:
                writer.wait()
                done = merge(Journal(store.backend), "13..latest", timeout=60)
                assert done.answer == "accepted"
                assert done.last == "18@1"
    assert writer.term == store.view().catalog.term == 1
    check(store, truth, [*range(1, 13), *range(18, 24)])


def test_lossy_steps_stay_marked(tmp_path: Path) -> None:
    """Sums are not what training had, and a merge does not make them exact."""
    store, _ = fill(tmp_path / "store", DiffOptions(batch=3, accumulate="sum"), 13)
    lossy = [info for info in store.checkpoints() if info.lossy]
    assert len(lossy) > 2
    with pytest.warns(LossyWarning):
        state = store.load(lossy[-1].step)
    whole = f"{lossy[0].ref}..{lossy[-1].ref}"
    assert merge(store.journal, whole, keep_steps=True, take_over=True).answer == "accepted"
    assert [info.ref for info in store.checkpoints() if info.lossy] == [info.ref for info in lossy]
    done = merge(store.journal, whole, take_over=True)
    assert done.answer == "accepted"
    assert store.checkpoint(lossy[-1].ref).lossy
    assert store.describe(lossy[-1].ref)[-1][1].lossy
    with pytest.warns(LossyWarning):
        same(state, store.load(lossy[-1].step))
