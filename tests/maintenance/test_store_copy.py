"""`Store.copy`: the same run in another place, continued after a crash, and when the run has continued."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore import CheckpointNotFoundError, CorruptionError, StoreNotFoundError, UsageError
from ckptstore.backends.memory import MemoryBackend
from tests.maintenance.stores import bits, flip, grown, late, segments, states


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("copy") / "store"
    store = grown(root)
    store.retire("1@1", "12@3", take_over=True)  # bases: held from now on
    return root


@pytest.fixture(scope="module")
def wanted(source: Path) -> dict[str, Any]:
    return states(ckptstore.open(source))


def check(copied: str | Path, wanted: dict[str, Any]) -> ckptstore.Store:
    store = ckptstore.open(copied)
    report = store.verify(deep=True)
    assert report.ok
    assert (report.orphans, report.strangers) == ((), ())
    assert states(store) == wanted
    return store


def test_everything(source: Path, tmp_path: Path, wanted: dict[str, Any]) -> None:
    before = ckptstore.open(source)
    told: list[tuple[int, int]] = []
    done = before.copy(tmp_path / "copy", progress=lambda *one: told.append(one))
    after = check(tmp_path / "copy", wanted)
    assert (after.run, after.checkpoints(), after.terms(), after.tags()) == (
        before.run,
        before.checkpoints(),
        before.terms(),
        before.tags(),
    )
    assert after.view().catalog.held == before.view().catalog.held
    assert done.checkpoints == tuple(wanted)
    assert done.bases == ("1@1", "12@3")
    assert (done.present, done.went_on) == (0, False)
    copies = list(segments(tmp_path / "copy"))
    assert [path.read_bytes() for path in copies] == [path.read_bytes() for path in segments(source)]
    assert done.segments == len(copies)
    assert done.nbytes == sum(path.stat().st_size for path in copies) == told[-1][0] == told[-1][1]
    with after.writer() as writer:
        writer.save({"n": 21}, 21)
    assert after.load("latest") == {"n": 21}


def test_to_memory_and_back(source: Path, tmp_path: Path, wanted: dict[str, Any]) -> None:
    ckptstore.open(source).copy("memory://h3-copy")
    try:
        check("memory://h3-copy", wanted).copy(tmp_path / "back")
    finally:
        MemoryBackend.forget("h3-copy")
    check(tmp_path / "back", wanted)


def test_some_and_what_they_build_on(source: Path, tmp_path: Path, wanted: dict[str, Any]) -> None:
    before = ckptstore.open(source)
    done = before.copy(tmp_path / "copy", ["3@1", "tag:best", 14])
    after = check(tmp_path / "copy", {ref: wanted[ref] for ref in ("3@1", "14@3", "20@4")})
    assert done.checkpoints == ("3@1", "14@3", "20@4")
    assert done.bases == ("1@1", *(f"{step}@3" for step in range(7, 14)), "19@4")
    assert list(after.tags()) == ["best"]
    assert [one.parent for one in after.terms()] == [None, "4@1", "6@2", "18@3"]  # whether they exist or not
    assert after.checkpoint("latest").ref == "20@4"
    assert len(list(segments(tmp_path / "copy"))) == done.segments < len(list(segments(source)))
    with pytest.raises(CheckpointNotFoundError):
        before.copy(tmp_path / "other", [99])
    assert not (tmp_path / "other").exists()


def test_as_fulls(source: Path, tmp_path: Path, wanted: dict[str, Any]) -> None:
    before = ckptstore.open(source)
    done = before.copy(tmp_path / "copy", ["6@1", "17@3"], form="full")
    after = check(tmp_path / "copy", {ref: wanted[ref] for ref in ("6@1", "17@3")})
    assert (done.bases, done.segments) == ((), 2)
    for info, old in zip(after.checkpoints(), (before.checkpoint("6@1"), before.checkpoint("17@3")), strict=True):
        assert (info.kind, info.base) == ("full", None)
        assert (info.state, info.time, info.metadata) == (old.state, old.time, old.metadata)
    again = before.copy(tmp_path / "copy", ["6@1", "17@3"], form="full")
    assert (again.segments, again.present, again.went_on) == (0, 2, True)
    with pytest.raises(UsageError, match="'stored' or as 'full'"):
        before.copy(tmp_path / "other", form="delta")  # type: ignore[arg-type]


def test_a_copy_takes_what_is_new_and_gives_nothing_up(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "run")
    with store.writer(poll_seconds=None) as writer:
        writer.save({"n": 1}, 1)
        writer.save({"n": 2}, 2)
        first = store.copy(tmp_path / "copy")  # a live writer continues
        writer.save({"n": 3}, 3)
        writer.tag("best", 3)
        second = store.copy(tmp_path / "copy")
    assert (first.segments, second.segments, second.present, second.went_on) == (2, 1, 2, True)
    store.retire("1@1", take_over=True)
    with store.writer() as writer:
        writer.save({"n": 4}, 4)
    store.copy(tmp_path / "copy")
    copied = check(tmp_path / "copy", {f"{n}@{t}": {"n": n} for n, t in ((1, 1), (2, 1), (3, 1), (4, 3))})
    assert [(one.parent, one.time) for one in copied.terms()] == [(one.parent, one.time) for one in store.terms()]
    assert list(copied.tags()) == ["best"]


def test_nothing_is_added_to_a_copy_whose_log_is_damaged(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "store")
    with store.writer(poll_seconds=None) as writer:
        for step in (1, 2):
            writer.save({"n": step}, step)
        store.copy(tmp_path / "copy")
        writer.save({"n": 3}, 3)
    slots = sorted((tmp_path / "copy" / "log").iterdir())
    flip(slots[1], 40)
    before = [path.read_bytes() for path in slots]
    with pytest.raises(UsageError, match=r"slot 1 of the copy that is there is damaged"):
        store.copy(tmp_path / "copy")
    assert [path.read_bytes() for path in sorted((tmp_path / "copy" / "log").iterdir())] == before


def test_rules_of_retention_go_with_the_whole_store(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "store")
    with store.writer(keep=["last:3", "every:4"]) as writer:
        for step in range(1, 6):
            writer.save({"n": step}, step)
    store.copy(tmp_path / "copy")
    copy = ckptstore.open(tmp_path / "copy")
    assert copy.rules() == store.rules() != ()
    assert [one.step for one in copy.checkpoints()] == [3, 4, 5]
    store.copy(tmp_path / "some", ["3"])
    assert ckptstore.open(tmp_path / "some").rules() == ()  # they would retire the requested ones
    store.keep(everything=True, take_over=True)
    with store.writer() as writer:
        writer.save({"n": 6}, 6)
    store.copy(tmp_path / "copy")
    assert ckptstore.open(tmp_path / "copy").rules() == store.rules() == ()


def test_copies_that_both_go_on_are_branches(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "run")
    with store.writer() as writer:
        writer.save({"n": 1}, 1)
    store.copy(tmp_path / "copy")
    with ckptstore.open(tmp_path / "copy").writer() as writer:
        writer.save({"there": 2}, 2)
    with store.writer() as writer:
        writer.save({"here": 2}, 2)
    with pytest.raises(UsageError, match=r"was written to in term 2"):
        store.copy(tmp_path / "copy")
    assert ckptstore.open(tmp_path / "copy").load("latest") == {"there": 2}
    assert ckptstore.verify(tmp_path / "copy").ok


def test_checkpoints_too_late_to_add_are_refused(source: Path, tmp_path: Path) -> None:
    store = ckptstore.open(source)
    store.copy(tmp_path / "copy", ["20@4"])
    with pytest.raises(UsageError, match=r"it has term 4 already.*empty place"):
        store.copy(tmp_path / "copy", ["5@1"])
    assert [info.ref for info in ckptstore.open(tmp_path / "copy").checkpoints()] == ["20@4"]


def test_other_places_are_left_alone(source: Path, tmp_path: Path) -> None:
    store = ckptstore.open(source)
    other = ckptstore.open(tmp_path / "other", create=True)
    with pytest.raises(UsageError, match=f"another run, {other.run}"):
        store.copy(tmp_path / "other")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.tex").write_text("important")
    with pytest.raises(UsageError, match="not empty"):
        store.copy(tmp_path / "taken")
    lost = Path(shutil.copytree(source, tmp_path / "lost"))
    (lost / "FORMAT").unlink()  # a store of the same run that lost its FORMAT file is not an unfinished copy
    with pytest.raises(UsageError, match="not empty"):
        store.copy(lost)
    with pytest.raises(UsageError, match="outside of"):
        store.copy(source / "copy")


@pytest.mark.parametrize("what", ["chunk", "header", "slot"])
def test_damage_stops_it(source: Path, tmp_path: Path, wanted: dict[str, Any], what: str) -> None:
    old = Path(shutil.copytree(source, tmp_path / "old"))
    store = ckptstore.open(old)
    path = old / store.describe("5@2")[0][0].key
    whole = path.read_bytes()
    if what == "slot":
        path = sorted((old / "log").iterdir())[2]
        whole = path.read_bytes()
    flip(path, {"chunk": 8200, "header": 100, "slot": 20}[what])
    with pytest.raises(CorruptionError, match="repair" if what == "slot" else path.name):
        store.copy(tmp_path / "copy")
    if what == "slot":
        assert not (tmp_path / "copy").exists()
        return
    assert not (tmp_path / "copy" / "seg" / "0000000002" / path.name).exists()
    with pytest.raises(StoreNotFoundError, match="not finished"):
        ckptstore.open(tmp_path / "copy").checkpoints()
    path.write_bytes(whole)  # found again elsewhere: the copy continues
    done = store.copy(tmp_path / "copy")
    assert done.present == 6
    check(tmp_path / "copy", wanted)


def killed(source: Path, target: Path, place: str) -> int:
    call = f"import ckptstore; ckptstore.open({str(source)!r}).copy({str(target)!r})"
    environment = {**os.environ, "CKPTSTORE_CRASH_AT": place}
    return subprocess.run([sys.executable, "-c", call], env=environment, check=False, timeout=240).returncode


@pytest.mark.slow
def test_killed_anywhere_it_continues_and_copies_nothing_twice(
    source: Path, tmp_path: Path, wanted: dict[str, Any]
) -> None:
    copy = tmp_path / "copy"
    for place in ("create.linked:1", "create.synced:4", "create.before-link:4"):
        assert killed(source, copy, place) == -signal.SIGKILL, place
        assert not (copy / "FORMAT").exists()
    with pytest.raises(UsageError, match="unfinished copy of something else"):
        ckptstore.open(source).copy(copy, ["5@1"])
    there = {path: path.stat().st_mtime_ns for path in segments(copy)}
    left = copy / "seg" / "0000000004" / f"{'0' * 32}.safetensors"
    left.parent.mkdir(exist_ok=True)
    left.write_bytes(b"half a segment of a process that was killed")
    done = ckptstore.open(source).copy(copy)
    check(copy, wanted)
    assert done.went_on
    assert 0 < done.present < len(list(segments(copy)))
    again = [path for path, time in there.items() if path.stat().st_mtime_ns != time]
    assert len(again) <= len(there) - done.present
    assert bits(ckptstore.open(copy).load("latest", framework="numpy")) == wanted["20@4"]


def test_two_that_copy_to_one_folder_take_turns(tmp_path: Path) -> None:
    """Otherwise the second one replaces the first one's segments, and deletes those that no slot names yet."""
    store = ckptstore.open(tmp_path / "run")
    with store.writer(poll_seconds=None) as writer, ThreadPoolExecutor(1) as pool:
        writer.save({"n": 1}, 1)
        other = late("ckptstore.open(sys.argv[1]).copy(sys.argv[2])", tmp_path / "run", tmp_path / "copy")
        try:
            writer.save({"n": 2}, 2)
            second = pool.submit(store.copy, tmp_path / "copy")
            assert not wait([second], 0.5).done, "it waits"
            told, _ = other.communicate("\n", timeout=120)
            assert (told, other.returncode) == ("", 0)
            done = second.result(60)
        finally:
            other.kill()
            other.communicate()
    assert (done.checkpoints, done.segments, done.went_on) == (("1@1", "2@1"), 1, True)
    check(tmp_path / "copy", {"1@1": {"n": 1}, "2@1": {"n": 2}})


def test_a_killed_copy_keeps_nobody_waiting(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "run")
    with store.writer() as writer:
        writer.save({"n": 1}, 1)
    other = late("ckptstore.open(sys.argv[1]).copy(sys.argv[2])", tmp_path / "run", tmp_path / "copy")
    other.kill()
    other.communicate()
    store.copy(tmp_path / "copy")
    check(tmp_path / "copy", {"1@1": {"n": 1}})
