"""A body that is cut short, with a length that shows it: requested again, and never treated as damage or as the end.

The server's ETags are not MD5s here, as under SSE-KMS and outside of S3, so only the length shows the cut.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem

import ckptstore
from ckptstore.backends.fsspec_files import FsspecBackend
from ckptstore.backends.object_store.objects import ObjectBackend
from ckptstore.log import fold_writer
from tools.objects.fast_server import serving_fast
from tools.objects.proxy import FaultProxy, Rule
from tools.objects.server import Server, options_for

TRIES = 2


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving_fast() as one:
        yield one


@pytest.fixture
def proxy(server: Server) -> Iterator[FaultProxy]:
    with FaultProxy(server.port) as one:
        yield one


def state(step: int) -> dict[str, Any]:
    return {"w": np.arange(step, step + 3000, dtype=np.float32)}


@pytest.fixture
def store(server: Server, proxy: FaultProxy) -> ckptstore.Store:
    """Three checkpoints, two of them in a fold; requests go through the proxy."""
    plain = ckptstore.open(server.url(), create=True, storage_options=server.options)
    with plain.writer(poll_seconds=None) as writer:
        for step in (1, 2, 3):
            writer.save(state(step), step)
            if step == 2:
                fold_writer.fold(plain.journal, plain.view())
    return ckptstore.open(plain.url, storage_options=options_for(proxy.port, tries=TRIES))


def short(operation: str, path: str = "", times: int = -1) -> Rule:
    return Rule("short", operation, path, times)


@pytest.mark.parametrize(
    "rule",
    [
        short("get", "/FORMAT", times=TRIES - 1),
        short("get", "/log/", times=TRIES - 1),
        short("get", "/fold/", times=TRIES - 1),
        short("list", times=TRIES - 1),
        short("range", times=TRIES - 1),
    ],
    ids=lambda rule: f"{rule.operation}{rule.path}",
)
def test_a_short_body_is_requested_again(store: ckptstore.Store, proxy: FaultProxy, rule: Rule) -> None:
    proxy.rules([rule])
    with store.writer(poll_seconds=None) as writer:  # whose OPEN depends on where the log ends
        assert writer.parent is not None
        assert writer.parent.ref == "3@1"
        writer.save(state(4), 4)
    assert store.load(4, framework="numpy")["w"].tobytes() == state(4)["w"].tobytes()
    report = store.verify()
    assert report.ok
    assert not report.damage
    proxy.rules([])
    assert ("short", rule.operation) in proxy.injected()
    assert [one.ref for one in store.checkpoints()] == ["1@1", "2@1", "3@1", "4@2"]


@pytest.mark.parametrize("path", ["FORMAT", "log/", "fold/"])
def test_a_body_that_stays_short_is_an_error_that_names_the_object(
    store: ckptstore.Store, proxy: FaultProxy, path: str
) -> None:
    proxy.rules([short("get", f"/{path}")])
    with pytest.raises(ckptstore.StorageError, match=rf"fewer bytes came.*{path}"):
        ckptstore.open(store.backend.reopened().url, storage_options=store.backend.storage_options).checkpoints()
    proxy.rules([])
    assert [one.ref for one in store.checkpoints()] == ["1@1", "2@1", "3@1"]


def test_a_segment_that_stays_short_is_not_called_damaged(store: ckptstore.Store, proxy: FaultProxy) -> None:
    proxy.rules([short("range", "/seg/")])
    with pytest.raises(ckptstore.StorageError, match=r"fewer bytes came.*seg/"):
        store.load(3, framework="numpy")
    report = store.verify(3)
    assert not report.damage
    assert report.unread


def test_a_server_that_fails_is_no_damage_either(store: ckptstore.Store, proxy: FaultProxy) -> None:
    proxy.rules([Rule("503", "range", "/seg/")])
    report = store.verify()
    assert not report.damage
    assert report.unread
    assert not report.lost


@pytest.mark.usefixtures("haste")
def test_a_commit_that_is_looked_up_short_is_in_doubt_and_nobody_is_fenced(
    store: ckptstore.Store, proxy: FaultProxy
) -> None:
    """The slot exists, its answer was lost; its content, cut short, is not what was sent."""
    writer = store.writer(poll_seconds=None)
    proxy.rules([Rule("lost_ack", "create", "/log/"), short("get", "/log/", times=1)])
    writer.save(state(4), 4)
    proxy.rules([Rule("lost_ack", "create", "/log/"), short("get", "/log/")])
    with pytest.raises(ckptstore.CommitUnknownError):
        writer.save(state(5), 5)
    proxy.rules([])
    with pytest.raises(ckptstore.CommitUnknownError):
        writer.save(state(6), 6)
    assert [one.ref for one in store.checkpoints()] == ["1@1", "2@1", "3@1", "4@2", "5@2"]


def test_an_object_of_no_bytes_is_read(server: Server) -> None:
    backend = ObjectBackend(server.url(), server.options)
    backend.replace("pins/none", b"")
    assert backend.get("pins/none") == b""


class Cuts(LocalFileSystem):
    """Reads return too few bytes, for a while."""

    left = 0

    def cat_file(self, path: str, *arguments: Any, **more: Any) -> bytes:
        data: bytes = super().cat_file(path, *arguments, **more)
        if self.left:
            self.left -= 1
            return data[:-3]
        return data


def test_a_file_system_that_reads_short(tmp_path: Path) -> None:
    files = Cuts(skip_instance_cache=True)
    backend = FsspecBackend(files, str(tmp_path / "run"))
    backend.replace("log/1", b"whole")
    sink = backend.open_sink("seg/1/a", 8)
    sink.write(0, memoryview(b"segment."))
    sink.seal(8)
    files.left = 2
    assert backend.get("log/1") == b"whole"
    out = bytearray(8)
    with backend.open_source("seg/1/a") as source:
        files.left = 2
        source.read_into(0, memoryview(out))
        assert out == b"segment."
        files.left = 99
        with pytest.raises(ckptstore.StorageError, match=r"5 of 8 bytes came.*seg/1/a"):
            source.read_into(0, memoryview(out))
    with pytest.raises(ckptstore.StorageError, match=r"2 of 5 bytes came.*log/1"):
        backend.get("log/1")
    shutil.rmtree(tmp_path / "run")
