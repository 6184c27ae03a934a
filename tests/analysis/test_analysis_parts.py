"""Parts of the analysis: series, classes, sampling, comparisons, and conclusions."""

from __future__ import annotations

import math
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptstore
from ckptstore.analysis import Options, analyze, document
from ckptstore.analysis.comparison_plan import plan_targets, spacing
from ckptstore.analysis.recommendations import interval_costs, parse_link
from ckptstore.analysis.sampling import Estimate, Sums, group_tensors
from ckptstore.analysis.series import TensorType, open_series, shared_tensors
from ckptstore.analysis.tensor_roles import TensorClass, by_name, by_values, classify, parse_overrides
from ckptstore.errors import UsageError
from ckptstore.write.policy.delta_interval import DeltaSizes, RestoreBound, Schedule, best_interval
from tests.analysis.analysis_data import trajectory, write
from tests.forms import short_or

# -- series


def test_files_are_ordered_by_the_steps_in_their_names(tmp_path: Path) -> None:
    paths = write(tmp_path, trajectory(3, 2), [200, 10, 100])
    assert [one.step for one in open_series(paths)] == [10, 100, 200]
    assert [one.label for one in open_series([str(tmp_path)])] == [f"step_{n}.safetensors" for n in (10, 100, 200)]
    assert [one.step for one in open_series([str(tmp_path / "*_?0*.safetensors")])] == [10, 100, 200]
    with pytest.raises(UsageError, match="matches no file"):
        open_series([str(tmp_path / "*.pt")])


def test_names_that_are_numbers_are_steps(tmp_path: Path) -> None:
    for old in write(tmp_path, trajectory(2, 2), [9, 30]):
        Path(old).rename(tmp_path / f"{int(Path(old).stem[5:]):06d}.safetensors")
    assert [one.step for one in open_series([str(tmp_path)])] == [9, 30]


def test_names_without_steps_keep_the_order_given(tmp_path: Path) -> None:
    first, second = write(tmp_path, trajectory(2, 2))
    late, early = tmp_path / "late.safetensors", tmp_path / "early.safetensors"
    Path(first).rename(late)
    Path(second).rename(early)
    assert [(one.label, one.step) for one in open_series([str(late), str(early)])] == [
        ("late.safetensors", 0),
        ("early.safetensors", 1),
    ]


def test_folders_with_an_optimizer_beside_the_model(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    for step, state in zip((500, 1000), trajectory(2, 2), strict=True):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        write(folder, [{"w.weight": state["model.wte.weight"]}])
        (folder / "step_1.safetensors").rename(folder / "model.safetensors")
        torch.save({"state": {0: {"exp_avg": torch.from_numpy(state["model.wte.weight"])}}}, folder / "optimizer.pt")
    series = open_series([str(tmp_path / "checkpoint-500"), str(tmp_path / "checkpoint-1000")])
    assert [one.step for one in series] == [500, 1000]
    assert list(series[0].tensors) == ["w.weight", "optimizer.state.0.exp_avg"]
    assert [one.step for one in open_series([str(tmp_path)])] == [500, 1000]
    with series[1].open() as read:
        assert len(read("optimizer.state.0.exp_avg", 4, 12)) == 12


def test_a_store_is_read_along_the_line_to_its_latest(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "run")
    for parent, steps in (("latest", (1, 2, 3)), ("2@1", (3, 4))):
        with store.writer(parent=parent, poll_seconds=None) as writer:
            for step in steps:
                writer.save({"weight": np.full(100, step, np.float32)}, step)
    assert [one.label for one in open_series([str(tmp_path / "run")])] == ["1@1", "2@1", "3@2", "4@2"]
    with pytest.raises(UsageError, match="one store, or files"):
        open_series([str(tmp_path / "run"), "x.pt"])
    with pytest.raises(UsageError, match="--ref"):
        open_series(["x.pt"], ["latest"])


def test_one_checkpoint_is_not_enough(tmp_path: Path) -> None:
    (path,) = write(tmp_path, trajectory(1, 2))
    with pytest.raises(UsageError, match="at least two checkpoints"):
        open_series([path])


def test_what_differs_is_left_out_and_reported(tmp_path: Path) -> None:
    a = {"same": np.ones(4, np.float32), "shape": np.ones(4, np.float32), "gone": np.ones(4), "type": np.ones(4)}
    b = {"same": np.ones(4, np.float32), "shape": np.ones(5, np.float32), "type": np.ones(4, np.float32)}
    shared, skipped = shared_tensors(open_series(write(tmp_path, [a, b])))
    assert list(shared) == ["same"]
    reasons = {one.name: one.reason for one in skipped}
    assert reasons["gone"] == "in 1 of 2 checkpoints only"
    assert reasons["shape"] == "F32 [4] in step_1.safetensors but F32 [5] in step_2.safetensors"
    assert reasons["type"].startswith("F64")
    with pytest.raises(UsageError, match="no tensor in common"):
        shared_tensors(open_series(write(tmp_path, [{"a": np.ones(4)}, {"b": np.ones(4)}])))


# -- classes


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("optimizer.state.0.exp_avg_sq", "second_moment"),
        ("optimizer.state.12.exp_avg", "first_moment"),
        ("exp_avg_sq.blocks.0.up.weight", "second_moment"),
        ("momentum.5.conv.weight", "first_moment"),
        ("state.0.momentum_buffer", "first_moment"),
        ("gradient.3.weight", "gradient"),
        ("model.layers.0.grad", "gradient"),
        ("model.bn1.running_var", "other"),
        ("model.layers.0.attn.v.weight", "weight"),
        ("transformer.h.0.mlp.c_fc.weight", "weight"),
        ("model.momentum.proj.weight", "weight"),  # a module may have any name
        ("v.blocks.0.weight", None),
        ("optimizer.param_groups.0.buffer", None),
        ("something", None),
    ],
)
def test_classes_by_name(name: str, expected: TensorClass | None) -> None:
    assert by_name(name, TensorType("F32", (4, 4), 64)) == expected


def test_integers_and_scalars_are_other() -> None:
    assert by_name("model.position_ids.weight", TensorType("I64", (4,), 32)) == "other"
    assert by_name("optimizer.state.0.exp_avg", TensorType("F32", (), 4)) == "other"


def test_classes_by_values() -> None:
    rng = np.random.default_rng(0)
    assert by_values(rng.normal(0, 1e-3, 999) ** 2) == "second_moment"
    assert by_values(rng.normal(0, 1e-3, 999)) == "weight"
    assert by_values(rng.normal(0, 1e-3, 999), optimizer=True) == "first_moment"
    assert by_values(np.ones(999)) == "weight"  # never negative, but not tiny
    assert by_values(np.zeros(999)) == "weight"
    assert by_values(np.full(9, np.nan)) == "weight"


def test_overrides_win_and_have_to_match() -> None:
    values = np.full(64, 1e-6, np.float32).view(np.uint8)
    tensors = {name: TensorType("F32", (64,), 256) for name in ("a.weight", "b.weight", "v.x")}
    found = classify(
        tensors, lambda _, start, length: values[start : start + length], parse_overrides(["b.*=GRADIENT"])
    )
    assert {name: (one.kind, one.by) for name, one in found.items()} == {
        "a.weight": ("weight", "name"),
        "b.weight": ("gradient", "override"),
        "v.x": ("second_moment", "values"),
    }
    with pytest.raises(UsageError, match="matches no tensor"):
        classify(tensors, lambda *_: values, [("zzz*", "weight")])
    with pytest.raises(UsageError, match="GLOB=CLASS"):
        parse_overrides(["b.*=moment"])


# -- sampling


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng = random.Random(7)
    population = [(2**20, 2**20 * min(1.0, rng.gauss(0.6, 0.05))) for _ in range(200)] + [(3000, 2000.0)] * 20
    truth = sum(y for _, y in population) / sum(x for x, _ in population)
    covered = 0
    for _ in range(400):
        sums = Sums()
        for x, y in rng.sample(population, 16):
            sums.add(x, y)
        estimate = sums.estimate(len(population))
        assert estimate.margin is not None
        covered += abs(estimate.fraction - truth) <= estimate.margin
    assert 0.92 <= covered / 400 <= 0.98


def test_a_census_has_no_error_and_one_block_has_no_estimate_of_it() -> None:
    sums = Sums()
    sums.add(100, 50)
    assert sums.estimate(1) == Estimate(0.5, 0.0)
    assert sums.estimate(2) == Estimate(0.5, None)
    assert Estimate(0.5, 0.1).interval == pytest.approx((1 / 0.6, 1 / 0.4))
    assert Estimate(0.1, 0.2).interval == pytest.approx((1 / 0.3, math.inf))


@given(st.lists(st.integers(1, 5 << 20), min_size=1, max_size=30), st.sampled_from([None, 1 << 20, 0.3]))
@settings(max_examples=40, deadline=None)
def test_units_cover_every_byte_once(sizes: list[int], budget: int | float | None) -> None:
    tensors = {f"w{n}.weight": TensorType("U8", (size,), size) for n, size in enumerate(sizes)}
    classes = classify(tensors, lambda *_: np.zeros(0, np.uint8))
    (group,) = group_tensors(tensors, classes, budget)
    assert group.nbytes == sum(sizes)
    pieces = [
        (piece.name, piece.start + at) for unit in group.units for piece in unit.pieces for at in (0, piece.length)
    ]
    assert len(group.units) <= group.blocks
    assert all(unit.nbytes <= 1 << 20 for unit in group.units)
    if budget is None:
        assert group.sampled == sum(sizes)
        assert {name for name, _ in pieces} == set(tensors)
    else:
        assert len(group.units) == group.blocks or len(group.units) >= 8


# -- comparisons


def test_a_regular_series_is_compared_over_octaves_at_the_same_targets() -> None:
    plan = plan_targets(list(range(0, 2000, 100)), points=12)
    assert plan.gaps == (1, 2, 4, 8, 16)
    assert [target.index for target in plan.targets if (target.index - 1, 1) in target.bases]
    of_gap = {
        gap: [t.index for t in plan.targets for base, g in t.bases if g == gap and base != t.index - 1]
        for gap in (2, 16)
    }
    assert of_gap[2] == of_gap[16] == [16, 17, 18, 19]
    for target in plan.targets:
        assert all(target.index - base == gap for base, gap in target.bases)


def test_few_steps_are_few_steps() -> None:
    """Seven gaps, each at four more steps, made 28 restores of whole chains in addition to the 4 requested."""
    steps = list(range(1, 259))
    plan = plan_targets(steps, points=4)
    assert [target.index for target in plan.targets] == [0, 86, 171, 257]
    assert {gap for target in plan.targets for _, gap in target.bases} == set(plan.gaps) == {1, 2, 8, 16, 32, 128, 256}
    assert len(plan.needed) <= 4 + 3 * 4
    assert plan.needed[-1] == 257
    assert len(plan_targets(steps, points=12).targets) > 12
    # If none of them has a base at a gap, one more is measured.
    gap = plan_targets(steps, (256,), points=2)
    assert [target.index for target in gap.targets] == [0, 257]
    odd = plan_targets([0, 5, 6, 20], (1,), points=2)
    assert [(target.index, target.bases) for target in odd.targets][1] == (2, ((1, 1),))


def test_only_what_is_measured_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a store with 258 step diffs each of the other checkpoints took a chain to open."""
    store = ckptstore.open(tmp_path / "run")
    with store.writer() as writer:
        for step, state in enumerate(trajectory(30, 16), 1):
            writer.save(state, step)
    opened: list[str] = []
    before = ckptstore.Store.tensors
    monkeypatch.setattr(ckptstore.Store, "tensors", lambda self, ref: (opened.append(ref), before(self, ref))[1])
    found = analyze([str(tmp_path / "run")], Options(points=3, gaps=(1, 2), methods=("raw", "xor")))
    assert len(found.series) == 30
    assert 3 <= len(opened) == len(set(opened)) <= 9
    listed = document(found)["checkpoints"]
    assert len(listed) == 30
    assert {one["label"] for one in listed if one["tensors"] is not None} == set(opened)
    assert listed[-1]["bytes"] == found.advice.nbytes


def test_an_irregular_series_counts_gaps_in_its_smallest_distance() -> None:
    steps = [40, 41, 42, 50, 140, 350, 351, 352]
    assert spacing(steps) == 1
    plan = plan_targets(steps, (1, 2, 10, 100))
    pairs = {(steps[t.index], steps[base], gap) for t in plan.targets for base, gap in t.bases}
    assert {(41, 40, 1), (42, 40, 2), (50, 40, 10), (140, 40, 100), (352, 350, 2)} <= pairs
    with pytest.raises(UsageError, match="no two checkpoints are 7 apart"):
        plan_targets(steps, (7,))


def test_an_uneven_series_loses_no_pair_to_a_gap_that_is_nearly_the_same() -> None:
    steps = [1000, 1001, 2000, 2001, 3000, 3001, 4000]
    plan = plan_targets(steps)
    assert plan.gaps[0] == 1
    thousand = plan.gaps[1]
    assert thousand in (999, 1000)
    pairs = [(steps[t.index] - steps[base], gap) for t in plan.targets for base, gap in t.bases]
    assert len([1 for difference, gap in pairs if gap == thousand]) >= 3
    assert {difference for difference, gap in pairs if gap == thousand} == {999, 1000}
    assert all(abs(difference - gap) <= gap / 16 for difference, gap in pairs)
    plan = plan_targets([0, 1, 17, 34], (16, 33))  # 17 counts as 16, 34 as 33; the exact one comes first
    pairs = [(t.index, base, gap) for t in plan.targets for base, gap in t.bases]
    assert pairs == [(1, 0, 1), (2, 1, 16), (3, 2, 16), (3, 1, 33)]
    assert plan_targets(sorted(np.random.default_rng(0).choice(10**9, 300, replace=False).tolist())).gaps


@given(st.sets(st.integers(0, 10**6), min_size=2, max_size=40), st.integers(2, 20))
@settings(max_examples=short_or(24, 60), deadline=None)
def test_any_series_can_be_planned(steps: set[int], points: int) -> None:
    plan = plan_targets(sorted(steps), (), points)
    assert 1 <= len(plan.gaps) <= 7
    assert any(target.bases for target in plan.targets)
    for target in plan.targets:
        assert all(base < target.index and gap >= 1 for base, gap in target.bases)


# -- conclusions


@given(
    st.lists(st.floats(20, 99), min_size=4, max_size=4), st.sampled_from([1.5, 3.0, 4.0, math.inf]), st.integers(1, 50)
)
@settings(max_examples=short_or(100, 400), deadline=None)
def test_the_recommendation_stores_least_by_the_table(sizes: list[float], times: float, depth: int) -> None:
    """Two calculations of one chain differed if the largest delta is not the one over the largest gap."""
    known = DeltaSizes(100.0, dict(zip((1, 2, 8, 16), sizes, strict=True)))
    chosen = best_interval(known, 100.0 * times, depth)
    table = {one.interval: one for one in interval_costs(known, 100.0 * times, depth)}
    assert table[chosen].mean <= min(one.mean for one in table.values()) / 0.999
    assert all(one.restore <= 100.0 * times for one in table.values())


@pytest.mark.parametrize("interval", [1, 3, 8])
def test_the_cost_of_an_interval_is_what_the_schedule_writes(interval: int) -> None:
    sizes = DeltaSizes(1000.0, {1: 500.0, 8: 600.0})
    bound = RestoreBound(times=4.0)
    cost = next(
        one for one in interval_costs(sizes, bound.limit(1000.0, None), bound.depth) if one.interval == interval
    )
    schedule = Schedule(interval, "anchor", bound)
    total, highest, costs = 0.0, 0.0, {0: 0.0}
    count = (cost.deltas * interval + 1) * 6
    for _ in range(count):
        decision = schedule.decide()
        nbytes = 1000.0 if decision.base is None else sizes.expect(decision.gap)
        below = 0.0 if decision.base is None else costs[decision.base]
        costs[schedule.written(decision, round(nbytes))] = below + nbytes
        total, highest = total + nbytes, max(highest, below + nbytes)
    assert total / count == pytest.approx(cost.mean, rel=0.01)
    assert highest == pytest.approx(cost.restore, rel=0.01)
    assert cost.times <= 4.0


def test_the_recommended_interval_is_the_stores(tmp_path: Path) -> None:
    paths = write(tmp_path, trajectory(4, 300))
    methods = ("planes", "xor", "sub")
    tight = analyze(paths, Options(sample=None, methods=methods, bound=RestoreBound(times=1.2)))
    assert tight.advice.best.interval == 0
    assert tight.advice.best.mean == tight.advice.nbytes
    wide = analyze(paths, Options(sample=None, methods=methods, bound=RestoreBound(times=5.0)))
    advice = wide.advice
    gaps = dict.fromkeys(wide.gaps, 0.0)
    for number, group in enumerate(wide.groups):
        for gap in gaps:
            cells = [one for one in wide.summaries if one.group == number and one.gap in (None, gap)]
            stored = [one.estimate.fraction for one in cells if one.method in ("raw", *methods)]
            gaps[gap] += group.nbytes * min(stored)
    assert advice.best.interval == best_interval(DeltaSizes(advice.full, gaps), 5.0 * advice.full)
    assert advice.best.times <= 5.0
    assert advice.best.mean < advice.nbytes
    methods_chosen = {wide.groups[one.group].kind: one.method for one in advice.groups}
    assert methods_chosen["weight"] in ("xor", "sub")


def test_shipping_is_arithmetic(tmp_path: Path) -> None:
    found = analyze(write(tmp_path, trajectory(2, 64)), Options(sample=None, links=(8e6, 8e9), cores=2))
    raw, *_ = found.shipping
    assert (raw.method, raw.link, raw.nbytes, raw.encode) == ("raw", 8e6, found.advice.nbytes, 0.0)
    assert raw.serial == raw.overlapped == found.advice.nbytes / 1e6
    cells = {(one.group, one.method): one for one in found.summaries if one.gap in (None, 1)}
    diff = next(one for one in found.shipping if (one.method, one.link) == ("sub", 8e9))
    expected = sum(group.nbytes * cells[number, "sub"].estimate.fraction for number, group in enumerate(found.groups))
    assert diff.nbytes == pytest.approx(expected)
    seconds = sum(group.nbytes / (cells[number, "sub"].encode or 1) for number, group in enumerate(found.groups))
    assert diff.encode == pytest.approx(seconds / 2)
    assert diff.serial == diff.encode + diff.send
    assert diff.overlapped == max(diff.encode, diff.send)


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("1Gbit", 1e9),
        ("10 Gb/s", 1e10),
        ("100Mbps", 1e8),
        ("1.2GB/s", 9.6e9),
        ("9bit", 9.0),
        ("fast", None),
        ("0Gbit", None),
    ],
)
def test_link_speeds(text: str, bits: float | None) -> None:
    if bits is None:
        with pytest.raises(UsageError, match="link speed"):
            parse_link(text)
    else:
        assert parse_link(text) == bits
