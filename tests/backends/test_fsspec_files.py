"""fsspec's file systems: used if they create exclusively, otherwise refused with the reason."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

import ckptstore
from ckptstore.backends.fsspec_files import FsspecBackend
from tests.backends.backend_conformance import BackendConformance, Opener


@pytest.fixture(scope="class")
def chosen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FsspecBackend:
    """A handle that creates in the way that its probe chose. The races of a probe take longer than most tests."""
    folder = str(tmp_path_factory.mktemp("fsspec") / "store")
    FsspecBackend(request.cls.filesystem(skip_instance_cache=True), folder).probe()
    backend = FsspecBackend(request.cls.filesystem(skip_instance_cache=True), folder)
    backend.probe()
    return backend


class TestFsspecLocal(BackendConformance):
    """fsspec's local files: `link` and `open("xb")` are exclusive there, `pipe_file(mode="create")` is not."""

    rounds = 10
    taken_at_seal = True
    filesystem: type[LocalFileSystem] = LocalFileSystem

    @pytest.fixture
    def opener(self, chosen: FsspecBackend) -> Opener:
        for key in chosen.list(""):
            chosen.delete(key)
        return lambda: chosen


class Linkless(LocalFileSystem):
    """Local files without hard links, like most file systems of fsspec: an object is visible while it is written."""

    protocol = "linkless"
    link = None

    def _open(self, path: str, mode: str = "rb", **more: Any) -> Any:
        file = super()._open(path, mode, **more)
        return _Slowly(file) if "x" in mode else file


class _Slowly:
    """Writes in pieces, each of which is visible before the next."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: bytes) -> None:
        for start in range(0, len(data), -(-len(data) // 4) or 1):
            self._file.write(data[start : start + -(-len(data) // 4)])
            self._file.flush()
            time.sleep(0.0005)

    def __enter__(self) -> _Slowly:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class TestFsspecLinkless(TestFsspecLocal):
    """Without links: only ``open("xb")`` is exclusive, and readers see each prefix."""

    filesystem = Linkless
    whole = False


class NoLinks(LocalFileSystem):
    """A medium that refuses hard links (FAT, some network file systems)."""

    protocol = "nolinks"

    def link(self, src: str, dst: str, **more: Any) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", src)


class Symbolic(LocalFileSystem):
    """A `link` that makes symbolic links, which are broken once the temporary file is gone."""

    protocol = "symbolic"

    def link(self, src: str, dst: str, **more: Any) -> None:
        self.symlink(src, dst)


@pytest.mark.parametrize("filesystem", [NoLinks, Symbolic])
def test_where_links_do_not_work_files_are_opened_exclusively(tmp_path: Path, filesystem: type[Any]) -> None:
    store = ckptstore.open(str(tmp_path / "run"), filesystem=filesystem(skip_instance_cache=True))
    with store.writer(poll_seconds=None) as writer:
        writer.save({"step": 1}, step=1)
    assert store.verify().ok
    assert [path for path in (tmp_path / "run").rglob("*") if path.name.startswith(".") or path.is_symlink()] == []
    assert ckptstore.open(tmp_path / "run").load()["step"] == 1


@pytest.mark.usefixtures("haste")
def test_a_slot_that_could_not_be_written_was_never_sent(tmp_path: Path) -> None:
    """It fails before the object has its name, so the term continues, and nobody finds half a slot."""

    class Full(LocalFileSystem):
        full = False

        def _open(self, path: str, mode: str = "rb", **more: Any) -> Any:
            if Full.full and "x" in mode:
                super()._open(path, mode, **more).close()
                raise OSError(errno.ENOSPC, "No space left on device")
            return super()._open(path, mode, **more)

    store = ckptstore.open(str(tmp_path / "run"), filesystem=Full(skip_instance_cache=True))
    with store.writer(poll_seconds=None) as writer:
        writer.save({"step": 1}, step=1)
        Full.full = True
        with pytest.raises(ckptstore.StorageError) as caught:
            writer.tag("best", 1)
        assert caught.value.errno == errno.ENOSPC
        Full.full = False
        writer.save({"step": 2}, step=2)
    assert store.verify().ok
    assert [info.step for info in store.checkpoints()] == [1, 2]


def test_a_run_in_a_file_system_that_the_user_made(tmp_path: Path) -> None:
    filesystem = DirFileSystem(path=str(tmp_path), fs=LocalFileSystem())
    store = ckptstore.open("runs/gpt", filesystem=filesystem)
    states = {step: {"weight": np.arange(3000) * step, "step": step} for step in range(1, 6)}
    with store.writer(deltas=2, poll_seconds=None) as writer:
        for step, state in states.items():
            writer.save(state, step=step)
    again = ckptstore.open(tmp_path / "runs" / "gpt", create=False)  # the same bytes as in a folder
    for one in (store, again):
        for step, state in states.items():
            found = one.load(step, framework="numpy")
            assert np.array_equal(found["weight"], state["weight"])
        assert one.verify(deep=True).ok
    store.retire(1, take_over=True)
    store.gc()
    assert store.verify().ok
    assert "fsspec (DirFileSystem)" in store.backend.medium()


def test_a_segment_that_was_shortened_while_it_was_open(tmp_path: Path) -> None:
    store = ckptstore.open("run", filesystem=DirFileSystem(path=str(tmp_path), fs=LocalFileSystem()))
    with store.writer(poll_seconds=None) as writer:
        writer.save({"weight": np.arange(3000)}, 1)
    ((segment, _),) = store.describe(1)
    with store.backend.open_source(segment.key) as source:
        os.truncate(tmp_path / "run" / segment.key, source.size - 7)
        with pytest.raises(ckptstore.CorruptSegmentError, match="although it had"):
            source.read_into(0, memoryview(bytearray(source.size)))


def test_a_file_system_without_exclusive_creates_is_refused_with_the_reason() -> None:
    class Careless(MemoryFileSystem):
        protocol = "careless"
        store: ClassVar[dict[str, Any]] = {}
        pseudo_dirs: ClassVar[list[str]] = [""]

        def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **more: Any) -> None:
            super().pipe_file(path, value, mode="overwrite")

        def _open(self, path: str, mode: str = "rb", **more: Any) -> Any:
            return super()._open(path, mode.replace("x", "w"), **more)

    store = ckptstore.open("/run", filesystem=Careless())
    with pytest.raises(
        ckptstore.UnsupportedBackendError, match=r"does not create exclusively.*of 4 won at once.*use a path, s3://"
    ):
        store.writer()
    assert store.backend.list("") == []


def test_a_scheme_of_fsspec(tmp_path: Path) -> None:
    store = ckptstore.open(f"local://{tmp_path}/run", storage_options={"auto_mkdir": True})
    with store.writer(poll_seconds=None) as writer:
        writer.save({"step": 1}, step=1)
    assert ckptstore.open(tmp_path / "run").load()["step"] == 1


def test_no_credential_of_a_url_or_an_option_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ckptstore.CkptError) as caught:
        ckptstore.open("ftp://me:hunter2@127.0.0.1:1/run?key=hunter3", storage_options={"password": "hunter4"})
    assert "hunter" not in str(caught.value)
    assert caught.value.__cause__ is None
    backend = FsspecBackend(fsspec.filesystem("memory"), "/x", url="sftp://me:hunter2@host/run?key=hunter3")
    assert backend.url == "sftp://host/run"


def test_filesystem_and_options_together_are_an_error() -> None:
    with pytest.raises(ckptstore.UsageError, match="has its options already"):
        ckptstore.open("/x", filesystem=fsspec.filesystem("memory"), storage_options={"a": 1})


def test_errors_of_a_file_system_become_the_projects(tmp_path: Path) -> None:
    class Broken(LocalFileSystem):
        def cat_file(self, path: str, *arguments: Any, **more: Any) -> bytes:
            raise RuntimeError("with a secret in it")

    backend = FsspecBackend(Broken(skip_instance_cache=True), str(tmp_path / uuid.uuid4().hex))
    backend.replace("pins/a", b"1")
    with pytest.raises(ckptstore.StorageError, match=r"RuntimeError.*pins/a") as caught:
        backend.get("pins/a")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_file_system_that_looks_before_it_writes_is_never_taken(tmp_path: Path, wrapped: bool) -> None:
    """fsspec's own `pipe_file`: one winner in the probe's race does not prove that it is safe."""

    class Looks(LocalFileSystem):
        link = None

        def _open(self, path: str, mode: str = "rb", **more: Any) -> Any:
            return super()._open(path, mode.replace("x", "w"), **more)

    filesystem = Looks(skip_instance_cache=True)
    whole = DirFileSystem(path=str(tmp_path), fs=filesystem) if wrapped else filesystem
    backend = FsspecBackend(whole, "store" if wrapped else str(tmp_path / "store"))
    with pytest.raises(ckptstore.UnsupportedBackendError, match="looks and then writes"):
        backend.probe()


def test_an_asynchronous_file_system_in_a_fork_is_named(tmp_path: Path) -> None:
    """Its loop is a thread of the parent's. A new one in the child works."""
    ckptstore.open(tmp_path / "store", create=True)
    script = (
        "import os, sys, warnings; warnings.simplefilter('ignore')\n"
        "import ckptstore, fsspec\n"
        "from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper as Wrapper\n"
        "def opened():\n"
        "    fs = Wrapper(fsspec.filesystem('file'), asynchronous=False)\n"
        "    return ckptstore.open(sys.argv[1], filesystem=fs)\n"
        "old = opened(); old.checkpoints()\n"
        "if os.fork() == 0:\n"
        "    print(len(list(opened().checkpoints())), 'new works', flush=True)\n"
        "    try: list(old.checkpoints())\n"
        "    except Exception as error: print(type(error).__name__, error, flush=True)\n"
        "    os._exit(0)\n"
        "os.wait()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "store"], capture_output=True, text=True, check=True, timeout=240
    )
    assert "0 new works" in done.stdout, done
    assert "UsageError" in done.stdout
    assert "opened before a fork" in done.stdout


def test_a_relative_path_of_local_files_stays_where_it_was_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "one")
    store = ckptstore.open("run", filesystem=LocalFileSystem(skip_instance_cache=True))
    with store.writer() as writer:
        writer.save({"step": 1}, 1)
        monkeypatch.chdir(tmp_path / "other")
        writer.save({"step": 2}, 2)
    rival = ckptstore.open("run", filesystem=LocalFileSystem(skip_instance_cache=True))
    with rival.writer() as writer:
        writer.save({"step": 7}, 7)
    assert (store.latest_step(), rival.latest_step()) == (2, 7)
