"""Any object at a key of a store: no reader hangs, none allocates memory by its size, and each error names it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptstore.backends.local_disk.local import LocalBackend
from ckptstore.errors import (
    CkptError,
    CorruptLogError,
    CorruptSegmentError,
    ForeignObjectError,
    FormatError,
    KeyExistsError,
)
from ckptstore.formats.history.records import manifest_key, slot_key
from ckptstore.log import fold_writer
from ckptstore.log.log_reader import read
from ckptstore.log.term import open_term
from ckptstore.maintenance.garbage_collection import collect
from ckptstore.store import Store, verify
from ckptstore.store import open as open_store
from tests.log.log_world import save

GIANT = 3 << 30


@pytest.fixture(autouse=True)
def nobody_waits() -> Iterator[None]:
    def late(_signal: int, _frame: object) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with checkpoints 1 to 4, a fold, a pin and a request."""
    root = tmp_path_factory.mktemp("template") / "store"
    store = open_store(root)
    with store.writer(poll_seconds=None) as writer:
        for step in (1, 2, 3):
            writer.save(state(step), step=step)
        fold_writer.fold(store.journal, store.view())
        writer.save(state(4), step=4)
    store.backend.close()
    return root


@pytest.fixture
def store(template: Path, tmp_path: Path) -> Store:
    shutil.copytree(template, tmp_path / "store")
    return open_store(tmp_path / "store")


def state(step: int) -> dict[str, Any]:
    return {"weight": np.full(1000, step, dtype=np.float32)}


def loads(store: Store, step: int) -> None:
    np.testing.assert_array_equal(store.load(step, framework="numpy")["weight"], state(step)["weight"])


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def unix_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the name of a socket may only be 108 bytes long
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(here)


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def folder(path: Path) -> None:
    path.mkdir()


def linked(path: Path) -> None:
    """A link to a valid file outside of the store."""
    path.symlink_to("/etc/hostname")


KINDS: list[Callable[[Path], None]] = [fifo, device, unix_socket, loop, folder, linked]


def giant(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(GIANT)


def put(store: Store, key: str, make: Callable[[Path], None]) -> None:
    path = Path(store.backend.root) / key  # type: ignore[attr-defined]
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    make(path)


def peak(call: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# The backend


@pytest.mark.parametrize("make", KINDS)
def test_an_object_that_is_no_file_is_refused_and_named(tmp_path: Path, make: Callable[[Path], None]) -> None:
    backend = LocalBackend(tmp_path / "store")
    backend.create("log/1", b"x")
    make(tmp_path / "store" / "log" / "2")
    for ask in (backend.get, backend.size):
        with pytest.raises(ForeignObjectError, match=r"log/2 is a (pipe|socket|symbolic link|folder)"):
            ask("log/2")
    with pytest.raises(CorruptSegmentError, match="log/2 is a"):
        backend.open_source("log/2")
    for take in (lambda: backend.create("log/2", b"y"), lambda: backend.open_sink("log/2", 0)):
        with pytest.raises(KeyExistsError):
            take()
    assert backend.list("log/") == (["log/1"] if make is folder else ["log/1", "log/2"])
    assert backend.get("log/1") == b"x"


@pytest.mark.parametrize("make", KINDS)
def test_a_folder_that_is_none_is_refused_and_named(tmp_path: Path, make: Callable[[Path], None]) -> None:
    if make is folder:
        pytest.skip("that is what it should be")
    backend = LocalBackend(tmp_path / "store")
    backend.create("FORMAT", b"x")
    make(tmp_path / "store" / "log")
    asked: list[Callable[[], object]] = [
        lambda: backend.get("log/1"),
        lambda: backend.size("log/1"),
        lambda: backend.list("log/"),
        lambda: backend.create("log/1", b"x"),
        lambda: backend.replace("log/1", b"x"),
        lambda: backend.delete("log/1"),
        lambda: backend.settle("log/"),
        lambda: backend.open_sink("log/1", 0),
    ]
    for ask in asked:
        with pytest.raises(ForeignObjectError, match=r"log is a .+, not a folder"):
            ask()
    assert backend.list("") == ["FORMAT", "log"]


def test_folders_without_end_are_not_walked_to_the_end(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path)
    backend.create("log/1", b"x")
    handle = os.open(tmp_path / "log", os.O_RDONLY)
    for _ in range(1500):  # deeper than Python's recursion limit, and longer than a path may be
        os.mkdir("d" * 10, dir_fd=handle)
        below = os.open("d" * 10, os.O_RDONLY, dir_fd=handle)
        os.close(handle)
        handle = below
    os.close(handle)
    try:
        found = backend.list("")
        assert "log/1" in found
        assert len(found) == 2
    finally:
        subprocess.run(["rm", "-rf", tmp_path / "log"], check=True)  # pytest's own clean-up would fail on it


# Every kind of object


@pytest.mark.parametrize("make", [*KINDS, giant])
def test_a_slot(store: Store, make: Callable[[Path], None]) -> None:
    put(store, slot_key(4), make)  # step 4: above the fold

    def ask() -> None:
        assert store.view().damage == (4,)
        with pytest.raises(CorruptLogError, match="slot 4 is damaged"):
            store.checkpoint("latest")
        loads(store, 3)
        report = verify(store)
        assert slot_key(4) in {damage.key for damage in report.damage}

    assert peak(ask) < 80 << 20


@pytest.mark.parametrize("make", [*KINDS, giant])
def test_the_next_slot(store: Store, make: Callable[[Path], None]) -> None:
    """At the slot where the next writer opens its term: that is damage, and the writer does not hang."""
    put(store, slot_key(store.view().end), make)
    with pytest.raises(CorruptLogError, match="damaged"):
        store.checkpoint("latest")
    with pytest.raises(CkptError), store.writer(poll_seconds=None):
        pass
    with store.writer(parent=4, poll_seconds=None) as writer:
        writer.save(state(5), step=5)
    loads(store, 5)


@pytest.mark.parametrize("make", [*KINDS, giant])
def test_a_slot_that_appears_under_a_writer(store: Store, make: Callable[[Path], None]) -> None:
    with store.writer(poll_seconds=None) as writer:
        writer.save(state(5), step=5)
        put(store, slot_key(store.view().end), make)
        with pytest.raises(CkptError, match="holds what this writer did not send"):
            writer.save(state(6), step=6)
    loads(store, 5)


@pytest.mark.parametrize("make", [*KINDS, giant])
def test_a_fold_is_skipped(store: Store, make: Callable[[Path], None]) -> None:
    (key,) = store.backend.list("fold/")
    put(store, key, make)
    put(store, f"fold/{99:020d}-{'0' * 16}", make)

    def ask() -> None:
        view = store.view()
        assert view.damage == ()
        if make is not folder:  # a medium lists no folders
            assert len(view.bad_folds) == 2
        assert store.checkpoint("latest").step == 4
        fold_writer.trim(store.journal, view)

    if make is not giant:
        ask()
        return
    assert peak(ask) < 80 << 20


@pytest.mark.parametrize("make", [*KINDS, giant])
def test_format(store: Store, make: Callable[[Path], None]) -> None:
    put(store, "FORMAT", make)
    fresh = open_store(store.url)

    def ask() -> None:
        with pytest.raises(FormatError, match="FORMAT"):
            fresh.checkpoints()

    assert peak(ask) < 10 << 20


@pytest.mark.parametrize("make", [*KINDS, giant])
def test_a_pin_keeps_gc_from_deleting_and_is_named(store: Store, make: Callable[[Path], None]) -> None:
    key = f"pins/{'a' * 32}"
    put(store, key, make)

    def ask() -> None:
        assert collect(store.journal).unreadable_pins == (() if make is folder else (key,))

    assert peak(ask) < 10 << 20
    loads(store, 3)


@pytest.mark.parametrize("make", [*KINDS, giant])
def test_a_request_is_left_alone(store: Store, make: Callable[[Path], None]) -> None:
    with store.writer(poll_seconds=None) as writer:
        key = f"req/{writer.term:010d}-{'a' * 32}"
        put(store, key, make)
        assert peak(writer.poll) < 10 << 20
        writer.save(state(5), step=5)
    loads(store, 5)
    assert os.path.lexists(Path(store.url) / key)


@pytest.mark.parametrize("make", [*KINDS, giant])
def test_a_segment(store: Store, make: Callable[[Path], None]) -> None:
    (segment,) = store.plan(4).segments
    key = store.view().catalog.segments[segment].key
    put(store, key, make)

    def ask() -> None:
        with pytest.raises(CorruptSegmentError, match=segment):
            store.load(4, framework="numpy")
        assert key in {damage.key for damage in verify(store).damage}

    assert peak(ask) < 80 << 20
    loads(store, 3)


@pytest.mark.parametrize("make", [*KINDS, giant])
def test_a_manifest(store: Store, make: Callable[[Path], None]) -> None:
    save(open_term(store.journal, None), 5, tags={f"tag{number}": (1, 4) for number in range(20_000)})
    manifest = list(store.view().catalog.manifests)[-1]
    key = manifest_key(2, manifest)
    assert key in store.backend.list("seg/")
    put(store, key, make)

    def ask() -> None:
        assert len(read(store.journal).damage) == 1

    assert peak(ask) < 10 << 20


def test_a_store_may_be_reached_through_a_link_and_no_part_of_it(store: Store, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("store")
    loads(open_store(tmp_path / "link"), 4)
    with open_store(tmp_path / "link").writer(poll_seconds=None) as writer:
        writer.save(state(5), step=5)
    loads(store, 5)
