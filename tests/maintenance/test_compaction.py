"""Compaction of real stores: every kind of chain, with a live writer, with damage, on every medium."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import DeltaOptions, DiffOptions, RestoreBound, Store
from ckptstore.backends.memory import MemoryBackend
from ckptstore.errors import CorruptLogError, ReadOnlyError, UsageError
from ckptstore.formats.segment_files.boxes import Box
from ckptstore.maintenance.compact import Samples, compaction
from ckptstore.maintenance.compact.size_samples import SampledSizes, measure
from tests.forms import in_turn
from tests.maintenance.stores import flip
from tests.restore.twofold import stored_again
from tests.store.states import same
from tests.write.trainer import Trainer
from tools.golden.shard_stores import ShardStore, cut
from tools.objects.server import Server

CHAIN = DeltaOptions(interval=1, bound=RestoreBound(times=None, depth=100))
PAPER = DeltaOptions(interval=5, form="paper", bound=RestoreBound(times=None, depth=100))
RULES = ("last:2", "every:10")


def state(step: int) -> dict[str, Any]:
    weights = np.random.default_rng(0).normal(size=20_000).astype(np.float32)
    weights[step % 7 :: 40] += np.float32(step)
    return {"w": weights, "b": np.arange(3) + step, "step": step}


def save(writer: Any, steps: Iterable[int]) -> None:
    for step in steps:
        writer.save(state(step), step)


def filled(
    store: Store,
    steps: Iterable[int],
    deltas: DeltaOptions | None = CHAIN,
    keep: Iterable[str] = (),
    **options: Any,
) -> Store:
    """The rules are set late: a writer that knew them would store the kept ones as fulls, and nothing would be left to
    do."""
    with store.writer(deltas=deltas, poll_seconds=0.02 if keep else None, **options) as writer:
        save(writer, steps)
        if keep:
            store.keep(*keep)
    return store


def check(store: Store, expected: Iterable[int]) -> None:
    """Exactly these are promised, and bit-exact, before gc and after it."""
    for _ in range(2):
        assert [info.step for info in store.checkpoints()] == list(expected)
        for info in store.checkpoints():
            same(state(info.step), store.load(info.ref, framework="numpy"))
        assert store.verify(deep=True).ok
        store.gc()


def stored(store: Store) -> int:
    return sum(segment.size for segment in store.view().catalog.segments.values())


def results(report: ckptstore.CompactReport) -> set[str]:
    return {move.result for move in report.moves}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return ckptstore.open(tmp_path / "store")


class TestChains:
    @pytest.mark.parametrize("deltas", [None, CHAIN, PAPER], ids=["full", "chain", "paper"])
    def test_kept_checkpoints_stay_and_bases_go(self, store: Store, deltas: DeltaOptions | None) -> None:
        filled(store, range(1, 35), deltas, keep=RULES)
        before = stored(store)
        report = store.compact(take_over=True)
        assert results(report) <= {"done"}
        assert report.bytes_before == before
        assert report.bytes_after == stored(store)
        assert report.kept == ("10@1", "20@1", "30@1", "33@1", "34@1")
        assert store.view().catalog.held == {}
        assert report.moves
        assert stored(store) < before
        check(store, [10, 20, 30, 33, 34])
        again = store.compact(take_over=True)
        assert again.moves == ()
        assert again.bytes_after == again.bytes_before

    def test_the_freed_bytes_are_those_that_gc_deletes(self, store: Store) -> None:
        filled(store, range(1, 25), keep=RULES)
        store.gc()
        report = store.compact(take_over=True)
        assert report.collectable_nbytes > 0
        assert store.gc().nbytes == report.collectable_nbytes

    @pytest.mark.parametrize(("how", "batch"), in_turn(["predicted", "sparse"], [1, 4]))
    def test_gradient_diffs(self, store: Store, batch: int, how: str) -> None:
        trainer, states = Trainer(sizes={"wide": (60, 300), "bias": (300,), "one": (1,)}), {}
        options = DiffOptions(full_every=6, batch=batch, seconds=None)
        with store.writer(diffs=options, poll_seconds=None) as writer:
            for step in range(1, 13):
                trainer.train(0.02 if how == "sparse" else None)
                states[step] = trainer.frozen()
                updates = trainer.updates(how == "sparse") if step > 1 else None
                writer.save_async(trainer.state(), step, updates=updates)
        store.prune("every:4", take_over=True)
        assert store.view().catalog.held
        before = stored(store)
        report = store.compact(take_over=True)
        assert results(report) == {"done"}
        assert stored(store) < before
        for info in store.checkpoints():
            assert info.step in (4, 8, 12)
            same(states[info.step], store.load(info.ref, framework="numpy"))
        store.gc()
        for info in store.checkpoints():
            same(states[info.step], store.load(info.ref, framework="numpy"))
        assert store.verify(deep=True).ok
        assert store.compact(take_over=True, max_depth=0).unmet == ()
        for info in store.checkpoints():
            same(states[info.step], store.load(info.ref, framework="numpy"))

    def test_depth_and_seconds(self, store: Store) -> None:
        filled(store, range(1, 15))
        report = store.compact(max_depth=3, take_over=True)
        assert results(report) == {"done"}
        assert max(len(store.plan(info.ref).encodings) - 1 for info in store.checkpoints()) <= 3
        report = store.compact(max_restore_seconds=1e-9, take_over=True)
        assert len(report.unmet) == 14
        check(store, range(1, 15))

    def test_fulls_become_deltas(self, store: Store) -> None:
        filled(store, range(1, 9), None)
        before = stored(store)
        report = store.compact(take_over=True)
        assert {move.kind for move in report.moves} == {"re-encode"}
        assert stored(store) < before / 2
        check(store, range(1, 9))

    def test_small_diffs_are_merged(self, store: Store) -> None:
        filled(store, range(1, 20))
        report = store.compact(take_over=True)
        assert "merge" in {move.kind for move in report.moves}
        assert len(store.view().catalog.segments) <= 3
        check(store, range(1, 20))

    def test_terms_and_forks(self, store: Store) -> None:
        filled(store, range(1, 13))
        with store.writer(parent=6, deltas=CHAIN, poll_seconds=None) as writer:
            save(writer, range(7, 13))
        store.tag("fork", "9@2", take_over=True)
        store.prune("every:4", take_over=True)
        kept = [info.ref for info in store.checkpoints()]
        report = store.compact(take_over=True)
        assert results(report) == {"done"}
        assert [info.ref for info in store.checkpoints()] == kept
        assert store.tags()["fork"].ref == "9@2"
        for ref in kept:
            same(state(int(ref.partition("@")[0])), store.load(ref, framework="numpy"))


class TestOptions:
    def test_a_dry_run_changes_nothing(self, store: Store) -> None:
        filled(store, range(1, 25), keep=RULES)
        before = store.view().catalog
        planned = store.compact(dry_run=True)
        after = store.view().catalog
        assert after.next_seq == before.next_seq
        assert set(after.segments) == set(before.segments)
        assert results(planned) == {"planned"}
        done = store.compact(take_over=True)
        assert [move.stored for move in done.moves] == [move.stored for move in planned.moves]
        assert done.bytes_after == pytest.approx(planned.bytes_after, rel=0.15)
        assert done.collectable_nbytes == planned.collectable_nbytes

    def test_bandwidth(self, store: Store) -> None:
        filled(store, range(1, 12), keep=["every:10"])
        logical = store.checkpoint(10).nbytes
        began = time.monotonic()
        store.compact(take_over=True, bandwidth=logical)
        assert time.monotonic() - began > 1.0  # written once, read back once

    def test_progress(self, store: Store) -> None:
        filled(store, range(1, 25), keep=RULES)
        told: list[tuple[int, int]] = []
        store.compact(take_over=True, progress=lambda done, total: told.append((done, total)))
        assert told[-1][0] == told[-1][1] > 0

    @pytest.mark.parametrize(
        "options", [{"max_depth": -1}, {"target_bytes": 1.5}, {"max_restore_seconds": "x"}, {"bandwidth": 0}]
    )
    def test_invalid_options(self, store: Store, options: dict[str, Any]) -> None:
        filled(store, [1])
        with pytest.raises(UsageError):
            store.compact(**options)

    def test_a_damaged_log(self, store: Store, tmp_path: Path) -> None:
        filled(store, range(1, 5))
        (tmp_path / "store/log" / f"{2:020d}").write_bytes(b"x")
        with pytest.raises(CorruptLogError):
            store.compact(take_over=True)

    def test_nobody_answers(self, store: Store) -> None:
        filled(store, range(1, 25), keep=RULES)
        with store.writer(poll_seconds=None):
            report = store.compact(timeout=0.1)
        assert [move.result for move in report.moves] == ["waiting", *["left"] * (len(report.moves) - 1)]
        assert not report.complete


class TestDamage:
    def test_only_the_move_that_needs_it_is_refused(self, store: Store, tmp_path: Path) -> None:
        """Only 10 needs steps 1 to 9; the full that 20 builds on is damaged, and what 10 needs is not."""
        filled(store, range(1, 12))
        filled(store, range(1, 12), keep=["every:10"], parent=None)
        catalog = store.view().catalog
        (segment,) = catalog.encodings[1, 3][0].segments
        path = tmp_path / "store" / catalog.segments[segment].key
        data = bytearray(path.read_bytes())
        data[4096:4200] = bytes(104)
        path.write_bytes(data)
        report = store.compact(take_over=True)
        told = {next(iter(move.stored)): move for move in report.moves}
        assert told["10@1"].result == "refused"
        assert told["10@1"].damaged
        assert segment in told["10@1"].reason
        assert told["10@2"].result == "done"
        same(state(10), store.load("10@2", framework="numpy"))
        assert catalog.segments.keys() - store.view().catalog.segments.keys()
        assert segment in store.view().catalog.segments, "what is damaged may be all that there is"

    def test_a_guess_that_was_too_low_costs_nothing(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        """A move that turns out larger than what it would replace is not committed."""
        with store.writer(poll_seconds=None) as writer:
            for step in range(1, 5):
                noise = np.frombuffer(np.random.default_rng(step).bytes(100_000), np.uint8)
                writer.save({"w": noise}, step)
        before = store.view().catalog
        monkeypatch.setattr(compaction, "measure", lambda *_: SampledSizes(Samples(0.5, ((1, 0.1),))))
        report = store.compact(take_over=True)
        assert results(report) == {"refused"}
        assert all("it would take" in move.reason for move in report.moves)
        assert not report.complete
        after = store.view().catalog
        assert dict(after.encodings.items()) == dict(before.encodings.items())
        assert len(store.backend.list("seg/")) == len(before.segments)

    @pytest.mark.parametrize("kind", ["materialize", "merge"])
    def test_written_segments_are_read_back(self, store: Store, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
        """A segment that is written wrongly is never committed, and the old ones stay."""
        if kind == "merge":
            filled(store, range(1, 12))
        else:
            filled(store, range(1, 12), keep=["every:10"])
        kept = [info.step for info in store.checkpoints()]
        from ckptstore.backends.local_disk.directio import FileSink

        seal = FileSink.seal

        def bad(sink: FileSink, size: int) -> None:
            sink.write(4096, memoryview(bytes(512)))
            seal(sink, size)

        monkeypatch.setattr(FileSink, "seal", bad)
        report = store.compact(take_over=True)
        assert results(report) == {"refused"}
        monkeypatch.undo()
        check(store, kept)
        files = {segment.rpartition("/")[2] for segment in store.backend.list("seg/")}
        assert files == {f"{one}.safetensors" for one in store.view().catalog.segments}

    @pytest.mark.filterwarnings("ignore::ckptstore.FallbackWarning")
    def test_a_checkpoints_other_encoding_is_read_before_its_bases_go(self, store: Store, tmp_path: Path) -> None:
        """It is stored as a full, too, which may never have been read since it was written."""
        filled(store, range(1, 4))
        stored_again(store, "3@1")
        for ref in ("1@1", "2@1"):
            store.retire(ref, take_over=True)
        catalog = store.view().catalog
        (full,) = (edge for edge in catalog.encodings[1, 3] if edge.base is None)
        flip(tmp_path / "store" / catalog.segments[full.segments[0]].key)
        told = {move.kind: move for move in store.compact(take_over=True).moves}
        assert (told["drop"].result, told["drop"].damaged) == ("refused", True)
        assert full.segments[0] in told["drop"].reason
        same(state(3), store.load(3, framework="numpy"))


def test_a_checkpoint_that_is_retired_during_measurement_is_skipped(store: Store) -> None:
    filled(store, range(1, 4), deltas=None)
    catalog = store.view().catalog
    store.retire("2@1", take_over=True)
    found = measure(store.journal, catalog).samples
    assert found is not None
    assert [gap for gap, _ in found.deltas] == [2]


class TestBesideOthers:
    def test_a_live_writer_and_readers(self, store: Store) -> None:
        stop = threading.Event()
        failures: list[BaseException] = []

        def read() -> None:
            own = ckptstore.open(store.url)
            while not stop.is_set():
                for info in own.checkpoints():
                    try:
                        loaded = own.load(info.ref, framework="numpy")
                    except ckptstore.NotFoundError:
                        continue  # retired meanwhile
                    except Exception as error:  # noqa: BLE001  # raised by the test, below
                        failures.append(error)
                        return
                    if not np.array_equal(loaded["w"], state(info.step)["w"]):
                        failures.append(AssertionError(info.ref))
                        return

        moves: list[Any] = []

        def compacts() -> None:
            own = ckptstore.open(store.url)
            try:
                while not stop.is_set():
                    moves.extend(own.compact(timeout=120.0).moves)
                    own.gc()
            except Exception as error:  # noqa: BLE001  # raised by the test, below
                failures.append(error)

        with store.writer(deltas=CHAIN, poll_seconds=0.02, keep=["last:4", "every:8"]) as writer:
            save(writer, range(1, 13))
            threads = [threading.Thread(target=work) for work in (read, read, compacts)]
            for thread in threads:
                thread.start()
            try:
                step = 12
                while not failures and step < 2000:
                    if step >= 40 and any(move.result == "done" for move in moves):
                        break
                    step += 1
                    time.sleep(0.02 if step > 40 else 0.0)  # the compaction has its turn
                    save(writer, [step])
            finally:
                stop.set()
                while any(thread.is_alive() for thread in threads):
                    for thread in threads:
                        thread.join(0.1)
        assert failures == []
        assert {move.result for move in moves} <= {"done", "refused"}
        assert any(move.result == "done" for move in moves)
        expected = sorted({*range(8, step + 1, 8), *range(step - 3, step + 1)})
        check(store, expected)

    def test_a_reader_that_planned_before_continues(self, store: Store) -> None:
        """A reader that has pinned the old encoding reads it to its end, though gc ran meanwhile."""
        filled(store, range(1, 12), keep=["every:10"])
        chunks = store.chunks(10, "w")
        first = next(chunks)
        store.compact(take_over=True)
        assert store.gc().pinned
        rest = [first, *chunks]
        assert b"".join(bytes(data) for _, data in rest) == state(10)["w"].tobytes()
        check(store, [10, 11])


class TestMedia:
    def test_memory(self) -> None:
        store = Store(MemoryBackend("compact"))
        try:
            filled(store, range(1, 25), keep=RULES)
            assert results(store.compact(take_over=True)) == {"done"}
            check(store, [10, 20, 23, 24])
        finally:
            MemoryBackend.forget("compact")

    @pytest.mark.slow
    def test_s3(self, s3: Server) -> None:
        store = ckptstore.open(s3.url(), storage_options=s3.options)
        filled(store, range(1, 15), keep=["every:6"])
        store.gc()
        report = store.compact(take_over=True)
        assert results(report) == {"done"}
        assert store.gc().nbytes == report.collectable_nbytes
        for step in (6, 12, 14):
            same(state(step), store.load(step, framework="numpy"))
        assert store.compact(take_over=True).moves == ()

    def test_read_only(self, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        filled(store, range(1, 25), keep=RULES)
        monkeypatch.setattr(type(store.backend), "read_only", property(lambda _self: True))
        with pytest.raises(ReadOnlyError):
            store.compact(take_over=True)
        with pytest.warns(ckptstore.UnpinnedWarning):
            assert results(store.compact(dry_run=True)) == {"planned"}


@pytest.mark.parametrize("only", [None, "4..4"])
def test_a_checkpoint_becomes_a_full_to_map(store: Store, only: str | None) -> None:
    """Whatever it was, and whatever builds on it. A second call with it changes nothing more."""
    filled(store, range(1, 13))
    with pytest.raises(UsageError, match="compact STORE --plain 4@1"):
        store.file_of(4)
    planned = store.compact(plain=[4], only=only, dry_run=True)
    assert planned.moves[0].stored == {"4@1": ""}
    done = store.compact(plain=[4], only=only, take_over=True)
    assert results(done) == {"done"}
    (file,) = store.file_of(4)
    assert file.tensors.keys() == {"w", "b"}
    mapped = store.load(4, mmap=True, framework="numpy")
    same(state(4), mapped)
    assert store.compact(plain=["4@1"], only=only, take_over=True).moves == ()
    check(store, range(1, 13))
    assert store.file_of(4) == [file]


def test_a_full_to_map_stays_one_until_it_may_be_compressed(store: Store, tmp_path: Path) -> None:
    """Later compactions leave it, also in a copy, until they are told that they may not."""
    filled(store, range(1, 6), deltas=None)
    assert results(store.compact(take_over=True)) == {"done"}
    assert results(store.compact(plain=[3], take_over=True)) == {"done"}
    files = store.file_of(3)
    assert store.compact(take_over=True).moves == ()
    assert store.file_of(3) == files
    store.copy(tmp_path / "copied")
    assert ckptstore.open(tmp_path / "copied").compact(dry_run=True).moves == ()
    (move,) = store.compact(compress_plain=True, take_over=True).moves
    assert move.stored == {"3@1": "1@1"}
    with pytest.raises(UsageError, match="compact STORE --plain 3@1"):
        store.file_of(3)
    check(store, range(1, 6))


def test_a_checkpoint_to_map_has_to_be_in_the_range(store: Store) -> None:
    filled(store, range(1, 8))
    with pytest.raises(UsageError, match=r"4@1, to become an uncompressed full, is not in 1\.\.3"):
        store.compact(plain=[4], only="1..3", take_over=True)
    assert store.view().catalog.term == 1  # no term was opened


def test_a_checkpoint_to_map_has_to_exist(store: Store) -> None:
    filled(store, range(1, 4))
    with pytest.raises(ckptstore.CheckpointNotFoundError, match="tag"):
        store.compact(plain=["tag:best"], take_over=True)
    assert store.view().catalog.term == 1  # no term was opened


def test_a_full_of_ranks_becomes_files_of_its_shards(tmp_path: Path) -> None:
    """A shard stays cut as it is: the hash of the state depends on it."""
    made = ShardStore(str(tmp_path / "ranks"))
    store = made.store
    halves = cut("w", np.arange(24.0), [Box((0,), (12,)), Box((12,), (12,))])
    made.commit(1, [[half] for half in halves], packed=True)
    assert results(store.compact(plain=[1], take_over=True)) == {"done"}
    files = store.file_of(1)
    assert sorted(str(file.tensors["w"]) for file in files) == ["((0, 12),)", "((12, 24),)"]
    assert store.verify(deep=True).ok
