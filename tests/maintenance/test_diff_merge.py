"""Merging: ranges of diffs become one segment, and every promised checkpoint restores bit for bit."""

from __future__ import annotations

import functools
import resource
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ckptstore
from ckptstore.backends.local_disk.directio import FileSink
from ckptstore.errors import (
    CheckpointNotFoundError,
    CorruptSegmentError,
    FencedError,
    ReadOnlyError,
    StorageError,
    UnsupportedBackendError,
    UsageError,
)
from ckptstore.formats.segment_files.segment import SegmentDoc
from ckptstore.log import requests
from ckptstore.log.change import CatalogChange
from ckptstore.log.change_committer import TakeOver
from ckptstore.log.journal import Journal
from ckptstore.maintenance.garbage_collection import collect
from ckptstore.maintenance.merge import Merged, merge
from ckptstore.maintenance.merge import merge_preparation as preparing_module
from ckptstore.segments import packed_segments
from ckptstore.store import Store
from ckptstore.write.policy.delta_interval import RestoreBound
from ckptstore.write.policy.delta_options import DeltaOptions
from tests.forms import in_turn
from tests.store.states import same
from tests.write.test_deltas import trajectory

CHAIN = DeltaOptions(interval=1, bound=RestoreBound(times=None, depth=100))
"""A full, then deltas, each against the one before."""


def fill(store: Store, states: list[dict[str, Any]], options: Any = CHAIN, first: int = 1, **writer: Any) -> None:
    with store.writer(deltas=options, poll_seconds=None, **writer) as opened:
        for step, state in enumerate(states, first):
            opened.save(state, step=step)


@pytest.fixture(scope="module")
def states() -> list[dict[str, Any]]:
    return trajectory(8)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory, states: list[dict[str, Any]]) -> Path:
    """Steps 1 to 8: a full and a chain of deltas. To be copied."""
    root = tmp_path_factory.mktemp("merging") / "store"
    fill(ckptstore.open(root), states)
    return root


@pytest.fixture
def store(tmp_path: Path, filled: Path) -> Store:
    """A copy of `filled`."""
    return ckptstore.open(shutil.copytree(filled, tmp_path / "store"))


def refs(store: Store) -> list[str]:
    return [info.ref for info in store.checkpoints()]


def check(store: Store, states: list[dict[str, Any]], *steps: int) -> None:
    """Exactly these steps exist, they restore, and no byte is damaged; then once more after gc."""
    for _ in range(2):
        assert [info.step for info in store.checkpoints()] == list(steps)
        for step in steps:
            same(states[step - 1], store.load(step))
        assert ckptstore.verify(store).ok
        collect(store.journal)


def segments(store: Store) -> set[str]:
    return set(store.backend.list("seg/"))


def owned(store: Store, text: str, **options: Any) -> Merged:
    return merge(store.journal, text, take_over=True, **options)


# ------------------------------------------------------------------------------------------------ the methods


def test_a_chain_becomes_one_delta(store: Store, states: list[dict[str, Any]]) -> None:
    before = segments(store)
    done = owned(store, "1..6")
    assert (done.answer, done.method, done.reason) == ("accepted", "materialized", "")
    assert done.retired == ("2@1", "3@1", "4@1", "5@1")
    assert done.merged == ("2@1", "3@1", "4@1", "5@1", "6@1")
    assert done.fulls == ("1@1",)
    assert done.held == {}
    assert done.before.links == 6
    assert done.after.links == 2
    assert done.after.nbytes < done.before.nbytes
    assert done.before.segments == 6
    assert done.after.segments == 2
    assert done.written_nbytes < done.dropped_nbytes
    info = store.checkpoint("6@1")
    assert (info.kind, info.base, info.stored) == ("delta", "1@1", done.written_nbytes)
    assert len(done.written) == 1
    check(store, states, 1, 6, 7, 8)
    assert segments(store) == (before | set(done.written)) - set(done.dropped)


def test_all_steps_in_one_segment(store: Store, states: list[dict[str, Any]]) -> None:
    done = owned(store, "2..7", keep_steps=True)
    assert (done.answer, done.method, done.retired) == ("accepted", "concatenated", ())
    assert len(done.written) == 1
    assert len(done.dropped) == 6
    assert done.before.links == done.after.links == 7
    assert (done.before.segments, done.after.segments) == (7, 2)
    check(store, states, *range(1, 9))
    assert len(segments(store)) == 3
    documents = [doc for _, doc in store.describe("7@1")]
    merged = next(doc for doc in documents if len(doc.steps) > 1)
    assert (merged.kind, merged.steps) == ("delta", (2, 3, 4, 5, 6, 7))
    assert [told.term for told in merged.encodings.values()] == [1] * 6
    assert [told.base and told.base.step for told in merged.encodings.values()] == list(range(1, 7))
    stored = sum(store.checkpoint(step).stored for step in range(2, 8))
    assert stored == done.written_nbytes  # the header's share included


def test_merged_segments_are_merged_again(store: Store, states: list[dict[str, Any]]) -> None:
    assert owned(store, "2..4", keep_steps=True).answer == "accepted"
    assert owned(store, "5@1..7@1", keep_steps=True).answer == "accepted"
    again = owned(store, "2..8", keep_steps=True)
    assert len(again.dropped) == 3
    check(store, states, *range(1, 9))
    assert len(segments(store)) == 2
    assert owned(store, "2..8").method == "materialized"
    check(store, states, 1, 8)


@pytest.fixture
def bulky(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copying seems to cost nothing: one delta for all is never smaller."""
    monkeypatch.setattr(preparing_module, "copied_bytes", lambda *_: 0)


@pytest.mark.usefixtures("bulky")
def test_the_smaller_result_is_taken(store: Store, states: list[dict[str, Any]]) -> None:
    """The chain is copied; then the checkpoints between are retired, in a separate change."""
    planned = merge(store.journal, "4..6", dry_run=True)
    end, before = store.view().end, segments(store)
    done = owned(store, "4..6")
    assert segments(store) == before | set(done.written)  # the rejected attempt is gone
    assert (done.method, done.answer) == ("concatenated", "accepted")
    assert (planned.method, planned.retired, planned.dropped) == (done.method, done.retired, done.dropped)
    assert done.retired == ("4@1", "5@1")
    assert store.view().end == end + 3
    assert done.after.links == done.before.links == 6
    assert done.after.segments == 4
    check(store, states, 1, 2, 3, 6, 7, 8)
    assert segments(store).isdisjoint(done.dropped)
    # The retired checkpoint is still on the way to 6@1, and cannot get another encoding: 6@1 is encoded again.
    assert owned(store, "2..6").method == "materialized"
    check(store, states, 1, 6, 7, 8)


@pytest.mark.usefixtures("bulky")
@pytest.mark.parametrize("answers", [1, 0])
def test_two_changes_may_be_answered_by_halves(store: Store, states: list[dict[str, Any]], answers: int) -> None:
    """The writer answers the first request, and nobody the second: nothing is lost, and the merge reports it."""
    with store.writer(poll_seconds=None) as writer, pytest.MonkeyPatch.context() as patch:
        post = requests.post

        def posted(journal: Journal, term: int, what: str, change: CatalogChange) -> Any:
            request = post(journal, term, what, change)
            if answers and change.segments:
                writer.poll()
            return request

        patch.setattr(requests, "post", posted)
        done = merge(store.journal, "4@1..6@1", timeout=0)
        assert (done.answer, done.method) == ("waiting", "concatenated")
        assert ("nothing is retired yet" in done.reason) == bool(answers)
        assert refs(store) == [f"{step}@1" for step in range(1, 9)]
        for step in range(1, 9):
            same(states[step - 1], store.load(f"{step}@1"))
        writer.save(states[0], step=9)  # and it looks for requests
    collect(store.journal)
    left = [1, 2, 3, 6, 7, 8] if answers else list(range(1, 9))
    assert refs(store) == [*(f"{step}@1" for step in left), "9@2"]
    for step in left:
        same(states[step - 1], store.load(f"{step}@1"))


@pytest.mark.parametrize(
    ("options", "keep_steps"),
    in_turn([DeltaOptions(interval=3, form="paper"), DeltaOptions(interval=3), "auto"], [False, True]),
)
def test_every_form_of_chains(tmp_path: Path, states: list[dict[str, Any]], options: Any, keep_steps: bool) -> None:
    store = ckptstore.open(tmp_path / "store")
    fill(store, states, options)
    last = max(info.step for info in store.checkpoints() if info.kind == "delta")
    done = owned(store, f"1..{last}", keep_steps=keep_steps)
    kept = [step for step in range(1, 9) if f"{step}@1" not in done.retired]
    assert keep_steps == (len(kept) == 8)
    check(store, states, *kept)


def test_where_b_needs_none_of_the_others_they_go_and_b_stays_as_it_is(
    tmp_path: Path, states: list[dict[str, Any]]
) -> None:
    store = ckptstore.open(tmp_path / "store")
    fill(store, states[:4], DeltaOptions(interval=10))  # each against the full
    done = owned(store, "1..4")
    assert (done.method, done.written, done.merged) == ("kept", (), ())
    assert done.retired == ("2@1", "3@1")
    assert len(done.dropped) == 2
    assert done.before == done.after
    check(store, states, 1, 4)


def test_a_full_where_no_tensor_gains_from_a_base(tmp_path: Path) -> None:
    noise = [np.random.default_rng(seed).integers(0, 256, 70_000, dtype=np.uint8) for seed in range(2)]
    states = [{"noise": noise[0]}, {"noise": noise[0].copy()}, {"noise": noise[1]}]
    states[1]["noise"][:9000] = 0
    store = ckptstore.open(tmp_path / "store")
    fill(store, states)
    assert [info.kind for info in store.checkpoints()] == ["full", "delta", "delta"]
    before = segments(store)
    done = owned(store, "1..3")
    assert done.method == "materialized"
    assert segments(store) == before | set(done.written)
    assert (store.checkpoint(3).kind, store.checkpoint(3).base) == ("full", None)
    assert done.after.links == 1
    check(store, states, 1, 3)


def test_more_than_a_segment_may_hold(
    store: Store, states: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole steps to a segment, as many as fit."""
    limited = functools.partial(preparing_module.copy_encodings, limit=2 * store.checkpoint(2).stored)
    monkeypatch.setattr(preparing_module, "copy_encodings", limited)
    done = owned(store, "1..8", keep_steps=True)
    assert 3 < len(done.written) < 7
    assert done.after.segments == len(done.written) + 1
    check(store, states, *range(1, 9))


def test_tensors_of_many_chunks_in_little_memory(tmp_path: Path) -> None:
    """A master of two chunks and its bf16 copy; a step changes a part of both."""
    rng = np.random.default_rng(1)
    master = rng.standard_normal(6_000_000).astype(np.float32)
    states = []
    for step in range(3):
        master = master.copy()
        master[::7] *= np.float32(1.001)
        states.append({"master": master, "copy": master.astype(ml_dtypes.bfloat16), "step": step})
    store = ckptstore.open(tmp_path / "store")
    fill(store, states)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert owned(store, "2..3", keep_steps=True).method == "concatenated"
    assert owned(store, "1..3").method == "materialized"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 << 10  # kilobytes; blocks and chunks
    assert {name: entry.codec for name, entry in store.tensors(3).items()} == {"master": "sub", "copy": "derive"}
    check(store, states, 1, 3)


# ------------------------------------------------------------------------------------------------ kept bases


def test_bases_of_others_stay(store: Store, states: list[dict[str, Any]]) -> None:
    """A checkpoint beyond the range, and one of another term, reach through the range."""
    fork = trajectory(3, seed=5)
    fill(store, fork, first=5, parent="4@1")
    done = owned(store, "1@1..6@1")
    assert done.held == {"4@1": "term 2 continues from it"}
    assert done.retired == ("2@1", "3@1", "5@1")
    assert done.merged == ("5@1", "6@1")
    assert [info.ref for info in store.checkpoints() if info.term == 1] == ["1@1", "4@1", "6@1", "7@1", "8@1"]
    for step in (1, 4, 6, 7, 8):
        same(states[step - 1], store.load(f"{step}@1"))
    for step in (5, 6, 7):
        same(fork[step - 5], store.load(f"{step}@2"))
    collect(store.journal)
    assert ckptstore.verify(store).ok
    assert store.checkpoint("6@1").base == "4@1"


def test_a_retired_base_in_the_range_serves_those_outside(tmp_path: Path, states: list[dict[str, Any]]) -> None:
    """Paper form: step n against step n-2. B is not in the chain of B+1, which needs others of the range."""
    store = ckptstore.open(tmp_path / "store")
    fill(store, states, DeltaOptions(interval=2, form="paper", bound=RestoreBound(times=None, depth=100)))
    assert store.checkpoint(7).base == "5@1"
    done = owned(store, "3..6")
    assert done.retired == ("3@1", "4@1", "5@1")
    check(store, states, 1, 2, 6, 7, 8)
    assert not store.view().catalog.segments.keys() & {key.split("/")[2][:32] for key in done.dropped}


def test_a_base_that_is_retired_already_serves_the_new_delta(store: Store, states: list[dict[str, Any]]) -> None:
    """2@1 is no longer promised, and only the range builds on it."""
    with store.writer(poll_seconds=None) as writer:
        requests.post(store.journal, writer.term, "test", CatalogChange(retires=((1, 2),)))
        writer.poll()
    done = owned(store, "3@1..7@1")
    assert done.method == "materialized"
    assert store.checkpoint("7@1").base == "2@1"
    check(store, states, 1, 7, 8)


def test_tags_and_latest_hold(store: Store, states: list[dict[str, Any]]) -> None:
    with store.writer(parent="5@1", poll_seconds=None):  # an empty term: 5@1 is the latest
        pass
    assert store.checkpoint("latest").ref == "5@1"
    with pytest.raises(UsageError, match=r"nothing to merge: .*5@1: term 2 continues from it"):
        owned(store, "5@1..6@1")
    done = owned(store, "2@1..8@1")
    assert done.held == {"5@1": "term 3 continues from it"}
    assert store.checkpoint("latest").ref == "5@1"
    check(store, states, 1, 5, 8)


# ------------------------------------------------------------------------------------------------ dry runs, errors


def test_a_dry_run_writes_nothing_and_knows_what_comes_of_it(store: Store) -> None:
    for text, keep_steps in (("1..7", False), ("1..7", True)):
        before = {key: store.backend.size(key) for key in store.backend.list("")}
        planned = merge(store.journal, text, keep_steps=keep_steps, dry_run=True)
        assert planned.answer == "planned"
        assert {key: store.backend.size(key) for key in store.backend.list("")} == before
        if keep_steps:
            store.backend.read_only = True
            with pytest.warns(ckptstore.UnpinnedWarning):
                assert merge(store.journal, text, keep_steps=True, dry_run=True).answer == "planned"
            store.backend.read_only = False
        else:
            copy = merge(store.journal, text, dry_run=True)
            assert copy.written_nbytes == planned.written_nbytes
    done = owned(store, "1..7", keep_steps=True)
    assert abs(done.written_nbytes - planned.written_nbytes) < 200  # the index compresses a little differently
    assert done.dropped_nbytes == planned.dropped_nbytes
    assert done.retired == planned.retired


@pytest.mark.parametrize(
    ("text", "error", "match"),
    [
        ("3", UsageError, "is not a range"),
        ("3..", UsageError, "is not a range"),
        ("1..2..3", UsageError, "is not a range"),
        ("6..3", UsageError, "6@1 comes after 3@1: write 3..6"),
        ("3..99", CheckpointNotFoundError, "no checkpoint of step 99"),
        ("99..100", CheckpointNotFoundError, "no checkpoint of step 99"),
        ("3..9@2", UsageError, "different terms"),
        ("1..2", UsageError, "nothing to merge: 1@1..2@1 holds 2 checkpoints, one of them a diff"),
        ("1..1", UsageError, "nothing to merge: 1@1..1@1 holds 1 checkpoint, none of them a diff"),
        ("9..latest", UsageError, "nothing to merge"),
        ("tag:no..4", CheckpointNotFoundError, "no"),
    ],
)
def test_ranges_that_cannot_be_merged(
    store: Store, states: list[dict[str, Any]], text: str, error: type[Exception], match: str
) -> None:
    fill(store, states[:1], first=9)
    terms = len(store.terms())
    with pytest.raises(error, match=match):
        owned(store, text)
    assert len(store.terms()) == terms  # nobody was fenced needlessly


def test_steps_already_in_one_segment(store: Store) -> None:
    assert owned(store, "2..6", keep_steps=True).answer == "accepted"
    with pytest.raises(UsageError, match="are in one segment"):
        owned(store, "2..6", keep_steps=True)
    with pytest.raises(UsageError, match="share their segments with checkpoints outside"):
        owned(store, "2..5", keep_steps=True)


def test_a_range_that_ends_with_a_full(tmp_path: Path, states: list[dict[str, Any]]) -> None:
    store = ckptstore.open(tmp_path / "store")
    fill(store, states[:7], DeltaOptions(interval=1, bound=RestoreBound(times=None, depth=2)))
    assert [info.kind for info in store.checkpoints()] == ["full", "delta", "delta", "full", "delta", "delta", "full"]
    with pytest.raises(UsageError, match=r"7@1 is a full.* End the range at 6@1"):
        owned(store, "1..7")
    assert owned(store, "2..7", keep_steps=True).merged == ("2@1", "3@1", "5@1", "6@1")
    check(store, states, *range(1, 8))
    done = owned(store, "1..6")
    assert done.retired == ("2@1", "3@1", "5@1")
    assert done.fulls == ("1@1", "4@1")
    assert store.checkpoint("6").base == "4@1"
    check(store, states, 1, 4, 6, 7)


def test_damage_in_the_range_is_found_and_nothing_changes(store: Store) -> None:
    (segment,) = store.checkpoint("4").segments
    key = store.view().catalog.segments[segment].key
    path = Path(store.url.removeprefix("file://")) / key
    data = bytearray(path.read_bytes())
    data[4096 + 100] ^= 1
    path.write_bytes(data)
    before = segments(store)
    for keep_steps in (False, True):
        with pytest.raises(CorruptSegmentError, match=segment):
            owned(store, "2..6", keep_steps=keep_steps)
        assert segments(store) == before
    assert refs(store) == [f"{step}@1" for step in range(1, 9)]


def test_a_wrongly_written_segment_is_never_requested(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of the new segment flip before it is read back."""
    before = segments(store)
    check_state, check_copies = preparing_module.check_state, preparing_module.check_copies

    def spoiled(what: Any) -> Any:
        def check(*arguments: Any) -> None:
            (new,) = segments(store) - before
            path = Path(store.url.removeprefix("file://")) / new
            data = bytearray(path.read_bytes())
            data[4096 + 50] ^= 4
            path.write_bytes(data)
            what(*arguments)

        return check

    monkeypatch.setattr(preparing_module, "check_state", spoiled(check_state))
    with pytest.raises(CorruptSegmentError, match="checksum"):
        owned(store, "2..6")
    monkeypatch.setattr(preparing_module, "check_state", check_state)
    monkeypatch.setattr(preparing_module, "check_copies", spoiled(check_copies))
    with pytest.raises(CorruptSegmentError, match="checksum"):
        owned(store, "2..6", keep_steps=True)
    assert segments(store) == before


def no_tree(doc: SegmentDoc) -> SegmentDoc:
    return replace(doc, trees={step: tree for step, tree in doc.trees.items() if step != 4})


def other_tree(doc: SegmentDoc) -> SegmentDoc:
    return replace(doc, trees={step: {**tree, "epoch": 99} if step == 4 else tree for step, tree in doc.trees.items()})


def no_tensor(doc: SegmentDoc) -> SegmentDoc:
    name = max(doc.tensors[4])
    rest = {other: entry for other, entry in doc.tensors[4].items() if other != name}
    return replace(doc, tensors={**doc.tensors, 4: {**rest, "unused": replace(doc.tensors[4][name], name="unused")}})


@pytest.mark.parametrize("change", [no_tree, other_tree, no_tensor])
def test_a_wrongly_described_segment_is_never_requested(
    store: Store, monkeypatch: pytest.MonkeyPatch, change: Callable[[SegmentDoc], SegmentDoc]
) -> None:
    """The new segment's hashes all fit; it does not restore the state that the log names."""
    before = segments(store)
    original = packed_segments.encode_packed
    for range_, keep_steps in (("2..6", True), ("1..4", False)):
        with monkeypatch.context() as patched:
            patched.setattr(packed_segments, "encode_packed", lambda doc, *rest: original(change(doc), *rest))
            with pytest.raises(CorruptSegmentError):
                owned(store, range_, keep_steps=keep_steps)
        assert segments(store) == before


def test_a_source_that_is_described_wrongly_is_not_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if nothing is written that could be read back."""
    for number, (change, keep_steps) in enumerate(((no_tree, True), (no_tree, False), (other_tree, False))):
        store = ckptstore.open(tmp_path / str(number))
        original = packed_segments.encode_packed

        def encode(doc: SegmentDoc, *rest: Any, change: Any = change, original: Any = original) -> Any:
            return original(change(doc) if doc.steps == (4,) else doc, *rest)

        with monkeypatch.context() as patched:
            patched.setattr(packed_segments, "encode_packed", encode)
            fill(store, trajectory(4))
        before = segments(store)
        for dry_run in (True, False):
            with pytest.raises(CorruptSegmentError):
                owned(store, "1..4", keep_steps=keep_steps, dry_run=dry_run)
        assert segments(store) == before


def test_a_change_against_the_rules_is_not_asked_for(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    before = segments(store)
    (needed,) = store.checkpoint("1").segments
    unneeded = preparing_module.unneeded
    monkeypatch.setattr(preparing_module, "unneeded", lambda *arguments: (*unneeded(*arguments), needed))
    with store.writer(poll_seconds=None):
        for dry_run in (True, False):
            with pytest.raises(CheckpointNotFoundError, match="cannot be restored any more"):
                merge(store.journal, "2..6", timeout=0, dry_run=dry_run)
    assert store.backend.list("req/") == []
    assert segments(store) == before


@pytest.mark.parametrize("keep_steps", [True, False])
def test_states_that_are_nothing(tmp_path: Path, keep_steps: bool) -> None:
    store = ckptstore.open(tmp_path / "store")
    with store.writer(diffs=ckptstore.DiffOptions(batch=1), poll_seconds=None) as writer:
        for step in (1, 2, 3, 4):
            writer.save_async(None, step, updates=[])
    owned(store, "2..4", keep_steps=keep_steps)
    check(store, [None] * 4, *([1, 2, 3, 4] if keep_steps else [1, 4]))


def test_nothing_is_taken_over_on_a_medium_that_lets_two_writers_create_one_slot(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def probe(_: object) -> None:
        raise UnsupportedBackendError("creating a file twice succeeded: writers cannot exclude each other here")

    monkeypatch.setattr(type(store.backend), "probe", probe)
    log = store.backend.list("log/")
    with pytest.raises(UnsupportedBackendError):
        owned(store, "1..6")
    assert store.backend.list("log/") == log


def test_a_read_only_store(store: Store) -> None:
    store.backend.read_only = True
    with pytest.raises(ReadOnlyError):
        merge(store.journal, "2..6")


# ------------------------------------------------------------------------------------------------ beside a writer


@pytest.fixture
def writer(store: Store) -> Iterator[ckptstore.Writer]:
    """A live writer that polls for requests."""
    with store.writer(deltas=CHAIN, poll_seconds=0.05) as writer:
        yield writer


@pytest.mark.parametrize("keep_steps", [False, True])
def test_beside_a_live_writer_that_continues(
    store: Store, states: list[dict[str, Any]], writer: ckptstore.Writer, keep_steps: bool
) -> None:
    stop = threading.Event()
    saved: list[int] = []

    def train() -> None:
        for step in range(9, 300):
            if stop.is_set():
                return
            writer.save(states[step % 8], step=step)
            saved.append(step)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        done = merge(Journal(store.backend), "2@1..7@1", keep_steps=keep_steps, timeout=60)
    finally:
        stop.set()
        thread.join()
    assert done.answer == "accepted"
    assert store.view().catalog.term == writer.term == 2
    assert store.backend.list("req/") == []
    writer.save(states[0], step=1000)
    collect(store.journal)
    for step in (1, 7, 8, *(range(2, 7) if keep_steps else ())):
        same(states[step - 1], store.load(f"{step}@1"))
    for step in saved:
        same(states[step % 8], store.load(f"{step}@2"))
    assert ckptstore.verify(store).ok


def test_its_own_newest_checkpoints(store: Store, states: list[dict[str, Any]], writer: ckptstore.Writer) -> None:
    """The base that the writer keeps in memory is the end of the range: the next delta builds on it."""
    for step in range(9, 13):
        writer.save(states[step - 9], step=step)
    assert merge(store.journal, "9..12", timeout=60).answer == "accepted"
    writer.save(states[4], step=13)
    assert store.checkpoint(13).base == "12@2"
    assert [info.step for info in store.checkpoints() if info.term == 2] == [9, 12, 13]
    collect(store.journal)
    for step in (9, 12, 13):
        same(states[step - 9], store.load(step))


def test_nobody_answers(store: Store, states: list[dict[str, Any]]) -> None:
    with store.writer(poll_seconds=None):
        done = merge(store.journal, "2..6", timeout=0)
        assert done.answer == "waiting"
    assert len(store.backend.list("req/")) == 1
    check(store, states, *range(1, 9))  # as if no request had been made
    with store.writer(poll_seconds=None):  # a newer term voids it
        pass
    collect(store.journal)
    assert segments(store).isdisjoint(done.written)
    check(store, states, *range(1, 9))


def test_a_late_answer(store: Store, states: list[dict[str, Any]]) -> None:
    with store.writer(deltas=CHAIN, poll_seconds=None) as writer:
        assert merge(store.journal, "2@1..6@1", timeout=0).answer == "waiting"
        writer.save(states[0], step=9)  # and then it looks for requests
    assert [info.ref for info in store.checkpoints()] == ["1@1", "6@1", "7@1", "8@1", "9@2"]
    collect(store.journal)
    for step in (1, 6, 7, 8):
        same(states[step - 1], store.load(f"{step}@1"))


def test_refused(store: Store, states: list[dict[str, Any]], writer: ckptstore.Writer) -> None:
    """While the merge is prepared somebody tags a checkpoint that it would retire."""
    for step in range(9, 13):
        writer.save(states[step - 9], step=step)
    prepare = preparing_module.MergePreparation.prepare

    def meanwhile(self: Any, *arguments: Any, **options: Any) -> Any:
        found = prepare(self, *arguments, **options)
        writer.tag("mine", 11)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparing_module.MergePreparation, "prepare", meanwhile)
        done = merge(store.journal, "9..12", timeout=60)
    assert done.answer == "refused"
    assert "tag 'mine' names it" in done.reason
    collect(store.journal)
    assert segments(store).isdisjoint(done.written)
    for step in range(9, 13):
        same(states[step - 9], store.load(step))


def test_void(store: Store, states: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = preparing_module.MergePreparation.prepare

    def meanwhile(self: Any, *arguments: Any, **options: Any) -> Any:
        found = prepare(self, *arguments, **options)
        with Store(store.backend).writer(poll_seconds=None):
            pass
        return found

    monkeypatch.setattr(preparing_module.MergePreparation, "prepare", meanwhile)
    with store.writer(poll_seconds=None):
        assert merge(store.journal, "2..6", timeout=60).answer == "void"
    with pytest.raises(FencedError):
        owned(store, "2..6")
    collect(store.journal)
    check(store, states, *range(1, 9))


def test_a_merge_that_takes_over_can_be_fenced(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    before = segments(store)

    class Late(TakeOver):
        def __init__(self, store: Store, purpose: str, *, several: bool = False) -> None:
            super().__init__(store, purpose, several=several)
            with Store(store.backend).writer(poll_seconds=None):
                pass

    monkeypatch.setattr("ckptstore.maintenance.merge.diff_merge.TakeOver", Late)
    with pytest.raises(FencedError, match="term 3 began after term 2"):
        owned(store, "2..6")
    assert segments(store) == before


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Writers that are closed at the end of the test."""
    with ExitStack() as found:
        yield found


@pytest.mark.parametrize("ends", [1, 9])
def test_a_term_that_ends_meanwhile_takes_along_what_was_written_in_it(
    store: Store, states: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, stack: ExitStack, ends: int
) -> None:
    """Before the new segment is read back a newer term begins, and gc deletes uncommitted segments."""
    check_copies = preparing_module.check_copies
    left = ends

    def meanwhile(*arguments: Any) -> None:
        nonlocal left
        if left:
            left -= 1
            stack.enter_context(Store(store.backend).writer(poll_seconds=None))
            assert len(collect(store.journal).segments) == 1
        check_copies(*arguments)

    monkeypatch.setattr(preparing_module, "check_copies", meanwhile)
    stack.enter_context(store.writer(poll_seconds=None))
    if ends > 1:
        with pytest.raises(FencedError, match="began while the merge was prepared"):
            merge(store.journal, "2..6", keep_steps=True, timeout=0)
    else:
        assert merge(store.journal, "2..6", keep_steps=True, timeout=0).answer == "waiting"
    check(store, states, *range(1, 9))


@pytest.mark.parametrize("ends", [1, 9])
def test_a_term_that_ends_takes_along_what_is_still_being_written_in_it(
    store: Store, states: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, stack: ExitStack, ends: int
) -> None:
    """Between the last block of the new segment and its seal a newer term begins, and gc deletes the file."""
    seal = FileSink.seal
    left = ends

    def late(sink: FileSink, size: int) -> None:
        nonlocal left
        if left:
            left -= 1
            stack.enter_context(Store(store.backend).writer(poll_seconds=None))
            assert len(collect(store.journal).segments) == 1
        seal(sink, size)

    stack.enter_context(store.writer(poll_seconds=None))
    monkeypatch.setattr(FileSink, "seal", late)
    if ends > 1:
        with pytest.raises(FencedError, match="began while the merge was prepared"):
            merge(store.journal, "2..6", keep_steps=True, timeout=0)
    else:
        assert merge(store.journal, "2..6", keep_steps=True, timeout=0).answer == "waiting"
    check(store, states, *range(1, 9))


def test_a_medium_that_fails_leaves_nothing_behind(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    before = segments(store)

    def fails(*_: Any, **__: Any) -> None:
        raise StorageError("no space for a pin")

    monkeypatch.setattr(preparing_module, "check_state", fails)
    with store.writer(poll_seconds=None), pytest.raises(StorageError):
        merge(store.journal, "2..6", timeout=0)
    assert segments(store) == before
    assert store.backend.list("req/") == []
    assert store.backend.list("pins/") == []
