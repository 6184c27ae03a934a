"""Folding at the limit between slots that are deleted and slots that stay."""

from __future__ import annotations

import secrets

from ckptstore.formats.history.records import CommitRecord, fold_of, slot_key
from ckptstore.log import fold_writer
from ckptstore.log.log_reader import View
from ckptstore.log.term import Term, open_term, read
from tests.log.log_world import HASTE, World, save


def opened(world: World) -> Term:
    return open_term(world.journal, None, patience=HASTE)


def view(world: World) -> View:
    return read(world.journal, patience=HASTE)


def folds(world: World) -> dict[int, str]:
    return {place[0]: key for key in world.list("fold/") if (place := fold_of(key))}


def test_a_fold_goes_where_no_slot_does() -> None:
    world = World(every=1000)
    term = opened(world)
    for step in (1, 2, 3):
        save(term, step)
        fold_writer.fold(world.journal, view(world))
    assert list(folds(world)) == [1, 2, 3]
    assert fold_writer.trim(world.journal, view(world)) == fold_writer.Trimmed(slots=0, folds=1, manifests=0)
    assert list(folds(world)) == [2, 3]
    assert len(world.list("log/")) == 4


def test_a_manifest_of_the_very_slot_that_a_fold_goes_through_is_forgotten_with_it() -> None:
    """The newest fold is damaged: the one below it still names a manifest that was deleted with its slot."""
    world = World(every=4)
    term = opened(world)
    save(term, 1)
    gone = tuple(secrets.token_hex(16) for _ in range(9000))
    term.commit(CommitRecord(term.number, secrets.token_hex(16), drops=gone))  # slot 2, too long for it
    fold_writer.fold(world.journal, view(world))
    for step in range(3, 6):
        save(term, step)
    fold_writer.fold(world.journal, view(world))
    assert set(folds(world)) == {2, 5}
    assert fold_writer.trim(world.journal, view(world)).manifests == 1
    assert slot_key(2) not in world.list("log/")
    world.damage(folds(world)[5])
    world.journal.fold = None  # another process: this one has read it
    found = view(world)
    assert (found.fold_seq, len(found.catalog.manifests)) == (2, 1)
    save(term, 6)
    fold_writer.fold(world.journal, view(world))
    again = view(world)
    assert (again.fold_seq, dict(again.catalog.manifests)) == (6, {})
    assert set(found.catalog.checkpoints) < set(again.catalog.checkpoints)
