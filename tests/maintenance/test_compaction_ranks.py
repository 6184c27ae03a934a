"""Compaction, merge, copy and repair of stores that many ranks wrote: shards and replicas, threads as ranks."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import DeltaOptions, DiffOptions, RankOptions, RestoreBound, Store
from ckptstore.formats.segment_files.segment import SegmentDoc
from ckptstore.formats.sources import BoxSource, NumpySource
from ckptstore.formats.states.state import FlatState, flatten
from ckptstore.write.ranks.messages.key_value_store import Group
from tests.forms import in_turn, long_only, short_or
from tests.maintenance.test_prune_kills import killed_at
from tests.store.states import same
from tests.write.rank_threads import as_ranks
from tests.write.test_rank_diffs import sharded, trainer, truths
from tools.objects.server import Server

RANKS = RankOptions(timeout=120)
CHAIN = DeltaOptions(interval=1, bound=RestoreBound(times=None, depth=100))
RULES = ("last:2", "every:4")
STEPS = 14
KEPT = [4, 8, 12, 13, 14]
SIZE = 3


def run(store: Store, steps: Iterable[int], *, shards: bool, keep: Any = None, **options: Any) -> None:
    """A job of three ranks that train alike; with shards each has its own rows. It continues the last one."""
    todo = list(steps)

    def work(group: Group) -> None:
        model = trainer()
        for _ in range(1, todo[0]):
            model.train()
        place = ckptstore.open(store.url)
        with place.writer(group=group, ranks=RANKS, max_in_flight=2, poll_seconds=0.1, **options) as writer:
            for step in todo:
                model.train()
                flat, updates = sharded(group, model) if shards else (flatten(model.state()), model.updates())
                told: Any = {"updates": updates} if "diffs" in options else {}
                writer.save_async(flat, step, **told)
            # Late: otherwise the kept ones are stored as fulls, and there is nothing to do.
            if keep and group.rank == 0:
                writer.wait()
                ckptstore.open(store.url).keep(*keep)

    assert as_ranks(SIZE, work) == [None] * SIZE


LIVES = {
    "deltas of shards": {"shards": True, "deltas": CHAIN},
    "deltas of replicas": {"shards": False, "deltas": CHAIN},
    "steps of shards": {"shards": True, "diffs": DiffOptions(full_every=20, batch=1)},
    "batches of shards": {"shards": True, "diffs": DiffOptions(full_every=20, batch=3, seconds=None)},
}
"""The saves of a job."""


def truth(steps: int = STEPS + 2) -> dict[int, Any]:
    return truths(steps)


def check(store: Store, expected: Iterable[int]) -> None:
    """Exactly these are promised, and bit-exact, before gc and after it."""
    wanted = truth(max(expected := list(expected)))
    for _ in range(2):
        assert [info.step for info in store.checkpoints()] == expected
        for info in store.checkpoints():
            same(store.load(info.ref, framework="numpy"), wanted[info.step])
        assert store.verify(deep=True).ok
        store.gc()


def stored(store: Store) -> int:
    return sum(segment.size for segment in store.view().catalog.segments.values())


def documents(store: Store, step: int) -> list[SegmentDoc]:
    """Of the segments of a checkpoint's own encoding."""
    return [doc for _, doc in store.describe(step) if step in doc.steps]


def shards_of(store: Store, step: int, name: str) -> list[tuple[int, ...] | None]:
    return [doc.tensors[step][name].offset for doc in documents(store, step) if name in doc.tensors.get(step, {})]


# In CI single steps of shards are merged below, and batches of them, here.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=long_only if name == "steps of shards" else ()) for name in LIVES]
)
def test_kept_checkpoints_stay_cut_as_they_were_and_bases_go(tmp_path: Path, name: str) -> None:
    life = LIVES[name]
    store = ckptstore.open(tmp_path / "store", create=True)
    run(store, range(1, STEPS + 1), keep=RULES, **life)
    assert [info.step for info in store.checkpoints()] == KEPT
    assert store.view().catalog.held
    cut = {step: shards_of(store, step, "model.wide") for step in KEPT}
    assert {len(one) for one in cut.values()} == {SIZE if life["shards"] else 1}
    before = stored(store)
    report = store.compact(take_over=True)
    assert {move.result for move in report.moves} == {"done"}, report
    assert report.unmet == ()
    # Of batches, too: step 8, stored again because of 5 to 7, gives up its part of the segment of 9 and 10.
    assert store.view().catalog.held == {}
    assert stored(store) < before
    assert {step: shards_of(store, step, "model.wide") for step in KEPT} == cut
    check(store, KEPT)
    assert store.compact(take_over=True).moves == ()
    # The job continues: its saves build on the checkpoints that were stored again.
    run(store, [STEPS + 1, STEPS + 2], **life)
    check(store, [4, 8, 12, STEPS + 1, STEPS + 2])
    # Segments describe themselves: without the log everything can be recovered.
    shutil.rmtree(tmp_path / "store" / "log")
    shutil.rmtree(tmp_path / "store" / "fold", ignore_errors=True)  # a short log has none
    repaired = ckptstore.repair(store.url, tmp_path / "repaired")
    assert [ref.partition("@")[0] for ref in repaired.kept] == ["4", "8", "12", "15", "16"]
    assert list(repaired.lost) == ["14@1"], "retired, and all that is left of it is that term 2 continues from it"
    again = ckptstore.open(tmp_path / "repaired")
    for info in again.checkpoints():
        same(again.load(info.ref, framework="numpy"), truth()[info.step])


def test_a_limit_of_depth(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "store", create=True)
    steps = range(1, short_or(5, 8))
    run(store, steps, **LIVES["deltas of shards"])
    report = store.compact(take_over=True, max_depth=1)
    assert (report.unmet, report.complete) == ((), True)
    assert max(len(store.plan(info.ref).encodings) for info in store.checkpoints()) <= 2
    check(store, steps)


def test_fulls_become_deltas_shard_by_shard(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "store", create=True)

    def work(group: Group) -> None:
        whole = np.random.default_rng(0).standard_normal((90, 400)).astype("<f4")
        with ckptstore.open(store.url).writer(group=group, ranks=RANKS) as writer:
            for step in range(1, 5):
                whole[step::9] += np.float32(1e-3)
                writer.save(share(group, whole), step)

    assert as_ranks(SIZE, work) == [None] * SIZE
    loaded = {step: store.load(step, framework="numpy")["w"].tobytes() for step in range(1, 5)}
    before = stored(store)
    report = store.compact(take_over=True)
    assert {move.kind for move in report.moves} == {"re-encode"}
    assert report.complete
    assert stored(store) < before
    assert [info.kind for info in store.checkpoints()][1:3] == ["delta", "delta"]
    for step, image in loaded.items():
        assert store.load(step, framework="numpy")["w"].tobytes() == image
    assert store.verify(deep=True).ok


def share(group: Group, whole: np.ndarray[Any, Any]) -> FlatState:
    """A third of the rows."""
    rows = len(whole) // group.size
    part = np.ascontiguousarray(whole[group.rank * rows : (group.rank + 1) * rows])
    source = BoxSource(NumpySource(part), part.shape, 0, whole.shape, (group.rank * rows, 0))
    return FlatState({"w": {"$a": "w"}}, {"w": source})


@pytest.mark.parametrize(("name", "keep_steps"), in_turn(list(LIVES), [True, False]))
def test_merge(tmp_path: Path, name: str, keep_steps: bool) -> None:
    life = LIVES[name]
    store = ckptstore.open(tmp_path / "store", create=True)
    run(store, range(1, 9), **life)
    done = store.merge("2..8", keep_steps=keep_steps, take_over=True)
    assert done.answer == "accepted"
    assert len(done.written) == (SIZE if life["shards"] else 1)
    assert len(done.dropped) >= 2 * (1 + SIZE)
    check(store, range(1, 9) if keep_steps else [1, 8])
    if keep_steps:
        assert done.method == "concatenated"
        assert {len(doc.steps) for doc in documents(store, 5)} == {7}
        with pytest.raises(ckptstore.UsageError, match="are in one segment"):
            store.merge("2..8", keep_steps=True, take_over=True)


def test_merge_of_fulls_and_copy_as_fulls(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "store", create=True)
    for first in (1, 4):
        run(store, range(first, first + 3), **LIVES["deltas of shards"])
    store.copy(tmp_path / "copy", form="full")
    copy = ckptstore.open(tmp_path / "copy")
    assert {info.kind for info in copy.checkpoints()} == {"full"}
    assert len(shards_of(copy, 6, "model.wide")) == SIZE
    check(copy, range(1, 7))
    done = store.merge("4..6", fulls=True, take_over=True)
    assert done.answer == "accepted"
    check(store, [1, 2, 3, 6])


def test_repair_keeps_the_intact_steps_of_a_damaged_segment(tmp_path: Path) -> None:
    """A batch of steps lies in one segment of each rank; one of them is damaged in its last step."""
    store = ckptstore.open(tmp_path / "store", create=True)
    run(store, range(1, 7), shards=True, diffs=DiffOptions(full_every=20, batch=5, seconds=None))
    catalog = store.view().catalog
    segment = catalog.segments[catalog.encodings[1, 6][0].segments[2]]
    doc = next(doc for entry, doc in store.describe(6) if entry.id == segment.id)
    assert doc.steps == (2, 3, 4, 5, 6)
    chunk = next(entry.chunks[0] for entry in doc.tensors[6].values() if entry.chunks and entry.chunks[0].length > 8)
    path = tmp_path / "store" / segment.key
    data = bytearray(path.read_bytes())
    data[chunk.offset + 3] ^= 0xFF
    path.write_bytes(data)
    report = ckptstore.repair(store.url, tmp_path / "repaired")
    assert list(report.lost) == ["6@1"]
    check(ckptstore.open(tmp_path / "repaired"), range(1, 6))


def test_a_damaged_shard_costs_its_own_move(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "store", create=True)
    run(store, range(1, 9), keep=("every:4",), **LIVES["deltas of shards"])
    catalog = store.view().catalog
    path = tmp_path / "store" / catalog.segments[catalog.encodings[1, 2][0].segments[2]].key
    data = bytearray(path.read_bytes())
    data[4096:4128] = bytes(32)
    path.write_bytes(data)
    files = {one.name for one in (tmp_path / "store" / "seg").rglob("*.safetensors")}
    report = store.compact(take_over=True)
    assert report.moves
    assert all(move.result == "refused" and move.damaged for move in report.moves)
    assert files == {one.name for one in (tmp_path / "store" / "seg").rglob("*.safetensors")}
    assert [info.step for info in store.checkpoints()] == [4, 8]


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards as deltas, of which the rules keep every fourth; to be copied."""
    root = tmp_path_factory.mktemp("ranks") / "origin"
    run(ckptstore.open(root, create=True), range(1, 9), keep=("every:4",), **LIVES["deltas of shards"])
    return root


@pytest.mark.parametrize("point", ["compact.rewritten", "compact.verified", "compact.committed"])
def test_kills(tmp_path: Path, origin: Path, point: str) -> None:

    def work(root: Path) -> None:
        one = ckptstore.open(root)
        one.compact(take_over=True)
        one.gc()

    for count in (1, 2)[: short_or(1, 2)]:
        root = Path(shutil.copytree(origin, tmp_path / f"{count}"))
        assert killed_at(point, count, lambda root=root: work(root)), point
        check(ckptstore.open(root), [4, 8])
        work(root)
        again = ckptstore.open(root)
        assert again.view().catalog.held == {}
        for pin in again.backend.list("pins/"):
            again.backend.delete(pin)  # a killed process cannot
        check(again, [4, 8])
        named = {f"{one}.safetensors" for one in again.view().catalog.segments}
        assert {key.rpartition("/")[2] for key in again.backend.list("seg/")} == named, "an orphan is left"


def test_retention_and_compaction_beside_ranks_on_s3(s3: Server) -> None:
    """Three ranks train with retention rules; a compaction and gc work beside them, through requests."""
    steps = short_or(9, STEPS)
    url = s3.url()
    store = ckptstore.open(url, create=True, storage_options=s3.options)

    def work(group: Group) -> None:
        model = trainer()
        place = ckptstore.open(url, storage_options=s3.options)
        rules: Any = {"keep": RULES} if group.rank == 0 else {}
        with place.writer(group=group, ranks=RANKS, deltas=CHAIN, poll_seconds=0.05, **rules) as writer:
            for step in range(1, steps + 1):
                model.train()
                writer.save(sharded(group, model)[0], step)
                if group.rank == 0 and step == steps - 4:
                    report = store.compact()
                    assert report.moves, report
                    assert report.complete, report
                    store.gc()

    assert as_ranks(SIZE, work) == [None] * SIZE
    store.compact(take_over=True)
    check(store, [step for step in range(1, steps + 1) if step % 4 == 0 or step > steps - 2])
    assert store.view().catalog.held == {}
