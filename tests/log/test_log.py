"""READ, WRITER OPEN and COMMIT, one hazard at a time. ``test_log_machine`` mixes them."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace

import pytest

from ckptstore.backends.base import Backend
from ckptstore.errors import (
    CheckpointNotFoundError,
    CommitUnknownError,
    CorruptLogError,
    FencedError,
    IncompatibleFormatError,
    KeyExistsError,
    ReadOnlyError,
    StepOrderError,
    StorageError,
    UsageError,
)
from ckptstore.formats.history import record_text
from ckptstore.formats.history.records import CheckpointId, CommitRecord, OpenRecord, fold_of, manifest_key, slot_key
from ckptstore.log import fold_writer
from ckptstore.log.journal import Journal
from ckptstore.log.term import Term, View, open_term, read
from tests.log.log_world import HASTE, Actor, Fate, FaultyBackend, World, full, save, scripted, segments_of


def latest(catalog: object) -> CheckpointId | None:
    entry = catalog.latest()  # type: ignore[attr-defined]
    return None if entry is None else entry.id  # type: ignore[no-any-return]


def opened(world: World, backend: Backend | None = None) -> Term:
    return open_term(Journal(backend or world, world.fmt), latest, {"host": "here"}, HASTE)


def view(world: World) -> View:
    return read(world.journal, patience=HASTE)


class TestRead:
    def test_an_empty_log(self) -> None:
        found = view(World())
        assert (found.end, found.fold_seq, found.catalog.term) == (0, -1, 0)

    def test_everything_before_the_end(self) -> None:
        world = World()
        term = opened(world)
        for step in range(1, 10):
            save(term, step)
        found = view(world)
        assert found.end == 10
        assert found.catalog == world.catalog() == term.catalog

    def test_an_earlier_view_is_continued(self) -> None:
        world = World(every=1000)
        term = opened(world)
        for step in range(1, 10):
            save(term, step)
        before = view(world)
        save(term, 10)
        after = read(world.journal, before, HASTE)
        assert after.reads == 1
        assert after.catalog == world.catalog()
        assert before.end == 10
        assert before.catalog == world.catalog(10)

    def test_a_stale_view_is_not_continued(self) -> None:
        world = World()
        term = opened(world)
        save(term, 1)
        before = view(world)
        for step in range(2, 20):
            save(term, step)
            fold_writer.fold(world.journal, term.view())
        fold_writer.trim(world.journal, term.view())
        assert slot_key(before.end) not in world.list("log/")
        assert read(world.journal, before, HASTE).catalog == world.catalog()

    def test_a_late_create_in_a_deleted_slot_is_not_history(self) -> None:
        world = World()
        first = opened(world, scripted(world, ["ok", "ok", "duplicate"]))
        save(first, 1)
        save(first, 2)  # its duplicate is in flight
        for step in range(3, 20):
            save(first, step)
            fold_writer.fold(world.journal, first.view())
        fold_writer.trim(world.journal, first.view())
        world.deliver(0)
        assert slot_key(2) in world.list("log/")
        assert view(world).catalog == world.catalog()
        for key in world.list("fold/"):
            world.delete(key)
        with pytest.raises(CorruptLogError, match="slot 1 is absent or stray"):
            view(world)

    @pytest.mark.parametrize("every", [4, 8])
    @pytest.mark.parametrize("next_is", ["commit", "open"])
    def test_a_stray_open_taken_for_history_is_uncovered_by_the_record_after_it(self, next_is: str, every: int) -> None:
        world = World(every=every)
        writer = opened(world)
        save(writer, 1)
        save(writer, 2)
        slow = Actor(world, "opener", lambda backend: opened(world, backend) and None)
        while slow.at != ("create", slot_key(3)):
            slow.step()
        found: list[View] = []
        reader = Actor(world, "reader", lambda backend: found.append(read(Journal(backend, world.fmt), patience=HASTE)))
        while reader.at != ("get", slot_key(3)):
            reader.step()
        save(writer, 3)
        fold_writer.fold(world.journal, writer.view())
        writer = opened(world) if next_is == "open" else writer
        if next_is == "commit":
            save(writer, 4)
        fold_writer.fold(world.journal, writer.view())
        while len(world.canon) <= every:
            save(writer, len(world.canon) + 4)
        fold_writer.trim(world.journal, writer.view())
        assert slot_key(3) not in world.list("log/")
        slow.step()  # OPEN of term 2 arrives in slot 3, which was deleted
        reader.step()  # and is read as if it were history
        reader.finish()
        assert found[0].catalog == world.catalog()
        slow.finish()
        assert view(world).catalog == world.catalog()

    def test_a_reader_that_was_overtaken_starts_over(self) -> None:
        world = World(every=4)
        writer = opened(world)
        save(writer, 1)
        found: list[View] = []
        reader = Actor(world, "reader", lambda backend: found.append(read(Journal(backend, world.fmt), patience=HASTE)))
        while reader.at != ("get", slot_key(1)):
            reader.step()
        for step in range(2, 9):
            save(writer, step)
            fold_writer.fold(world.journal, writer.view())
        fold_writer.trim(world.journal, writer.view())
        reader.finish()
        assert found[0].catalog == world.catalog()

    def test_the_newest_fold_may_be_damaged(self) -> None:
        world = World()
        term = opened(world)
        for step in range(1, 20):
            save(term, step)
            fold_writer.fold(world.journal, term.view())
            fold_writer.trim(world.journal, term.view())
        newest = max(world.list("fold/"))
        world.damage(newest)
        found = view(world)
        assert found.catalog == world.catalog()
        assert found.bad_folds == (newest,)

    def test_a_newer_format_is_not_taken_for_damage(self) -> None:
        world = World()
        term = opened(world)
        record = full(1, 1)
        data, _ = record_text.encode_commit(replace(record, incompat=("warp",)), seq=1, run=world.fmt.run, manifest="")
        world.create(slot_key(1), data)
        with pytest.raises(IncompatibleFormatError, match="warp"):
            view(world)
        assert term.number == 1

    def test_a_failing_medium_is_not_taken_for_an_absent_slot(self) -> None:
        world = World()
        opened(world)
        backend = scripted(world, [])
        backend.fate = lambda operation, key: "error" if (operation, key) == ("get", slot_key(1)) else "ok"
        with pytest.raises(StorageError):
            read(Journal(backend, world.fmt), patience=HASTE)


class TestDamage:
    def store(self, commits: int = 6) -> tuple[World, Term]:
        world = World(every=1000)
        term = opened(world)
        for step in range(1, commits + 1):
            save(term, step)
        return world, term

    def test_reading_continues_after_a_damaged_slot(self) -> None:
        world, _ = self.store()
        world.damage(slot_key(3))
        found = view(world)
        assert found.damage == (3,)
        assert found.end == 7
        assert set(found.catalog.checkpoints) == {(1, step) for step in (1, 2, 4, 5, 6)}
        assert found.catalog.latest() is not None

    def test_damage_at_the_end_hides_the_newest(self) -> None:
        world, _ = self.store()
        world.damage(slot_key(6))
        found = view(world)
        with pytest.raises(CorruptLogError, match=r"slot 6 .*5@1"):
            found.catalog.latest()
        with pytest.raises(CorruptLogError):
            opened(world)
        entry = found.catalog.checkpoints[1, 5]
        term = open_term(world.journal, entry.id, patience=HASTE)  # an explicit parent
        assert save(term, 6).node == (2, 6)
        newest = view(world).catalog.latest()
        assert newest is not None
        assert newest.node == (2, 6)

    def test_a_damaged_open_is_passed_over(self) -> None:
        world, _ = self.store(2)
        save(opened(world), 3)
        world.damage(slot_key(3))
        found = view(world)
        assert found.damage == (3,)
        assert found.catalog.term == 2
        assert (2, 3) in found.catalog.checkpoints

    @pytest.mark.parametrize(("every", "lost"), [(1000, 1), (1000, 5), (3, 3), (2, 4), (5, 6)])
    def test_a_slot_that_the_medium_lost_is_damage_not_the_end(self, every: int, lost: int) -> None:
        world = World(every=every)
        term = opened(world)
        for step in range(1, 8):
            save(term, step)
        world.delete(slot_key(lost))
        found = view(world)
        assert found.damage == (lost,)
        assert found.end == 8

    def test_a_lost_slot_below_an_anchor_is_corruption(self) -> None:
        world = World(every=4)
        term = opened(world)
        for step in range(1, 8):
            save(term, step)
        world.delete(slot_key(2))
        with pytest.raises(CorruptLogError, match="slot 2"):
            view(world)

    @pytest.mark.parametrize("kind", ["OPEN of the same term", "COMMIT of a term without an OPEN"])
    def test_a_record_out_of_order_that_nobody_folded_is_damage(self, kind: str) -> None:
        world, _ = self.store(2)
        last, nonce = view(world).catalog.last, view(world).catalog.terms[1].nonce
        data = record_text.encode_open(OpenRecord(1, None, "0" * 32, 0.0, previous=last), seq=3, run=world.fmt.run)
        if kind.startswith("COMMIT"):
            data, _ = record_text.encode_commit(
                replace(full(2, 3), nonce=nonce, previous=last), seq=3, run=world.fmt.run, manifest=""
            )
        world.create(slot_key(3), data)
        found = view(world)
        assert found.damage == (3,)

    def test_a_damaged_slot_lets_no_older_term_back_in(self) -> None:
        world, _ = self.store(1)
        term = opened(world)
        save(term, 2)
        world.damage(slot_key(3))
        data, _ = record_text.encode_commit(full(1, 9), seq=4, run=world.fmt.run, manifest="")
        world.create(slot_key(4), data)
        found = view(world)
        assert found.damage == (3, 4)
        assert (1, 9) not in found.catalog.checkpoints

    def test_a_damaged_view_is_not_folded_until_a_parent_was_chosen(self) -> None:
        world, _ = self.store()
        world.damage(slot_key(6))
        with pytest.raises(CorruptLogError, match="not folded"):
            fold_writer.fold(world.journal, view(world))
        open_term(world.journal, view(world).catalog.checkpoints[1, 5].id, patience=HASTE)
        fold_writer.fold(world.journal, view(world))
        assert view(world).damage == (6,)


class TestOpen:
    def test_terms_count_up_and_name_their_parent(self) -> None:
        world = World()
        first = opened(world)
        assert (first.number, first.parent) == (1, None)
        identity = save(first, 5)
        second = opened(world)
        assert (second.number, second.parent) == (2, identity)
        assert second.catalog.terms[2].writer == {"host": "here"}

    def test_it_fences_the_earlier_writer_for_good(self) -> None:
        world = World()
        first = opened(world)
        opened(world)
        with pytest.raises(FencedError, match=r"term 2 .*host here"):
            save(first, 1)
        slots = len(world.canon)
        for _ in range(2):
            with pytest.raises(FencedError):
                save(first, 2)
        assert isinstance(first.dead, FencedError)
        assert len(world.canon) == slots

    @pytest.mark.parametrize("fates", [["lost answer"], ["error"], ["error", "lost answer"], ["duplicate"]])
    def test_a_doubtful_create_is_read_back(self, fates: list[Fate]) -> None:
        world = World()
        term = opened(world, scripted(world, fates))
        assert save(term, 1)
        assert len(world.canon) == 2

    def test_the_loser_of_a_race_starts_over_above_the_winner(self) -> None:
        world = World()
        terms: list[Term] = []
        slow = Actor(world, "slow", lambda backend: terms.append(opened(world, backend)))
        while slow.at is not None and slow.at[0] != "create":
            slow.step()
        fast = opened(world)
        slow.finish()
        assert [term.number for term in terms] == [2]
        with pytest.raises(FencedError):
            save(fast, 1)

    def test_an_open_in_a_deleted_slot_is_void(self) -> None:
        world = World()
        terms: list[Term] = []
        first = opened(world)
        save(first, 1)
        slow = Actor(world, "slow", lambda backend: terms.append(opened(world, backend)))
        while slow.at != ("create", slot_key(2)):
            slow.step()
        for step in range(2, 20):
            save(first, step)
            fold_writer.fold(world.journal, first.view())
        fold_writer.trim(world.journal, first.view())
        slow.step()  # creates slot 2, which was deleted
        assert world.get(slot_key(2)) != world.canon[2]
        while slow.at is not None and slow.at[0] != "list":  # the anchor above: its view was stale, no slot is read
            assert slow.at[0] != "get"
            slow.step()
        slow.finish()
        assert slow.error is None
        assert terms[0].catalog == world.catalog()
        assert terms[0].parent is not None
        assert terms[0].parent.step == 19

    def test_the_parent_is_looked_up_in_the_view_the_open_is_built_on(self) -> None:
        world = World()
        first = opened(world)
        old = save(first, 1)
        new = save(first, 2)
        errors: list[Exception] = []

        def work(backend: Backend) -> None:
            with pytest.raises(CheckpointNotFoundError) as caught:
                open_term(Journal(backend, world.fmt), old, patience=HASTE)
            errors.append(caught.value)

        slow = Actor(world, "slow", work)
        while slow.at is not None and slow.at[0] != "create":
            slow.step()
        first.commit(
            CommitRecord(1, "0" * 32, retires=(old.node,), drops=segments_of(first.catalog, old.node))
        )  # takes the slot
        slow.finish()
        assert errors
        assert open_term(world.journal, new, patience=HASTE).parent == new

    @pytest.mark.parametrize("identity", [CheckpointId(1, 9, "0" * 32), CheckpointId(1, 1, "0" * 32)])
    def test_a_parent_that_is_not_there_is_refused(self, identity: CheckpointId) -> None:
        world = World()
        save(opened(world), 1)
        with pytest.raises(CheckpointNotFoundError, match=identity.ref):
            open_term(world.journal, identity, patience=HASTE)
        assert len(world.canon) == 2

    def test_a_base_that_is_no_longer_promised_is_no_parent(self) -> None:
        world = World()
        term = opened(world)
        base = save(term, 1)
        save(term, 2, base, retires=(base.node,))
        with pytest.raises(CheckpointNotFoundError):
            open_term(world.journal, base, patience=HASTE)

    def test_a_read_only_medium_or_an_unknown_feature_is_refused(self) -> None:
        world = World()
        fmt = replace(world.fmt, features={"read": (), "write": ("warp",)})
        with pytest.raises(ReadOnlyError, match="warp"):
            open_term(Journal(world, fmt), None, patience=HASTE)
        term = opened(world)
        term.commit(replace(full(1, 1), ro_compat=("weft",)))
        fold_writer.fold(world.journal, term.view())
        assert view(world).catalog.latest()
        with pytest.raises(ReadOnlyError, match="weft"):
            opened(world)
        world.read_only = True
        with pytest.raises(ReadOnlyError, match="read-only"):
            opened(world)

    def test_a_slot_that_exists_and_does_not_is_the_mediums_fault(self) -> None:
        class Odd(World):
            def create(self, key: str, data: bytes) -> None:
                raise KeyExistsError(f"{key} exists")

        with pytest.raises(StorageError, match="does not exist in turn") as caught:
            opened(Odd())
        assert not isinstance(caught.value, KeyExistsError)

    def test_a_medium_that_refuses_every_create_is_reported(self) -> None:
        world = World()
        with pytest.raises(StorageError):
            opened(world, scripted(world, ["error"] * 3))
        assert not world.canon


class TestCommit:
    @pytest.mark.parametrize(
        "fates", [["lost answer"], ["duplicate"], ["error"], ["error", "error"], ["error", "lost answer"]]
    )
    def test_a_doubtful_create_is_read_back_and_identical_bytes_are_sent_again(self, fates: list[Fate]) -> None:
        world = World()
        term = opened(world, scripted(world, ["ok", *fates]))
        save(term, 1)
        save(term, 2)
        assert term.dead is None
        assert view(world).catalog == term.catalog
        assert len(world.canon) == 3
        while world.net:
            world.deliver(0)
        assert view(world).catalog == term.catalog

    def test_a_create_that_arrives_late_after_all_was_ones_own(self) -> None:
        world = World()
        backend = scripted(world, ["ok", "late"])
        term = opened(world, backend)
        passed = backend.fate

        def fate(operation: str, key: str) -> Fate:
            if operation == "get" and world.net:
                world.deliver(0)
            return passed(operation, key)

        backend.fate = fate
        save(term, 1)
        assert len(world.canon) == 2

    def test_unknown_ends_the_term_and_deletes_nothing(self) -> None:
        world = World()
        term = opened(world, scripted(world, ["ok", "late", "late", "late"]))
        with pytest.raises(CommitUnknownError, match="slot 1"):
            save(term, 1)
        for _ in range(2):
            with pytest.raises(CommitUnknownError):
                save(term, 2)
        assert len({data for _, data in world.net}) == 1  # one byte string per slot, ever
        world.deliver(0)
        newest = view(world).catalog.latest()
        assert newest is not None
        assert newest.step == 1

    def test_a_failing_read_back_is_tried_again(self) -> None:
        world = World()
        backend = scripted(world, ["ok", "lost answer"])
        term = opened(world, backend)
        fails = ["get"]
        passed = backend.fate
        backend.fate = lambda operation, key: (
            "error" if operation in fails and not fails.clear() else passed(operation, key)  # type: ignore[func-returns-value]
        )
        save(term, 1)
        assert term.dead is None

    @pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
    @pytest.mark.parametrize("landed", [False, True])
    def test_an_interrupt_while_the_slot_is_sent_ends_the_term(self, error: type[BaseException], landed: bool) -> None:
        world = World()
        backend = scripted(world, [])
        term = opened(world, backend)

        def create(key: str, data: bytes) -> None:
            if landed:
                world.create(key, data)
            raise error

        backend.create = create  # type: ignore[method-assign]
        with pytest.raises(error):
            save(term, 1)
        del backend.create
        with pytest.raises(CommitUnknownError):
            save(term, 2)
        assert len(world.canon) == 1 + landed

    def test_a_refused_record_leaves_the_term_alive(self) -> None:
        world = World()
        term = opened(world)
        save(term, 5)
        with pytest.raises(StepOrderError):
            save(term, 5)
        with pytest.raises(UsageError):
            term.commit(CommitRecord(1, "0" * 32, drops=segments_of(term.catalog, (1, 5))))
        with pytest.raises(ValueError, match="JSON"):
            save(term, 6, extra={"loss": float("nan")})
        save(term, 6)
        assert len(world.canon) == 3

    def test_the_catalog_in_memory_equals_the_read_one(self) -> None:
        world = World()
        term = opened(world)
        save(term, 1, extra={"shape": (1, 2)})
        assert term.catalog == view(world).catalog

    def test_a_base_dropped_meanwhile_is_reported_so_that_the_writer_encodes_again(self) -> None:
        world = World()
        term = opened(world)
        base = save(term, 1)
        term.commit(CommitRecord(1, "0" * 32, retires=(base.node,), drops=segments_of(term.catalog, base.node)))
        with pytest.raises(CheckpointNotFoundError, match="1@1"):
            save(term, 2, base)
        save(term, 2)

    def test_commits_may_finish_out_of_order(self) -> None:
        world = World()
        term = opened(world)
        for step in (3, 1, 2):
            save(term, step)
        newest = view(world).catalog.latest()
        assert newest is not None
        assert newest.step == 3


class TestManifest:
    def big(self, term: Term, step: int) -> CommitRecord:
        return full(term.number, step, drops=tuple(secrets.token_hex(16) for _ in range(9000)))

    def test_a_record_too_long_for_a_slot_is_committed_all_the_same(self) -> None:
        world = World()
        term = opened(world)
        term.commit(self.big(term, 1))
        assert len(world.get(slot_key(1))) < 1000
        assert view(world).catalog == term.catalog
        assert len(view(world).catalog.dropped) == 9000

    def test_a_manifest_that_cannot_be_written_leaves_the_term_alive(self) -> None:
        world = World()
        backend = scripted(world, ["error"] * 3, prefix="seg/")
        term = opened(world, backend)
        with pytest.raises(StorageError):
            term.commit(self.big(term, 1))
        assert len(world.canon) == 1
        save(term, 1)

    @pytest.mark.parametrize("harm", [World.damage, World.delete])
    def test_a_harmed_manifest_is_damage(self, harm: Callable[[World, str], None]) -> None:
        world = World(every=1000)
        term = opened(world)
        term.commit(self.big(term, 1))
        save(term, 2)
        (manifest,) = view(world).catalog.manifests
        harm(world, manifest_key(1, manifest))
        assert view(world).damage == (1,)

    def test_it_goes_after_its_slot_and_is_forgotten(self) -> None:
        world = World()
        term = opened(world)
        for step in range(1, 14):
            term.commit(self.big(term, step) if step in (2, 4, 13) else full(1, step))
            fold_writer.fold(world.journal, view(world))
            fold_writer.trim(world.journal, view(world))
        catalog = view(world).catalog
        kept = {manifest_key(*place) for place in [(1, name) for name in catalog.manifests]}
        assert {seq for _, seq in catalog.manifests.values()} == {4, 13}  # slot 4 is an anchor, slot 2 was trimmed
        assert set(world.list("seg/")) == kept
        assert not any(map(catalog.collectable, kept))

    def test_a_reader_between_slot_and_manifest_starts_over(self) -> None:
        world = World()
        term = opened(world)
        save(term, 1)
        term.commit(self.big(term, 2))
        found: list[View] = []
        slow = Actor(world, "slow", lambda backend: found.append(read(Journal(backend, world.fmt), patience=HASTE)))
        while slow.at is None or not slow.at[1].startswith("seg/"):
            slow.step()
        for step in range(3, 20):
            save(term, step)
            fold_writer.fold(world.journal, view(world))
            fold_writer.trim(world.journal, view(world))
        assert slot_key(2) not in world.list("log/")
        slow.finish()
        assert found[0].damage == ()
        assert found[0].catalog.latest() == view(world).catalog.latest()

    def test_also_where_every_slot_after_it_is_still_there(self) -> None:
        world = World(every=3)
        term = opened(world)
        save(term, 1)
        term.commit(self.big(term, 2))
        found: list[View] = []
        slow = Actor(world, "slow", lambda backend: found.append(read(Journal(backend, world.fmt), patience=HASTE)))
        while slow.at is None or not slow.at[1].startswith("seg/"):
            slow.step()
        for step in (3, 4):
            save(term, step)
            fold_writer.fold(world.journal, view(world))
        fold_writer.trim(world.journal, view(world))
        assert world.list("log/") == [slot_key(seq) for seq in (0, 3, 4)]
        slow.finish()
        assert found[0].damage == ()
        assert found[0].catalog == view(world).catalog

    def test_a_manifest_under_anothers_name_is_not_pointed_to(self) -> None:
        world = World()

        def fate(operation: str, key: str) -> Fate:
            if operation == "create" and key.startswith("seg/"):
                world.create(key, b"what somebody else wrote")
            return "ok"

        term = opened(world, FaultyBackend(world, fate))
        with pytest.raises(StorageError, match="exists already"):
            term.commit(self.big(term, 1))
        assert len(world.canon) == 1
        save(term, 1)


def test_folds_are_named_by_slot_and_hash() -> None:
    world = World()
    term = opened(world)
    save(term, 1)
    key = fold_writer.fold(world.journal, term.view())
    place = fold_of(key)
    assert place is not None
    assert place[0] == 1
    assert fold_writer.fold(world.journal, view(world)) == key
