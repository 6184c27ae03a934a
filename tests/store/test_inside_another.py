"""A store is not made inside another: `ckpt ls` would not list it, and it would be deleted with the outer one."""

from __future__ import annotations

import os
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from fsspec.implementations.local import LocalFileSystem

import ckptstore
from ckptstore.backends.memory import MemoryBackend
from ckptstore.backends.object_store.objects import ObjectBackend
from ckptstore.cli.main import cli
from tools.objects.server import Server

INSIDE = r"is inside the checkpoint store {}.*: no store is created there; choose a place outside it"


def filled(place: str | Path, **how: Any) -> ckptstore.Store:
    store = ckptstore.open(place, **how)
    with store.writer(poll_seconds=None) as writer:
        writer.save({"w": 1.5}, 1)
    return store


@pytest.fixture(params=["folder", "pmem", "fsspec", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The place of the outer store, and how it is opened."""
    name = uuid.uuid4().hex
    urls = {"folder": f"{tmp_path}/run", "fsspec": f"{tmp_path}/run"}
    urls |= {"pmem": f"pmem://{tmp_path}/run", "memory": f"memory://{name}"}
    yield urls[request.param], {"filesystem": LocalFileSystem()} if request.param == "fsspec" else {}
    for made in MemoryBackend.names():
        if made.partition("/")[0] == name:
            MemoryBackend.forget(made)


@pytest.mark.parametrize("inner", ["x", "log/x", "seg/0000000001", "log", "pins/x/y", "req"])
def test_no_store_is_made_inside_another(place: tuple[str, dict[str, Any]], inner: str) -> None:
    outer, how = place
    store = filled(outer, **how)
    before = store.backend.list("")
    where = f"{outer}/{inner}"
    with pytest.raises(ckptstore.UsageError, match=INSIDE.format(".*")) as refused:
        ckptstore.open(where, create=True, **how)
    assert (f"in {inner.partition('/')[0]}/, which is that store's own" in str(refused.value)) == (inner != "x")
    with pytest.raises(ckptstore.UsageError, match=INSIDE.format(".*")):
        ckptstore.open(where, **how).writer(poll_seconds=None)
    assert store.backend.list("") == before
    report = store.verify()
    assert (report.ok, report.strangers) == (True, ())


@pytest.mark.parametrize("inner", ["x", "log/x", "deep/er/x"])
def test_no_copy_and_no_repaired_store_is_made_inside_another(tmp_path: Path, inner: str) -> None:
    store, other = filled(tmp_path / "run"), filled(tmp_path / "other")
    where = tmp_path / "run" / inner
    for make in (other.copy, other.sync, lambda target: ckptstore.repair(tmp_path / "other", target)):
        with pytest.raises(ckptstore.UsageError, match=INSIDE.format(tmp_path / "run")):
            make(where)
        assert not list(where.glob("*"))
    assert store.verify().strangers == ()


def test_the_place_counts_not_the_way_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path / "run")
    (tmp_path / "link").symlink_to(tmp_path / "run" / "seg")
    monkeypatch.chdir(tmp_path / "run")
    for way in (tmp_path / "link" / "x", "x", "../run/x", f"file://{tmp_path}/run/x"):
        with pytest.raises(ckptstore.UsageError, match=INSIDE.format(tmp_path / "run")):
            ckptstore.open(way, create=True)
    beside = filled("../run-2")  # a name that begins alike is another folder
    assert beside.latest_step() == 1


def test_files_that_only_look_like_a_store_prevent_nothing(tmp_path: Path) -> None:
    """A user's file that is called FORMAT, a folder that is called log, an unreadable folder."""
    (tmp_path / "log").mkdir()
    (tmp_path / "FORMAT").write_text("A4\n")
    filled(tmp_path / "log" / "run")
    (tmp_path / "FORMAT").unlink()
    (tmp_path / "FORMAT").mkdir()
    filled(tmp_path / "seg" / "run")
    (tmp_path / "FORMAT").rmdir()
    os.mkfifo(tmp_path / "FORMAT")
    filled(tmp_path / "req" / "run")


@pytest.mark.parametrize("damage", [b"", b"x"])
def test_a_damaged_store_is_one(tmp_path: Path, damage: bytes) -> None:
    place = tmp_path / "run"
    filled(place)
    text = (place / "FORMAT").read_bytes()
    (place / "FORMAT").write_bytes(text[:-4] + damage)
    with pytest.raises(ckptstore.UsageError, match=INSIDE.format(place)):
        ckptstore.open(place / "seg" / "x", create=True)


def test_a_store_that_is_there_already_stays_usable(tmp_path: Path) -> None:
    """Earlier versions made them: they are read and written, and gc of the outer one deletes nothing of theirs."""
    outer = filled(tmp_path / "run")
    with outer.writer(poll_seconds=None) as writer:
        writer.save({"w": 2.5}, 2)
    filled(tmp_path / "x")
    (tmp_path / "x").rename(tmp_path / "run" / "seg" / "x")
    inner = ckptstore.open(tmp_path / "run" / "seg" / "x")
    with inner.writer(poll_seconds=None) as writer:
        writer.save({"w": 2.5}, 2)
    outer.retire("1@1", take_over=True)
    collected = outer.gc()
    assert len(collected.segments) == 1
    assert collected.strangers
    assert all(key.startswith("seg/x/") for key in collected.strangers)
    assert inner.load(2) == {"w": 2.5}
    assert inner.verify().ok


def test_in_a_bucket_it_costs_one_request_and_only_when_a_store_is_made(
    s3: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spent(url: str) -> Counter[str]:
        costs = ckptstore.open(url, create=True, storage_options=s3.options).backend.costs
        assert costs is not None
        return Counter(costs.spent.requests)

    url = s3.url()
    made = spent(url)
    again = spent(url)
    monkeypatch.setattr(ObjectBackend, "above", lambda _: ())
    assert made - spent(s3.url()) == {"get": 1}
    assert again == spent(url) == {"get": 1}
    monkeypatch.undo()
    filled(url, storage_options=s3.options)
    other = filled(f"memory://{uuid.uuid4().hex}")
    for inner in ("x", "log/x", "seg/0000000001/x", "fold/a/b"):
        with pytest.raises(ckptstore.UsageError, match=INSIDE.format(url)):
            ckptstore.open(f"{url}/{inner}", create=True, storage_options=s3.options)
        target = ckptstore.open(f"{url}/{inner}", storage_options=s3.options)
        with pytest.raises(ckptstore.UsageError, match=INSIDE.format(url)):
            other.copy(target)
    assert ckptstore.open(url, storage_options=s3.options).verify().strangers == ()
    filled(f"{s3.url()}/log/run", storage_options=s3.options)  # a folder that is called log, of no store


def test_by_command(tmp_path: Path) -> None:
    run = tmp_path / "run"
    filled(run)
    told = CliRunner().invoke(cli, ["copy", str(run), str(run / "log" / "x")])
    assert told.exit_code == 2
    looked = CliRunner().invoke(cli, ["log", str(run / "log")])
    assert looked.exit_code == 3
    assert f"did you mean {run}?" in looked.stderr
