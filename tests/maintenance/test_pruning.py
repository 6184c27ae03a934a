"""Retention: a store's rules, writers that apply them, pruning with a live writer and without one."""

from __future__ import annotations

import operator
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import DeltaOptions, DiffOptions, RestoreBound, Store
from ckptstore.formats.history.records import CommitRecord
from ckptstore.log import fold_writer, requests
from ckptstore.log.term import open_term
from tests.forms import short_or
from tests.store.states import same
from tests.waiting import until
from tests.write.trainer import Trainer
from tools.bench.storage.catalog import make
from tools.conformance.comparing import differences
from tools.conformance.ours import answer
from tools.conformance.page import store as page

CHAIN = DeltaOptions(interval=1, bound=RestoreBound(times=None, depth=6))
PAPER = DeltaOptions(interval=3, form="paper", bound=RestoreBound(times=None, depth=3))
RULES = ("last:2", "every:5", "best:loss:2")


def state(step: int) -> dict[str, Any]:
    weights = np.zeros(5000, np.float32)
    weights[: step % 100] = step
    return {"w": weights, "step": step}


def loss(step: int) -> float:
    """Lowest at step 7."""
    return abs(step - 7) + 0.25


def save(writer: Any, steps: Iterable[int]) -> None:
    for step in steps:
        writer.save(state(step), step, metadata={"loss": loss(step)})


def promised(
    steps: Iterable[int], last: int = 2, every: int = 5, best: int = 2, tagged: Iterable[int] = ()
) -> list[int]:
    """The checkpoints that `RULES` keep of one term, computed independently."""
    alive = sorted(steps)
    rated = sorted(alive, key=lambda step: (loss(step), -step))
    return sorted({*alive[-last:], *rated[:best], *tagged, *(step for step in alive if step % every == 0)})


def check(store: Store, expected: Iterable[int]) -> None:
    """Exactly these are promised, gc deletes nothing needed, each restores bit for bit, every byte is right."""
    store.gc()
    assert [info.step for info in store.checkpoints()] == list(expected)
    for info in store.checkpoints():
        same(state(info.step), store.load(info.ref, framework="numpy"))
    assert store.verify(deep=True).ok


@pytest.fixture
def quiet() -> Iterator[None]:
    """No writer had to skip retirement: it would warn, in a thread whose warnings raise nothing."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert [str(one.message) for one in caught] == []


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return ckptstore.open(tmp_path / "store")


class TestWriters:
    @pytest.mark.parametrize("deltas", [None, CHAIN, PAPER], ids=["full", "chain", "paper"])
    def test_only_the_promised_checkpoints_are_left(self, store: Store, deltas: DeltaOptions | None) -> None:
        with store.writer(keep=RULES, deltas=deltas, poll_seconds=None) as writer:
            for step in range(1, 24):
                save(writer, [step])
                assert [info.step for info in store.checkpoints()] == promised(range(1, step + 1))
                if deltas is not None and step % 6 == 0:
                    store.gc()
        kinds = {info.kind for info in store.checkpoints()}
        assert ("delta" in kinds) is (deltas is not None)
        check(store, promised(range(1, 24)))

    @pytest.mark.usefixtures("quiet")
    @pytest.mark.parametrize("deltas", [CHAIN, PAPER], ids=["chain", "paper"])
    def test_bases_of_the_next_deltas_stay_stored(self, tmp_path: Path, deltas: DeltaOptions) -> None:
        """Deltas come as often as without rules; and their bases go once they no longer need them."""
        kinds = []
        for keep in ([], ["last:1"]):
            store = ckptstore.open(tmp_path / f"store-{len(keep)}")
            with store.writer(keep=keep, deltas=deltas, poll_seconds=None) as writer:
                kinds.append([writer.save(state(step), step).kind for step in range(1, 31)])
                if keep:
                    assert len(store.view().catalog.held) < 12
                    assert len(store.prune(dry_run=True).dropped) <= 9  # the chains of the bases in memory
        assert kinds[0] == kinds[1]
        assert kinds[0].count("full") < 8
        done = store.prune(take_over=True)
        assert done.retired == ()
        assert (len(done.dropped) > 0) == (deltas is PAPER)
        assert len(done.held) == len(store.plan().segments) - 1
        check(store, [30])

    def test_retirements_of_others_are_not_counted(self, store: Store) -> None:
        with store.writer(keep=["last:3"], poll_seconds=0.02) as writer:
            save(writer, range(1, 6))
            store.retire(4)
            save(writer, [6])
            assert [info.step for info in store.checkpoints()] == [3, 5, 6]

    def test_gradient_diffs_in_batches(self, tmp_path: Path) -> None:
        store = ckptstore.open(tmp_path / "store")
        trainer, states = Trainer(seed=3), {}
        options = DiffOptions(full_every=8, batch=3, seconds=None)
        with store.writer(keep=["last:2", "every:7"], diffs=options, poll_seconds=None) as writer:
            for step in range(1, 24):
                trainer.train()
                states[step] = trainer.frozen()
                writer.save_async(trainer.state(), step, updates=trainer.updates() if step > 1 else None)
        store.gc()
        assert [info.step for info in store.checkpoints()] == [7, 14, 21, 22, 23]
        for info in store.checkpoints():
            same(states[info.step], store.load(info.ref, framework="numpy"))
        assert store.verify(deep=True).ok

    def test_a_last_batch_that_is_longer_than_what_is_kept_of_it(self, tmp_path: Path) -> None:
        """The surplus goes when the writer is closed: no further save comes that would retire it."""
        store, trainer = ckptstore.open(tmp_path / "store"), Trainer(seed=3)
        options = DiffOptions(full_every=50, batch=10, seconds=None)
        with store.writer(keep=["last:2"], diffs=options, poll_seconds=None) as writer:
            for step in range(1, 10):
                trainer.train()
                writer.save_async(trainer.state(), step, updates=trainer.updates() if step > 1 else None)
        assert [info.step for info in store.checkpoints()] == [8, 9]
        assert store.verify(deep=True).ok

    @pytest.mark.usefixtures("quiet")
    def test_fulls_that_overtake_one_another(self, store: Store) -> None:
        with store.writer(keep=RULES, max_in_flight=4, poll_seconds=None) as writer:
            for step in range(1, 41):
                writer.save_async(state(step), step, metadata={"loss": loss(step)})
        check(store, promised(range(1, 41)))

    def test_a_save_and_what_it_retires_are_one_record(self, store: Store) -> None:
        with store.writer(keep=["last:3"], poll_seconds=None) as writer:
            begin = store.view().end
            save(writer, range(1, 21))
            assert store.view().end == begin + 20

    def test_tags_protect_until_they_go(self, store: Store) -> None:
        with store.writer(keep=["last:2"], poll_seconds=None) as writer:
            save(writer, range(1, 4))
            writer.tag("mine", 2)
            writer.save(state(4), 4, tags="also")
            save(writer, range(5, 8))
            assert [info.step for info in store.checkpoints()] == [2, 4, 6, 7]
            writer.tag("mine", 6)
            writer.untag("also")
            save(writer, [8, 9])
            assert [info.step for info in store.checkpoints()] == [6, 8, 9]

    def test_tagged_is_a_rule_that_may_be_given(self, store: Store) -> None:
        with store.writer() as writer:
            save(writer, range(1, 7))
            writer.tag("good", 3)
        assert store.prune("last:1", "tagged", dry_run=True).kept["tagged"] == ("3@1",)
        store.prune("last:1", "tagged", take_over=True)
        check(store, [3, 6])

    def test_rules_stay_and_every_later_writer_keeps_to_them(self, store: Store, tmp_path: Path) -> None:
        with store.writer(keep=RULES, poll_seconds=None) as writer:
            save(writer, range(1, 12))
            for _ in range(3):  # folded, and the slot with the rules deleted
                fold_writer.fold(store.journal, store.view())
                save(writer, [store.checkpoints()[-1].step + 1])
            fold_writer.trim(store.journal, store.view())
        again = ckptstore.open(tmp_path / "store")
        assert again.rules() == RULES
        with again.writer(poll_seconds=None) as writer:
            save(writer, range(15, 20))
        assert again.rules() == RULES
        check(again, promised(range(1, 20)))
        with again.writer(keep=[], poll_seconds=None) as writer:  # none: everything stays
            save(writer, range(20, 24))
        assert again.rules() == ()
        check(again, [*promised(range(1, 20)), 20, 21, 22, 23])

    @pytest.mark.usefixtures("haste")
    def test_a_save_that_failed_counts_for_nothing(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        with store.writer(keep=["last:2", "best:loss:1"], poll_seconds=None) as writer:
            save(writer, range(1, 5))
            create = type(store.backend).create

            def refusing(self: Any, key: str, data: bytes) -> None:
                if key.startswith("log/"):
                    error = ckptstore.StorageError("no space")
                    error.unsent = True
                    raise error
                create(self, key, data)

            with monkeypatch.context() as patch:
                patch.setattr(type(store.backend), "create", refusing)
                with pytest.raises(ckptstore.StorageError, match="no space"):
                    writer.save(state(7), 7, metadata={"loss": 0.0})
            assert [info.step for info in store.checkpoints()] == [3, 4]
            save(writer, [8])
            assert [info.step for info in store.checkpoints()] == [4, 8]
        check(store, [4, 8])

    def test_no_save_fails_because_something_cannot_be_retired(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with store.writer(keep=["last:1"], deltas=CHAIN, poll_seconds=None) as writer:
            save(writer, [1, 2])
            every = store.view().catalog.segments
            with monkeypatch.context() as patch:
                patch.setattr("ckptstore.write.retainer.droppable", lambda *_: tuple(every))
                with pytest.warns(UserWarning, match="upkeep of the log failed"):
                    save(writer, [3])
            save(writer, [4])
        check(store, [4])

    def test_a_rollback_keeps_the_branch_if_the_rules_say_so(self, store: Store) -> None:
        with store.writer(keep=["last:2", "branches"], poll_seconds=None) as writer:
            save(writer, range(1, 6))
        with store.writer(parent=4, poll_seconds=None) as writer:
            save(writer, range(5, 8))
        assert [info.ref for info in store.checkpoints()] == ["5@1", "6@2", "7@2"]
        store.prune("last:2", take_over=True)
        assert [info.ref for info in store.checkpoints()] == ["6@2", "7@2"]

    def test_rules_of_a_later_version_retire_nothing(self, store: Store) -> None:
        with store.writer(poll_seconds=None) as writer:
            save(writer, [1])
        term = open_term(store.journal, lambda catalog: catalog.latest().id)  # type: ignore[union-attr]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ckptstore.formats.history.commit_checks.checked", tuple)
            term.commit(CommitRecord(term.number, keep=("last:1", "cosine:3")))
        with (
            pytest.warns(UserWarning, match="nothing is retired: of the rules last:1, cosine:3 this version does not"),
            store.writer(poll_seconds=None) as writer,
        ):
            save(writer, [2, 3])
        assert [info.step for info in store.checkpoints()] == [1, 2, 3]
        with pytest.raises(ckptstore.UsageError, match="does not know all of its rules last:1, cosine:3"):
            store.prune(dry_run=True)
        assert store.prune("last:1", dry_run=True).retired == ("1@1", "2@3")

    def test_rules_that_come_late_to_a_long_history(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """No save waits until all of it is examined, or retired: it goes bit by bit."""
        monkeypatch.setattr("ckptstore.write.retainer._MANY", 1000)
        make(tmp_path / "long", "fulls", 3000)
        store = ckptstore.open(tmp_path / "long")
        begin, left = store.view().end, list[int]()
        with store.writer(keep=["last:3", "every:1000"], poll_seconds=None) as writer:
            for step in range(3001, 3013):
                writer.save(state(step), step)
                left.append(len(store.checkpoints()))
        wanted = [1000, 2000, 3000, 3010, 3011, 3012]
        assert left[0] > 2700
        assert left[1] > left[2] > left[3] > 1000
        assert store.view().end - begin <= 3 + 2 * 12  # OPEN, the rules, the end; each save, and one record after it
        assert [info.step for info in store.checkpoints()] == wanted

    def test_a_long_run_forgets_what_it_dropped_when_that_is_deleted(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("ckptstore.write.commits._MANY_DROPPED", 8)
        with store.writer(keep=["last:2"], deltas=CHAIN, poll_seconds=None) as writer:
            for step in range(1, 61):
                save(writer, [step])
                if step % 10 == 0:
                    store.gc()
                    writer.poll()
            left = store.view().catalog
            assert len(left.dropped) < 30
            assert left.dropped.isdisjoint(left.segments)
            on_medium = {key.rpartition("/")[2].partition(".")[0] for key in store.backend.list("seg/")}
            assert on_medium - left.segments.keys() <= left.dropped  # gc learns of everything that is left to delete
        check(store, [59, 60])

    def test_invalid_rules_open_no_term(self, store: Store) -> None:
        for keep in (["last:x"], "last:3", 5):
            with pytest.raises(ckptstore.UsageError):
                store.writer(keep=keep)  # type: ignore[arg-type]
        assert store.latest_step() is None

    def test_another_reader_made_from_the_specification_is_not_bothered(self, store: Store, tmp_path: Path) -> None:
        """It knows no rules: neither in a record nor in a fold."""
        for steps in (range(1, 12), range(12, 15)):
            with store.writer(keep=RULES, deltas=CHAIN, poll_seconds=None) as writer:
                save(writer, steps)
            found = page.Store(tmp_path / "store").answer()
            assert differences(answer(tmp_path / "store"), found) == []
            assert len(found["checkpoints"]) == len(store.checkpoints())
            fold_writer.fold(store.journal, store.view())


class TestBesideALiveWriter:
    @pytest.fixture
    def writer(self, store: Store) -> Any:
        with store.writer(poll_seconds=0.02, deltas=CHAIN) as writer:
            save(writer, range(1, 13))
            yield writer

    def test_prune_follows_no_writer_that_makes_more(self, store: Store, writer: Any) -> None:
        store.keep("last:12")
        done = threading.Event()

        def train() -> None:
            step = 12
            while not done.wait(0.002):
                step += 1
                save(writer, [step])

        with ThreadPoolExecutor(1) as pool:
            training = pool.submit(train)
            try:
                began = time.monotonic()
                store.prune("last:3", timeout=120)
                assert time.monotonic() - began < 120
            finally:
                done.set()
            training.result()
        assert all(info.step > 9 for info in store.checkpoints())

    def test_it_takes_rules_and_keeps_to_them_at_once(self, store: Store, writer: Any) -> None:
        assert store.keep(*RULES) == RULES
        writer.poll()
        assert [info.step for info in store.checkpoints()] == promised(range(1, 13))
        slots = store.view().end
        assert store.keep(*RULES) == RULES  # asks nobody
        assert store.view().end == slots
        save(writer, range(13, 21))
        with pytest.raises(ckptstore.UsageError, match="everything=True"):
            store.keep()
        with pytest.raises(ckptstore.UsageError, match="everything=True"):
            store.keep("last:1", everything=True)
        assert store.keep(everything=True) == ()
        save(writer, range(21, 24))
        check(store, [*promised(range(1, 21)), 21, 22, 23])

    def test_prune(self, store: Store, writer: Any) -> None:
        planned = store.prune(*RULES, dry_run=True)
        assert len(store.checkpoints()) == 12
        done = store.prune(*RULES)
        assert done == planned
        assert done.retired == tuple(f"{step}@1" for step in range(1, 13) if step not in promised(range(1, 13)))
        assert done.kept == {
            "newest": ("12@1",),
            "tagged": (),
            "last:2": ("11@1", "12@1"),
            "every:5": ("5@1", "10@1"),
            "best:loss:2": ("7@1", "8@1"),
        }
        assert done.checkpoints == 6
        freed = store.gc()
        assert (freed.segments, freed.nbytes) == (tuple(sorted(done.dropped)), done.dropped_nbytes)
        assert done.held
        assert set(done.held) <= set(done.retired)
        save(writer, [13])  # nobody was fenced
        check(store, [5, 7, 8, 10, 11, 12, 13])
        assert store.rules() == ()

    def test_held_bases_go_when_nothing_builds_on_them(self, store: Store, writer: Any) -> None:
        store.prune("last:1")
        left = sum(path.size for path in store.view().catalog.segments.values())
        save(writer, range(13, 15))  # a chain has six deltas: a full, and one of it
        done = store.prune("last:1")
        assert (done.held, done.held_nbytes) != ((), 0)
        save(writer, range(15, 23))
        done = store.prune("last:1")
        store.gc()
        assert sum(path.size for path in store.view().catalog.segments.values()) < left + done.held_nbytes
        check(store, [22])

    def test_a_refusal_is_planned_again(self, store: Store, writer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        post, times = requests.post, []

        def late(*arguments: Any, **changes: Any) -> Any:
            if not times:
                writer.tag("mine", 3)  # between our READ and its answer
            times.append(1)
            return post(*arguments, **changes)

        monkeypatch.setattr(requests, "post", late)
        done = store.prune("last:2")
        assert len(times) == 2
        assert "3@1" not in done.retired
        assert done.kept["tagged"] == ("3@1",)
        check(store, [3, 11, 12])


class TestMistakes:
    def test_no_rules(self, store: Store) -> None:
        store.create()
        with pytest.raises(ckptstore.UsageError, match="no run has written here yet"):
            store.keep("last:3")
        with store.writer(poll_seconds=None) as writer:
            save(writer, [1, 2])
        with pytest.raises(ckptstore.UsageError, match="has no rules of retention"):
            store.prune(take_over=True)
        with pytest.raises(ckptstore.UsageError, match="'newest:3' is not a retention rule"):
            store.prune("newest:3", dry_run=True)
        with pytest.raises(ckptstore.UsageError, match="'newest:3' is not a retention rule"):
            store.keep("newest:3", take_over=True)
        with pytest.raises(ckptstore.RequestTimeoutError):
            store.prune("last:1", timeout=0.01)
        assert len(store.checkpoints()) == 2

    def test_a_damaged_log_is_not_pruned(self, store: Store, tmp_path: Path) -> None:
        with store.writer(poll_seconds=None) as writer:
            save(writer, range(1, 6))
        slot = sorted((tmp_path / "store/log").iterdir())[2]
        slot.write_bytes(slot.read_bytes()[:-5] + b"xxxxx")
        with pytest.raises(ckptstore.CorruptLogError, match="damaged"):
            store.prune("last:1", take_over=True)
        with (
            pytest.warns(UserWarning, match="nothing is retired while a slot of the log is damaged"),
            store.writer(keep=["last:1"], poll_seconds=None) as writer,
        ):
            save(writer, [6, 7])
        assert [info.step for info in store.checkpoints()] == [1, 3, 4, 5, 6, 7]


@pytest.mark.slow
def test_readers_and_collectors_beside_a_long_run(store: Store, tmp_path: Path) -> None:
    """A long run; two readers restore the newest or oldest checkpoint, gc runs, tags come and go."""
    store.create()
    ended = threading.Event()
    failures: list[BaseException] = []
    restored: list[int] = []
    most, steps = 0, short_or(90, 300)
    rounds = [0, 0, 0]

    def restore(which: int) -> None:
        own = ckptstore.open(tmp_path / "store")
        while not ended.is_set():
            rounds[which] += 1
            try:
                if found := own.checkpoints():
                    step = found[which].step
                    same(state(step), own.load(found[which].ref, framework="numpy"))
                    restored.append(step)
            except ckptstore.CheckpointNotFoundError:
                pass  # retired between the two calls
            except BaseException as error:  # noqa: BLE001  # reported below
                failures.append(error)
                return

    def collect() -> None:
        nonlocal most
        own = ckptstore.open(tmp_path / "store")
        while not ended.is_set():
            try:
                own.gc()
            except BaseException as error:  # noqa: BLE001  # reported below
                failures.append(error)
                return
            most = max(most, len(own.backend.list("seg/")))
            rounds[1] += 1
            ended.wait(0.02)

    threads = [threading.Thread(target=restore, args=(which,)) for which in (0, -1)]
    threads.append(threading.Thread(target=collect))
    rules = ["last:3", "every:60", "best:loss:2"]
    with store.writer(keep=rules, deltas=CHAIN, poll_seconds=0.05) as writer:
        for thread in threads:
            thread.start()
        for step in range(1, steps + 1):
            writer.save_async(state(step), step, metadata={"loss": loss(step)})
            if step % 7 == 0:  # on a busy machine one of them might have no turn for many steps
                before = list(rounds)
                until(lambda before=before: failures or all(map(operator.gt, rounds, (one + 1 for one in before))))
            if step in (steps // 3, steps // 3 * 2):
                writer.wait()
                writer.tag("mark", step)
    ended.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(set(restored)) > 10
    check(store, promised(range(1, steps + 1), last=3, every=60, tagged=[steps // 3 * 2]))
    assert most < 60  # bounded, whatever so many steps have written
