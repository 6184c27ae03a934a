"""OPEN and COMMIT: settling, the number of tries, and the error for a lost parent."""

from __future__ import annotations

import random

import pytest

from ckptstore.errors import CommitUnknownError, CorruptLogError, FencedError
from ckptstore.formats.history.records import slot_key
from ckptstore.log.journal import Journal
from ckptstore.log.log_reader import Patience
from ckptstore.log.term import Term, open_term, read
from tests.log.log_world import HASTE, Fate, FaultyBackend, World, save


class Noted(FaultyBackend):
    """A backend for a `World` that records its calls; creates in ``log/`` meet `fates` in turn."""

    def __init__(self, world: World, *fates: Fate) -> None:
        self.asked: list[str] = []
        left = list(fates)

        def fate(operation: str, key: str) -> Fate:
            self.asked.append(f"{operation} {key}")
            return left.pop(0) if left and operation == "create" and key.startswith("log/") else "ok"

        super().__init__(world, fate)

    def of(self, operation: str) -> list[str]:
        return [asked.partition(" ")[2] for asked in self.asked if asked.startswith(operation)]


def opened(backend: World | FaultyBackend, world: World, patience: Patience = HASTE) -> Term:
    return open_term(Journal(backend, world.fmt), None, patience=patience)


def test_the_first_term_has_nothing_to_settle_and_a_later_one_the_log() -> None:
    world = World()
    first = Noted(world)
    opened(first, world)
    assert first.of("settle") == []
    second = Noted(world)
    opened(second, world)
    assert second.of("settle") == ["log/"]
    assert second.asked.index("settle log/") < second.asked.index(f"create {slot_key(1)}")


@pytest.mark.parametrize(("fates", "settled"), [(("ok",), []), (("lost answer",), ["log/"]), (("error",), [])])
def test_a_slot_is_settled_where_it_was_only_read_back(fates: tuple[Fate, ...], settled: list[str]) -> None:
    world = World()
    backend = Noted(world, "ok", *fates)
    term = opened(backend, world)
    save(term, 1)
    assert backend.of("settle") == settled
    assert len(world.canon) == 2


def test_records_of_others_are_not_settled() -> None:
    world = World()
    backend = Noted(world)
    term = opened(backend, world)
    opened(world, world)
    with pytest.raises(FencedError):
        save(term, 1)
    assert backend.of("settle") == []


@pytest.mark.parametrize("term", [1, 2])
def test_a_term_of_the_other_tier_is_opened_only_above_every_term_of_this_one(term: int) -> None:
    """A writer without the remote may open a term here after the remote's: two terms must not share a number."""
    here, there = World(), World()
    theirs = [opened(there, there).opened for _ in range(3)]
    opened(here, here)
    same = open_term(here.journal, None, patience=HASTE, like=theirs[1])
    assert (same.number, same.opened.nonce) == (2, theirs[1].nonce)
    with pytest.raises(FencedError, match=rf"^term {term} of the other tier: this one has term 2 already$"):
        open_term(here.journal, None, patience=HASTE, like=theirs[term - 1])
    assert len(here.canon) == 2, "nothing was opened"
    assert open_term(here.journal, None, patience=HASTE, like=theirs[2]).number == 3


def waiting() -> tuple[Patience, list[float]]:
    paused: list[float] = []
    return Patience(tries=3, first=1.0, longest=3.0, sleep=paused.append), paused


def test_a_create_is_tried_so_often_with_growing_pauses_and_none_at_the_end() -> None:
    world = World()
    patience, paused = waiting()
    backend = Noted(world, "ok", *["error"] * 9)
    term = opened(backend, world, patience)
    numbers = random.getstate()
    with pytest.raises(CommitUnknownError):
        save(term, 1)
    assert random.getstate() == numbers  # they belong to the training script
    assert backend.of("create") == [slot_key(0)] + [slot_key(1)] * 4
    assert len(paused) == 3
    for found, longest in zip(paused, (1.0, 2.0, 3.0), strict=True):
        assert longest / 2 <= found <= longest


def test_the_last_try_counts() -> None:
    world = World()
    patience, paused = waiting()
    term = opened(Noted(world, "ok", *["error"] * 3), world, patience)
    save(term, 1)
    assert len(paused) == 3


def lost(world: World, *damaged: int) -> CorruptLogError:
    """The error when the newest checkpoint is chosen, and its base is in a damaged slot."""
    for seq in damaged:
        world.damage(slot_key(seq))
    with pytest.raises(CorruptLogError) as refused:
        open_term(world.journal, lambda catalog: max(catalog.checkpoints.values(), key=lambda e: e.step).id)
    return refused.value


@pytest.mark.parametrize(
    ("damaged", "said"),
    [
        ((1,), "is lost with log slot 1, which is damaged; none can"),
        ((2,), "is lost with log slot 2, which is damaged; the newest that can is 1@1: name it as parent"),
        ((2, 3), "is lost with log slot 2, 3, which is damaged; the newest that can is 1@1: name it as parent"),
    ],
)
def test_a_lost_parent_is_reported_with_the_newest_intact_one(damaged: tuple[int, ...], said: str) -> None:
    world = World(every=1000)
    term = opened(world, world)
    base = save(term, 1)
    for step in range(2, 6):
        base = save(term, step, base)
    assert said in str(lost(world, *damaged))


def test_a_dead_term_says_the_same_again() -> None:
    world = World()
    term = opened(world, world)
    opened(world, world)
    with pytest.raises(FencedError) as first:
        save(term, 1)
    with pytest.raises(FencedError) as second:
        save(term, 1)
    assert first.value is second.value


def test_a_read_starts_over_so_often_with_growing_pauses_and_none_at_the_end() -> None:
    """Slots were deleted that no fold replaces: every READ finds that it is stale."""
    world = World(every=4)
    term = opened(world, world)
    for step in range(1, 7):
        save(term, step)
    for seq in (1, 2):
        world.delete(slot_key(seq))
    patience, paused = waiting()
    with pytest.raises(CorruptLogError, match="slot 1 is absent or stray"):
        read(world.journal, patience=patience)
    assert len(paused) == 3
    for found, longest in zip(paused, (1.0, 2.0, 3.0), strict=True):
        assert longest / 2 <= found <= longest
