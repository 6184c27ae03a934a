"""Step diffs of many ranks: threads as ranks, numpy tensors. Processes and torch are in `test_rank_processes`."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import DiffOptions, DivergedReplicasError, FailedRankError, RankOptions, Update
from ckptstore.errors import CkptError, RankMismatchError, UnsupportedStateError
from ckptstore.formats import optim
from ckptstore.formats.optim import SparseGradient
from ckptstore.formats.sources import BoxSource, NumpySource
from ckptstore.formats.states.state import FlatState, flatten
from ckptstore.log import requests
from ckptstore.log.change import CatalogChange
from ckptstore.write.ranks.messages.key_value_store import Group, LocalMailbox
from ckptstore.write.ranks.shares import holding_of, steady, updates_of
from tests.forms import in_turn
from tests.store.states import same
from tests.write.rank_threads import as_ranks
from tests.write.trainer import ADAM, Trainer

OPTIONS = RankOptions(timeout=120)
SIZES = {"wide": (300, 70), "tall": (900, 20), "bias": (700,), "norm": (3,), "one": (1,)}


def trainer() -> Trainer:
    """The same on every rank, as under DDP."""
    return Trainer(0, SIZES)


@functools.lru_cache(4)
def truths(steps: int, keep: float | None = None) -> dict[int, Any]:
    """Step -> the state after it. Tests do not change them."""
    found, model = {}, trainer()
    for step in range(1, steps + 1):
        model.train(keep)
        found[step] = model.frozen()
    return found


def replicas(path: Path, options: DiffOptions, steps: int, keep: float | None = None) -> Callable[[Group], list[Any]]:
    """A rank's life: every step in the background."""

    def work(group: Group) -> list[Any]:
        model = trainer()
        with ckptstore.open(path).writer(group=group, ranks=OPTIONS, diffs=options, max_in_flight=2) as writer:
            pending = []
            for step in range(1, steps + 1):
                model.train(keep)
                pending.append(writer.save_async(model.state(), step, updates=model.updates()))
        return [one.result().kind for one in pending]

    return work


def kinds(store: ckptstore.Store) -> list[str]:
    return [info.kind for info in store.checkpoints()]


def expected(steps: int, every: int) -> list[str]:
    return ["gradient" if step % every else "full" for step in range(steps)]


@pytest.mark.parametrize(
    ("cut", "gradient", "batch"),
    [  # in CI each pair of two values
        *in_turn(["whole", "cut"], [("dense", 1), ("sparse", 1)]),
        *in_turn(["whole", "cut"], [("sparse", 3), ("dense", 3)]),
    ],
)
def test_every_step_of_replicas_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: str, gradient: str, batch: int
) -> None:
    keep = 0.02 if gradient == "sparse" else None
    if cut == "cut":
        monkeypatch.setattr("ckptstore.write.ranks.division.CUT_FROM", 4096)
    found = as_ranks(3, replicas(tmp_path, DiffOptions(full_every=6, batch=batch), 13, keep))
    assert found == [expected(13, 6)] * 3
    store = ckptstore.open(tmp_path)
    for step, truth in truths(13, keep).items():
        same(store.load(step), truth)
        rows = store.read_tensor(step, "master.wide", box=np.s_[100:211, 3:9])
        assert rows.tobytes() == np.ascontiguousarray(truth["master"]["wide"][100:211, 3:9]).tobytes()
    assert store.verify(deep=True).ok


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
def test_replicas_cost_what_one_process_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: bool) -> None:
    """A parameter and its moments are with one rank, cut alike: otherwise they would be differences, much larger."""
    if cut:
        monkeypatch.setattr("ckptstore.write.ranks.division.CUT_FROM", 4096)
    as_ranks(3, replicas(tmp_path / "ranks", DiffOptions(), 5))
    model = trainer()
    alone = ckptstore.open(tmp_path / "alone", create=True)
    with alone.writer(diffs=DiffOptions()) as writer:
        for step in range(1, 6):
            model.train()
            writer.save_async(model.state(), step, updates=model.updates())
    store = ckptstore.open(tmp_path / "ranks")
    assert store.checkpoint(5).stored < alone.checkpoint(5).stored + 3 * 12_000  # headers of three segments
    held = [doc.tensors[5] for _, doc in store.describe(5) if 5 in doc.tensors]
    moved = [
        {name.partition(".")[2]: entry.shape for name, entry in one.items() if entry.codec == "step"} for one in held
    ]
    assert set().union(*moved) == set(SIZES)
    assert any(entry.offset for one in held for entry in one.values()) == cut


def test_a_batch_is_one_segment_of_each_rank_and_one_of_trees(tmp_path: Path) -> None:
    as_ranks(3, replicas(tmp_path, DiffOptions(batch=4), 9))
    store = ckptstore.open(tmp_path)
    described = [doc for _, doc in store.describe(9)]
    assert [doc.steps for doc in described[4:]] == [(2, 3, 4, 5)] * 4 + [(6, 7, 8, 9)] * 4
    assert [len(doc.trees) for doc in described[4:]] == [4, 0, 0, 0] * 2
    assert described[5].extra["rank"] == [[step, 0] for step in (2, 3, 4, 5)]
    assert described[4].extra["ranks"] == [[step, [1, 1, 1]] for step in (2, 3, 4, 5)]
    assert {doc.encodings[4].part.first for doc in described[4:8]} == {described[4].segment}
    sizes = sum(store.backend.size(key) for key in store.backend.list("seg/"))
    assert sum(info.stored for info in store.checkpoints()) == sizes


def rows_of(group: Group, whole: np.ndarray[Any, Any]) -> tuple[int, int]:
    bounds = [len(whole) * place // group.size for place in range(group.size + 1)]
    return bounds[group.rank], bounds[group.rank + 1]


def sharded(group: Group, model: Trainer) -> tuple[FlatState, list[Update]]:
    """The state of which this rank has rows, as under FSDP; and its optimizer's updates."""
    flat = flatten(model.state())
    for name, source in list(flat.tensors.items()):
        if not name.startswith(("model", "master", "m.", "v.")) or source.shape in ((3,), (1,)):
            continue
        whole = source.array  # type: ignore[attr-defined]
        first, stop = rows_of(group, whole)
        part = np.ascontiguousarray(whole[first:stop])
        offset = (first,) + (0,) * (whole.ndim - 1)
        flat.tensors[name] = BoxSource(NumpySource(part), part.shape, 0, whole.shape, offset)
    updates = []
    for update in model.updates():
        shape = SIZES[update.slots[0].partition(".")[2]]
        if shape in ((3,), (1,)):
            updates.append(update)
            continue
        assert isinstance(update.gradient, NumpySource)
        whole = update.gradient.array
        first, stop = rows_of(group, whole)
        updates.append(replace(update, gradient=NumpySource(np.ascontiguousarray(whole[first:stop]))))
    return flat, updates


@pytest.mark.parametrize("batch", [1, 4])
def test_steps_of_shards_come_back_in_another_sharding(tmp_path: Path, batch: int) -> None:
    def work(group: Group) -> None:
        model = trainer()
        options = DiffOptions(full_every=20, batch=batch)
        with ckptstore.open(tmp_path / "store").writer(group=group, ranks=OPTIONS, diffs=options) as writer:
            for step in range(1, 8):
                model.train()
                flat, updates = sharded(group, model)
                writer.save_async(flat, step, updates=updates)

    assert as_ranks(4, work) == [None] * 4
    store = ckptstore.open(tmp_path / "store")
    assert kinds(store) == expected(7, 20)
    for step, truth in truths(7).items():
        same(store.load(step), truth)
    truth = truths(7)[7]
    entries = [doc.tensors[7] for _, doc in store.describe(7) if 7 in doc.tensors]
    moved = [entry for one in entries for entry in one.values() if entry.codec == "step" and entry.offset is not None]
    assert len(moved) == 4 * 3 * 3  # of each rank: three parameters in shards, three slots each
    box = store.read_tensor(7, "v.tall", box=np.s_[200:700])  # rows of three ranks
    assert box.tobytes() == truth["v"]["tall"][200:700].tobytes()
    assert store.verify(deep=True).ok
    store.export(7, tmp_path / "whole.safetensors")
    from safetensors.numpy import load_file

    exported = load_file(tmp_path / "whole.safetensors")
    assert exported["master.wide"].tobytes() == truth["master"]["wide"].tobytes()


def test_a_step_saved_at_once_ends_its_batch(tmp_path: Path) -> None:
    def work(group: Group) -> None:
        model = trainer()
        with ckptstore.open(tmp_path).writer(group=group, ranks=OPTIONS, diffs=DiffOptions(batch=10)) as writer:
            for step in range(1, 7):
                model.train()
                if step in (3, 6):
                    assert writer.save(model.state(), step, updates=model.updates()).step == step
                else:
                    writer.save_async(model.state(), step, updates=model.updates())

    assert as_ranks(3, work) == [None] * 3
    store = ckptstore.open(tmp_path)
    for step, truth in truths(6).items():
        same(store.load(step), truth)
    assert store.describe(6)[-1][1].steps == (4, 5, 6)


@pytest.mark.parametrize("who", [(0,), (2,), (0, 1, 2)])
def test_waiting_for_a_result_ends_the_batch(tmp_path: Path, who: tuple[int, ...]) -> None:
    def work(group: Group) -> None:
        model = trainer()
        options = DiffOptions(batch=10, seconds=None)
        with ckptstore.open(tmp_path).writer(group=group, ranks=OPTIONS, diffs=options, max_in_flight=3) as writer:
            for step in range(1, 6):
                model.train()
                pending = writer.save_async(model.state(), step, updates=model.updates())
                if step == 4 and group.rank in who:
                    assert pending.result(120).step == 4
            if group.rank == 1:
                writer.wait()

    assert as_ranks(3, work) == [None] * 3
    store = ckptstore.open(tmp_path)
    assert kinds(store) == expected(5, 9)
    for step, truth in truths(5).items():
        same(store.load(step), truth)


def test_a_batch_waits_no_longer_than_its_limit(tmp_path: Path) -> None:
    def work(group: Group) -> None:
        model = trainer()
        options = DiffOptions(batch=10, seconds=0.3)
        with ckptstore.open(tmp_path).writer(group=group, ranks=OPTIONS, diffs=options) as writer:
            for step in range(1, 4):
                model.train()
                pending = writer.save_async(model.state(), step, updates=model.updates())
            until = time.monotonic() + 120
            while not pending.done() and time.monotonic() < until:
                time.sleep(0.01)
            assert pending.done()

    assert as_ranks(2, work) == [None] * 2


def test_a_tag_and_a_request_write_what_waits(tmp_path: Path) -> None:
    tagged = threading.Event()

    def work(group: Group) -> None:
        model, store = trainer(), ckptstore.open(tmp_path)
        options = DiffOptions(batch=10, seconds=None)
        with store.writer(group=group, ranks=OPTIONS, diffs=options, poll_seconds=0.05) as writer:
            for step in range(1, 4):
                model.train()
                writer.save_async(model.state(), step, updates=model.updates())
            if group.rank == 0:
                assert writer.tag("three", 3).step == 3
            model.train()
            writer.save_async(model.state(), 4, updates=model.updates())
            if group.rank == 0:
                store.tag("one", 1)  # as another process would, beside the writer
                tagged.set()
            assert tagged.wait(120)

    assert as_ranks(2, work) == [None] * 2
    store = ckptstore.open(tmp_path)
    assert (store.checkpoint("tag:three").step, store.checkpoint("tag:one").step) == (3, 1)
    same(store.load(4), truths(4)[4])


@pytest.mark.parametrize(
    ("options", "when"),
    [
        ({"diffs": DiffOptions(batch=10, seconds=None)}, "ranks.coded"),
        ({"diffs": DiffOptions(batch=2, seconds=None)}, "ranks.shared"),
        ({"deltas": 1}, "ranks.before-part"),
    ],
    ids=["waiting", "batch", "delta"],
)
def test_a_base_is_not_retired_before_its_steps_are_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], when: str
) -> None:
    """A request for that comes while steps wait for their batch, while it is written, and while a delta is."""
    asked: list[requests.Request] = []
    answered = threading.Event()

    def passed(name: str) -> None:
        store = ckptstore.open(tmp_path)
        if name == when and not asked and store.latest_step() == 1:
            change = CatalogChange(retires=((1, 1),), drops=store.checkpoint(1).segments)
            asked.append(requests.post(store.journal, 1, "test", change))
            time.sleep(0.3)  # the writer looks for requests meanwhile

    for module in ("rank_batches", "share_writer"):
        monkeypatch.setattr(f"ckptstore.write.ranks.{module}.crash_point", passed)

    def work(group: Group) -> list[str]:
        model, store = trainer(), ckptstore.open(tmp_path)
        with store.writer(group=group, ranks=OPTIONS, poll_seconds=0.02, **options) as writer:
            pending = []
            for step in (1, 2, 3):
                model.train()
                told: Any = {"updates": model.updates()} if "diffs" in options else {}
                pending.append(writer.save_async(model.state(), step, **told))
                if step == 1:
                    pending[0].result()
            pending[-1].result()
            if group.rank == 0:
                assert requests.wait(store.journal, asked[0], timeout=60).answer == "refused"
                answered.set()
            assert answered.wait(60)
            return [one.result().kind for one in pending]

    kind = "delta" if "deltas" in options else "gradient"
    assert as_ranks(2, work) == [["full", kind, kind]] * 2
    same(ckptstore.open(tmp_path).load(3), truths(3)[3])


@pytest.mark.parametrize("batch", [1, 3])
def test_a_replica_that_diverged_is_found_in_its_batch(tmp_path: Path, batch: int) -> None:
    lost = {3} if batch == 1 else {2, 3, 4}

    def work(group: Group) -> list[str]:
        model = trainer()
        told = []
        options = DiffOptions(full_every=50, batch=batch)
        with ckptstore.open(tmp_path).writer(group=group, ranks=OPTIONS, diffs=options) as writer:
            pending = []
            for step in range(1, 9):
                model.train()
                state = model.frozen()
                if step == 3 and group.rank == 1:
                    state["master"]["wide"][7, 7] += 1
                pending.append(writer.save_async(state, step))
                if step == max(lost):
                    for one in reversed(pending):  # the next call does not raise an error that was reported
                        one.exception()
            for one in pending:
                error = one.exception()
                if isinstance(error, DivergedReplicasError):
                    assert (error.tensor, error.rank, error.step) == ("master.wide", 1, 3)
                told.append(type(error).__name__ if error is not None else one.result().kind)
        return told

    after = max(lost) + 1
    wanted = [
        "DivergedReplicasError" if step in lost else "full" if step in (1, after) else "gradient"
        for step in range(1, 9)
    ]
    assert as_ranks(3, work) == [wanted] * 3
    store = ckptstore.open(tmp_path)
    for info in store.checkpoints():
        same(store.load(info.ref), truths(8)[info.step])
    assert len(store.gc().segments) == (2 if batch == 1 else 0)  # rank 0 had detected it before it wrote


def test_a_state_that_one_rank_cannot_store_costs_no_batch(tmp_path: Path) -> None:
    def work(group: Group) -> list[str]:
        model = trainer()
        told: list[Any] = []
        with ckptstore.open(tmp_path).writer(group=group, ranks=OPTIONS, diffs=DiffOptions(batch=3)) as writer:
            for step in range(1, 9):
                model.train()
                bad = step in (3, 6) and group.rank == (1 if step == 3 else 0)
                state: Any = model.state() | ({"odd": object()} if bad else {})
                try:
                    told.append(writer.save_async(state, step, updates=model.updates()))
                    if step in (3, 6):
                        told[-1].exception()  # otherwise the next call raises it
                except UnsupportedStateError:
                    told.append(None)
        outcomes = []
        for one in told:
            error = None if one is None else one.exception()
            outcomes.append("lost" if one is None or isinstance(error, FailedRankError) else one.result().kind)
        return outcomes

    wanted = ["full", "gradient", "lost", "gradient", "gradient", "lost", "gradient", "gradient"]
    found = as_ranks(3, work)
    assert found == [wanted] * 3
    store = ckptstore.open(tmp_path)
    for info in store.checkpoints():
        same(store.load(info.ref), truths(8)[info.step])


def test_a_rank_that_cannot_code_a_step_fails_its_batch_on_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptstore.write.steps import resident_step

    coded = resident_step.encode_step

    def encode(flat: FlatState, updates: Any, base: Any, step: int, **how: Any) -> Any:
        if step == 3 and threading.current_thread().name.startswith("ckptstore-part") and flat.tree["step"] == 103:
            raise MemoryError("no memory")
        return coded(flat, updates, base, step, **how)

    monkeypatch.setattr(resident_step, "encode_step", encode)

    def work(group: Group) -> list[str]:
        model = trainer()
        pending = []
        with ckptstore.open(tmp_path).writer(group=group, ranks=OPTIONS, diffs=DiffOptions(batch=3)) as writer:
            for step in range(1, 8):
                model.train()
                own = model.state() | ({"step": step + 100} if group.rank == 1 else {})
                pending.append(writer.save_async(own, step, updates=model.updates()))
                if step == 3:
                    pending[-1].exception()  # otherwise the next call raises it
                    pending[-2].exception()
            return [
                one.result().kind if (error := one.exception()) is None else type(error).__name__ for one in pending
            ]

    found = as_ranks(3, work)
    for rank, why in enumerate(("FailedRankError", "MemoryError", "FailedRankError")):
        assert found[rank] == ["full", why, why, "full", "gradient", "gradient", "gradient"]
    for info in ckptstore.open(tmp_path).checkpoints():
        loaded = ckptstore.open(tmp_path).load(info.ref, rank=0)
        same(loaded, truths(8)[info.step])


def test_tensors_that_come_begin_with_a_full_after_what_waits(tmp_path: Path) -> None:
    def work(group: Group) -> list[str]:
        model = trainer()
        pending = []
        with ckptstore.open(tmp_path).writer(group=group, ranks=OPTIONS, diffs=DiffOptions(batch=5)) as writer:
            for step in range(1, 7):
                model.train()
                state = model.state() | ({"new": np.ones(3)} if step > 3 else {})
                pending.append(writer.save_async(state, step, updates=model.updates()))
        return [one.result().kind for one in pending]

    assert as_ranks(2, work) == [["full", "gradient", "gradient", "full", "gradient", "gradient"]] * 2


def test_tensors_that_come_on_one_rank_alone_cost_one_step(tmp_path: Path) -> None:
    def work(group: Group) -> list[str]:
        model, told = trainer(), []
        options = DiffOptions(batch=2, seconds=None)
        with ckptstore.open(tmp_path).writer(group=group, ranks=OPTIONS, diffs=options, poll_seconds=None) as writer:
            for step in range(1, 6):
                model.train()
                own = model.state() | ({"new": np.ones(2)} if step >= 3 and group.rank else {})
                try:
                    told.append(writer.save_async(own, step, updates=model.updates()).result().kind)
                except RankMismatchError:
                    told.append("refused")
        return told

    assert as_ranks(2, work) == [["full", "gradient", "refused", "full", "gradient"]] * 2
    assert ckptstore.open(tmp_path).load(5)["new"].tobytes() == np.ones(2).tobytes()


@pytest.mark.filterwarnings("ignore:the ranks divide:ckptstore.UnexplainedStepWarning")
def test_updates_that_come_late_cost_one_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptstore.write.ranks.division.CUT_FROM", 4096)

    def work(group: Group) -> list[str]:
        model = trainer()
        pending = []
        with ckptstore.open(tmp_path).writer(group=group, ranks=OPTIONS, diffs=DiffOptions()) as writer:
            for step in range(1, 6):
                model.train()
                updates = model.updates() if step not in (1, 4) else None
                pending.append(writer.save_async(model.state(), step, updates=updates))
        return [one.result().kind for one in pending]

    assert as_ranks(2, work) == [["full", "full", "gradient", "gradient", "gradient"]] * 2
    for step, truth in truths(5).items():
        same(ckptstore.open(tmp_path).load(step), truth)


def test_deltas_between_diffs(tmp_path: Path) -> None:
    def work(group: Group) -> list[str]:
        model = trainer()
        pending = []
        options: dict[str, Any] = {"diffs": DiffOptions(full_every=3), "deltas": 2}
        with ckptstore.open(tmp_path).writer(group=group, ranks=OPTIONS, **options) as writer:
            for step in range(1, 11):
                model.train()
                pending.append(writer.save_async(model.state(), step, updates=model.updates()))
        return [one.result().kind for one in pending]

    found = as_ranks(2, work)
    assert found[0] == found[1]
    assert {"full", "delta", "gradient"} == set(found[0])
    for step, truth in truths(10).items():
        same(ckptstore.open(tmp_path).load(step), truth)


def test_nothing_is_left_in_the_mailbox(tmp_path: Path) -> None:
    box = LocalMailbox()
    assert as_ranks(3, replicas(tmp_path, DiffOptions(full_every=6, batch=4), 12), box) == [expected(12, 6)] * 3
    assert box.keys() == []


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
def test_gradients_are_summed_up_as_in_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: bool) -> None:
    """Each rank sums the gradients of its share. Together they are, bit for bit, the state that one process stores."""
    if cut:
        monkeypatch.setattr("ckptstore.write.ranks.division.CUT_FROM", 4096)
    options = DiffOptions(batch=4, accumulate="sum", seconds=None)
    steps = 11

    def work(group: Group) -> list[tuple[int, bool]]:
        model = trainer()
        store = ckptstore.open(tmp_path / "ranks")
        with store.writer(group=group, ranks=OPTIONS, diffs=options, max_in_flight=2) as writer:
            pending = []
            for step in range(1, steps + 1):
                model.train()
                updates, tags = model.updates(), [f"tag-{step}"]
                pending.append(writer.save_async(model.state(), step, updates=updates, tags=tags))
        return [(one.result().step, one.result().lossy) for one in pending]

    answers = [(1, False), *[(5, True)] * 4, *[(9, True)] * 4, *[(11, True)] * 2]
    assert as_ranks(3, work) == [answers] * 3
    model = trainer()
    alone = ckptstore.open(tmp_path / "alone", create=True)
    with alone.writer(diffs=options) as writer:
        for step in range(1, steps + 1):
            model.train()
            writer.save_async(model.state(), step, updates=model.updates())
    store = ckptstore.open(tmp_path / "ranks")
    assert [(info.step, info.kind, info.lossy) for info in store.checkpoints()] == [
        (1, "full", False),
        (5, "gradient", True),
        (9, "gradient", True),
        (11, "gradient", True),
    ]
    assert set(store.checkpoint(5).tags) == {"tag-2", "tag-3", "tag-4", "tag-5"}
    for step in (5, 9, 11):
        with pytest.warns(ckptstore.LossyWarning):
            one, other = store.load(step), alone.load(step)
        same(one, other)
        assert one["master"]["wide"].tobytes() != truths(step)[step]["master"]["wide"].tobytes()
    assert store.verify(deep=True).ok


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("how", ["gradient", "state"])
def test_no_sum_lacks_a_step_that_failed(tmp_path: Path, culprit: int, how: str) -> None:
    """A missing gradient fails its batch; a state that cannot be stored fails alone. A full follows either."""
    options = DiffOptions(batch=4, accumulate="sum", seconds=None)

    def work(group: Group) -> None:
        model = trainer()
        with ckptstore.open(tmp_path).writer(group=group, ranks=OPTIONS, diffs=options) as writer:
            pending = []
            for step in range(1, 8):
                model.train()
                given, updates = model.state(), model.updates()
                if step == 4 and group.rank == culprit:
                    given, updates = (given, []) if how == "gradient" else ({**given, "buffer": object()}, updates)
                with contextlib.suppress(UnsupportedStateError):
                    pending.append(writer.save_async(given, step, updates=updates))
                for one in reversed(pending if step == 4 else []):  # so that no later call raises it on one rank alone
                    with contextlib.suppress(CkptError):
                        one.result()

    assert as_ranks(2, work) == [None] * 2
    stored = [(info.step, info.kind) for info in ckptstore.open(tmp_path).checkpoints()]
    if how == "gradient":
        assert stored == [(1, "full"), (5, "full"), (7, "gradient")]
    else:
        assert stored == [(1, "full"), (3, "gradient"), (5, "full"), (7, "gradient")]
    same(ckptstore.open(tmp_path).load(5), truths(5)[5])


def test_inconsistent_options_are_reported_before_anything_is_saved(tmp_path: Path) -> None:
    def work(group: Group) -> None:
        how: dict[str, Any] = {"diffs": DiffOptions()} if group.rank == 0 else {}
        with pytest.raises(CkptError, match=r"rank 0 was opened with diffs=, rank 1 with neither"):
            ckptstore.open(tmp_path).writer(group=group, ranks=OPTIONS, **how)

    assert as_ranks(2, work) == [None] * 2


def test_a_gradient_is_cut_with_its_rows() -> None:
    whole = np.arange(24, dtype="<f4").reshape(6, 4)
    flat = flatten({name: whole + number for number, name in enumerate("wmv")})
    holding = holding_of(steady(flat), 0, ())
    sparse = SparseGradient(np.array([1, 9, 17]), np.array([1, 2, 3], "<f4"), 24)
    for gradient in (NumpySource(whole), sparse):
        update = Update(("w", "m", "v"), ADAM, optim.Step(count=1, lr=0.1), gradient)
        (found,) = updates_of(holding, dict.fromkeys("wmv", (2, 4)), [update])
        if isinstance(found.gradient, SparseGradient):
            assert (list(found.gradient.indices), list(found.gradient.values), found.gradient.size) == ([1], [2.0], 8)
        else:
            assert found.gradient is not None
            part = found.gradient.view()
            assert part is not None
            assert part.tobytes() == whole[2:4].tobytes()
        assert updates_of(holding, {"w": (2, 4), "m": (2, 4), "v": (3, 4)}, [update]) == []
        assert updates_of(holding, {"w": None, "m": None}, [update]) == []
