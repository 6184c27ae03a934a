"""Units as people write them, a store's data about its job, and the picture."""

from __future__ import annotations

import contextlib
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckptstore
from ckptstore.errors import CheckpointNotFoundError, MissingDependencyError, StorageError, UsageError
from ckptstore.tuning import Job, quantity_units
from ckptstore.tuning.job_profile import measure
from ckptstore.tuning.paper_table import TABLE_JOB
from ckptstore.tuning.wasted_time_plot import heat_map


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("500ms", 0.5),
        ("0.5s", 0.5),
        (".5 s", 0.5),
        ("30min", 1800),
        ("30m", 1800),
        ("2h", 7200),
        ("1h30min", 5400),
        ("1h 30min 10s", 5410),
        ("3d", 259200),
        ("20us", 2e-5),
        ("1e3s", 1000),
        ("0s", 0),
    ],
)
def test_times(text: str, seconds: float) -> None:
    assert quantity_units.seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "5", "h", "-1s", "2 hours", "1h30", "5x", "1,5s", "nan s", "1e999s", "1s;"])
def test_invalid_times(text: str) -> None:
    with pytest.raises(UsageError, match=r"is not a time: write|out of range"):
        quantity_units.seconds(text)


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("1GB/s", 1e9),
        ("1.5 GB/s", 1.5e9),
        ("800MiB/s", 800 * 2**20),
        ("10Gbit/s", 1.25e9),
        ("25Gbps", 3.125e9),
        ("100Mbit/s", 1.25e7),
        ("1e9B/s", 1e9),
        ("2TB/s", 2e12),
    ],
)
def test_bandwidths(text: str, rate: float) -> None:
    assert quantity_units.bandwidth(text) == pytest.approx(rate)


@pytest.mark.parametrize("text", ["1Gb/s", "10 Gib/s", "1GBps", "800mb/s"])
def test_a_bandwidth_that_could_be_bits_or_bytes_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="bits or bytes"):
        quantity_units.bandwidth(text)


@pytest.mark.parametrize("text", ["", "1GB", "fast", "-1GB/s", "GB/s", "1 GB/h", "1e999GB/s"])
def test_invalid_bandwidths(text: str) -> None:
    with pytest.raises(UsageError, match=r"is not a bandwidth: write|out of range"):
        quantity_units.bandwidth(text)


@pytest.mark.parametrize(
    ("text", "nbytes"), [("8.7GB", 8.7e9), ("500MiB", 500 * 2**20), ("123", 123), ("1k", 1000), ("2 tib", 2 * 2**40)]
)
def test_sizes(text: str, nbytes: float) -> None:
    assert quantity_units.nbytes(text) == pytest.approx(nbytes)


@given(st.text(max_size=12) | st.text("0123456789.eE+-hmsdGKMTibB/ ", max_size=12))
def test_any_text_is_a_number_or_a_usage_error(text: str) -> None:
    for parse in (quantity_units.seconds, quantity_units.nbytes, quantity_units.bandwidth):
        with contextlib.suppress(UsageError):
            assert 0 <= parse(text) < float("inf")


def saved(url: str | Path, **options: object) -> ckptstore.Store:
    rng, store = np.random.default_rng(0), ckptstore.open(url, create=True)
    weight = rng.standard_normal(50_000).astype(np.float32)
    with store.writer(poll_seconds=None, **options) as writer:  # type: ignore[arg-type]
        for step in (10, 20, 30):
            weight = weight + np.float32(1e-6)
            writer.save({"weight": weight}, step=step)
    return store


def test_measuring_fulls(tmp_path: Path) -> None:
    store = saved(tmp_path / "run")
    found = measure(store)
    infos = store.checkpoints()
    assert (found.ref, found.fulls, found.diffs) == ("30@1", 3, 0)
    assert found.full_bytes == infos[0].stored
    assert found.diff_bytes is found.merge_batch is found.replay_diff is None
    gaps = [b.time - a.time for a, b in pairwise(infos)]
    assert found.iteration == pytest.approx(sum(gaps) / 2 / 10)  # two gaps of ten steps
    assert found.write_floor == pytest.approx(infos[0].stored / min(gaps))
    assert found.load_full > 0


def test_measuring_diffs(tmp_path: Path) -> None:
    store = saved(tmp_path / "run", deltas=4)
    found = measure(store)
    assert (found.ref, found.fulls, found.diffs) == ("30@1", 1, 2)
    assert found.diff_bytes is not None
    assert 0 < found.diff_bytes < found.full_bytes
    assert found.replay_diff is not None
    assert found.merge_batch is not None
    job = Job(found.full_bytes, 1e9, 3600, found.iteration or 1, found.load_full, found.merge_batch, found.replay_diff)
    assert job.model().mtbf > 0


def test_measuring_changes_nothing(tmp_path: Path) -> None:
    store = saved(tmp_path / "run", deltas=4)
    before = sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "run").rglob("*") if path.is_file())
    measure(store)
    after = sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert after == before


def test_terms_are_not_neighbours_and_an_empty_store_says_so(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "run", create=True)
    with pytest.raises(CheckpointNotFoundError, match="holds no full"):
        measure(store)
    for step in (1, 2):
        with store.writer(poll_seconds=None) as writer:
            writer.save({"step": step, "w": np.zeros(3)}, step=step)
    found = measure(store)
    assert found.iteration is None
    assert found.write_floor is None


def pixels(path: Path) -> np.ndarray:
    image = pytest.importorskip("matplotlib.image")
    return np.asarray(image.imread(path))


@pytest.mark.parametrize(
    "job",
    [
        TABLE_JOB,
        Job(8e9, 1e9, mtbf=1e6, iteration=0.1, load_full=9, merge_batch=0.1),
        Job(8e9, 1e9, mtbf=60, iteration=30, load_full=9, merge_batch=90),  # the optimum is in the corner (1, 1)
    ],
    ids=["paper", "rare", "corner"],
)
def test_the_heat_map(job: Job, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    heat_map(job, tmp_path / "wasted.png")
    drawn = pixels(tmp_path / "wasted.png")
    assert drawn.shape[0] > 600
    assert drawn.shape[1] > 1000
    colours = {tuple(c) for c in (drawn[::7, ::7, :3] * 20).round().astype(int).reshape(-1, 3)}
    assert len(colours) > 30  # a gradient, not an empty frame
    star = np.abs(drawn[..., :3] - np.array([0xD5, 0x5E, 0x00]) / 255).max(-1) < 0.02
    assert star.sum() > 100  # the optimum, and its sign in the legend


def test_the_heat_maps_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(UsageError, match="no picture of this kind"):
        heat_map(TABLE_JOB, tmp_path / "wasted.docx")
    with pytest.raises((StorageError, FileNotFoundError)):
        heat_map(TABLE_JOB, tmp_path / "nowhere" / "wasted.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependencyError, match=r"ckptstore\[plot\]"):
        heat_map(TABLE_JOB, tmp_path / "wasted.png")
