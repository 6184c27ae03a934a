"""`Store.writer(reuse=True)`: all callers in a process share one writer of a store."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore import FencedError, RankOptions, UsageError, Writer
from ckptstore.write.ranks.messages.key_value_store import Group
from tests.write.rank_states import PATIENT
from tests.write.rank_threads import as_ranks

STATE = {"x": 1}


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "store") if request.param == "file" else f"memory://{uuid.uuid4().hex}"


def reused(url: str | Path, **options: Any) -> Writer:
    return ckptstore.open(url).writer(reuse=True, **options)


def test_ten_saves_are_one_term(url: str) -> None:
    refs = []
    for _ in range(10):
        with ckptstore.open(url) as store:  # closing the handle leaves the writer usable
            refs.append(store.writer(reuse=True).save(STATE).ref)
    assert refs == [f"{step}@1" for step in range(1, 11)]
    reused(url).close()


def test_all_names_of_a_folder_are_one_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "store")
    first = reused("store")
    for other in (tmp_path / "store", "./store/", f"file://{tmp_path}/store", "link"):
        assert reused(other) is first
    assert reused("another") is not first
    first.close()
    reused("another").close()


def test_a_writer_opened_without_it_is_not_shared(url: str) -> None:
    first = reused(url)
    first.save(STATE)
    with ckptstore.open(url).writer() as own:
        assert own is not first
        own.save(STATE)
    with pytest.raises(FencedError):
        first.save(STATE)
    assert not first.usable
    again = reused(url)
    assert again.save(STATE).ref == "3@3"
    again.close()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("threads", 3),
        ("max_in_flight", 2),
        ("deltas", 1),
        ("keep", ["last:2"]),
        ("on_metrics", print),
        ("staging_bytes", 128 << 20),
        ("memory", 64 << 20),
        ("compact", ckptstore.CompactOptions()),
        ("poll_seconds", 1.0),
        ("diffs", ckptstore.DiffOptions()),
        ("parent", None),
    ],
)
def test_an_option_that_differs_is_refused_by_its_name(url: str, name: str, value: Any) -> None:
    first = reused(url)
    first.save(STATE)
    with pytest.raises(UsageError, match=f"^{name}: .*close that writer first"):
        reused(url, **{name: value})
    assert first.usable
    first.close()
    second = reused(url, **{name: value})
    assert second is not first
    assert reused(url, **{name: value}) is second
    if name == "keep":
        assert reused(url) is second, "None: the store's rules"
    elif name != "parent":
        with pytest.raises(UsageError, match=f"^{name}: "):
            reused(url)
    second.close()


def test_the_remote_counts_as_an_option(tmp_path: Path) -> None:
    first = reused(tmp_path / "store")
    with pytest.raises(UsageError, match=r"^remote: "):
        ckptstore.open(tmp_path / "store", remote=f"memory://{uuid.uuid4().hex}").writer(reuse=True)
    first.close()


def test_latest_is_the_newest_of_the_open_writer(url: str) -> None:
    first = reused(url, parent=None)
    first.save(STATE, 4)
    assert reused(url) is first
    assert reused(url, parent=None) is first
    with pytest.raises(UsageError, match=r"^parent: 4; this process has .* open with None"):
        reused(url, parent=4)
    first.close()


def test_a_closed_writer_is_replaced(url: str) -> None:
    first = reused(url)
    first.save(STATE)
    first.close()
    assert not first.usable
    second = reused(url)
    assert second.save(STATE).ref == "2@2"
    second.close()


@pytest.mark.parametrize("again", [False, True])
def test_a_replaced_or_deleted_store_gets_a_new_writer(tmp_path: Path, again: bool) -> None:
    first = reused(tmp_path / "store")
    first.save(STATE)
    shutil.rmtree(tmp_path / "store")
    if again:
        with ckptstore.open(tmp_path / "store").writer() as writer:
            writer.save(STATE, 7)
    second = reused(tmp_path / "store")
    assert second is not first
    assert second.save(STATE).ref == ("8@2" if again else "1@1")
    second.close()


def test_threads_that_ask_at_the_same_time_get_the_same_writer(url: str) -> None:
    found: list[Writer] = []
    start = threading.Barrier(6)

    def ask() -> None:
        start.wait()
        found.append(reused(url))
        found[-1].save(STATE)

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    found[0].close()
    store = ckptstore.open(url)
    assert [info.ref for info in store.checkpoints()] == [f"{step}@1" for step in range(1, 7)]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_opens_its_own_writer(tmp_path: Path) -> None:
    first = reused(tmp_path / "store")
    first.save(STATE)
    child = os.fork()
    if not child:
        ref = ""
        try:
            own = reused(tmp_path / "store")
            ref = own.save(STATE).ref
            own.close()
        finally:
            os._exit(0 if ref == "2@2" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with pytest.raises(FencedError):
        first.save(STATE)
    second = reused(tmp_path / "store")
    assert second.save(STATE).ref == "3@3"
    second.close()


def test_ranks_share_by_group(url: str) -> None:
    def work(group: Group) -> list[Any]:
        first = reused(url, group=group, ranks=PATIENT)
        assert reused(url, group=group, ranks=PATIENT) is first
        with pytest.raises(UsageError, match=r"^ranks: "):
            reused(url, group=group, ranks=RankOptions(timeout=1))
        with pytest.raises(UsageError, match="a writer open with group="):
            reused(url)
        refs = [reused(url, group=group, ranks=PATIENT).save({"x": group.rank}).ref for _ in range(3)]
        first.close()
        return refs

    assert as_ranks(2, work) == [["1@1", "2@1", "3@1"]] * 2


def test_the_exit_of_the_process_closes_it(tmp_path: Path) -> None:
    script = "import sys, ckptstore; ckptstore.open(sys.argv[1]).writer(reuse=True).save_async({'x': 1})"
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "s")], capture_output=True, text=True, check=True
    )
    assert not done.stderr
    assert [info.ref for info in ckptstore.open(tmp_path / "s").checkpoints()] == ["1@1"]
