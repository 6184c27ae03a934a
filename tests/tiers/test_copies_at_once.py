"""Several processes that bring one run to one place in a bucket, where no lock makes any of them wait."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore import RemoteLostError, RemoteWarning, StorageError
from ckptstore.backends.object_store.objects import ObjectBackend
from ckptstore.formats.history.records import COPYING_KEY
from ckptstore.log import log_copy, pins
from ckptstore.maintenance.copies import store_copy
from ckptstore.tiers import background_drain
from tests.maintenance.stores import late
from tests.tiers.test_tiers import check, state, steps
from tools.objects.proxy import FaultProxy, Rule
from tools.objects.server import Server, options_for

COPY = "ckptstore.open(sys.argv[1]).copy(sys.argv[2])"


class Bucket:
    """A run in a folder, whose writer lives, and a place for its copy, which other processes know, too."""

    def __init__(self, server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.url = folder, server.url()
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        self.store = ckptstore.open(folder)
        self.writer = self.store.writer(poll_seconds=None)
        self.save(1)

    def save(self, step: int) -> None:
        self.writer.save(state(step), step)
        self.writer.tag("best", step)

    def elsewhere(self) -> None:
        """Another process makes the copy, from beginning to end."""
        call = f"import sys, ckptstore; {COPY}"
        subprocess.run([sys.executable, "-c", call, str(self.folder), self.url], check=True, timeout=240)

    def check(self, *numbers: int) -> None:
        copied = ckptstore.open(self.url, create=False)
        report = copied.verify(deep=True)
        assert (report.ok, report.orphans) == (True, ())
        assert steps(copied) == [f"{number}@1" for number in numbers]
        for number in numbers:
            check(copied.load(number, framework="numpy"), number)
        assert copied.tags()["best"].step == numbers[-1]
        assert COPYING_KEY not in copied.backend.list("")


@pytest.fixture
def bucket(s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    found = Bucket(s3, tmp_path / "run", monkeypatch)
    yield found
    found.writer.close()


def at(name: str, number: int, work: Callable[[], object]) -> Callable[[str], None]:
    """Replaces `crash_point`: acts when that point is passed for the `number`th time."""
    passed = []

    def point(place: str) -> None:
        if place == name:
            passed.append(place)
            if len(passed) == number:
                work()

    return point


def test_finishing_a_copy_deletes_nothing_that_another_is_about_to_name(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = []

    def meanwhile() -> None:
        bucket.save(2)
        others.append(late(COPY, bucket.folder, bucket.url))

    # The first slot is the term's, the second has everything that there is to copy.
    monkeypatch.setattr(log_copy, "crash_point", at("replica.slot-created", 2, meanwhile))
    try:
        assert bucket.store.copy(bucket.url).checkpoints == ("1@1",)
        told, _ = others[0].communicate("\n", timeout=120)
        assert (told, others[0].returncode) == ("", 0)
    finally:
        for other in others:
            other.kill()
            other.communicate()
    bucket.check(1, 2)


def test_a_drain_whose_slot_is_taken_reads_again_and_brings_the_rest(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meanwhile() -> None:
        bucket.save(2)
        bucket.elsewhere()
        bucket.save(3)

    monkeypatch.setattr(pins, "crash_point", at("pin.created", 1, meanwhile))
    assert bucket.store.copy(bucket.url).checkpoints == ("1@1", "2@1", "3@1")
    bucket.check(1, 2, 3)


def test_a_newer_tag_is_not_put_back(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """The destination is read before the source, which is then no older."""
    bucket.elsewhere()
    begun = []

    def slow(*arguments: Any) -> log_copy.LogCopy:
        if not begun:
            begun.append(True)
            bucket.save(2)
            bucket.elsewhere()
        return log_copy.LogCopy(*arguments)

    monkeypatch.setattr(store_copy, "LogCopy", slow)
    bucket.store.copy(bucket.url)
    bucket.check(1, 2)


def test_a_claim_of_a_place_that_another_completed_accepts_the_copy(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe, begun = ObjectBackend.probe, []

    def slow(backend: ObjectBackend) -> None:
        if not begun:
            begun.append(True)
            bucket.elsewhere()
        probe(backend)

    monkeypatch.setattr(ObjectBackend, "probe", slow)
    done = bucket.store.copy(bucket.url)
    assert (done.checkpoints, done.segments, done.went_on) == (("1@1",), 0, True)
    bucket.check(1)


@pytest.mark.parametrize("shared", [True, False])
def test_a_segment_of_a_copy_that_is_given_up_in_doubt_is_left_where_another_may_have_named_it(
    s3: Server, shared: bool
) -> None:
    key, data = f"seg/0000000001/{'0' * 32}.safetensors", bytes(range(256)) * 16
    with FaultProxy(s3.port) as proxy:
        url = s3.url()
        backend = ckptstore.open(url, storage_options=options_for(proxy.port, read_timeout=5.0, tries=2)).backend
        sink = backend.open_sink(key, len(data))
        sink.shared = shared
        sink.write(0, memoryview(data))
        proxy.rules([Rule("lost_ack", operation="create"), Rule("503", operation="head"), Rule("503", operation="get")])
        with pytest.raises(StorageError):
            sink.seal(len(data))
        proxy.rules([])
        sink.abort()
    directly = ckptstore.open(url, storage_options=s3.options).backend
    assert (key in directly.list("seg/")) is shared


def test_a_bucket_that_is_emptied_beside_a_drain_is_not_taken_for_the_remote(
    s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its log would begin in the middle: readers would conclude that the remote has checkpoints that no slot names."""
    monkeypatch.setattr(background_drain, "WATCH", 60.0)  # the warning is that of close
    url = s3.url()
    store = ckptstore.open(tmp_path / "run", remote=url, remote_options=s3.options)
    writer = store.writer(poll_seconds=None)
    writer.save_async(state(1), 1).result(tier="remote", timeout=60)
    theirs = ckptstore.open(url, storage_options=s3.options).backend
    for key in theirs.list(""):
        theirs.delete(key)
    pending = writer.save_async(state(2), 2)
    pending.result()
    end = time.monotonic() + 120
    while "the store was deleted" not in (writer.lag().error or ""):
        assert time.monotonic() < end
        time.sleep(0.02)
    with pytest.raises(RemoteLostError, match="the store was deleted"):
        pending.result(tier="remote", timeout=0.5)
    assert theirs.list("") == []
    assert "the store was deleted" in (writer.lag().error or "")
    with pytest.warns(RemoteWarning, match="Everything that is not there yet is in"):
        writer.close()
    check(ckptstore.open(tmp_path / "run", remote=False).load(2, framework="numpy"), 2)
