"""`verify` on media that fail, on many small segments, and with damage that only decoding shows."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import ckptstore
from ckptstore import StorageError
from ckptstore.backends.local_disk.local import LocalBackend
from ckptstore.backends.local_disk.posix import Posix
from ckptstore.backends.memory import MemoryBackend
from ckptstore.cli.main import cli
from ckptstore.formats import checksums
from ckptstore.formats.history.record_text import encode_format
from ckptstore.formats.history.records import FormatFile, slot_of
from ckptstore.formats.segment_files.segment import TensorEntry
from ckptstore.host.task_pool import Task, sweep
from ckptstore.log import fold_writer
from ckptstore.log.journal import Journal
from ckptstore.maintenance.repair.store_repair import repair
from ckptstore.maintenance.verify.verification import verify
from ckptstore.write import delta_encoding
from ckptstore.write.policy.delta_interval import RestoreBound
from ckptstore.write.policy.delta_options import DeltaOptions
from tests.cli.conftest import assert_documented, documented
from tests.maintenance.crafted import Crafted

CHAIN = DeltaOptions(interval=1, bound=RestoreBound(times=None, depth=1000))


def save_chain(store: ckptstore.Store, steps: int, size: int = 2000) -> None:
    weight = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    with store.writer(deltas=CHAIN, poll_seconds=None) as writer:
        for step in range(1, steps + 1):
            weight[:: 7 + step] += 1
            writer.save({"w": weight, "step": step}, step)


@pytest.fixture
def store(tmp_path: Path) -> ckptstore.Store:
    made = ckptstore.open(tmp_path / "store", create=True)
    save_chain(made, 4)
    return made


Break = Callable[[str, int], None]


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Break:
    """Opening an object fails with a system error. It is opened by its name, in its folder's handle."""

    def breaks(key: str, number: int) -> None:
        original, name = Posix.open, key.rpartition("/")[2]

        def failing(self: Any, path: str, flags: int, dir_fd: int | None = None) -> int:
            if path == name:
                raise OSError(number, os.strerror(number), path)
            return original(self, path, flags, dir_fd)

        monkeypatch.setattr(Posix, "open", failing)

    return breaks


@pytest.mark.parametrize("name", ["EMFILE", "ENFILE", "ENOMEM", "EACCES", "ESTALE"])
@pytest.mark.parametrize("deep", [False, True])
def test_a_lack_of_resources_is_no_damage(store: ckptstore.Store, broken: Break, name: str, deep: bool) -> None:
    key = store.describe(3)[-1][0].key
    broken(key, getattr(errno, name))
    report = ckptstore.verify(store, deep=deep)
    assert not report.damage
    assert not report.lost
    assert not report.ok
    (unread,) = report.unread
    assert unread.key == key
    assert os.strerror(getattr(errno, name)) in unread.what
    assert unread.checkpoints == report.unknown == ("3@1", "4@1")
    assert report.restorable == ("1@1", "2@1")


@pytest.mark.parametrize("name", ["EIO", "ENODATA", "EBADMSG", "EUCLEAN"])
def test_a_place_that_cannot_be_read_any_more_is_damage(store: ckptstore.Store, broken: Break, name: str) -> None:
    key = store.describe(3)[-1][0].key
    broken(key, getattr(errno, name))
    report = ckptstore.verify(store)
    assert not report.unread
    assert [damage.key for damage in report.damage] == [key]
    assert report.lost == ("3@1", "4@1")


def test_a_chunk_that_this_process_cannot_read(store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The segment was opened; later, memory runs out."""
    key = store.describe(2)[-1][0].key
    open_source = type(store.backend).open_source

    def opened(self: Any, wanted: str) -> Any:
        source = open_source(self, wanted)
        if wanted == key:
            read_into = source.read_into

            def failing(offset: int, out: memoryview) -> None:
                if offset != 4096:  # header and index: the payload begins behind the header's page
                    read_into(offset, out)
                else:
                    raise ckptstore.StorageError(errno.ENOMEM, "cannot read: Cannot allocate memory", key)

            monkeypatch.setattr(source, "read_into", failing, raising=True)
        return source

    monkeypatch.setattr(type(store.backend), "open_source", opened)
    report = ckptstore.verify(store)
    assert not report.damage
    assert [unread.key for unread in report.unread] == [key]
    assert report.unknown == ("2@1", "3@1", "4@1")


def test_one_bad_sector_is_no_reason_to_give_its_neighbours_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbouring tensors are read at once. A failed read is repeated piece by piece, and the bad tensor is named."""
    store = ckptstore.open(f"memory://{uuid.uuid4().hex}", create=True)
    chance = np.random.default_rng(1)
    state = {name: chance.integers(0, 256, 3000, dtype=np.uint8) for name in "abc"}
    with store.writer(poll_seconds=None) as writer:
        writer.save(state, 1)
    (key,) = (entry.key for entry in store.view().catalog.segments.values())
    bad = store.backend.get(key).index(state["b"].tobytes()) + 5
    open_source = MemoryBackend.open_source

    def opened(self: Any, wanted: str) -> Any:
        source = open_source(self, wanted)
        read_into = source.read_into

        def failing(offset: int, out: memoryview) -> None:
            if wanted == key and offset <= bad < offset + len(out):
                raise ckptstore.StorageError(errno.EIO, "cannot read: Input/output error", key)
            read_into(offset, out)

        monkeypatch.setattr(source, "read_into", failing)
        return source

    monkeypatch.setattr(MemoryBackend, "open_source", opened)
    report = ckptstore.verify(store)
    (damage,) = report.damage
    assert damage.key == key
    assert "tensor 'b'" in damage.what
    assert report.lost == ("1@1",)
    assert not report.unread


def test_a_file_named_like_a_slot_or_a_fold_is_named_and_no_damage(store: ckptstore.Store) -> None:
    for folder in ("log", "fold"):
        store.backend.create(f"{folder}/notes", b"what somebody left here")
    report = ckptstore.verify(store)
    assert report.ok
    assert report.strangers == ("fold/notes", "log/notes")
    assert len(report.restorable) == 4


def test_the_command_says_what_was_not_read(store: ckptstore.Store, broken: Break) -> None:
    key = store.describe(4)[-1][0].key
    root = Path(store.url.removeprefix("file://"))
    broken(key, errno.EACCES)
    outcome = CliRunner().invoke(cli, ["verify", str(root)])
    assert outcome.exit_code == 8
    assert f"unread   {key}: " in outcome.output
    assert "unknown  4@1" in outcome.output
    assert "damaged" not in outcome.output
    outcome = CliRunner().invoke(cli, ["verify", str(root), "--json"])
    assert outcome.exit_code == 8
    found = json.loads(outcome.stdout)
    assert_documented(found, documented("ckpt verify")[0])
    assert found["ok"] is False
    assert found["unread"][0]["checkpoints"] == found["unknown"] == ["4@1"]


def test_deep_by_command(store: ckptstore.Store) -> None:
    root = Path(store.url.removeprefix("file://"))
    outcome = CliRunner().invoke(cli, ["verify", str(root), "--deep"])
    assert outcome.exit_code == 0
    assert "4 checkpoints, each of them decoded" in outcome.output
    for more, deep in (["--deep"], True), ([], False):
        outcome = CliRunner().invoke(cli, ["verify", str(root), "--json", *more])
        assert json.loads(outcome.stdout)["deep"] is deep


def forged(monkeypatch: pytest.MonkeyPatch, change: Callable[[TensorEntry], TensorEntry]) -> ckptstore.Store:
    """A chain of three whose second delta is described wrongly."""
    store = ckptstore.open(f"memory://{uuid.uuid4().hex}", create=True)
    original, seen = delta_encoding.append_tensor, []

    def append(*arguments: Any) -> TensorEntry:
        seen.append(original(*arguments))
        return change(seen[-1]) if len(seen) == 1 else seen[-1]

    monkeypatch.setattr(delta_encoding, "append_tensor", append)
    save_chain(store, 3)
    return store


def test_a_state_digest_that_is_not_that_of_the_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is training's claim against the store's; only decoding decides. Checkpoints that build on the state are as
    saved."""
    store = forged(monkeypatch, lambda entry: replace(entry, digest=(entry.digest or 0) ^ 1))
    assert ckptstore.verify(store).ok
    report = ckptstore.verify(store, deep=True)
    (damage,) = report.damage
    assert "'w': its state digest is not that of step 2" in damage.what
    assert report.lost == damage.checkpoints == ("2@1",)
    store.load(3)
    with pytest.raises(ckptstore.CorruptSegmentError, match="state digest"):
        store.load(2)


def test_one_wrong_payload_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only that checkpoint is lost: those that build on it have their own hashes, which a load relies on (SPEC 5.4)."""
    other = checksums.chunk_hash(b"other bytes")
    store = forged(monkeypatch, lambda entry: replace(entry, chunks=(replace(entry.chunks[0], decoded_hash=other),)))
    report = ckptstore.verify(store, deep=True)
    (damage,) = report.damage
    assert "gives other bytes than were saved in step 2" in damage.what
    assert report.lost == ("2@1",)
    store.load("3@1")


def test_a_long_chain_needs_few_descriptors(tmp_path: Path) -> None:
    """Each delta has its own file, and a process has descriptors for a few hundred."""
    store = ckptstore.open(tmp_path / "store", create=True)
    save_chain(store, 120)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 90, hard))
    try:
        report = ckptstore.verify(store, deep=True)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert report.ok, (report.damage[:2], report.unread[:2])
    assert len(report.restorable) == 120


def test_many_small_segments_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store = ckptstore.open(f"memory://{uuid.uuid4().hex}", create=True)
    save_chain(store, 12)
    meeting = threading.Barrier(3, timeout=60)
    waiting = threading.local()
    open_source = MemoryBackend.open_source

    def met(self: Any, key: str) -> Any:
        if not getattr(waiting, "done", False):
            waiting.done = True
            meeting.wait()  # breaks, unless three threads open segments at one time
        return open_source(self, key)

    monkeypatch.setattr(MemoryBackend, "open_source", met)
    assert ckptstore.verify(store, threads=3).ok


def test_a_log_that_promises_what_nothing_restores() -> None:
    """Every hash is right, and there is no way to the checkpoint: the store is not intact."""
    store = ckptstore.open(f"memory://{uuid.uuid4().hex}", create=True)
    save_chain(store, 2)
    crafted = Crafted.read(store)
    newest = crafted.slots[max(key for key, slot in crafted.slots.items() if "checkpoints" in slot)]
    del newest["encodings"]
    again = crafted.write()
    report = ckptstore.verify(again)
    assert report.lost == ("2@1",)
    assert any("nothing stored restores 2@1" in damage.what for damage in report.damage)


class TestSweep:
    def test_everything_is_done_once(self) -> None:
        done: list[int] = []

        def task(number: int) -> Task:
            def work() -> list[Task]:
                done.append(number)
                return [task(10 * number + more) for more in (1, 2, 3)] if number < 100 else []

            return work

        sweep([task(number) for number in range(1, 8)], 3, "test")
        assert sorted(done) == sorted(set(done))
        assert len(done) == 7 + 21 + 63

    @pytest.mark.parametrize("threads", [1, 3])
    def test_the_first_error_ends_it(self, threads: int) -> None:
        after = threading.Event()

        def failing() -> list[Task]:
            raise ckptstore.StorageError(errno.EIO, "no")

        def late() -> list[Task]:
            after.set()
            return []

        with pytest.raises(ckptstore.StorageError, match="no"):
            sweep([failing, *[failing] * 5, late], threads, "test")
        assert threads > 1 or not after.is_set()


MEMORY = """
import sys, re, pathlib
import numpy as np
import ckptstore, ckptstore.maintenance.verify.verification
from ckptstore.write.policy.delta_options import DeltaOptions
from ckptstore.write.policy.delta_interval import RestoreBound
status = pathlib.Path("/proc/self/status")
def field(name): return int(re.search(name + r":\\s+(\\d+)", status.read_text())[1]) * 1024
store = ckptstore.open(sys.argv[1], create=True)
options = DeltaOptions(interval=4, form=sys.argv[2], bound=RestoreBound(times=None, depth=9))
state = {f"layer{i}": np.zeros(5 << 20, np.float32) for i in range(20)}
with store.writer(deltas=options, poll_seconds=None) as writer:
    for step in range(1, 5):
        for array in state.values():
            array[::1000] += step
        writer.save(state, step)
size = sum(array.nbytes for array in state.values())
del state, writer
ckptstore.verify(store, deep=True, threads=1)
pathlib.Path("/proc/self/clear_refs").write_text("5"); before = field("VmRSS")
assert ckptstore.verify(store, deep=True, threads=1).ok
print(field("VmHWM") - before, size)
"""


@pytest.mark.slow
def test_deep_holds_chunks_and_no_state(tmp_path: Path) -> None:
    """Deltas on one anchor: the anchor's chunk is kept while each of them is decoded, and nothing else of it."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("this system cannot reset the peak of resident memory")
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path / "store"), "anchor"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    peak, state = map(int, done.stdout.split())
    assert state == 400 << 20
    assert peak < 100 << 20, peak >> 20


def test_an_encoding_that_the_log_names_twice() -> None:
    """It is one encoding: it is decoded once, and the result is right."""
    store = ckptstore.open(f"memory://{uuid.uuid4().hex}", create=True)
    save_chain(store, 3)
    crafted = Crafted.read(store)
    newest = crafted.slots[max(key for key, slot in crafted.slots.items() if "checkpoints" in slot)]
    newest["encodings"] *= 2
    report = ckptstore.verify(crafted.write(), deep=True)
    assert report.ok, report.damage
    assert len(report.restorable) == 3


@pytest.mark.parametrize("after", range(4))
def test_descriptors_that_run_out_in_between(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Everything was read once, and a segment cannot be opened again for decoding: nothing is reported as proven."""
    store = ckptstore.open(f"memory://{uuid.uuid4().hex}", create=True)
    save_chain(store, 4)
    opened = 0
    open_source = MemoryBackend.open_source

    def short(self: Any, key: str) -> Any:
        nonlocal opened
        opened += 1
        if opened > 4 + after:
            raise ckptstore.StorageError(errno.EMFILE, "cannot read: Too many open files", key)
        return open_source(self, key)

    monkeypatch.setattr(MemoryBackend, "open_source", short)
    report = ckptstore.verify(store, deep=True, threads=1)
    assert not report.damage
    assert report.unread
    assert not report.ok
    assert "4@1" in report.unknown
    assert not report.lost


@pytest.mark.parametrize("form", ["anchor", "paper"])
def test_several_that_build_on_one(form: Any) -> None:
    """Each of them is decoded from the base's original state, whatever was done to it for the others."""
    store = ckptstore.open(f"memory://{uuid.uuid4().hex}", create=True)
    weight = np.random.default_rng(0).standard_normal(5000).astype("<f4")
    options = DeltaOptions(interval=4, form=form, bound=RestoreBound(times=None, depth=1000))
    with store.writer(deltas=options, poll_seconds=None) as writer:
        kinds = [writer.save({"w": weight * np.float32(1 + step / 1000)}, step).kind for step in range(1, 10)]
    assert kinds.count("delta") > 5
    bases = [info.base for info in store.checkpoints() if info.base is not None]
    assert (len(set(bases)) < len(bases)) or form == "paper"
    report = ckptstore.verify(store, deep=True)
    assert report.ok, report.damage
    assert len(report.restorable) == 9


def test_a_segment_that_goes_away_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was read once, and is gone when it must be decoded."""
    store = ckptstore.open(f"memory://{uuid.uuid4().hex}", create=True)
    save_chain(store, 4)
    keys: list[str] = []
    open_source = MemoryBackend.open_source

    def gone(self: Any, key: str) -> Any:
        keys.append(key)
        if len(keys) == 8:  # described again, the last of four
            self.delete(key)
        return open_source(self, key)

    monkeypatch.setattr(MemoryBackend, "open_source", gone)
    report = ckptstore.verify(store, deep=True, threads=1)
    (damage,) = report.damage
    assert damage.key == keys[7]
    assert "missing" in damage.what
    assert report.lost == ("4@1",)


class BehindAProxy(LocalBackend):
    """The first `wrong` listings of a prefix are answered by another page, which counts as an empty listing."""

    prefix, wrong, asked = "none", 100, 0

    def list(self, prefix: str) -> list[str]:
        self.asked += prefix == self.prefix
        return [] if prefix == self.prefix and self.asked <= self.wrong else super().list(prefix)


@pytest.fixture
def proxied(tmp_path: Path) -> BehindAProxy:
    """A store of slots that were folded and deleted."""
    root = tmp_path / "store"
    ckptstore.open(root, create=True)
    (root / "FORMAT").write_bytes(encode_format(FormatFile("a" * 32, anchor_every=4)))
    store = ckptstore.open(root)
    with store.writer(poll_seconds=None) as writer:
        for step in range(1, 30):
            writer.save({"n": step}, step)
            if step in (10, 20, 28):
                fold_writer.fold(store.journal, store.view())
    fold_writer.trim(store.journal, store.view())
    assert store.verify().ok
    return BehindAProxy(root)


@pytest.mark.parametrize("prefix", ["", "fold/"])
def test_a_page_in_place_of_a_listing_is_no_damage(
    proxied: BehindAProxy, prefix: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("ckptstore.log.log_reader.time.sleep", lambda _: None)
    proxied.prefix, proxied.wrong = prefix, 1
    assert verify(Journal(proxied)).ok
    proxied.asked, proxied.wrong = 0, 100
    with pytest.raises(StorageError, match=r"may answer listings in its place. The store was not verified"):
        verify(Journal(proxied))
    if not prefix:
        with pytest.raises(StorageError, match=r"Nothing was repaired"):
            repair(proxied, LocalBackend(tmp_path / "repaired"))
        assert not (tmp_path / "repaired").exists()


def test_a_listing_of_which_a_page_is_missing_is_no_damage(
    proxied: BehindAProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the objects before some slots, and those after them."""
    listed, tries = proxied.list, []

    def some(prefix: str) -> list[str]:
        tries.append(prefix)
        short = prefix in ("", "log/")[:wrong]
        return [key for key in listed(prefix) if not (short and key.startswith("log/") and slot_of(key) in (26, 27))]

    monkeypatch.setattr(proxied, "list", some)
    wrong = 1
    assert verify(Journal(proxied)).ok
    wrong = 2
    with pytest.raises(StorageError, match="00026 shows it, and the listing none"):
        verify(Journal(proxied))
