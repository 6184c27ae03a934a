"""The plan of a compaction, on made-up stores: nothing kept is lost, limits hold, and a second plan has no moves."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.errors import CorruptionError
from ckptstore.formats.history.catalog import Catalog, CatalogBuilder
from ckptstore.formats.history.commit_checks import check_commit, droppable
from ckptstore.formats.history.records import (
    CheckpointEntry,
    CommitRecord,
    Encoding,
    Node,
    OpenRecord,
    SegmentEntry,
)
from ckptstore.maintenance.compact import CompactLimits, Planned, Samples, plan_moves
from ckptstore.maintenance.compact.simulated_store import SimulatedStore
from ckptstore.maintenance.compact.size_estimates import known_sizes
from ckptstore.maintenance.merge.merge_range import unneeded
from ckptstore.restore.restore_plan import TYPICAL, plan_all, restore_seconds

STATE = 100_000_000
"""Bytes of a state."""


@dataclass(frozen=True)
class Sizes:
    """The same for all: a full, and a delta that grows with the gap."""

    whole: int = STATE
    per_step: int = STATE // 40

    def full(self, entry: CheckpointEntry) -> int:
        return self.whole

    def delta(self, entry: CheckpointEntry, base: CheckpointEntry) -> int | None:
        return min(self.whole, self.per_step * abs(entry.step - base.step)) if self.per_step else None


def digest(number: int) -> str:
    return f"{number:032x}"


def entry_of(step: int) -> CheckpointEntry:
    return CheckpointEntry(1, step, digest(step), float(step), 3, STATE)


def store_of(saves: list[tuple[int | None, int, bool]], kept: set[int], together: int = 1) -> Catalog:
    """A store of steps 1, 2, ...: base (None: a full), bytes, whether it is a gradient; and the kept ones.

    A given number of consecutive diffs share a segment, unless a full comes between.
    """
    builder = CatalogBuilder()
    builder.apply(OpenRecord(1, None, digest(1), 0.0), 0)
    batch: list[tuple[int, int | None, int, bool]] = []

    def flush() -> None:
        if batch:
            steps = [step for step, *_ in batch]
            segment = SegmentEntry(digest(steps[0]), 1, sum(one[2] for one in batch), 64, digest(0))
            record = CommitRecord(
                1,
                digest(0),
                (segment,),
                tuple(map(entry_of, steps)),
                tuple(
                    Encoding(
                        (1, step),
                        "full" if base is None else "gradient" if gradient else "delta",
                        None if base is None else entry_of(base).id,
                        (segment.id,),
                        False,
                        nbytes,
                    )
                    for step, base, nbytes, gradient in batch
                ),
            )
            check_commit(builder.catalog, record)
            builder.apply(record, builder.catalog.next_seq)
            batch.clear()

    for step, (base, nbytes, gradient) in enumerate(saves, 1):
        if base is None or len(batch) == together:
            flush()
        batch.append((step, base, nbytes, gradient))
        if base is None:
            flush()
    flush()
    gone = tuple(node for node in builder.catalog.checkpoints if node[1] not in kept and node[1] != len(saves))
    record = CommitRecord(1, digest(0), retires=gone, drops=droppable(builder.catalog, gone))
    check_commit(builder.catalog, record)
    builder.apply(record, builder.catalog.next_seq)
    return builder.catalog


def chain(
    count: int, kept: set[int], *, gradient: bool = False, together: int = 1, nbytes: int = STATE // 40
) -> Catalog:
    """A full, and diffs each on the one before."""
    saves: list[tuple[int | None, int, bool]] = [(None, STATE, False)]
    saves += [(step, nbytes, gradient) for step in range(1, count)]
    return store_of(saves, kept, together)


@st.composite
def stores(draw: st.DrawFn) -> Catalog:
    count = draw(st.integers(2, 24))
    form = draw(st.sampled_from(["chain", "star", "any"]))
    saves: list[tuple[int | None, int, bool]] = []
    for step in range(1, count + 1):
        base = None
        if step > 1 and draw(st.integers(0, 5)):
            base = {"chain": step - 1, "star": max(1, step - step % 7), "any": draw(st.integers(1, step - 1))}[form]
            base = None if base == step else base
        size = STATE if base is None else draw(st.integers(1, STATE // 2))
        saves.append((base, size, base == step - 1 and draw(st.booleans())))
    kept = draw(st.sets(st.integers(1, count)))
    return store_of(saves, kept, draw(st.sampled_from([1, 1, 4])))


limits = st.builds(
    CompactLimits,
    max_depth=st.none() | st.integers(0, 5),
    max_restore_seconds=st.none() | st.floats(0.01, 2.0),
    target_bytes=st.none() | st.integers(0, 5 * STATE),
)
sizes = st.builds(Sizes, st.integers(STATE // 3, STATE), st.sampled_from([0, STATE // 100, STATE // 10]))


def made(catalog: Catalog, planned: Planned) -> SimulatedStore:
    """The store after a plan: each of its records may be committed in its place."""
    world = SimulatedStore(catalog, TYPICAL)
    for move in planned.moves:
        check_commit(world.catalog, world.record(move.kind, move.rewrites, move.drops))
        what = move.kind, move.why, move.rewrites, move.drops
        again = world.move(*what, required=move.required, spared=move.spared)
        assert again == move
    return world


def restores(catalog: Catalog) -> dict[Node, tuple[int, float]]:
    """Links and seconds of every checkpoint, all of which can be restored."""
    seconds = restore_seconds(catalog)
    found = {}
    for node, one in plan_all(catalog).items():
        assert not isinstance(one, CorruptionError), one
        found[node] = len(one.encodings) - 1, sum(map(seconds, one.encodings))
    return found


class TestAnyStore:
    @given(stores(), limits, sizes, st.booleans())
    @settings(max_examples=40, deadline=None)
    def test_nothing_kept_is_lost_and_limits_hold_or_are_named(
        self, catalog: Catalog, wanted: CompactLimits, guess: Sizes, owned: bool
    ) -> None:
        before = dict(catalog.checkpoints.items())
        planned = plan_moves(catalog, wanted, guess, owned=owned)
        assert dict(catalog.checkpoints.items()) == before, "the planner changed what it was given"
        assert planned == plan_moves(catalog, wanted, guess, owned=owned)
        after = made(catalog, planned).catalog
        assert dict(after.checkpoints.items()) == before
        named = {one.ref for one in planned.unmet}
        was = restores(catalog)
        for node, (depth, seconds) in restores(after).items():
            if wanted.exceeded(depth, seconds):
                assert before[node].ref in named
            if wanted.max_depth is None:
                assert depth <= max(1, was[node][0])
        nbytes = sum(segment.size for segment in after.segments.values())
        assert planned.bytes_after == nbytes
        if wanted.max_depth is None and wanted.max_restore_seconds is None:
            assert nbytes <= planned.bytes_before
        if wanted.target_bytes is not None and nbytes > wanted.target_bytes:
            assert "" in named

    @given(stores(), limits, sizes, st.booleans())
    @settings(max_examples=40, deadline=None)
    def test_the_result_of_a_plan_needs_no_plan(
        self, catalog: Catalog, wanted: CompactLimits, guess: Sizes, owned: bool
    ) -> None:
        after = made(catalog, plan_moves(catalog, wanted, guess, owned=owned)).catalog
        assert plan_moves(after, wanted, guess, owned=owned).moves == ()

    @given(stores(), st.data())
    @settings(max_examples=40, deadline=None)
    def test_the_planned_drops_are_those_that_a_commit_may_make(self, catalog: Catalog, data: st.DataObject) -> None:
        """The planner looks only at the neighbourhood; `unneeded`, which decides the record, at the whole store."""
        world = SimulatedStore(catalog, TYPICAL)
        if drops := world.garbage():
            world.move("drop", "", (), drops)
        kept = list(world.catalog.checkpoints)
        renewed = data.draw(st.sets(st.sampled_from(kept), min_size=1))
        added = [Encoding(node, "full", None, (digest(0),), False, 1) for node in renewed]
        assert set(world.freed(renewed)) == set(unneeded(world.catalog, (), renewed, added))


class TestMoves:
    def test_a_chain_of_bases_makes_way_for_a_full(self) -> None:
        catalog = chain(30, {20, 30}, nbytes=STATE // 4)
        (move, *rest) = plan_moves(catalog, CompactLimits(), Sizes(), owned=True).moves
        assert move.kind == "materialize"
        assert [(one.node, one.base) for one in move.rewrites] == [((1, 20), None)]
        assert len(move.drops) == 20
        assert move.bytes_before - move.bytes_after == 19 * STATE // 4
        assert move.seconds_after < move.seconds_before
        assert [(one.node, one.base) for one in rest[0].rewrites] == [((1, 30), (1, 20))]

    def test_the_writers_parent_stays_unless_nobody_writes(self) -> None:
        catalog = chain(30, {10}, nbytes=STATE // 4)
        assert [move.rewrites[0].node for move in plan_moves(catalog, CompactLimits(), Sizes()).moves] == [(1, 10)]
        nodes = [move.rewrites[0].node for move in plan_moves(catalog, CompactLimits(), Sizes(), owned=True).moves]
        assert nodes == [(1, 10), (1, 30)]

    def test_a_checkpoint_that_was_stored_again_gives_up_its_place_in_a_batch(self) -> None:
        """Step 8, stored again because of 5 to 7, is not stored once more because its old diff lies with 9 and 10."""
        catalog = chain(14, {4, 8, 12, 13}, gradient=True, together=3, nbytes=26_000_000)
        planned = plan_moves(catalog, CompactLimits(), Sizes(70_000_000, 65_000_000), owned=True)
        last = planned.moves[-1]
        assert [one.node for one in last.rewrites] == [(1, 12), (1, 13)]
        assert last.spared == ((1, 8),)
        assert made(catalog, planned).catalog.held == {}

    def test_a_base_that_many_build_on_stays(self) -> None:
        """As many new deltas as old ones, and a full for a full: nothing is gained."""
        saves: list[tuple[int | None, int, bool]] = [(None, STATE, False)]
        catalog = store_of([*saves, *[(1, STATE // 10, False)] * 9], set(range(2, 11)))
        assert plan_moves(catalog, CompactLimits(), Sizes(), owned=True).moves == ()

    def test_one_of_a_batch_frees_the_batch(self) -> None:
        catalog = chain(21, {11}, gradient=True, together=20, nbytes=STATE // 4)
        (move, *_) = plan_moves(catalog, CompactLimits(), Sizes(per_step=0), owned=True).moves
        # 11 and 21, the newest, lie in the one segment of the batch: both leave it, or it stays.
        assert [one.node for one in move.rewrites] == [(1, 11), (1, 21)]
        assert len(move.drops) == 2

    def test_depth(self) -> None:
        catalog = chain(40, set(range(1, 41)))
        planned = plan_moves(catalog, CompactLimits(max_depth=8), Sizes())
        assert max(depth for depth, _ in restores(made(catalog, planned).catalog).values()) <= 8
        assert planned.unmet == ()
        assert all(move.required and move.kind == "materialize" for move in planned.moves if move.kind != "merge")
        assert len(planned.moves) <= 10

    def test_a_time_that_cannot_be_reached_is_named(self) -> None:
        catalog = chain(3, {1, 2, 3})
        planned = plan_moves(catalog, CompactLimits(max_restore_seconds=1e-6), Sizes())
        assert {one.ref for one in planned.unmet} == {"1@1", "2@1", "3@1"}
        assert all("full" in one.why for one in planned.unmet)
        assert planned.moves == ()

    def test_fulls_become_deltas_as_far_as_the_data_lets_them(self) -> None:
        catalog = store_of([(None, STATE, False)] * 60, set(range(1, 61)))
        planned = plan_moves(catalog, CompactLimits(), Sizes())
        after = made(catalog, planned).catalog
        fulls = [node[1] for node, edges in after.encodings.items() if edges[-1].base is None]
        # At 32 steps a delta takes 80 % of a full: the next one is the anchor of those that follow. The newest stays.
        assert fulls == [1, 34, 60]
        assert {move.kind for move in planned.moves} == {"re-encode"}
        assert planned.bytes_after < planned.bytes_before * 0.6

    def test_a_target_is_enough(self) -> None:
        catalog = store_of([(None, STATE, False)] * 20, set(range(1, 21)))
        planned = plan_moves(catalog, CompactLimits(target_bytes=15 * STATE), Sizes())
        assert 14 * STATE < planned.bytes_after <= 15 * STATE
        assert planned.unmet == ()

    def test_a_checkpoint_that_rules_retire_soon_is_no_base(self) -> None:
        catalog = store_of([(None, STATE, False)] * 20, set(range(1, 21)))
        planned = plan_moves(catalog, CompactLimits(), Sizes(), stays=lambda node: node[1] % 5 == 0)
        assert [(one.rewrites[0].node, one.rewrites[0].base) for one in planned.moves] == [
            ((1, 10), (1, 5)),
            ((1, 15), (1, 5)),
        ]

    def test_small_diffs_are_merged(self) -> None:
        catalog = chain(30, set(range(1, 31)), nbytes=1000)
        (move,) = plan_moves(catalog, CompactLimits(), Sizes(per_step=0)).moves
        assert move.kind == "merge"
        assert len(move.rewrites) == len(move.drops) == 29

    def test_a_checkpoint_that_cannot_be_stored_again_is_left(self) -> None:
        catalog = chain(30, {20, 30}, nbytes=STATE // 4)
        planned = plan_moves(catalog, CompactLimits(max_depth=3), Sizes(), owned=True, refused=[(1, 20), (1, 30)])
        assert planned.moves == ()
        assert [one.ref for one in planned.unmet] == ["20@1", "30@1"]


class TestSizes:
    def test_between_samples_the_magnitude_of_the_gap_counts(self) -> None:
        samples = Samples(0.9, ((1, 0.1), (100, 0.5)))
        assert samples.delta(1) == 0.1
        assert abs((samples.delta(10) or 0) - 0.3) < 1e-9
        assert samples.delta(1000) == 0.5
        assert Samples().delta(3) is None

    def test_the_stores_own_sizes_are_the_sample(self) -> None:
        catalog = chain(4, {1, 2, 3, 4}, nbytes=STATE // 10)
        guess = known_sizes(catalog)
        assert abs((guess.delta(entry_of(4), entry_of(3)) or 0) - STATE // 10) < 10_000
        other = CheckpointEntry(1, 9, digest(9), 0.0, 4, STATE)
        assert guess.delta(other, entry_of(1)) is None
