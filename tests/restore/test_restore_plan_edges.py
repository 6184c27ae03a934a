"""Plans, REFs and answers where two things are nearly the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptstore.errors import CheckpointNotFoundError, CorruptionError
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.records import CheckpointEntry, CheckpointId, Encoding, Request, SegmentEntry
from ckptstore.log import refs, requests
from ckptstore.log.change import CatalogChange
from ckptstore.log.journal import Journal
from ckptstore.log.term import open_term
from ckptstore.restore.restore_plan import Rates as WorkRates
from ckptstore.restore.restore_plan import plan, plan_all, restore_seconds
from tests.log.log_world import HASTE, FaultyBackend, World, save

RATES = WorkRates(read=100.0, decode=50.0, replay=10.0)


def hexed(number: int) -> str:
    return f"{number:032x}"


def segment(number: int) -> SegmentEntry:
    return SegmentEntry(hexed(number), 1, 100, 64, hexed(0))


def catalog_of(*edges: Encoding, nbytes: int = 1000) -> Catalog:
    catalog = Catalog(term=1)
    for edge in edges:
        term, step = edge.checkpoint
        catalog.checkpoints[edge.checkpoint] = CheckpointEntry(term, step, hexed(step), 0.0, 1, nbytes)
        catalog.encodings[edge.checkpoint] = (*catalog.encodings.get(edge.checkpoint, ()), edge)
        catalog.segments.update((name, segment(int(name, 16))) for name in edge.segments)
    return catalog


def edge(step: int, kind: str, base: int | None, *segments: int, nbytes: int = 1000) -> Encoding:
    below = None if base is None else CheckpointId(1, base, hexed(base))
    return Encoding((1, step), kind, below, tuple(map(hexed, segments)), False, nbytes)


@pytest.mark.parametrize(
    ("kind", "nbytes", "seconds"),
    [
        ("full", 1001, 10.01),
        ("full", 1000, 10.0),  # as many bytes as the state has: nothing to decode
        ("full", 999, 9.99 + 20),  # fewer: compressed
        ("delta", 999, 9.99 + 20),
        ("delta", 1000, 10.0 + 20),  # a delta is decoded however large it is
        ("delta", 2000, 20.0 + 20),
        ("gradient", 100, 1.0 + 100),
        ("later", 100, 1.0 + 20),
    ],
)
def test_the_cost_of_an_encoding(kind: str, nbytes: int, seconds: float) -> None:
    found = edge(1, kind, None, 1, nbytes=nbytes)
    assert restore_seconds(catalog_of(found), RATES)(found) == pytest.approx(seconds)
    unknown = replace(found, checkpoint=(1, 9))  # of an unknown checkpoint: the cost of reading it
    expected = nbytes / 100
    assert restore_seconds(catalog_of(found), RATES)(unknown) == pytest.approx(expected)


def test_an_encoding_of_which_one_segment_is_missing_is_not_planned() -> None:
    catalog = catalog_of(edge(1, "full", None, 1, 2, nbytes=1), edge(1, "full", None, 3, nbytes=10**6))
    assert plan(catalog, CheckpointId(1, 1, hexed(1))).segments == (hexed(1), hexed(2))
    for gone in (1, 2):
        left = catalog_of(*catalog.encodings[1, 1])
        del left.segments[hexed(gone)]
        assert plan(left, CheckpointId(1, 1, hexed(1))).segments == (hexed(3),)
        assert plan(catalog, CheckpointId(1, 1, hexed(1)), avoid=frozenset({hexed(gone)})).segments == (hexed(3),)


@pytest.mark.parametrize("damage", [(), (4,), (9, 4), (9, 4, 7, 8)])
def test_why_there_is_no_plan(damage: tuple[int, ...]) -> None:
    catalog = catalog_of(edge(1, "full", None, 1))
    del catalog.segments[hexed(1)]
    catalog.damage = damage
    with pytest.raises(CorruptionError) as refused:
        plan(catalog, CheckpointId(1, 1, hexed(1)))
    shown = {0: "", 1: " (log slot 4 is damaged)", 2: " (log slot 4, 9 is damaged)"}
    said = shown.get(len(damage), " (log slot 4, 7, 8 is damaged)")
    assert str(refused.value) == f"checkpoint 1@1 cannot be restored: segment {hexed(1)} is not in the catalog{said}"
    assert str(plan_all(catalog)[1, 1]) == str(refused.value)


def test_of_steps_equally_near_the_newest_terms_are_named() -> None:
    catalog = Catalog(term=6)
    for term in range(1, 7):
        catalog.checkpoints[term, 10] = CheckpointEntry(term, 10, hexed(10), 0.0, 1, 1)
    with pytest.raises(CheckpointNotFoundError, match="the nearest are 10@3, 10@4, 10@5, 10@6"):
        refs.resolve(catalog, 11)
    catalog.checkpoints[2, 12] = CheckpointEntry(2, 12, hexed(12), 0.0, 1, 1)
    with pytest.raises(CheckpointNotFoundError, match="the nearest are 12@2, 10@4, 10@5, 10@6"):
        refs.resolve(catalog, 13)


def test_a_request_took_effect_if_all_of_it_is_there() -> None:
    request = Request(hexed(7), 1, "two segments", (segment(1), segment(2)), (), (), (), {})
    for there, answer in ((), "void"), ((1,), "void"), ((2,), "void"), ((1, 2), "accepted"):
        catalog = Catalog(term=2)
        catalog.segments.update((hexed(number), segment(number)) for number in there)
        assert requests.outcome(catalog, request).answer == answer, there


def test_an_acceptance_is_settled_before_it_is_told_and_nothing_else_is() -> None:
    world = World(every=1000)
    term = open_term(world.journal, None, patience=HASTE)
    done = save(term, 1)
    asked: list[str] = []

    def fate(operation: str, key: str) -> str:
        asked.append(f"{operation} {key}")
        return "ok"

    backend = FaultyBackend(world, fate)  # type: ignore[arg-type]
    good = requests.post(world.journal, 1, "a tag", CatalogChange(tags={"a": done.node}))
    bad = requests.post(world.journal, 1, "a tag", CatalogChange(tags={"b": (1, 99)}))
    assert requests.wait(Journal(backend, world.fmt), good, timeout=0).answer == "waiting"
    assert "settle log/" not in asked
    assert requests.handle(term) == 2
    assert requests.wait(Journal(backend, world.fmt), bad, timeout=0).answer == "refused"
    assert "settle log/" not in asked
    assert requests.wait(Journal(backend, world.fmt), good, timeout=0).answer == "accepted"
    assert asked[-1] == "settle log/"
