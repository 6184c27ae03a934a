"""GC: which segments it deletes, which it keeps, and in which order."""

from __future__ import annotations

import math
import os
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptstore.backends.base import OBJECT_LIMIT
from ckptstore.backends.local_disk.local import LocalBackend
from ckptstore.errors import ForeignObjectError, ReadOnlyError, StorageError, UsageError
from ckptstore.formats.history.commit_checks import droppable
from ckptstore.formats.history.record_text import decode_pin, encode_pin
from ckptstore.formats.history.records import Node, pin_key, segment_key
from ckptstore.log import requests
from ckptstore.log.change import CatalogChange
from ckptstore.log.journal import Journal
from ckptstore.log.pins import Pin, PinWatch
from ckptstore.maintenance.garbage_collection import Collected, collect, collect_patiently
from ckptstore.store import Store
from ckptstore.store import open as open_store


class Noted(LocalBackend):
    """A local backend that records its calls."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.done: list[str] = []

    def _note(self, what: str) -> None:
        self.done.append(what)

    def get(self, key: str, limit: int = OBJECT_LIMIT) -> bytes:
        self._note(f"get {key.split('/')[0]}")
        return super().get(key, limit)

    def list(self, prefix: str) -> list[str]:
        self._note(f"list {prefix}")
        return super().list(prefix)

    def settle(self, prefix: str) -> None:
        self._note(f"settle {prefix}")
        super().settle(prefix)

    def delete(self, key: str) -> None:
        self._note(f"delete {key.split('/')[0]}")
        super().delete(key)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Steps 1 to 3 of term 1; term 2 is open and has retired step 1."""
    store = open_store(tmp_path / "store")
    with store.writer(poll_seconds=None) as writer:
        for step in (1, 2, 3):
            writer.save(state(step), step=step)
    retire(store, (1, 1))
    return store


def state(step: int) -> dict[str, Any]:
    return {"weight": np.full(1000, step, dtype=np.float32)}


def retire(store: Store, *nodes: Node) -> None:
    with store.writer(poll_seconds=None) as writer:
        drops = droppable(store.view().catalog, nodes)
        requests.post(store.journal, writer.term, "test", CatalogChange(drops=tuple(drops), retires=tuple(nodes)))
        writer.poll()


def segments(store: Store) -> list[str]:
    return store.backend.list("seg/")


def test_unneeded_segments_are_deleted_and_the_rest_loads(store: Store) -> None:
    before = segments(store)
    done = collect(store.journal)
    assert len(done.segments) == 1
    assert done.nbytes > 4000
    assert set(segments(store)) == set(before) - set(done.segments)
    for step in (2, 3):
        np.testing.assert_array_equal(store.load(step, framework="numpy")["weight"], state(step)["weight"])
    assert collect(store.journal) == Collected()


def test_a_dry_run_deletes_nothing(store: Store) -> None:
    before = segments(store)
    planned = collect(store.journal, dry_run=True)
    assert segments(store) == before
    assert collect(store.journal) == planned


def test_pinned_segments_stay_until_the_reader_is_done(store: Store) -> None:
    segment = collect(store.journal, dry_run=True).segments[0]
    with Pin(store.backend, [segment.rpartition("/")[2].partition(".")[0]]):
        done = collect(store.journal)
        assert done.segments == ()
        assert done.pinned == (segment,)
        assert done.pinned_nbytes > 4000
        (holder,) = done.holders
        assert holder.segments == (segment,)
        assert holder.reader["pid"] == os.getpid()
        # A reader claims the checkpoint that it reads; only garbage is deleted.
        live = [entry.id for entry in store.view().catalog.segments.values()]
        with Pin(store.backend, live):
            assert collect(store.journal).holders == done.holders
    assert collect(store.journal).segments == (segment,)


def test_a_collector_that_watched_a_dead_readers_pin_removes_it(store: Store) -> None:
    segment = collect(store.journal, dry_run=True).segments[0]
    pin = Pin(store.backend, [segment.rpartition("/")[2].partition(".")[0]])
    pin.renew()  # and never again
    now = [0.0]
    watch = PinWatch(store.backend, dead_after=60, clock=lambda: now[0])
    assert collect(store.journal, watch).pinned == (segment,)
    now[0] = 61
    assert collect(store.journal).pinned == (segment,)  # this one has not watched
    done = collect(store.journal, watch)
    assert done.segments == (segment,)
    assert done.dead_pins == (pin.key,)
    assert store.backend.list("pins/") == []


_READER = """
import sys, time
from ckptstore.backends.local_disk.local import LocalBackend
from ckptstore.log.pins import Pin
with Pin(LocalBackend(sys.argv[1]), [sys.argv[2]]) as pin:
    print(pin.key, flush=True)
    time.sleep(600)
"""


def test_the_pin_of_a_killed_process_of_this_host_is_removed_at_once(store: Store, tmp_path: Path) -> None:
    """No watching is needed. A living reader's pin stays, and so does one with too little information, or from
    elsewhere."""
    segment = collect(store.journal, dry_run=True).segments[0]
    name = segment.rpartition("/")[2].partition(".")[0]
    command = [sys.executable, "-c", _READER, str(tmp_path / "store"), name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        key = reader.stdout.readline().strip()
        data = store.backend.get(key)
        assert collect(store.journal).pinned == (segment,)
        reader.kill()
    record = decode_pin(data, what=key)
    elsewhere = encode_pin(replace(record, reader=dict(record.reader) | {"host": "another"}))
    for other in (elsewhere, encode_pin(replace(record, reader={"host": platform.node(), "pid": reader.pid}))):
        store.backend.replace(key, other)
        assert collect(store.journal).pinned == (segment,)
    store.backend.replace(key, data)
    assert collect(store.journal, dry_run=True).dead_pins == (key,)
    assert store.backend.list("pins/") == [key]
    done = collect(store.journal)
    assert (done.segments, done.dead_pins) == ((segment,), (key,))
    assert store.backend.list("pins/") == []
    assert store.backend.shrink_spare(1 << 40) == 0, "what it may still have mapped is unlinked, not written over"


def test_a_patient_collector_waits_for_readers_and_finds_the_dead_ones_out(store: Store) -> None:
    segment = collect(store.journal, dry_run=True).segments[0]
    pin = Pin(store.backend, [segment.rpartition("/")[2].partition(".")[0]])
    pin.renew()
    now = [0.0]
    told: list[tuple[int, int]] = []

    def patiently(wait: float, ends: float | None = None) -> Collected:
        """The reader renews its pin until `ends`."""

        def sleep(seconds: float) -> None:
            now[0] += seconds
            if ends is not None and now[0] < ends:
                pin.renew()

        return collect_patiently(
            store.journal,
            wait=wait,
            dead_after=60,
            clock=lambda: now[0],
            sleep=sleep,
            progress=lambda done, total: told.append((done, total)),
        )

    assert patiently(0).pinned == (segment,)
    assert patiently(59).pinned == (segment,)
    alive = patiently(100, ends=1000)
    assert (alive.segments, alive.pinned) == ((), (segment,))
    began = now[0]
    done = patiently(300, ends=began + 50)
    assert done.segments == (segment,)
    assert done.dead_pins == (pin.key,)
    assert done.pinned == ()
    assert 100 < now[0] - began < 130
    assert told == [(done.nbytes, done.nbytes)]
    with pytest.raises(UsageError, match="still be alive"):
        collect_patiently(store.journal, dead_after=59)
    with pytest.raises(UsageError, match="still be alive"):
        collect_patiently(store.journal, dead_after=math.nan)
    for wait in (-1, math.nan):
        with pytest.raises(UsageError, match="wait"):
            collect_patiently(store.journal, wait=wait)


def test_with_an_unreadable_pin_nothing_goes(store: Store) -> None:
    key = pin_key("0" * 32)
    store.backend.replace(key, b"damaged")
    before = segments(store)
    done = collect(store.journal)
    assert done.unreadable_pins == (key,)
    assert len(done.pinned) == 1
    assert segments(store) == before


def test_uncommitted_segments_of_the_newest_term_stay(store: Store) -> None:
    newest, older = segment_key(2, "a" * 32), segment_key(1, "b" * 32)
    for key in (newest, older):
        store.backend.create(key, b"not committed")
    assert older in collect(store.journal).segments
    assert newest in segments(store)


def test_the_log_is_read_before_the_pins_and_settled_before_anything_goes(store: Store, tmp_path: Path) -> None:
    backend = Noted(tmp_path / "store")
    collect(Journal(backend))
    listed, deleted = backend.done.index("list pins/"), backend.done.index("delete seg")
    assert max(at for at, what in enumerate(backend.done) if what == "get log") < listed
    assert {"settle log/", "settle fold/"} <= set(backend.done[listed:deleted])


def test_nothing_is_settled_for_nothing(store: Store, tmp_path: Path) -> None:
    collect(store.journal)
    backend = Noted(tmp_path / "store")
    collect(Journal(backend))
    assert not [what for what in backend.done if what.startswith(("settle", "delete"))]


def test_read_only(store: Store) -> None:
    store.backend.read_only = True
    with pytest.raises(ReadOnlyError):
        collect(store.journal)
    assert len(collect(store.journal, dry_run=True).segments) == 1


# Foreign processes

STRANGERS = [
    "seg/0000000001/notes.txt",
    "seg/0000000001/" + "c" * 32,
    "seg/0000000001/" + "c" * 32 + ".safetensors.bak",
    "seg/0000000001/" + "c" * 31 + ".safetensors",
    "seg/0000000001/" + "C" * 32 + ".safetensors",
    "seg/0000000001/model.safetensors",
    "seg/0000000001/deeper/" + "c" * 32 + ".safetensors",
    "seg/1/" + "c" * 32 + ".safetensors",
    "seg/" + "c" * 32 + ".safetensors",
    "seg/old/" + "c" * 32 + ".json",
]


def test_only_names_of_the_format_are_deleted_and_strangers_are_reported(store: Store, tmp_path: Path) -> None:
    root = tmp_path / "store"
    for key in STRANGERS:
        (root / key).parent.mkdir(parents=True, exist_ok=True)
        (root / key).write_bytes(b"somebody's")
    (root / "seg" / "0000000001" / ("d" * 32 + ".json")).write_bytes(b"a manifest that was never committed")
    planned = collect(store.journal, dry_run=True)
    done = collect(store.journal)
    assert planned == done
    assert done.strangers == tuple(sorted(STRANGERS))
    assert len(done.segments) == 2
    for key in STRANGERS:
        assert (root / key).read_bytes() == b"somebody's"
    assert not set(done.segments) & set(segments(store))
    assert collect(store.journal) == Collected(strangers=tuple(sorted(STRANGERS)))


@pytest.mark.parametrize("what", ["file", "folder", "loop", "pipe"])
def test_nothing_is_deleted_through_a_link_and_no_link_either(store: Store, tmp_path: Path, what: str) -> None:
    name = "e" * 32 + ".safetensors"
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / name).write_bytes(b"somebody's")
    term, older = tmp_path / "store" / "seg" / "0000000001", tmp_path / "store" / "seg" / "0000000000"
    if what == "file":
        (term / name).symlink_to(outside / name)
    elif what == "folder":
        older.symlink_to(outside)
    elif what == "loop":
        (term / name).symlink_to(name)
    else:
        os.mkfifo(term / name)
    done = collect(store.journal)
    assert done.strangers == (f"seg/{older.name}" if what == "folder" else f"seg/{term.name}/{name}",)
    assert len(done.segments) == 1
    assert (outside / name).read_bytes() == b"somebody's"
    assert os.path.lexists(older if what == "folder" else term / name)


def test_a_linked_folder_of_all_segments_is_refused(store: Store, tmp_path: Path) -> None:
    seg = tmp_path / "store" / "seg"
    seg.rename(tmp_path / "elsewhere")
    seg.symlink_to(tmp_path / "elsewhere")
    before = sorted(path.name for path in (tmp_path / "elsewhere").rglob("*"))
    with pytest.raises(ForeignObjectError, match="seg is a symbolic link"):
        collect(store.journal)
    assert sorted(path.name for path in (tmp_path / "elsewhere").rglob("*")) == before


def test_a_loop_of_links_is_not_walked(store: Store, tmp_path: Path) -> None:
    (tmp_path / "store" / "seg" / "again").symlink_to("..")
    assert collect(store.journal).strangers == ("seg/again",)


class BehindAProxy(LocalBackend):
    """The first `wrong` listings of the pins are answered by another page, which counts as an empty listing."""

    asked, wrong = 0, 1

    def list(self, prefix: str) -> list[str]:
        self.asked += prefix == "pins/"
        return [] if prefix == "pins/" and self.asked <= self.wrong else super().list(prefix)


def test_one_wrong_listing_of_the_pins_frees_nothing(store: Store, tmp_path: Path) -> None:
    (segment,) = collect(store.journal, dry_run=True).segments
    backend = BehindAProxy(tmp_path / "store")
    with Pin(store.backend, [segment.rpartition("/")[2].partition(".")[0]]):
        done = collect(Journal(backend))
    assert (done.segments, done.pinned, backend.asked) == ((), (segment,), 2)
    assert segment in segments(store)


def test_nothing_goes_while_the_folders_are_not_listed(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (segment,) = collect(store.journal, dry_run=True).segments
    backend = BehindAProxy(tmp_path / "store")
    monkeypatch.setattr(backend, "folders", lambda _prefix: [])
    reader = Pin(store.backend, [segment.rpartition("/")[2].partition(".")[0]])
    with reader, pytest.raises(StorageError, match="one listing shows segments, and another none"):
        collect(Journal(backend))
    assert segment in segments(store)


def test_nothing_goes_while_listings_of_the_pins_lack_what_others_show(store: Store, tmp_path: Path) -> None:
    (segment,) = collect(store.journal, dry_run=True).segments
    backend = BehindAProxy(tmp_path / "store")
    backend.wrong = 100
    reader = Pin(store.backend, [segment.rpartition("/")[2].partition(".")[0]])
    with reader, pytest.raises(StorageError, match="one listing shows pins, and another none"):
        collect(Journal(backend))
    assert segment in segments(store)
    assert collect(Journal(backend)).segments == (segment,)  # no pin: the folder is there, and empty


def test_a_store_that_never_had_a_pin_is_not_listed_as_a_whole(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a bucket that would be a request for each thousand segments."""
    (segment,) = collect(store.journal, dry_run=True).segments
    backend = LocalBackend(tmp_path / "store")
    listed = []
    of_all = backend.list
    monkeypatch.setattr(backend, "folders", lambda _prefix: ["fold", "log", "seg"])
    monkeypatch.setattr(backend, "list", lambda prefix: listed.append(prefix) or of_all(prefix))
    assert collect(Journal(backend)).segments == (segment,)
    assert "" not in listed
