"""Common mistakes, as an outside attacker found them: each raises an error that gives a remedy."""

from __future__ import annotations

import math
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import ckptstore
from ckptstore.cli.main import cli


@pytest.fixture
def store() -> ckptstore.Store:
    return ckptstore.open(f"memory://{uuid.uuid4().hex}")


def state(step: int) -> dict[str, Any]:
    return {"w": np.full(300, step, "<f4")}


def saved(store: ckptstore.Store, *steps: int, **options: Any) -> None:
    with store.writer(poll_seconds=None, **options) as writer:
        for step in steps:
            writer.save(state(step), step)


def test_a_term_from_nothing_names_what_there_is_instead_of_latest(tmp_path: Path) -> None:
    """It said that the store holds no checkpoint, and the next writer silently started from scratch."""
    store = ckptstore.open(tmp_path / "s")
    saved(store, 1, 2)
    saved(store, parent=None)
    with pytest.raises(ckptstore.CheckpointNotFoundError, match=r"writer\(parent='2@1'\)"):
        store.load()
    shown = CliRunner().invoke(cli, ["inspect", str(tmp_path / "s")])
    assert (shown.exit_code, "writer(parent='2@1')" in shown.output) == (3, True)
    with pytest.warns(ckptstore.FreshStartWarning, match="parent='2@1'") as caught:
        saved(store)
    assert [one.filename for one in caught] == [__file__]
    saved(store, 3, parent="2@1")
    assert store.latest_step() == 3


@pytest.mark.filterwarnings("error")
def test_a_requested_run_from_nothing_causes_no_warning(store: ckptstore.Store) -> None:
    saved(store)
    saved(store, 1)
    saved(store, 1, parent=None)
    saved(store, 2)
    assert [one.ref for one in store.checkpoints()] == ["1@2", "1@3", "2@4"]


REMEDY = "restore FORMAT from a copy"


def test_a_store_without_format_is_not_taken_for_none(tmp_path: Path) -> None:
    """`latest_step` was None, as for a run that has yet to begin; and a live writer acknowledged checkpoints that
    nobody can open."""
    place = tmp_path / "s"
    held = ckptstore.open(place)
    assert held.latest_step() is None
    with held.writer(poll_seconds=None) as writer:
        writer.save(state(1), 1)
        (place / "FORMAT").rename(tmp_path / "FORMAT")
        with pytest.raises(ckptstore.StorageError, match=REMEDY):
            writer.save(state(2), 2)
        store = ckptstore.open(place)
        for ask in (store.latest_step, store.load, store.checkpoints, store.writer, store.create, held.verify):
            with pytest.raises(ckptstore.StoreNotFoundError, match=REMEDY):
                ask()
        (tmp_path / "FORMAT").rename(place / "FORMAT")
        writer.save(state(2), 2)
    assert store.latest_step() == 2
    assert held.verify().ok


def test_a_store_that_was_deleted_is_not_taken_for_one_that_never_was(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "s")
    saved(store, 1)
    shutil.rmtree(tmp_path / "s")
    for ask in (store.latest_step, store.load, store.writer, store.tags):
        with pytest.raises(ckptstore.StoreNotFoundError, match="deleted while it was open"):
            ask()
    assert not (tmp_path / "s").exists()
    store.create()
    assert store.latest_step() is None


def test_a_folder_that_holds_other_things_has_no_latest_step(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    store = ckptstore.open(tmp_path)
    assert store.latest_step() is None
    with pytest.raises(ckptstore.UsageError, match=r"it holds 'notes\.txt'"):
        store.writer()


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    """The error was: bad file descriptor. A descriptor that another folder has by then is never used."""
    store = ckptstore.open(tmp_path / "s")
    saved(store, 1)
    store.close()
    store.close()
    others = [os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY) for _ in range(4)]
    for ask in (store.latest_step, store.load, store.writer, store.create, store.tags, store.verify, store.gc):
        with pytest.raises(ckptstore.UsageError, match="was closed; open the store again"):
            ask()
    for one in others:
        os.close(one)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s"]


NO_TIMES = [math.nan, -1.0, -math.inf, "5", True]


@pytest.mark.parametrize("timeout", NO_TIMES)
def test_a_timeout_that_is_no_time_is_refused(store: ckptstore.Store, timeout: Any) -> None:
    """NaN never expires: it waited for ever."""
    saved(store, 1, 2, 3)
    asks: list[Callable[[], object]] = [
        lambda: store.tag("x", 1, timeout=timeout),
        lambda: store.retire(1, timeout=timeout),
        lambda: store.merge("1..3", timeout=timeout),
    ]
    for ask in asks:
        with pytest.raises(ckptstore.UsageError, match="timeout"):
            ask()
    assert not store.backend.list("req/")


def test_a_timeout_without_end_is_none(store: ckptstore.Store) -> None:
    with store.writer(poll_seconds=0.05) as writer:
        writer.save(state(1), 1)
        assert store.tag("x", 1, timeout=math.inf).tags == ("x",)


@pytest.mark.parametrize("timeout", ["nan", "-1"])
def test_the_command_exits_with_usage_for_a_timeout_that_is_no_time(tmp_path: Path, timeout: str) -> None:
    saved(ckptstore.open(tmp_path), 1)
    assert CliRunner().invoke(cli, ["tag", str(tmp_path), "x", "1", f"--timeout={timeout}"]).exit_code == 2


NAN, INF = math.nan, math.inf
OPTIONS: list[dict[str, Any]] = [
    {"threads": 0},
    {"threads": "2"},
    {"threads": 1.5},
    {"threads": 100_000},
    {"threads": True},
    {"threads": 1 << 20_000},
    {"staging_bytes": "64MB"},
    {"staging_bytes": 1 << 60},
    {"staging_bytes": 1.5e9},
    {"max_in_flight": None},
    {"max_in_flight": 1.5},
    {"max_in_flight": 10**9},
    {"poll_seconds": "5"},
    {"poll_seconds": NAN},
    {"poll_seconds": 0},
    {"memory": "1GB"},
    {"memory": 1 << 60},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_an_invalid_option_of_a_writer_opens_no_term(store: ckptstore.Store, options: dict[str, Any]) -> None:
    with pytest.raises(ckptstore.UsageError, match=rf"^{next(iter(options))}"):
        store.writer(**options)
    assert not store.backend.list("")


NO_BOUNDS: list[dict[str, Any]] = [{"times": value} for value in (0, -1, NAN, "x", True)]
NO_BOUNDS += [{"nbytes": -1}, {"nbytes": NAN}, {"seconds": 0}, {"seconds": NAN}, {"depth": -1}, {"depth": 2.5}]


@pytest.mark.parametrize("bound", NO_BOUNDS, ids=str)
def test_an_invalid_bound_is_refused(bound: dict[str, Any]) -> None:
    """NaN bounds nothing: no comparison with it is true."""
    with pytest.raises(ckptstore.UsageError, match=f"RestoreBound: {next(iter(bound))}"):
        ckptstore.RestoreBound(**bound)


NO_DELTAS: list[dict[str, Any]] = [{"bound": None}, {"bound": 3}, {"bound": "3 apples"}, {"policy": "x"}]
NO_DELTAS += [{"policy": None}, {"memory": "1GB"}, {"memory": -1}]
NO_DIFFS: list[dict[str, Any]] = [{"seconds": NAN}, {"seconds": "x"}, {"seconds": 0}, {"batch_bytes": "x"}]
NO_DIFFS += [{"batch_bytes": -1}, {"policy": 5}, {"controller": 5}]


@pytest.mark.parametrize("options", NO_DELTAS, ids=str)
def test_invalid_delta_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ckptstore.UsageError):
        ckptstore.DeltaOptions(**options)


@pytest.mark.parametrize("options", NO_DIFFS, ids=str)
def test_invalid_diff_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ckptstore.UsageError, match=next(iter(options))):
        ckptstore.DiffOptions(**options)


def test_valid_options_are_accepted(store: ckptstore.Store) -> None:
    assert ckptstore.DeltaOptions(bound="3x,30s").bound == ckptstore.RestoreBound(3.0, None, 30.0)  # type: ignore[arg-type]
    assert ckptstore.DiffOptions(seconds=INF).seconds is None
    assert ckptstore.DiffOptions(seconds=1e300).seconds is None
    for poll_seconds in (INF, 1e300, np.float32(0.5)):
        with store.writer(poll_seconds=poll_seconds, threads=np.int64(1), max_in_flight=np.int32(2)) as writer:
            step = (store.latest_step() or 0) + 1
            writer.save(state(step), step, tags=None)  # type: ignore[arg-type]
    assert store.latest_step() == 3


LABELS: list[dict[str, Any]] = [{"tags": 5}, {"tags": b"x"}, {"tags": [None]}, {"metadata": {"a": 1 << 20000}}]


@pytest.mark.parametrize("labels", LABELS)
def test_labels_that_cannot_be_stored_are_refused(store: ckptstore.Store, labels: dict[str, Any]) -> None:
    with store.writer(poll_seconds=None) as writer:
        with pytest.raises(ckptstore.UsageError):
            writer.save(state(1), 1, **labels)
        writer.save(state(1), 1, metadata={"a": 1 << 4000})
    assert store.checkpoint().metadata == {"a": 1 << 4000}


LOADS: list[dict[str, Any]] = [{"select": 5}, {"select": [5]}, {"select": b"w"}, {"threads": "2"}, {"threads": 10**6}]
LOADS += [{"progress": 5}, {"rank": "x"}]


@pytest.mark.parametrize("options", LOADS, ids=str)
def test_an_invalid_option_of_load_is_refused(store: ckptstore.Store, options: dict[str, Any]) -> None:
    saved(store, 1)
    with pytest.raises(ckptstore.UsageError, match=next(iter(options))):
        store.load(1, **options)


@pytest.mark.parametrize("call", ["save", "save_async"])
@pytest.mark.parametrize("deltas", [None, 2])
def test_updates_without_diffs_cause_one_warning(store: ckptstore.Store, call: str, deltas: int | None) -> None:
    with store.writer(poll_seconds=None, deltas=deltas) as writer:
        with pytest.warns(ckptstore.UnexplainedStepWarning, match=r"diffs=DiffOptions") as caught:
            _ = [getattr(writer, call)(state(step), step, updates=[]) for step in (1, 2, 3)]
        assert [one.filename for one in caught] == [__file__]
    assert store.latest_step() == 3


def test_a_pending_save_says_how_it_is(store: ckptstore.Store) -> None:
    with store.writer(poll_seconds=None) as writer:
        pending = writer.save_async(state(1), 1)
        assert repr(pending).startswith("<PendingSave of step 1: ")
        pending.result()
        assert repr(pending) == "<PendingSave of step 1: durable>"
