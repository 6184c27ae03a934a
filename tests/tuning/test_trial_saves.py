"""Trial saves: their state, their place, and that nothing of them stays."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptstore
from ckptstore.errors import CheckpointNotFoundError, StorageError, StoreNotFoundError, UsageError
from ckptstore.tuning.trial_folder import existing_store, scratch
from ckptstore.tuning.trial_saves import TrialPlan, lengths_like, lengths_of, profile, trial_state

MIB = 1 << 20


@settings(deadline=None)
@given(st.lists(st.integers(0, 3000), min_size=1, max_size=60), st.integers(1, 20_000))
def test_a_trial_state_is_an_even_part_of_the_whole(lengths: list[int], most: int) -> None:
    kept = [len(array) for array in trial_state(lengths, most).values()]
    total = sum(lengths)
    if total <= most:
        assert kept == lengths
    else:
        assert sum(kept) <= most + 1
        assert sum(kept) >= min(most, total) - max(lengths)


def test_lengths_of_a_size_a_checkpoint_and_a_file(tmp_path: Path) -> None:
    assert sum(lengths_of(100 * MIB + 5)) == 100 * MIB + 5
    assert max(lengths_of(100 * MIB + 5)) == 16 * MIB
    store = ckptstore.open(tmp_path / "run", create=True)
    with store.writer(poll_seconds=None) as writer:
        writer.save({"a": np.zeros(10, np.float32), "b": np.zeros((3, 3), np.float64), "step": 1}, 1)
    assert sorted(lengths_like("latest", store)) == [40, 72]
    file = tmp_path / "one.safetensors"
    store.export("latest", file)
    assert sorted(lengths_like(str(file), None)) == [40, 72]
    with pytest.raises(UsageError, match="no file of this name, and no store yet"):
        lengths_like("latest", None)
    with pytest.raises(CheckpointNotFoundError):
        lengths_like("99", store)


def test_where_trial_saves_go(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for place in (run, f"file://{run}"):  # a path where nothing is yet
        with scratch(str(place)) as found:
            assert found.folder.parent == tmp_path
    ckptstore.open(run, create=True).close()
    with scratch(str(run)) as found:  # beside a store
        assert found.folder.parent == tmp_path
        assert found.url("0") == str(found.folder / "0")
    (tmp_path / "plain").mkdir()
    with scratch(str(tmp_path / "plain")) as found:  # in any other folder
        assert found.folder.parent == tmp_path / "plain"
    assert sorted(path.name for path in tmp_path.rglob(".ckpt-tune-*")) == []


def test_where_no_trial_saves_can_go(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"the folder .*/no does not exist"), scratch(str(tmp_path / "no" / "run")):
        pass
    with pytest.raises(UsageError, match="a folder of this machine"), scratch("memory://run"):
        pass
    with pytest.raises(UsageError, match="no backend for tape://"):
        existing_store("tape:///run")
    ckptstore.open(tmp_path / "run", create=True).close()
    with pytest.raises(UsageError, match="is inside the checkpoint store"), scratch(str(tmp_path / "run" / "log")):
        pass
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreNotFoundError, match="is a file"), scratch(str(tmp_path / "file")):
        pass


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), scratch(str(tmp_path / "run")) as place:
        profile(place, trial_state([MIB], MIB), TrialPlan(2, range(1, 3), (64 << 20,), 2), interrupt)
    assert list(tmp_path.iterdir()) == []


def test_too_little_space_is_reported_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with scratch(str(tmp_path / "run")) as place:
        monkeypatch.setattr("ckptstore.tuning.trial_folder.Scratch.free", lambda _self: 5 * MIB)
        with pytest.raises(StorageError, match=f"trial saves take {6 * MIB} bytes, {5 * MIB} are free"):
            profile(place, trial_state([2 * MIB], 2 * MIB), TrialPlan(1, range(1, 2), (64 << 20,), 2))
        assert list(place.folder.iterdir()) == []


def test_a_profile_measures_real_saves(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    plan = TrialPlan(2, range(1, 3), (64 << 20, 128 << 20), 2)
    with scratch(str(tmp_path / "run")) as place:
        found = profile(place, trial_state([MIB, 5 * MIB], 100 * MIB), plan, lambda *both: told.append(both))
        assert list(place.folder.iterdir()) == []
    settings_tried = [one.setting for one in found.timings]
    assert len(settings_tried) == len(set(settings_tried))
    assert {(one.in_flight, one.threads) for one in settings_tried} >= {(1, 1), (1, 2)}
    assert 2 in {one.in_flight for one in settings_tried}
    assert {one.staging_bytes for one in settings_tried} == {64 << 20, 128 << 20}
    for one in found.timings:
        assert 0 < one.loss <= one.write < found.seconds
    assert 0 < found.load < found.seconds
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1][0] == told[-1][1] <= plan.most_saves() * 6 * MIB
    doubled = found.scaled(2.0)
    assert [one.write for one in doubled.timings] == [2 * one.write for one in found.timings]
    assert doubled.load == 2 * found.load


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(StorageError, match="a temporary folder cannot be made"), scratch(str(tmp_path / "run")):
            pass
    finally:
        tmp_path.chmod(0o700)
