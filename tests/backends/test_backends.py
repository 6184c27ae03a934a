"""The conformance suite on every backend, and `open_backend`."""

from __future__ import annotations

import errno
import functools
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptstore.backends import open_backend
from ckptstore.backends.local_disk.local import LocalBackend
from ckptstore.backends.memory import MemoryBackend
from ckptstore.errors import StorageError, StoreNotFoundError, UsageError
from ckptstore.store import Store
from ckptstore.store import open as open_store
from tests.backends.backend_conformance import BackendConformance, Opener
from tools.crash.faults import Fault, FaultyPosix, no_hard_links, short_reads, short_writes
from tools.crash.ramfs import RamPosix

SHARED_MEMORY = Path("/dev/shm")


class TestLocal(BackendConformance):
    processes = True

    @pytest.fixture
    def opener(self, tmp_path: Path) -> Opener:
        return functools.partial(LocalBackend, tmp_path / "runs" / "gpt")


class TestLocalThroughThePageCache(BackendConformance):
    rounds = 20

    @pytest.fixture
    def opener(self, tmp_path: Path) -> Opener:
        return functools.partial(LocalBackend, tmp_path / "store", direct=False)


@pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="no tmpfs here")
class TestLocalOnTmpfs(BackendConformance):
    processes = True

    @pytest.fixture
    def opener(self) -> Iterator[Opener]:
        import shutil

        folder = SHARED_MEMORY / f"ckptstore-test-{uuid.uuid4().hex}"
        yield functools.partial(LocalBackend, folder)
        shutil.rmtree(folder, ignore_errors=True)


class TestLocalWithoutHardLinks(BackendConformance):
    """Falls back to RENAME_NOREPLACE."""

    rounds = 50

    @pytest.fixture
    def opener(self, tmp_path: Path) -> Opener:
        from ckptstore.backends.local_disk.posix import SYSTEM

        return lambda: LocalBackend(tmp_path / "store", FaultyPosix(SYSTEM, no_hard_links()))


class TestLocalInMemory(BackendConformance):
    """On the file system that the crash tests use: proof that it behaves like one."""

    @pytest.fixture
    def opener(self) -> Opener:
        return functools.partial(LocalBackend, "/data/store", RamPosix())


class TestLocalInMemoryWithoutDirectIO(BackendConformance):
    @pytest.fixture
    def opener(self) -> Opener:
        return functools.partial(LocalBackend, "/data/store", RamPosix(direct=False))


class TestLocalWithShortTransfers(BackendConformance):
    """The system may always read and write less than requested."""

    @pytest.fixture
    def opener(self) -> Opener:
        return functools.partial(LocalBackend, "/store", FaultyPosix(RamPosix(), short_reads(), short_writes()))


class TestMemory(BackendConformance):
    @pytest.fixture
    def opener(self) -> Iterator[Opener]:
        name = uuid.uuid4().hex
        yield functools.partial(MemoryBackend, name)
        MemoryBackend.forget(name)


def test_a_path_opens_a_folder(tmp_path: Path) -> None:
    urls = (f"file://{tmp_path}/new", f"file://localhost{tmp_path}/n%65w", f"pmem://{tmp_path}/n%65w")
    for url in (tmp_path / "new", str(tmp_path / "new"), *urls):
        with pytest.raises(StoreNotFoundError, match="does not exist"):
            open_backend(url, create=False)
    backend = open_backend(f"file://{tmp_path}/new", create=True)
    assert not (tmp_path / "new").exists(), "nothing is made before the first write"
    backend.create("FORMAT", b"x")
    for url in (tmp_path / "new", f"file://{tmp_path}/n%65w"):
        again = open_backend(url, create=False)
        assert isinstance(again, LocalBackend)
        assert again.get("FORMAT") == b"x"
        assert again.url == str(url)


def test_a_relative_path_survives_a_change_of_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    backend = open_backend("store", create=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    backend.create("FORMAT", b"x")
    assert (tmp_path / "store" / "FORMAT").read_bytes() == b"x"


def test_a_relative_path_in_a_folder_that_was_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(StorageError, match="the working directory was deleted: give an absolute path"):
        open_backend("store", create=True)
    open_backend(tmp_path / "store", create=True)


def test_a_file_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x")
    for create in (False, True):
        with pytest.raises(StoreNotFoundError, match="is a file"):
            open_backend(tmp_path / "model.safetensors", create=create)


def test_a_tilde_is_the_home_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for url in ("~/run", Path("~/run")):
        open_backend(url, create=True).create(f"log/{type(url).__name__}", b"x")
        assert open_backend(url, create=False).url == "~/run"
    assert len(list((tmp_path / "home" / "run" / "log").iterdir())) == 2
    assert list((tmp_path / "here").iterdir()) == []
    with pytest.raises(UsageError, match="nobody-of-this-name"):
        open_backend("~nobody-of-this-name/run", create=True)
    open_backend("./~", create=True).create("FORMAT", b"x")
    assert (tmp_path / "here" / "~" / "FORMAT").exists()


@pytest.mark.parametrize("create", [True, False, None])
@pytest.mark.parametrize("path", ["a\0b", "file:///a%00b", "run/\ud800"])
def test_an_invalid_path_is_a_usage_error(path: str, create: bool | None) -> None:
    with pytest.raises(UsageError, match="is not a path"):
        open_store(path, create=create)


@pytest.mark.parametrize("create", [True, False, None])
def test_a_system_error_on_a_path_is_a_storage_error(tmp_path: Path, create: bool | None) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for path, code in ((tmp_path / ("x" * 300), errno.ENAMETOOLONG), (tmp_path / "loop", errno.ELOOP)):
        with pytest.raises(StorageError, match=path.name) as caught:
            open_store(path, create=create)
        assert caught.value.errno == code


@pytest.mark.parametrize("create", [True, False, None])
@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE])
def test_a_path_that_may_not_be_looked_at_is_a_storage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, create: bool | None, code: int
) -> None:
    def refused(self: Path, **_: object) -> os.stat_result:
        raise OSError(code, os.strerror(code), str(self))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "stat", refused)
        with pytest.raises(StorageError, match="store") as caught:
            open_store(tmp_path / "store", create=create)
    assert caught.value.errno == code


@pytest.mark.parametrize("code", [errno.EDQUOT, errno.ENOSPC, errno.EACCES, errno.EMFILE])
@pytest.mark.parametrize("call", ["create", "mkdir", "open", "link", "fsync"])
def test_a_store_that_cannot_be_made_is_a_storage_error(call: str, code: int) -> None:
    posix = FaultyPosix(RamPosix(), Fault(frozenset({call}), times=None, code=code))
    with pytest.raises(StorageError, match="/data/store") as caught:
        Store(LocalBackend("/data/store", posix)).create()
    assert caught.value.errno == code


def test_memory_stores_have_names() -> None:
    name = f"memory://{uuid.uuid4().hex}"
    with pytest.raises(StoreNotFoundError):
        open_backend(name, create=False)
    open_backend(name, create=True).create("FORMAT", b"x")
    assert open_backend(name, create=False).get("FORMAT") == b"x"
    assert open_backend(name, create=False).url == name
    assert open_backend(name + "2", create=True).list("") == []
    for url in (name, name + "2"):
        MemoryBackend.forget(url.partition("://")[2])
    with pytest.raises(StoreNotFoundError):
        open_backend(name, create=False)


@pytest.mark.parametrize(
    "url",
    [
        "ftp://host/x",
        "nonsense://bucket/run",
        "s3://",
        "s3://b/x?y",
        "gs://bucket/a/../b",
        "az://b ucket/x",
        "memory://",
        "",
        "file://host/x",
        "file://x?y",
        "file://",
        "pmem://x",
        "pmem://",
    ],
)
def test_an_unopenable_url_is_named(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_backend(url, create=True)
    if "//" in url:
        assert url in str(caught.value)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("s3:/bucket/run", "s3://bucket/run"),
        ("S3:bucket/run", "s3://bucket/run"),
        ("file:/data/run", "file:///data/run"),
    ],
)
def test_a_url_with_too_few_slashes_is_no_folder(
    typed: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a run would silently be saved to a folder named ``s3:``."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=f"did you mean {meant}"):
        open_backend(typed, create=True)
    assert open_backend(f"./{typed}", create=True).url == f"./{typed}"
    Path(typed).mkdir(parents=True)
    assert open_backend(typed, create=False).url == typed


@pytest.mark.parametrize(
    ("url", "meant"),
    [
        ("s3://bucket/a//b", "write s3://bucket/a/b"),
        ("s3://bucket//a", "write s3://bucket/a"),
        ("s3://bucket/a//", "write s3://bucket/a"),
        ("s3://bucket//", "write s3://bucket/"),
        ("gs://bucket/a/../b", "write gs://bucket/b"),
        ("az://bucket/./a", "write az://bucket/a"),
        ("memory://a//b", "write memory://a/b"),
        ("memory://a/../b", "write memory://b"),
        ("memory:////a", "write memory:///a"),
        ("memory://..", "give another name"),
        ("webhdfs://host//a", "write webhdfs://host/a"),
    ],
)
def test_a_name_that_media_read_differently_is_refused(url: str, meant: str) -> None:
    """One client takes ``a//b`` as it is, another as ``a/b``: what one saves the other does not find."""
    if url.partition("://")[0] in ("s3", "gs", "az"):
        pytest.importorskip("obstore")
    elif url.startswith("webhdfs"):
        pytest.importorskip("requests")
    with pytest.raises(UsageError, match=re.escape(url)) as caught:
        open_backend(url, create=True)
    assert str(caught.value).endswith(f": {meant}")


def test_a_path_in_a_file_system_is_refused_likewise() -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    for path in ("a//b", "a/../b", "./a", "/a//", "memory://a//b"):
        with pytest.raises(UsageError, match="the name of a store has no empty part"):
            open_backend(path, create=True, filesystem=MemoryFileSystem())
    for path in ("a/b", "/a/b", "a/b/", "memory://a/b", "memory:///a/b/"):
        backend = open_backend(path, create=True, filesystem=MemoryFileSystem())
        backend.create("FORMAT", path.encode())
        assert MemoryFileSystem().cat("/a/b/FORMAT") == path.encode()
        backend.delete("FORMAT")


@pytest.mark.parametrize(
    "same",
    [
        ["s3://bucket/a", "s3://bucket/a/", "S3://bucket/a"],
        ["s3://bucket", "s3://bucket/"],
        [
            "{tmp}/a b",
            "{tmp}/a b/",
            "{tmp}//a b",
            "{tmp}/x/../a b",
            "file://{tmp}/a%20b",
            "FILE://localhost{tmp}//a%20b",
        ],
        ["pmem://{tmp}/a%20b", "pmem://{tmp}//a%20b/"],
    ],
)
def test_a_store_has_one_address_by_whatever_name_it_is_opened(tmp_path: Path, same: list[str]) -> None:
    """An agent is found by it, and a store is not its own remote."""
    if same[0].startswith("s3"):
        pytest.importorskip("obstore")
    (tmp_path / "x").mkdir()
    found = {open_backend(one.format(tmp=tmp_path), create=True).address for one in same}
    assert len(found) == 1
    (address,) = found
    assert address is not None
    assert open_backend(address, create=True).address == address


def test_a_memory_store_has_one_name() -> None:
    open_backend("memory://one/name/", create=True).create("FORMAT", b"x")
    for url in ("MEMORY://one/name", "memory:///one/name"):  # fsspec writes three slashes
        assert open_backend(url, create=False).get("FORMAT") == b"x"
    MemoryBackend.forget("one/name")


@pytest.mark.parametrize(
    "url",
    ["simplecache::s3://bucket/run", "filecache::memory://x", "arrow_hdfs://host/run", "simplecache::blockcache::s3://b/x",
     "zip://x::file:///a.zip", "reference://::s3://bucket/run", "filecache://a::s3://bucket"],
)  # fmt: skip
def test_a_url_that_only_fsspec_opens_is_no_folder(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a run would be saved to a folder named ``simplecache::s3:``, in silence."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="chained URLs, and schemes with an underscore, are not opened"):
        open_backend(url, create=True)
    assert open_backend(f"./{url}", create=True).url == f"./{url}"


@pytest.mark.parametrize("url", ["simplecache::ftp://user:secret@host/x", "zip://a::ftp://user:secret@host/x"])
def test_a_refused_url_is_shown_without_its_password(url: str) -> None:
    with pytest.raises(UsageError, match="ftp://host/x: chained URLs") as told:
        open_backend(url, create=True)
    assert "secret" not in str(told.value)


def test_an_unknown_scheme_names_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"nonsense://.*file, pmem, memory, s3, gs, az"):
        open_backend("nonsense://bucket/run", create=True)


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    backend = open_backend("/proc/ckptstore-test", create=True)
    with pytest.raises(StorageError, match="/proc/ckptstore-test"):
        backend.create("FORMAT", b"x")


def test_a_folder_needs_neither_numpy_nor_fsspec(tmp_path: Path) -> None:
    script = (
        "import sys; from ckptstore.backends import open_backend; b = open_backend(sys.argv[1], create=True);"
        "b.create('FORMAT', b'x'); b.open_source('FORMAT').close();"
        "print({'numpy', 'fsspec', 'torch', 'multiprocessing'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path / "s"], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
