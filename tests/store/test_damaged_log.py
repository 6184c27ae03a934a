"""Slots that are gone from the middle of a log: every reader is warned once, and no reader twice."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import ckptstore
from ckptstore import DamagedLogWarning
from ckptstore.cli.main import cli
from ckptstore.formats.history.records import slot_key
from ckptstore.log.log_watch import LogWatch
from ckptstore.reports.notebooks import store_html
from ckptstore.reports.runs import find_runs


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty slots: an OPEN, 38 checkpoints, the end of the term."""
    root = tmp_path_factory.mktemp("damaged") / "run"
    with ckptstore.open(root).writer(poll_seconds=None) as writer:
        for step in range(1, 39):
            writer.save({"w": np.full(5, step)}, step=step)
    assert len(list((root / "log").iterdir())) == 40
    return root


@pytest.fixture
def root(whole: Path, tmp_path: Path) -> Path:
    """The same without two slots in the middle."""
    root = tmp_path / "run"
    shutil.copytree(whole, root)
    for seq in (17, 18):
        (root / slot_key(seq)).unlink()
    return root


def written(store: ckptstore.Store) -> None:
    with store.writer(poll_seconds=None) as writer:
        writer.save({"w": np.full(5, 39)}, step=39)


def followed(store: ckptstore.Store) -> None:
    follower = store.follow(framework="numpy", timeout=20, poll=0.02)
    next(follower)
    follower.close()


READERS: dict[str, Callable[[ckptstore.Store], object]] = {
    "checkpoints": lambda store: store.checkpoints(),
    "checkpoint": lambda store: store.checkpoint(),
    "latest_step": lambda store: store.latest_step(),
    "load": lambda store: store.load("latest", framework="numpy"),
    "load a step": lambda store: store.load(5, framework="numpy"),
    "writer": written,
    "view": lambda store: store.view(),
    "terms": lambda store: store.terms(),
    "tags": lambda store: store.tags(),
    "rules": lambda store: store.rules(),
    "plan": lambda store: store.plan(),
    "inspect": lambda store: store.inspect(),
    "explain": lambda store: store.explain(),
    "statistics": lambda store: store.statistics("latest", "w"),
    "lineage": lambda store: store.lineage(),
    "stats": lambda store: store.stats(),
    "gc": lambda store: store.gc(),
    "follow": followed,
    "watch": lambda store: next(store.watch()),
    "export": lambda store: store.export("latest", Path(store.url).parent / "out.safetensors"),
    "retire": lambda store: store.retire(3, take_over=True),
    "tag": lambda store: store.tag("best", 5, take_over=True),
    "keep": lambda store: store.keep("last:5", take_over=True),
}


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_is_warned_once(root: Path, reader: str) -> None:
    store = ckptstore.open(root)
    with pytest.warns(DamagedLogWarning, match=r"log slots 17, 18 are damaged or missing.*`ckpt verify .*run`") as told:
        READERS[reader](store)
    assert len(told) == 1
    assert told[0].filename == __file__, "it blames the caller's line"
    assert store.latest_step()  # there is no further warning: it would be an error here
    assert len(store.checkpoints()) in (35, 36, 37)
    with pytest.warns(DamagedLogWarning):
        ckptstore.open(root).checkpoints()  # another handle


def test_operations_that_refuse_or_report_give_no_warning(root: Path, tmp_path: Path) -> None:
    store = ckptstore.open(root)
    assert {one.key for one in store.verify().damage} >= {slot_key(17), slot_key(18)}
    assert {one.key for one in ckptstore.repair(root, tmp_path / "repaired").damage} >= {slot_key(17), slot_key(18)}
    assert "2 log slots are damaged or missing" in store_html(store.journal)
    run = next(one for one in find_runs(root.parent).runs if one.path == str(root))
    assert "damaged" in (run.error or "")
    with pytest.warns(DamagedLogWarning), pytest.raises(ckptstore.CorruptLogError, match="the log is damaged"):
        store.prune("last:1")


def test_later_damage_causes_another_warning(whole: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    shutil.copytree(whole, root)
    store = ckptstore.open(root)
    assert store.latest_step() == 38
    (root / slot_key(20)).unlink()
    with pytest.warns(DamagedLogWarning, match="log slot 20 is damaged"):
        store.latest_step()
    store.latest_step()
    (root / slot_key(21)).write_bytes(b"garbage")
    with pytest.warns(DamagedLogWarning, match="log slots 20, 21 are"):
        store.latest_step()
    store.latest_step()
    for seq in range(22, 36):
        (root / slot_key(seq)).unlink()
    with pytest.warns(DamagedLogWarning, match=r"20, 21, 22, 23, 24, 25, 26, 27 and 8 more are"):
        store.latest_step()


def test_a_lost_end_causes_a_warning(whole: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    shutil.copytree(whole, root)
    (root / "seg" / "0000000009").mkdir()
    shutil.copy(next((root / "seg" / "0000000001").iterdir()), root / "seg" / "0000000009" / f"{'a' * 32}.safetensors")
    store = ckptstore.open(root)
    with pytest.warns(DamagedLogWarning, match="the end of the log is lost, with term 9"):
        store.checkpoints()
    store.checkpoints()


def test_many_looks_tell_it_once(root: Path) -> None:
    """Each look at a folder has another handle of it."""
    store = ckptstore.open(root)
    looks = LogWatch(store.journal)
    with pytest.warns(DamagedLogWarning) as told:
        looks.look()
    looks.look()
    looks.look()
    assert len(told) == 1
    looks.close()
    store.latest_step()


def test_as_an_error_it_stops_one_call_and_no_second(root: Path) -> None:
    store = ckptstore.open(root)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(DamagedLogWarning):
            store.latest_step()
        assert store.latest_step() == 38


def test_a_fork_is_warned_again(root: Path) -> None:
    store = ckptstore.open(root)
    with pytest.warns(DamagedLogWarning):
        store.latest_step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's own, about forks and threads
        pid = os.fork()
    if not pid:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            store.latest_step()
        os._exit(len(told))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


def test_a_script_sees_it(root: Path) -> None:
    code = f"import ckptstore; print(len(ckptstore.open({str(root)!r}, create=False).checkpoints()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "36"
    assert re.search(r"DamagedLogWarning: .*log slots 17, 18 are damaged or missing", done.stderr)


@pytest.mark.filterwarnings("always::ckptstore.DamagedLogWarning")
@pytest.mark.parametrize("command", [["restore", "--out", "x.safetensors"], ["inspect"], ["log"], ["gc"], ["stats"]])
def test_a_command_says_it_once(root: Path, tmp_path: Path, command: list[str]) -> None:
    more = [str(tmp_path / one) if one.endswith("safetensors") else one for one in command[1:]]
    done = CliRunner().invoke(cli, [command[0], str(root), *more], catch_exceptions=False)
    said = re.findall(r"slots? 17\b", done.stderr + done.stdout)
    assert len(said) == 1, done.stderr + done.stdout
    assert done.exit_code == (4 if command[0] in ("gc", "stats") else 0)
