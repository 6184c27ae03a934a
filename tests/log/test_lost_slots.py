"""Slots that are gone, foreign, or damaged at a critical place: never silently an older checkpoint."""

from __future__ import annotations

import secrets
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import ckptstore
from ckptstore.backends.memory import MemoryBackend
from ckptstore.errors import (
    CheckpointNotFoundError,
    CorruptLogError,
    FencedError,
    ForeignObjectError,
    KeyNotFoundError,
)
from ckptstore.formats.history import record_text
from ckptstore.formats.history.records import NO_SLOT, CommitRecord, OpenRecord, slot_key
from ckptstore.log import fold_writer
from ckptstore.log.log_reader import WIDEST_GAP
from ckptstore.log.partial_objects import exists
from ckptstore.log.term import open_term, read
from ckptstore.maintenance.garbage_collection import collect
from ckptstore.store import Store
from tests.log.log_world import HASTE, Fate, FaultyBackend, World, full, save


def state(step: int) -> dict[str, object]:
    return {"w": np.full(4, step, np.float32), "step": step}


@pytest.fixture
def store() -> Iterator[Store]:
    """Term 1 with steps 1..6 in slots 1..6 of a store in memory; slot 7 says that it is closed."""
    name = secrets.token_hex(8)
    store = ckptstore.open(f"memory://{name}")
    with store.writer(poll_seconds=None) as writer:
        for step in range(1, 7):
            writer.save(state(step), step)
    yield store
    MemoryBackend.forget(name)


def damage(store: Store, seq: int) -> None:
    data = bytearray(store.backend.get(slot_key(seq)))
    data[len(data) // 2] ^= 1
    store.backend.replace(slot_key(seq), bytes(data))


class TestLostSlots:
    @pytest.mark.parametrize("lost", [(5,), (4, 5), (3, 4, 5), (2, 4, 5), (1, 2, 3, 4, 5)])
    def test_a_gap_is_never_the_end_of_the_log(self, store: Store, lost: tuple[int, ...]) -> None:
        for seq in lost:
            store.backend.delete(slot_key(seq))
        view = store.view()
        assert view.damage == lost
        assert view.end == store.view(look_above=True).end
        # Slot 6 is there and belongs to the newest term: it is the newest checkpoint, whatever was before it.
        assert store.load("latest")["step"] == 6
        report = ckptstore.verify(store)
        assert {found.key for found in report.damage} == {slot_key(seq) for seq in lost}

    def test_latest_behind_a_gap_is_refused_and_writing_needs_a_choice(self, store: Store) -> None:
        # The newest term has only a record without checkpoints left.
        with store.writer(poll_seconds=None) as writer:
            writer.save(state(7), 7)
        top = store.view().end - 1
        nonce = store.view().catalog.terms[2].nonce
        for seq in range(5, top):
            store.backend.delete(slot_key(seq))
        data, _ = record_text.encode_commit(CommitRecord(2, nonce), seq=top, run=store.run, manifest="")
        store.backend.delete(slot_key(top))
        store.backend.create(slot_key(top), data)
        with pytest.raises(CorruptLogError, match="4@1"):
            store.load("latest")
        with pytest.raises(CorruptLogError, match="4@1"):
            store.writer()
        assert store.load("4@1")["step"] == 4
        with store.writer(parent="4@1", poll_seconds=None) as writer:
            assert writer.term == 3  # not 2, which the lost OPEN has used
            writer.save(state(5), 5)
        assert store.load("latest")["step"] == 5
        assert store.view().end > top

    def test_nothing_that_a_lost_slot_may_have_promised_is_collected(self, store: Store) -> None:
        before = set(store.backend.list("seg/"))
        for seq in (4, 5):
            store.backend.delete(slot_key(seq))
        for _ in range(3):
            store.writer(parent=3, poll_seconds=None).close()
            assert collect(store.journal).segments == ()
        assert set(store.backend.list("seg/")) == before

    def test_only_a_listing_finds_a_wide_gap_and_it_is_asked_for_where_it_matters(self, store: Store) -> None:
        for seq in (4, 5):
            store.backend.delete(slot_key(seq))
        assert read(store.journal, look_above=False).end == 4
        assert read(store.journal, look_above=True).damage == (4, 5)
        store.backend.cheap_looks = False  # a medium where each listing costs a request
        assert read(store.journal).end == 4
        store.writer(parent=None, poll_seconds=None).close()
        assert store.view(look_above=True).catalog.terms[2].seq == 8

    def test_a_file_that_merely_has_a_slots_name_costs_no_hours(self, store: Store) -> None:
        store.backend.create(slot_key(10**19), b"junk")
        with pytest.raises(CorruptLogError, match=f"{slot_key(10**19)} exists, .* remove it"):
            store.view()
        store.backend.delete(slot_key(10**19))
        store.backend.create(slot_key(8 + WIDEST_GAP), b"junk")
        assert len(store.view().damage) == WIDEST_GAP + 1
        store.backend.delete(slot_key(8 + WIDEST_GAP))
        store.backend.create(slot_key(9 + WIDEST_GAP), b"junk")
        with pytest.raises(CorruptLogError, match="remove it"):
            store.view()

    def test_a_view_that_is_read_on_from_damage_misses_nothing(self) -> None:
        world = World()
        term = open_term(world.journal, None, patience=HASTE)
        save(term, 1)
        save(term, 2)
        world.damage(slot_key(2))
        before = read(world.journal, patience=HASTE)
        assert before.damage == (2,)
        world.cheap_looks = False  # otherwise the writer sees it, too, and stops
        save(term, 3)
        after = read(world.journal, before, HASTE)
        assert (1, 3) in after.catalog.checkpoints
        assert after.catalog == read(world.journal, patience=HASTE).catalog


class TestChain:
    def test_every_slot_names_the_one_before_it(self) -> None:
        world = World()
        term = open_term(world.journal, None, patience=HASTE)
        for step in (1, 2):
            save(term, step)
        named = [world.record(seq).previous for seq in range(3)]
        assert named == [NO_SLOT, *(record_text.xxh3_128(world.canon[seq]) for seq in range(2))]
        assert term.catalog.last == record_text.xxh3_128(world.canon[2])

    @pytest.mark.parametrize("kind", ["OPEN", "COMMIT"])
    @pytest.mark.parametrize("folded", [False, True])
    def test_records_of_another_log_are_not_applied(self, kind: str, folded: bool) -> None:
        world = World()
        term = open_term(world.journal, None, patience=HASTE)
        kept = save(term, 1)
        if folded:
            fold_writer.fold(world.journal, term.view())
        foreign = replace(full(1, 2), nonce=term.nonce, previous="5" * 32)
        data, _ = record_text.encode_commit(foreign, seq=2, run=world.fmt.run, manifest="")
        if kind == "OPEN":
            data = record_text.encode_open(
                OpenRecord(2, kept, "0" * 32, 0.0, previous="5" * 32), seq=2, run=world.fmt.run
            )
        world.create(slot_key(2), data)
        found = read(world.journal, patience=HASTE)
        assert found.damage == (2,)
        assert (found.fold_seq, found.catalog.term) == (1 if folded else -1, 1)
        assert set(found.catalog.checkpoints) == {(1, 1)}
        with pytest.raises(CorruptLogError, match=r"slot 2 .*1@1"):
            found.catalog.latest()
        with pytest.raises(FencedError):
            save(term, 2)

    def test_a_first_slot_that_continues_something_is_damage(self) -> None:
        world = World()
        record = OpenRecord(1, None, "0" * 32, 0.0, previous="5" * 32)
        world.create(slot_key(0), record_text.encode_open(record, seq=0, run=world.fmt.run))
        found = read(world.journal, patience=HASTE)
        assert (found.damage, found.catalog.term) == ((0,), 0)

    def test_a_lost_fence_that_somebody_filled_is_found_beside_a_fold(self) -> None:
        world = World()
        world.cheap_looks = False
        old = open_term(world.journal, None, patience=HASTE)
        kept = save(old, 1)
        fence = open_term(world.journal, kept, patience=HASTE)
        fold_writer.fold(world.journal, fence.view())
        before = read(world.journal, patience=HASTE, look_above=True)
        assert (before.fold_seq, before.damage) == (2, ())
        world.delete(slot_key(2))
        assert read(world.journal, patience=HASTE, look_above=True).catalog == before.catalog  # the fold has it
        save(old, 2)
        found = read(world.journal, patience=HASTE, look_above=True)
        assert (found.fold_seq, found.damage) == (2, (2,))
        world.damage(slot_key(2))  # an unreadable slot proves nothing against the fold
        assert read(world.journal, patience=HASTE, look_above=True).damage == ()

    def test_writing_on_after_a_damaged_slot_names_the_bytes_that_are_there(self) -> None:
        world = World()
        term = open_term(world.journal, None, patience=HASTE)
        kept = save(term, 1)
        save(term, 2)
        world.damage(slot_key(2))
        second = open_term(world.journal, kept, patience=HASTE)
        assert world.record(3).previous == record_text.xxh3_128(world.get(slot_key(2)))
        save(second, 2)
        found = read(world.journal, patience=HASTE).catalog
        assert found.damage == (2,)
        assert found.latest() is not None


class TestOlderCopy:
    """A copy of the store, taken earlier, is put back while its writer lives."""

    @pytest.fixture
    def place(self, tmp_path: Path) -> Path:
        return tmp_path / "run"

    def put_back(self, place: Path, copy: Path) -> None:
        """The folders stay the same, and the files in them return to their old contents."""
        for path in place.rglob("*"):
            if path.is_file() and not (copy / path.relative_to(place)).exists():
                path.unlink()

    def test_a_live_writer_finds_out_before_it_acknowledges_anything(self, place: Path, tmp_path: Path) -> None:
        store = ckptstore.open(place)
        writer = store.writer(poll_seconds=None)
        for step in (1, 2, 3, 4, 5):
            writer.save(state(step), step)
            if step == 2:
                shutil.copytree(place, tmp_path / "copy")
        self.put_back(place, tmp_path / "copy")
        with pytest.raises(FencedError, match=rf"{slot_key(5)}.* is gone: the store was put back from a copy"):
            writer.save(state(6), 6)
        writer.close()
        assert store.load("latest")["step"] == 2

    def test_a_look_that_fails_stops_nobody(self) -> None:
        world = World()
        term = open_term(world.journal, None, patience=HASTE)

        def fate(operation: str, key: str) -> Fate:
            return "error" if operation == "get" else "ok"

        term.journal.backend = faulty = FaultyBackend(world, fate)
        faulty.cheap_looks = True
        assert save(term, 1)

    @pytest.mark.parametrize("looks", [True, False])
    def test_two_writers_with_one_term_number_are_told_apart(self, place: Path, tmp_path: Path, looks: bool) -> None:
        store = ckptstore.open(place)
        with store.writer(poll_seconds=None) as first:
            first.save(state(1), 1)
        shutil.copytree(place, tmp_path / "copy")
        old = store.writer(poll_seconds=None)
        old.save(state(2), 2)
        self.put_back(place, tmp_path / "copy")
        new = store.writer(poll_seconds=None)
        assert new.term == old.term
        if looks:
            with pytest.raises(FencedError, match="is gone"):
                old.save(state(30), 3)
            new.save(state(2), 2)
            assert store.load("latest")["step"] == 2
            assert ckptstore.verify(store).ok
            new.close()
            return
        store.backend.cheap_looks = False  # a medium where each look costs a request: the readers must detect it
        old.save(state(30), 3)
        new.save(state(2), 2)
        store.backend.cheap_looks = True
        gap = store.view().catalog.slots[2, 2] + 1
        assert store.view().damage == (gap,)
        assert set(store.view().catalog.checkpoints) == {(1, 1), (2, 2)}
        with pytest.raises(CorruptLogError, match="2@2"):
            store.load("latest")
        with pytest.raises(FencedError):
            new.save(state(3), 3)

    def test_records_above_a_gap_do_not_belong_to_the_newer_term(self, place: Path, tmp_path: Path) -> None:
        store = ckptstore.open(place)
        store.writer(poll_seconds=None).close()
        shutil.copytree(place, tmp_path / "copy")
        store.backend.cheap_looks = False
        old = store.writer(poll_seconds=None)
        for step in (1, 2):
            old.save(state(step), step)
        self.put_back(place, tmp_path / "copy")
        store.writer(poll_seconds=None)
        old.save(state(30), 3)  # with a slot free between this one and the new writer's OPEN of the same term number
        store.backend.cheap_looks = True
        assert len(store.view().damage) == 3
        assert store.view().catalog.checkpoints == {}
        with pytest.raises(CorruptLogError):
            store.load("latest")


class TestLostParent:
    def test_a_damaged_last_commit_before_an_open_is_never_silent(self, store: Store) -> None:
        store.writer(poll_seconds=None).close()  # an OPEN whose parent is 6@1
        opened = store.view().catalog.terms[2]
        damage(store, store.view().catalog.slots[1, 6])
        assert opened.parent is not None
        assert opened.parent.ref == "6@1"
        for call in (store.load, store.checkpoint, store.writer):
            with pytest.raises(CorruptLogError, match=r"continues from 6@1.*last intact checkpoint is 5@1"):
                call()
        assert store.load("5@1")["step"] == 5
        with store.writer(parent="5@1", poll_seconds=None) as writer:
            writer.save(state(6), 6)
        assert store.load("latest")["step"] == 6
        assert not ckptstore.verify(store).ok

    def test_a_fold_keeps_what_was_lost(self, store: Store) -> None:
        store.writer(poll_seconds=None).close()
        damage(store, store.view().catalog.slots[1, 6])
        fold_writer.fold(store.journal, store.view())
        assert store.view().fold_seq > 0
        with pytest.raises(CorruptLogError, match="continues from 6@1"):
            store.load("latest")

    def test_a_term_with_its_own_checkpoints_remains_valid(self, store: Store) -> None:
        with store.writer(poll_seconds=None) as writer:
            writer.save(state(7), 7)
        damage(store, store.view().catalog.slots[1, 6])
        assert store.load("latest")["step"] == 7

    def test_another_state_of_the_same_step_is_not_the_parent(self) -> None:
        world = World()
        term = open_term(world.journal, None, patience=HASTE)
        kept = save(term, 1)
        data = record_text.encode_open(
            OpenRecord(2, kept._replace(state="7" * 32), "0" * 32, 0.0, previous=term.catalog.last),
            seq=2,
            run=world.fmt.run,
        )
        world.create(slot_key(2), data)
        with pytest.raises(CorruptLogError, match="continues from 1@1"):
            read(world.journal, patience=HASTE).catalog.latest()

    def test_a_parent_that_was_retired_later_is_no_loss(self) -> None:
        world = World()
        term = open_term(world.journal, None, patience=HASTE)
        kept, last = save(term, 1), save(term, 2)
        second = open_term(world.journal, last, patience=HASTE)
        drops = read(world.journal).catalog.encodings[last.node][0].segments
        second.commit(replace(full(2, 3), segments=(), checkpoints=(), encodings=(), retires=(last.node,), drops=drops))
        newest = read(world.journal, patience=HASTE).catalog.latest()
        assert newest is not None
        assert newest.id == kept


class TestSteps:
    def test_a_step_of_an_abandoned_branch_is_not_taken_for_a_lost_newer_one(self, store: Store) -> None:
        with store.writer(parent=4, poll_seconds=None) as writer:
            writer.save(state(50), 5)
            writer.save(state(60), 6)
        assert store.load(6)["step"] == 60
        damage(store, store.view().catalog.slots[2, 6])
        with pytest.raises(CorruptLogError, match="6@1"):
            store.load(6)
        assert store.load("6@1")["step"] == 6
        assert store.load(5)["step"] == 50
        with pytest.raises(CorruptLogError):
            store.writer(parent=6)

    def test_damage_before_the_step_hides_nothing(self, store: Store) -> None:
        store.writer(parent=4, poll_seconds=None).close()
        damage(store, 2)
        assert store.load(6)["step"] == 6


class TestAudit:
    """`verify` checks slots that readers, which begin from a fold, skip."""

    def long(self, slots: int) -> Store:
        """A store with K = 4 that was folded and trimmed as far as the rules allow."""
        world = World(every=4)
        store = Store(world)
        world.create("FORMAT", record_text.encode_format(world.fmt))
        term = open_term(world.journal, None, patience=HASTE)
        for step in range(1, slots):
            save(term, step)
            if step % 3 == 0:
                fold_writer.fold(world.journal, term.view())
                fold_writer.trim(world.journal, term.view())
        return store

    def log_damage(self, store: Store) -> dict[str, str]:
        """Of the log alone: these segments have no objects."""
        return {found.key: found.what for found in ckptstore.verify(store).damage if found.key.startswith("log/")}

    def test_slots_that_folding_deleted_are_not_missed(self) -> None:
        store = self.long(20)
        assert len(store.backend.list("log/")) < 15
        assert self.log_damage(store) == {}

    @pytest.mark.parametrize("seq", [0, 4, 16, 17])
    def test_a_slot_that_nobody_may_delete_is_missed_below_the_fold(self, seq: int) -> None:
        store = self.long(20)
        assert store.view().fold_seq > seq
        store.backend.delete(slot_key(seq))
        assert self.log_damage(store) == {slot_key(seq): "the slot is missing, and no fold allows this deletion"}
        assert store.view().damage == ()

    def test_a_slot_below_the_fold_that_continues_another_log(self) -> None:
        store = self.long(20)
        seq = store.view().fold_seq - 1
        data, _ = record_text.encode_commit(
            replace(full(1, 99), nonce="1" * 32, previous="2" * 32), seq=seq, run=store.run, manifest=""
        )
        store.backend.delete(slot_key(seq))
        store.backend.create(slot_key(seq), data)
        found = self.log_damage(store)
        assert set(found) == {slot_key(seq), slot_key(seq + 1)}
        assert all("does not continue the log" in what for what in found.values())

    def test_a_lost_fold_is_one_line(self) -> None:
        """The fold is missing, not the slots that were deleted after it."""
        store = self.long(40)
        store.backend.delete(store.backend.list("fold/")[-1])
        (missing,) = [found.what for found in ckptstore.verify(store).damage if not found.key.startswith("seg/")]
        assert "a fold is missing" in missing
        assert self.log_damage(store) == {}


class TestLostEnd:
    """The last slots are gone: their terms' segments prove it, if they belong to newer terms."""

    def cut(self, store: Store, end: int) -> None:
        for seq in range(end, store.view().end):
            store.backend.delete(slot_key(seq))

    @pytest.fixture
    def place(self, tmp_path: Path) -> Iterator[Store]:
        """On a disk, where folders are listed: term 1 with steps 1..6, term 2 with step 7, whose slots are gone."""
        store = ckptstore.open(tmp_path / "run")
        with store.writer(poll_seconds=None) as writer:
            for step in range(1, 7):
                writer.save(state(step), step)
        end = store.view().end
        with store.writer(poll_seconds=None) as writer:
            writer.save(state(7), 7)
        self.cut(store, end)
        yield store
        store.close()

    def test_it_is_seen(self, store: Store) -> None:
        end = store.view().end
        with store.writer(poll_seconds=None) as writer:
            writer.save(state(7), 7)
        self.cut(store, end)
        (found,) = ckptstore.verify(store).damage
        assert found.key.startswith("seg/0000000002/")
        assert "its end was lost" in found.what
        store.backend.delete(found.key)
        assert ckptstore.verify(store).ok
        assert store.load("latest")["step"] == 6

    def test_latest_and_steps_are_refused(self, place: Store) -> None:
        for ref in ("latest", 6):
            with pytest.raises(CorruptLogError, match="6@1"):
                place.load(ref)
        assert place.load("6@1")["step"] == 6
        with pytest.raises(CheckpointNotFoundError, match="the end of the log is lost, with term 2"):
            place.load(7)

    def test_writing_on_is_a_choice_and_takes_a_new_term(self, place: Store) -> None:
        with pytest.raises(CorruptLogError, match="6@1"):
            place.writer()
        lost = place.backend.list("seg/0000000002/")
        for _ in range(3):
            place.writer(parent="6@1", poll_seconds=None).close()
            assert collect(place.journal).segments == ()
        assert set(place.view().catalog.terms) == {1, 3, 4, 5}
        assert place.load("latest")["step"] == 6
        assert place.backend.list("seg/0000000002/") == lost
        assert not ckptstore.verify(place).ok

    def test_a_log_that_is_gone_as_a_whole(self, place: Store) -> None:
        self.cut(place, 0)
        with pytest.raises(CorruptLogError, match=r"no checkpoint is intact\n`ckpt repair") as lost:
            place.load("latest")
        hint = f"`ckpt repair {shlex.quote(place.url)} DST` builds a store from what the segments still contain"
        # No checkpoint to name: the error gives another remedy, with the real place.
        assert lost.value.__notes__ == [hint]
        with pytest.raises(ckptstore.CheckpointNotFoundError, match="is left") as gone:
            place.load(6)
        assert gone.value.__notes__ == [hint]
        with pytest.raises(CorruptLogError):
            place.writer()

    def test_a_folder_of_a_term_that_wrote_nothing_proves_nothing(self, place: Store) -> None:
        for key in place.backend.list("seg/0000000002/"):
            place.backend.delete(key)
        assert place.load("latest")["step"] == 6


class TestTags:
    def test_a_tag_that_a_lost_slot_may_have_moved_is_refused(self, store: Store) -> None:
        with store.writer(parent=4, poll_seconds=None) as writer:
            writer.save(state(50), 5)
            writer.tag("best", 5)
            moved = store.view().end
            writer.save(state(60), 6)
            writer.tag("best", 6)
            writer.save(state(70), 7)
        assert store.load("tag:best")["step"] == 60
        damage(store, moved + 1)
        with pytest.raises(CorruptLogError, match="what is left of it names 5@2"):
            store.load("tag:best")
        assert store.load("5@2")["step"] == 50
        damage(store, moved)
        with pytest.raises(CheckpointNotFoundError, match="damaged or lost, which may have held it"):
            store.load("6@2")
        with pytest.raises(CorruptLogError, match="may have held what tag 'worst' names"):
            store.load("tag:worst")


class TestForeignFolder:
    def test_a_linked_log_is_refused_at_once(self, tmp_path: Path) -> None:
        store = ckptstore.open(tmp_path / "run")
        store.writer(poll_seconds=None).close()
        (tmp_path / "run" / "log").rename(tmp_path / "log")
        (tmp_path / "run" / "log").symlink_to(tmp_path / "log")
        again = ckptstore.open(tmp_path / "run")
        for call in (again.load, again.writer, again.view, lambda: ckptstore.verify(again)):
            with pytest.raises(ForeignObjectError, match="log"):
                call()


def test_a_slot_that_appears_while_it_is_looked_for_is_no_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was absent in the first query, and its follower existed a moment later: it is queried again."""
    world = World()
    term = open_term(world.journal, None, patience=HASTE)
    for step in (1, 2):
        save(term, step)
    get, missed = world.get, []

    def late(key: str, limit: int = 1 << 20) -> bytes:
        if key == slot_key(1) and not missed:
            missed.append(key)
            raise KeyNotFoundError(f"{key} does not exist")
        return get(key, limit)

    monkeypatch.setattr(world, "get", late)
    found = read(world.journal, patience=HASTE)
    assert (missed, found.damage, found.end) == ([slot_key(1)], (), 3)


def test_a_stray_where_slots_were_deleted_is_stale_and_no_damage() -> None:
    """An old view continues at a slot that has been folded and deleted, where another late create has taken effect."""
    world = World(every=4)
    term = open_term(world.journal, None, patience=HASTE)
    for step in (1, 2):
        save(term, step)
    before = read(world.journal, patience=HASTE)
    for step in (3, 4, 5):
        save(term, step)
        if step != 4:
            fold_writer.fold(world.journal, term.view())
    fold_writer.trim(world.journal, term.view())
    assert before.end == 3
    assert not exists(world, slot_key(3))
    assert exists(world, slot_key(4))  # an anchor, from which on all is there
    stray = CommitRecord(1, "f" * 32, previous="e" * 32)
    data, _ = record_text.encode_commit(stray, seq=before.end, run=world.fmt.run, manifest="0" * 32)
    world.create(slot_key(before.end), data)
    after = read(world.journal, before, HASTE)
    assert after.damage == ()
    assert after.catalog == world.catalog()


@pytest.mark.parametrize("look_above", [True, False])
def test_another_record_where_a_fold_ends_is_damage_to_every_reader(store: Store, look_above: bool) -> None:
    """Also to a reader that lists nothing: its `latest` would be older than the other writer's new term."""
    view = store.view()
    fold_writer.fold(store.journal, view)
    end = view.end - 1
    other = OpenRecord(2, None, "b" * 32, 1.0, previous=NO_SLOT)
    store.backend.replace(slot_key(end), record_text.encode_open(other, seq=end, run=store.run))
    found = read(ckptstore.open(store.url).journal, look_above=look_above, tell=False)
    assert (found.fold_seq, found.damage) == (end, (end,))
    with pytest.raises(CorruptLogError):
        found.catalog.latest()
