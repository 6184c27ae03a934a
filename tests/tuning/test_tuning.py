"""The wasted-time model: its units, its derivation, and its optima against brute force."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ckptstore.errors import UsageError
from ckptstore.tuning import Configuration, Job, Model, best, continuous, fulls_only, neighbours, paper_optimum
from ckptstore.tuning.paper_table import TABLE_BATCHES, TABLE_I, TABLE_INTERVALS, TABLE_JOB, table
from ckptstore.tuning.wasted_time import Recovery
from tests.forms import short_or


def log_uniform(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(math.log(low), math.log(high)).map(math.exp)


def models(recovery: Recovery = "serial", *, plain: bool = False) -> st.SearchStrategy[Model]:
    """From crash-looping jobs on slow disks to months without a failure; iterations from 0.1 s to a minute."""
    return st.builds(
        Model,
        mtbf=log_uniform(10, 1e6),
        full_write=log_uniform(1e-3, 1e3),
        load_full=log_uniform(1e-3, 1e3),
        merge_batch=log_uniform(1e-4, 30),
        replay_diff=st.just(0.0) if plain or recovery == "parallel" else st.just(0.0) | log_uniform(1e-4, 3),
        batch_write=st.just(0.0) if plain else st.just(0.0) | log_uniform(1e-4, 1),
        recovery=st.just(recovery),
    )


EITHER = st.sampled_from(["serial", "parallel"]).flatmap(models)


# The model


def test_equation_8_by_hand() -> None:
    # N = 1, T = 10,000 iterations, all times in iterations: Eq. (8) written out.
    model = Model(mtbf=500, full_write=3, load_full=4, merge_batch=0.5)
    run, failures = 10_000, 20
    wasted = failures * (8 / 2 + (4 + 0.5 / 2 * (100 / 8 - 1))) + run * 3 * (1 / 100)
    assert model.total(100, 8) * run == pytest.approx(wasted)
    parts = model.waste(100, 8)
    assert parts.lost_work * run == pytest.approx(failures * 4)
    assert parts.load * run == pytest.approx(failures * 4)
    assert parts.fulls * run == pytest.approx(300)
    assert parts.batches == 0


def test_all_times_become_iterations() -> None:
    job = Job(8e9, 2e9, mtbf=3600, iteration=0.5, load_full=3, merge_batch=0.1, replay_diff=0.01, write_latency=0.02)
    assert job.model() == Model(7200, 8, 6, 0.2, 0.02, 0.04)


@given(models(), log_uniform(0.01, 100), log_uniform(1, 1e4), log_uniform(1, 1e3))
def test_the_unit_of_time_does_not_matter_if_it_is_one(model: Model, t: float, interval: float, batch: float) -> None:
    """The trap: b/2 counts iterations. A job all of whose times are t times as long wastes the same share."""
    assume(batch <= interval)

    def job(t: float) -> Job:
        return Job(
            full_bytes=model.full_write * t * 1e9,
            bandwidth=1e9,
            mtbf=model.mtbf * t,
            iteration=t,
            load_full=model.load_full * t,
            merge_batch=model.merge_batch * t,
            replay_diff=model.replay_diff * t,
            write_latency=model.batch_write * t,
        )

    assert job(t).model().total(interval, batch) == pytest.approx(job(1).model().total(interval, batch), rel=1e-9)


@pytest.mark.parametrize(("interval", "batch"), [(20, 1), (20, 4), (96, 8), (60, 60)])
def test_the_average_over_every_moment_of_failure(interval: int, batch: int) -> None:
    """Eq. (8)'s averages are exact where b divides 1/f: fail at each moment of an interval and count."""
    model = Model(mtbf=1000, full_write=2, load_full=5, merge_batch=0.3, replay_diff=0.05, batch_write=0.1)
    moments = (np.arange(interval * 100) + 0.5) / 100
    batches = np.floor(moments / batch)
    recovery = 5 + batches * (0.3 + 0.05 * batch) + (moments - batches * batch)
    steady = 2 / interval + 0.1 / batch
    assert model.total(interval, batch) == pytest.approx(recovery.mean() / 1000 + steady, rel=1e-9)


def test_a_simulated_run() -> None:
    """Failures at random times, fulls that stall: a run wastes as much as the model predicts (failures are rare)."""
    rng = np.random.default_rng(7)
    model = Model(mtbf=2000, full_write=2, load_full=5, merge_batch=0.3)
    interval, batch, wasted, done = 40, 4, 0.0, 0.0
    for gap in rng.exponential(2000, 4000):  # iterations of progress from one failure to the next
        done += gap
        batches, lost = divmod((done % interval), batch)  # progress counts once, so the phase carries over
        wasted += 5 + 0.3 * batches + lost
    wasted += done / interval * 2
    assert model.total(interval, batch) == pytest.approx(wasted / done, rel=0.05)


def test_parallel_recovery_takes_a_logarithm_of_the_merges() -> None:
    serial = Model(mtbf=1000, full_write=2, load_full=5, merge_batch=0.5)
    parallel = replace(serial, recovery="parallel")
    # 1/f = 62, b = 2: 15 merges on average one by one, 4 rounds as a tree (16 leaves with the full)
    assert serial.waste(62, 2).replay == pytest.approx(15 * 0.5 / 1000)
    assert parallel.waste(62, 2).replay == pytest.approx(4 * 0.5 / 1000)
    assert parallel.waste(62, 62).replay == serial.waste(62, 62).replay == 0


@pytest.mark.parametrize(("interval", "batch"), [(10, 11), (10, 0.5), (0.5, 0.5), (math.nan, 1)])
def test_an_invalid_configuration_is_refused(interval: float, batch: float) -> None:
    with pytest.raises(UsageError, match="1 <= batch <= full_every"):
        TABLE_JOB.model().waste(interval, batch)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mtbf": 0.0}, "mtbf: 0, more than 0"),
        ({"bandwidth": -1.0}, "bandwidth: -1, more than 0"),
        ({"iteration": math.nan}, "iteration: nan is out of range"),
        ({"load_full": math.inf}, "load_full: inf is out of range"),
        ({"merge_batch": -0.1}, "merge_batch: -0.1, 0 or more"),
        ({"merge_batch": 0.0}, "applying diffs costs nothing"),
        ({"recovery": "both"}, "'serial' or 'parallel'"),
        ({"recovery": "parallel", "replay_diff": 1.0}, "merges whole batches"),
    ],
)
def test_impossible_jobs_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        replace(TABLE_JOB, **change).model()  # type: ignore[arg-type]


def test_the_share_of_the_bandwidth() -> None:
    job = Job(8e9, 2e9, mtbf=3600, iteration=0.5, load_full=3, merge_batch=0.1, diff_bytes=3e8)
    assert job.bandwidth_share(10) == pytest.approx((3e8 + 8e8) / 1e9)
    assert replace(job, diff_bytes=None).bandwidth_share(10) is None


# The optima


@given(models(plain=True))
def test_equation_10_is_where_the_derivatives_vanish(model: Model) -> None:
    point = paper_optimum(model)
    f, b = 1 / point.interval, point.batch
    # Eq. (9), with S/W, R_D, M in iterations; each term against the other
    assert model.full_write == pytest.approx(model.merge_batch / (2 * f**2 * model.mtbf * b), rel=1e-9)
    assert b**2 * f == pytest.approx(model.merge_batch, rel=1e-9)


@given(models(plain=True))
def test_the_continuous_optimum_is_equation_10_where_that_is_allowed(model: Model) -> None:
    paper, found = paper_optimum(model), continuous(model)
    if 1 <= paper.batch <= paper.interval:
        assert found.batch == pytest.approx(paper.batch, rel=1e-3)
        assert found.interval == pytest.approx(paper.interval, rel=1e-3)
        assert model.total(found.interval, found.batch) == pytest.approx(
            model.total(paper.interval, paper.batch), rel=1e-12
        )
    else:
        assert found.batch == pytest.approx(1) or found.batch == pytest.approx(found.interval)


@settings(max_examples=short_or(80, 200))
@given(EITHER, st.data())
def test_nothing_real_beats_the_continuous_optimum(model: Model, data: st.DataObject) -> None:
    found = continuous(model)
    assert 1 <= found.batch <= found.interval
    batch = data.draw(log_uniform(1, 1e5) | log_uniform(0.5, 2).map(lambda factor: max(1.0, found.batch * factor)))
    interval = batch * data.draw(log_uniform(1, 1e5) | st.just(found.interval / batch))
    assume(interval >= batch)
    assert model.total(interval, batch) >= model.total(found.interval, found.batch) * (1 - 1e-12)


def grid_least(model: Model, intervals: int, batches: int) -> float:
    """The least over all integers 1 <= b <= batches, b <= 1/f <= intervals, written without the code under test."""
    n, b = np.arange(1, intervals + 1)[None, :], np.arange(1, batches + 1)[:, None]
    merges = (n / b - 1) / 2
    with np.errstate(invalid="ignore", divide="ignore"):
        if model.recovery == "serial":
            replay = merges * (model.merge_batch + model.replay_diff * b)
        else:
            replay = model.merge_batch * np.log2(1 + merges)
    failures = (b / 2 + model.load_full + replay) / model.mtbf
    total = np.where(b <= n, failures + model.full_write / n + model.batch_write / b, np.inf)
    return float(total.min())


@settings(max_examples=short_or(60, 150), deadline=None)
@given(EITHER)
def test_the_integer_optimum_is_the_least_of_the_whole_grid(model: Model) -> None:
    found = best(model)
    assert 1 <= found.batch <= found.interval
    intervals, batches = 2 * found.interval + 5, 2 * found.batch + 5
    assume(intervals * batches <= 4_000_000)
    least = grid_least(model, intervals, batches)
    assert model.total(found.interval, found.batch) == pytest.approx(least, rel=1e-12)


@settings(max_examples=40, deadline=None)
@given(EITHER)
def test_the_integer_optimum_is_near_the_continuous_one(model: Model) -> None:
    real, found = continuous(model), best(model)
    floor = model.total(real.interval, real.batch)
    assert model.total(found.interval, found.batch) >= floor * (1 - 1e-12)
    rounded = Configuration(max(math.ceil(real.interval), math.ceil(real.batch)), math.ceil(real.batch))
    assert model.total(found.interval, found.batch) <= model.total(rounded.interval, rounded.batch) * (1 + 1e-12)


@given(models())
def test_fulls_only_is_youngs_interval(model: Model) -> None:
    found = fulls_only(model)
    assert found.interval == found.batch
    young = math.sqrt(2 * model.mtbf * (model.full_write + model.batch_write))
    assert abs(found.interval - young) <= 1 or found.interval == 1
    here = model.total(*[found.interval] * 2)
    for other in range(max(1, found.interval - 5), found.interval + 6):
        assert here <= model.total(other, other) * (1 + 1e-12)
    optimum = best(model)
    assert model.total(optimum.interval, optimum.batch) <= here * (1 + 1e-12)


@given(models(), log_uniform(1.0, 10))
def test_replay_slower_than_training_means_fulls_only(model: Model, slow: float) -> None:
    model = replace(model, replay_diff=slow)
    found, fulls = best(model), fulls_only(model)
    assert model.total(found.interval, found.batch) == pytest.approx(
        model.total(fulls.interval, fulls.batch), rel=1e-12
    )


def test_a_steeper_price_moves_the_optimum_the_right_way() -> None:
    model = TABLE_JOB.model()
    at = best(model)
    assert best(replace(model, full_write=model.full_write * 20)).interval > at.interval  # expensive fulls: fewer
    assert best(replace(model, mtbf=model.mtbf / 20)).interval < at.interval  # frequent failures: more
    assert best(replace(model, merge_batch=model.merge_batch * 20)).batch > at.batch  # expensive merges: larger batches
    assert best(replace(model, batch_write=1.0)).batch > at.batch  # expensive writes: larger batches


def test_neighbours_are_configurations_around_the_optimum() -> None:
    model = TABLE_JOB.model()
    around = neighbours(model, Configuration(20, 2))
    assert list(around) == [Configuration(n, b) for n in (10, 20, 40) for b in (1, 2, 4)]
    assert min(around, key=lambda pair: around[pair]) == Configuration(20, 2)
    assert list(neighbours(model, Configuration(1, 1))) == [
        Configuration(1, 1),
        Configuration(2, 1),
        Configuration(2, 2),
    ]


# Table I


def test_the_printed_table_has_its_minimum_at_20_and_2() -> None:
    cells = np.array(TABLE_I)
    assert cells.min() == 1.0
    assert np.argwhere(cells == 1.0).tolist() == [[TABLE_INTERVALS.index(20), TABLE_BATCHES.index(2)]]


def test_the_model_has_its_minimum_where_the_table_has_it() -> None:
    cells = np.array(table(TABLE_JOB))
    assert np.unravel_index(cells.argmin(), cells.shape) == (1, 1)
    assert cells.min() == 1.0
    model = TABLE_JOB.model()
    assert best(model) == Configuration(20, 2)
    point = paper_optimum(model)
    assert (round(point.interval), round(point.batch)) == (21, 2)
    # The shape agrees: too rare and too frequent fulls cost more, and so does batching too little or too much.
    assert (cells[[0, 2, 3], 1] > 1.05).all()
    assert (np.argmin(cells, 1)[:3] == np.argmin(TABLE_I, 1)[:3]).all()
