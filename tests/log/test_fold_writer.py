"""Folds and the slots that they let go: anchors, OPENs and everything that a reader may still need stay."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.errors import StorageError
from ckptstore.formats.history.records import OpenRecord, fold_of, slot_key, slot_of
from ckptstore.log import fold_writer
from ckptstore.log.journal import Journal
from ckptstore.log.log_reader import View
from ckptstore.log.term import Term, open_term, read
from tests.forms import short_or
from tests.log.log_world import HASTE, Fate, FaultyBackend, World, save


def opened(world: World) -> Term:
    return open_term(world.journal, None, patience=HASTE)


def view(world: World) -> View:
    return read(world.journal, patience=HASTE)


def slots(world: World) -> set[int]:
    return {seq for key in world.list("log/") if (seq := slot_of(key)) is not None}


def folds(world: World) -> list[int]:
    return sorted(place[0] for key in world.list("fold/") if (place := fold_of(key)))


@pytest.mark.parametrize(
    ("end", "fold_seq", "live", "expected"),
    [
        (63, -1, 0, False),
        (64, -1, 0, True),
        (164, 100, 100, False),
        (165, 100, 100, True),
        (1000, 0, 16_000, False),
        (1001, 0, 16_000, True),
        (1024, 0, 10**6, False),
        (1025, 0, 10**6, True),
    ],
)
def test_a_fold_is_due_after_some_slots_more_of_them_in_big_stores(
    end: int, fold_seq: int, live: int, expected: bool
) -> None:
    assert fold_writer.due(end, fold_seq, live) is expected


def test_maintenance_keeps_the_log_short() -> None:
    world = World(every=64)
    term = opened(world)
    folded = [step for step in range(1, 301) if (save(term, step), fold_writer.maintain(term))[1]]
    assert folded == [63, 127, 191, 255]
    assert folds(world) == [191, 255]
    assert slots(world) == {0, 64, 128} | set(range(192, 301))
    found = view(world)
    assert found.fold_seq == term.fold_seq == 255
    assert found.reads == 46
    assert found.catalog == world.catalog() == term.catalog


def test_a_failed_fold_does_not_touch_the_term() -> None:
    world = World(every=64)
    failing = FaultyBackend(world, lambda _operation, key: "error" if key.startswith("fold/") else "ok")
    term = opened(world)
    for step in range(1, 100):
        save(term, step)
    term.journal.backend = failing
    with pytest.raises(StorageError):
        fold_writer.maintain(term)
    save(term, 100)
    term.journal.backend = world
    assert fold_writer.maintain(term)


def test_seen_records_are_made_durable_before_any_deletion() -> None:
    world = World()
    term = opened(world)
    done: list[str] = []

    def fate(operation: str, key: str) -> Fate:
        if operation in ("settle", "delete"):
            done.append(f"{operation} {key.split('/')[0]}")
        return "ok"

    backend = FaultyBackend(world, fate)
    for step in range(1, 20):
        save(term, step)
        fold_writer.fold(world.journal, term.view())
    fold_writer.trim(Journal(backend, world.fmt), term.view())
    assert done[:2] == ["settle fold", "settle log"]
    assert {"delete fold", "delete log"} == set(done[2:])


def test_trimming_when_there_is_nothing_to_delete_does_nothing() -> None:
    world = World()
    term = opened(world)
    assert fold_writer.trim(world.journal, term.view()) == fold_writer.Trimmed()
    save(term, 1)
    fold_writer.fold(world.journal, term.view())
    assert fold_writer.trim(world.journal, term.view()) == fold_writer.Trimmed()


def test_no_slot_goes_before_the_anchor_above_it_exists() -> None:
    world = World(every=8)
    term = opened(world)
    for step in range(1, 8):
        save(term, step)
        fold_writer.fold(world.journal, term.view())
    fold_writer.trim(world.journal, term.view())
    assert slots(world) == set(range(8))
    save(term, 8)
    fold_writer.trim(world.journal, term.view())
    assert slots(world) == {0, 7, 8}


def test_with_an_old_view_trimming_reaches_no_further_than_it_knows_the_opens() -> None:
    world = World()
    term = opened(world)
    save(term, 1)
    old = term.view()
    term = opened(world)
    for step in range(1, 10):
        save(term, step)
        fold_writer.fold(world.journal, term.view())
    fold_writer.trim(world.journal, old)
    assert slots(world) == set(range(12)) - {1}
    fold_writer.trim(world.journal, term.view())
    assert slots(world) == {0, 2, 4, 8, 9, 10, 11}


def test_damaged_slots_stay_as_evidence() -> None:
    world = World()
    term = opened(world)
    for step in range(1, 4):
        save(term, step)
    world.damage(slot_key(2))
    term = open_term(world.journal, None, patience=HASTE)
    for step in range(1, 20):
        save(term, step)
        fold_writer.fold(world.journal, view(world))
    fold_writer.trim(world.journal, view(world))
    assert 2 in slots(world)
    assert {1, 3}.isdisjoint(slots(world))
    assert view(world).damage == (2,)


@given(st.data())
@settings(max_examples=short_or(24, 60), deadline=None)
def test_only_what_no_reader_needs_is_deleted(data: st.DataObject) -> None:
    world = World(every=data.draw(st.integers(1, 7), label="K"))
    term = opened(world)
    step = 0
    for action in data.draw(
        st.lists(st.sampled_from(["save", "save", "fold", "open"]), min_size=8, max_size=25), label="log"
    ):
        if action == "save":
            save(term, step := step + 1)
        elif action == "fold":
            fold_writer.fold(world.journal, view(world))
        else:
            term = opened(world)
    folded = folds(world)
    broken = data.draw(st.sampled_from(folded) if folded else st.none(), label="damaged fold")
    for key in world.list("fold/"):
        if slot_key(broken or 0)[4:] in key and data.draw(st.booleans()):
            world.damage(key)
            folded.remove(broken)
    before = slots(world)
    fold_writer.trim(world.journal, view(world))
    limit = folded[-2] if len(folded) > 1 else -1
    opens = {seq for seq in before if isinstance(world.record(seq), OpenRecord)}
    every = world.fmt.anchor_every
    deleted = {
        seq
        for seq in before
        if seq <= limit and seq % every and seq not in opens and (seq // every + 1) * every < len(world.canon)
    }
    assert slots(world) == before - deleted
    assert set(folded[-2:]) <= set(folds(world))
    # Whichever of the two newest folds a reader begins from, it finds the whole history.
    assert view(world).catalog == world.catalog()
    for key in world.list("fold/")[-1:]:
        world.damage(key)
        if len(folded) > 1:
            assert view(world).catalog == world.catalog()


@given(st.integers(0, 40))
@settings(max_examples=30, deadline=None)
def test_trimming_may_stop_anywhere(operations: int) -> None:
    world = World()
    term = opened(world)
    left = [operations]

    def fate(_operation: str, _key: str) -> Fate:
        left[0] -= 1
        return "error" if left[0] < 0 else "ok"

    for step in range(1, 20):
        save(term, step)
        if step % 3 == 0:
            fold_writer.fold(world.journal, term.view())
    try:
        fold_writer.trim(Journal(FaultyBackend(world, fate), world.fmt), term.view())
    except StorageError:
        assert view(world).catalog == world.catalog()
        fold_writer.trim(world.journal, term.view())
    assert folds(world) == [15, 18]
    assert slots(world) == {0, 4, 8, 12, 16, 17, 18, 19}
    assert view(world).catalog == world.catalog()
