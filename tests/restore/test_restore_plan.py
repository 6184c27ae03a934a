"""Plans: the cheapest path through any graph of encodings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.errors import CorruptionError
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.records import CheckpointEntry, CheckpointId, Encoding, SegmentEntry
from ckptstore.restore.restore_plan import Plan, plan, plan_all, restore_seconds, stored_bytes
from ckptstore.restore.restore_plan import Rates as WorkRates

Edge = tuple[int, int | None, int]  # step, step of its base or None, bytes


def identity(step: int) -> CheckpointId:
    return CheckpointId(1, step, f"{step:032x}")


def catalog_of(edges: Iterable[Edge]) -> Catalog:
    catalog = Catalog(term=1)
    for place, (step, base, nbytes) in enumerate(edges):
        node, segment = (1, step), f"{place:032x}"
        catalog.checkpoints[node] = CheckpointEntry(1, step, identity(step).state, 0.0, 1, 10)
        catalog.segments[segment] = SegmentEntry(segment, 1, nbytes, 10, "0" * 32)
        below = None if base is None else identity(base)
        edge = Encoding(node, "full" if base is None else "delta", below, (segment,), False, nbytes)
        catalog.encodings[node] = (*catalog.encodings.get(node, ()), edge)
    return catalog


def steps(found: Plan) -> list[int]:
    return [encoding.checkpoint[1] for encoding in found.encodings]


def test_the_cheapest_path_wins() -> None:
    catalog = catalog_of([(1, None, 100), (2, 1, 10), (3, 2, 10), (3, None, 125), (4, 3, 5), (4, 2, 12)])
    assert steps(plan(catalog, identity(4), stored_bytes)) == [1, 2, 4]
    assert steps(plan(catalog, identity(3), stored_bytes)) == [1, 2, 3]
    damaged = frozenset(plan(catalog, identity(2), stored_bytes).segments)
    assert steps(plan(catalog, identity(4), stored_bytes, avoid=damaged)) == [3, 4]
    assert plan(catalog, identity(4), lambda _: 1.0).encodings[0].checkpoint == (1, 3)


def test_circles_are_walked_around() -> None:
    """Compaction may reverse chains: 1 builds on 3 and 3 on 1, and both have another way, too."""
    catalog = catalog_of([(1, 3, 1), (1, None, 100), (2, 1, 1), (3, 2, 1), (3, None, 50), (4, 1, 1), (4, 3, 9)])
    assert steps(plan(catalog, identity(1), stored_bytes)) == [3, 1]
    assert steps(plan(catalog, identity(2), stored_bytes)) == [3, 1, 2]
    assert steps(plan(catalog, identity(4), stored_bytes)) == [3, 1, 4]
    with pytest.raises(CorruptionError, match="1@1 cannot be restored: its chain of bases does not end in a full"):
        plan(catalog_of([(1, 2, 1), (2, 1, 1)]), identity(1))


def test_replaying_has_its_price() -> None:
    """A hundred steps are few bytes, and a hundred passes over the state: a full nearby is faster to restore."""
    edges = [(0, None, 1000), *((step, step - 1, 10) for step in range(1, 101)), (80, None, 2000)]
    catalog = catalog_of(edges)
    for node, entry in catalog.checkpoints.items():
        catalog.checkpoints[node] = replace(entry, nbytes=1000)
        catalog.encodings[node] = tuple(
            edge if edge.base is None else replace(edge, kind="gradient") for edge in catalog.encodings[node]
        )
    assert len(plan(catalog, identity(100)).encodings) == 21
    assert len(plan(catalog, identity(81), stored_bytes).encodings) == 82
    found = plan(catalog, identity(81))
    assert len(found.encodings) == 2
    cost = restore_seconds(catalog, WorkRates(read=100, decode=50, replay=10))
    assert plan(catalog, identity(81), cost).cost == pytest.approx(2000 / 100 + 10 / 100 + 1000 / 10)


def test_missing_bases_are_named() -> None:
    catalog = catalog_of([(1, None, 100), (2, 1, 10), (3, 2, 10)])
    del catalog.encodings[1, 1]
    with pytest.raises(CorruptionError, match="3@1 cannot be restored: nothing stored restores 1@1"):
        plan(catalog, identity(3))


def test_a_long_history_is_planned_in_one_pass() -> None:
    catalog = catalog_of([(0, None, 100), *((step, step - 1, 1) for step in range(1, 2000))])
    found = plan_all(catalog, avoid=frozenset({f"{1500:032x}"}))
    assert [isinstance(found[1, step], Plan) for step in (0, 1499, 1500, 1999)] == [True, True, False, False]
    whole = found[1, 1499]
    assert isinstance(whole, Plan)
    assert len(whole.encodings) == 1500


@given(
    st.lists(st.tuples(st.integers(0, 6), st.none() | st.integers(0, 6), st.integers(1, 9)), min_size=1, max_size=14)
)
def test_plans_agree_with_all_paths(edges: list[Edge]) -> None:
    catalog = catalog_of(edges)

    def cheapest(step: int, seen: frozenset[int]) -> float:
        return min(
            (
                nbytes + (0 if base is None else cheapest(base, seen | {step}))
                for own, base, nbytes in edges
                if own == step and base not in seen | {step}
            ),
            default=float("inf"),
        )

    together = plan_all(catalog, stored_bytes)
    for _, step in catalog.checkpoints:
        expected = cheapest(step, frozenset())
        found = together[1, step]
        if expected == float("inf"):
            assert isinstance(found, CorruptionError)
            with pytest.raises(CorruptionError):
                plan(catalog, identity(step))
        else:
            assert isinstance(found, Plan)
            assert found.cost == expected == plan(catalog, identity(step), stored_bytes).cost
