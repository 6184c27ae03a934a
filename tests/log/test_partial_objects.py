"""A slot, pin, request, fold or FORMAT that is being written is not damage to readers beside the writer."""

from __future__ import annotations

import itertools
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem

import ckptstore
from ckptstore.doctor.examination import examine
from ckptstore.errors import KeyNotFoundError
from ckptstore.formats.history.record_text import encode_format, seal, torn
from ckptstore.formats.history.records import FORMAT_KEY, FormatFile, segment_key, slot_key, slot_of
from ckptstore.log import fold_writer, partial_objects
from ckptstore.log.change import CatalogChange
from ckptstore.log.log_reader import Patience, damaged_folds
from ckptstore.log.log_watch import LogWatch
from ckptstore.log.partial_objects import LONGEST, read_when_complete
from ckptstore.log.pins import Pin, PinWatch
from ckptstore.log.requests import handle, outcome, post
from ckptstore.log.term import open_term
from ckptstore.maintenance.copies.store_copy import copy
from ckptstore.maintenance.garbage_collection import collect
from ckptstore.maintenance.repair.store_repair import repair
from ckptstore.reports.notebooks import store_html
from tests.forms import LONG, in_turn, short_or
from tests.log.revealing import Reveal, revealing
from tools.objects.server import Server

STILL_FOR_USERS = partial_objects.STILL  # the imported value; it is shorter while tests run

damaged = pytest.mark.filterwarnings("ignore::ckptstore.DamagedLogWarning")
"""For tests in which a slot stays torn."""

Maker = Callable[[str], ckptstore.Store]


@pytest.fixture(params=["local", "memory", "fsspec", "s3"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Maker:
    """Opens the store of a name, on each medium."""

    def made(name: str) -> ckptstore.Store:
        if request.param == "s3":
            server: Server = request.getfixturevalue("s3")
            urls.setdefault(name, server.url())
            return ckptstore.open(urls[name], storage_options=server.options)
        if request.param == "fsspec":
            return ckptstore.open(str(tmp_path / name), filesystem=fsspec.filesystem("file"))
        if request.param == "memory":
            return ckptstore.open(urls.setdefault(name, f"memory://{uuid.uuid4().hex}"))
        return ckptstore.open(tmp_path / name)

    urls: dict[str, str] = {}
    return made


def filled(store: ckptstore.Store) -> None:
    with store.writer(poll_seconds=None) as writer:
        for step in (1, 2, 3):
            writer.save({"w": np.full(9, step)}, step=step)
    with store.writer(poll_seconds=None) as writer:
        writer.save({"w": np.full(9, 4)}, step=4)
        writer.tag("best", 4)
        writer.save({"w": np.full(9, 5)}, step=5)
    for key in store.backend.list("fold/"):  # of a medium where a closing writer folds: READ would begin there
        store.backend.delete(key)


def newest_slot(store: ckptstore.Store) -> str:
    return max((key for key in store.backend.list("log/")), key=lambda key: slot_of(key) or 0)


def watched(store: ckptstore.Store, reveal: Reveal) -> ckptstore.Store:
    revealing(store.backend, reveal)
    return store


def followed(store: ckptstore.Store, _make: Maker) -> object:
    follower = store.follow(after="4", framework="numpy", timeout=20, poll=0.02)
    try:
        return next(follower).info.ref
    finally:
        follower.close()


def written(store: ckptstore.Store, _make: Maker) -> object:
    with store.writer(poll_seconds=None) as writer:
        return writer.parent.ref if writer.parent is not None else None


def copied(store: ckptstore.Store, make: Maker) -> object:
    return copy(store.journal, make("copy").backend).checkpoints


def repaired(store: ckptstore.Store, make: Maker) -> object:
    done = repair(store.backend, make("repaired").backend)
    return done.log, done.lost, done.damage, done.latest


READERS: dict[str, Callable[[ckptstore.Store, Maker], object]] = {
    "latest_step": lambda store, _: store.latest_step(),
    "checkpoints": lambda store, _: [info.ref for info in store.checkpoints()],
    "load": lambda store, _: store.load(framework="numpy")["w"].tolist(),
    "a step": lambda store, _: store.checkpoint(5).ref,
    "a tag": lambda store, _: store.checkpoint("tag:best").ref,
    "writer": written,
    "follower": followed,
    "watch": lambda store, _: (status := next(store.watch())).latest and (status.latest, status.damage),
    "verify": lambda store, _: store.verify().damage,
    "verify one": lambda store, _: store.verify("latest").damage,
    "repair": repaired,
    "gc": lambda store, _: collect(store.journal, dry_run=True).damage,
    "inspect": lambda store, _: store.inspect().info.ref,
    "lineage": lambda store, _: (store.lineage().latest, store.lineage().damage),
    "stats": lambda store, _: store.stats().damage,
    "notebook": lambda store, _: "damaged" in store_html(store.journal),
    "fate": lambda store, _: store.fate(77),
    "copy": copied,
}


def cuts(data: bytes) -> list[list[int]]:
    size = len(data)
    return [[0], [1], [size // 2], [size - 34], [size - 33], [size - 1], [0, 1, size // 3, size // 2, size - 1]]


@pytest.mark.parametrize(
    ("reader", "make"),
    [
        *(pytest.param(reader, "memory", id=f"{reader}-memory") for reader in READERS),
        *in_turn(list(READERS), ["local", "fsspec", "s3"]),
    ],
    indirect=["make"],
)
def test_a_partly_written_newest_slot_is_waited_for(make: Maker, reader: str) -> None:
    """Each prefix of it x every reader x every medium: the result is that of the whole slot.

    A reader treats a prefix alike on every medium: in CI each reader is shown all prefixes in memory, and two on one
    of the other media.
    """
    plain = make("run")
    filled(plain)
    if reader == "writer":
        expected: object = "5@2"
    else:
        expected = READERS[reader](plain, lambda name: make(f"{name}-expected"))
    data = plain.backend.get(newest_slot(plain))
    every = cuts(data)
    if not (plain.backend.anchored if LONG else plain.backend.url.startswith("memory:")):
        every = every[2::4]
    for number, lengths in enumerate(every):
        reveal = Reveal()
        # Closing commits a slot; the newest one is another after a writer was opened.
        key = newest_slot(plain)
        store = watched(make("run"), reveal)
        assert store.run  # FORMAT is read
        reveal.begin(key, lengths)
        assert READERS[reader](store, lambda name, number=number: make(f"{name}-{number}")) == expected, lengths
        assert reveal.looks[key] == len(lengths), "the medium showed them"


@pytest.mark.parametrize("reader", ["latest_step", "verify", "writer"])
def test_a_partly_written_format_file_is_waited_for(make: Maker, reader: str) -> None:
    plain = make("run")
    plain.journal.create()
    size = len(plain.backend.get(FORMAT_KEY))
    for lengths in ([0], [size // 2], [size - 1], [0, 7, size - 33]):
        reveal = Reveal()
        store = watched(make("run"), reveal)
        reveal.begin(FORMAT_KEY, lengths)
        READERS[reader](store, make)
        assert reveal.looks[FORMAT_KEY] == len(lengths)
        if reader == "writer":
            break  # slots exist from now on, so FORMAT cannot be in progress


def test_pins_on_their_way_are_waited_for(make: Maker) -> None:
    plain = make("run")
    filled(plain)
    reveal = Reveal()
    store = watched(make("run"), reveal)
    with Pin(plain.backend, ["0" * 32]) as pin:
        size = len(plain.backend.get(pin.key))
        for lengths in ([0], [size // 2], [size - 1], [0, 9, size - 20]):
            reveal.begin(pin.key, lengths)
            found = PinWatch(store.backend).survey()
            assert (found.alive, found.unreadable, set(found.segments)) == ((pin.key,), (), {"0" * 32})
            reveal.begin(pin.key, lengths)
            assert store.verify().ok


def test_requests_on_their_way_are_waited_for_and_not_refused(make: Maker) -> None:
    plain = make("run")
    filled(plain)
    reveal = Reveal()
    store = watched(make("run"), reveal)
    term = open_term(store.journal, None)
    for lengths in ([0], [30], [0, 9, 60]):
        request = post(plain.journal, term.number, "a test", CatalogChange(keep=("last:3",)))
        reveal.begin(request.key, lengths)
        assert store.verify().ok
        reveal.begin(request.key, lengths)
        assert handle(term) == 1
        assert outcome(plain.view().catalog, request).answer == "accepted"


def test_folds_on_their_way_are_no_damage(make: Maker) -> None:
    plain = make("run")
    filled(plain)
    key = fold_writer.fold(plain.journal, plain.view())
    size = len(plain.backend.get(key))
    for lengths in ([0], [size // 2], [size - 1], [0, 9, size - 20]):
        reveal = Reveal()
        store = watched(make("run"), reveal)
        assert store.run
        reveal.begin(key, lengths)
        assert store.latest_step() == 5, "READ passes over it, and needs none"
        reveal.begin(key, lengths)
        assert store.verify().damage == ()
        reveal.begin(key, [0, *lengths])
        view = store.view()
        assert view.bad_folds == (key,)
        assert damaged_folds(store.journal, view) == ()
    plain.backend.delete(key)
    plain.backend.create(key, b"ckptstore fold\nnothing")
    view = plain.view()
    assert damaged_folds(plain.journal, view) == (key,)


def test_the_doctor_reports_a_fold_that_is_damaged(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "run")
    filled(store)
    (tmp_path / "run" / fold_writer.fold(store.journal, store.view())).write_bytes(b"torn")
    (found,) = [one for one in examine(str(tmp_path / "run"), quick=True).findings if one.group == "store"]
    assert found.values["damage"] == 1


@pytest.mark.parametrize("medium", ["local", "fsspec"])
def test_a_partly_written_segment_is_no_damage(tmp_path: Path, medium: str) -> None:
    """Its name may exist before its bytes. A record names it only when it is whole."""
    filesystem = fsspec.filesystem("file") if medium == "fsspec" else None
    store = ckptstore.open(str(tmp_path / "run"), filesystem=filesystem)
    filled(store)
    with store.writer(poll_seconds=None) as writer:
        key = segment_key(writer.term, "a" * 32)
        (tmp_path / "run" / key).parent.mkdir()
        for data in (b"", b"\x00", bytes(9000)):
            (tmp_path / "run" / key).write_bytes(data)
            assert store.verify().damage == ()
            assert store.latest_step() == 5
            done = repair(store.backend, ckptstore.open(tmp_path / f"repaired{len(data)}").backend)
            assert (done.log, done.damage, done.lost, done.latest) == ("whole", (), {}, "5@2")


@damaged
@pytest.mark.parametrize("reader", ["verify", "repair"])
def test_a_slot_that_is_slower_than_readers_wait_is_looked_at_again_in_the_end(make: Maker, reader: str) -> None:
    """Its writer was stopped, and finishes before the slow part of the operation: nothing is damaged or cut off."""
    filled(make("run"))
    reveal = Reveal()
    store = watched(make("run"), reveal)
    reveal.begin(newest_slot(store), [9], forever=True)

    def whole(done: int, total: int) -> None:
        if done < total:  # the log was read, segments are read now
            reveal.cuts.clear()

    if reader == "verify":
        report = store.verify(progress=whole)
        assert (report.damage, report.lost) == ((), ())
        assert report.restorable[-1] == "5@2"
    else:
        done = repair(store.backend, make("repaired").backend, progress=whole)
        assert (done.log, done.damage, done.lost, done.found, done.latest) == ("whole", (), {}, (), "5@2")


@pytest.mark.parametrize("reader", ["verify", "repair"])
def test_slots_that_are_folded_and_deleted_meanwhile_are_no_damage(tmp_path: Path, reader: str) -> None:
    """READ starts over, as in other cases; its first listing of folds is older than the later reads."""
    root = tmp_path / "run"
    ckptstore.open(root, create=True)
    (root / "FORMAT").write_bytes(encode_format(FormatFile("a" * 32, anchor_every=4)))
    store = ckptstore.open(root)
    with store.writer(poll_seconds=None) as writer:
        for step in range(1, 12):
            writer.save({"w": np.full(9, step)}, step=step)
            if step in (6, 9):
                fold_writer.fold(store.journal, store.view())
    folds = store.backend.list("fold/")
    assert len(folds) > 1
    for seq in (1, 2, 3):
        store.backend.delete(slot_key(seq))
    looks: list[str] = []
    kind: Any = type(store.backend)

    def listed(self: Any, prefix: str) -> list[str]:
        found: list[str] = kind.list(self, prefix)
        if prefix != "fold/" or looks:
            return found
        looks.append(prefix)
        return []

    store.backend.__class__ = type("Older", (kind,), {"list": listed})
    if reader == "verify":
        assert store.verify().damage == ()
    else:
        done = repair(store.backend, ckptstore.open(tmp_path / "repaired").backend)
        assert (done.log, done.damage, done.lost, done.latest) == ("whole", (), {}, "11@1")
    assert looks


# ------------------------------------------------------------------------------------------------ torn for good


@damaged
def test_a_slot_that_a_dead_writer_tore_is_damage_after_a_bounded_time(make: Maker) -> None:
    """`latest` is an error, a step can be named, and a writer opens there. The wait happens once."""
    plain = make("run")
    filled(plain)
    reveal = Reveal()
    store = watched(make("run"), reveal)
    key = newest_slot(plain)
    reveal.begin(key, [0, 10], forever=True)
    with pytest.raises(ckptstore.CorruptLogError, match=f"slot {slot_of(key)} is damaged"):
        store.latest_step()
    looks = reveal.looks[key]  # with growing pauses between them, which alone count as time
    assert looks < 20
    with pytest.raises(ckptstore.CorruptLogError):
        store.latest_step()
    assert reveal.looks[key] == looks + 1, "what was found torn for good is not waited for again"
    assert store.load("4", framework="numpy")["w"][0] == 4
    reveal.looks[key] = 0
    with store.writer(parent="4", poll_seconds=None) as writer:
        writer.save({"w": np.full(9, 50)}, step=50)
    assert reveal.looks[key] < 8
    assert store.latest_step() == 50


def test_a_pin_that_a_dead_reader_tore_is_unreadable_and_waited_for_once(make: Maker) -> None:
    plain = make("run")
    filled(plain)
    reveal = Reveal()
    store = watched(make("run"), reveal)
    with Pin(plain.backend, ["0" * 32]) as pin:
        reveal.begin(pin.key, [10], forever=True)
        watch = PinWatch(store.backend)
        assert watch.survey().unreadable == (pin.key,)
        looks = reveal.looks[pin.key]
        assert looks > 3
        assert watch.survey().unreadable == (pin.key,)
        assert reveal.looks[pin.key] == looks + 1


@damaged
def test_a_follower_finds_a_slot_whole_that_was_slow(make: Maker) -> None:
    """Its writer was stopped for longer than any wait. The slot counts as soon as it is whole."""
    plain = make("run")
    filled(plain)
    reveal = Reveal()
    store = watched(make("run"), reveal)
    key = newest_slot(plain)
    looks = LogWatch(store.journal)
    reveal.begin(key, [10], forever=True)
    assert looks.look()[1].damage == (slot_of(key),)
    reveal.cuts.clear()
    view = looks.look()[1]
    assert view.damage == ()
    assert (latest := view.catalog.latest()) is not None
    assert latest.ref == "5@2"
    looks.close()


@damaged
def test_a_term_that_was_opened_over_a_slow_slot_is_void(make: Maker) -> None:
    """The slot was torn when the log was read, and is whole when the OPEN exists: its record counts."""
    plain = make("run")
    filled(plain)
    end = plain.view().end
    reveal = Reveal()
    store = watched(make("run"), reveal)
    key = newest_slot(plain)
    reveal.begin(key, [10], forever=True)
    create = type(store.backend).create

    def arrives(backend: Any, name: str, data: bytes) -> None:
        create(backend, name, data)
        if name == slot_key(end):
            reveal.cuts.clear()

    type(store.backend).create = arrives  # a class of this test's own
    term = open_term(store.journal, plain.checkpoint("4").id)
    assert term.next_seq == end + 2
    view = plain.view()
    assert (view.end, view.damage) == (end + 2, (end,)), "the void OPEN does not continue the log"
    assert view.catalog.checkpoints[2, 5], "what the slow writer committed"
    assert view.catalog.terms[3].parent == term.parent, "and the new term has its parent"


@damaged
def test_a_slot_that_was_given_up_is_read_again_when_its_successor_is_found(make: Maker) -> None:
    """Its writer was stopped, and has continued: it completed the slot, and the next one, while the log was read."""
    plain = make("run")
    filled(plain)
    newest = slot_of(newest_slot(plain)) or 0
    for forever in (True, False):
        reveal = Reveal()
        store = watched(make("run"), reveal)
        assert store.run  # FORMAT is read
        reveal.begin(slot_key(newest - 1), [10], forever=True)
        get, size = store.backend.get, store.backend.size
        asked: list[str] = []
        hidden: dict[str, list[int]] = {} if forever else reveal.cuts

        def goes_on(
            key: str, *rest: Any, get: Any = get, asked: list[str] = asked, hidden: dict[str, list[int]] = hidden
        ) -> bytes:
            if key == slot_key(newest):
                asked.append(key)  # it is there from now on
                hidden.clear()
            data: bytes = get(key, *rest)
            return data

        def not_yet(key: str, size: Any = size, asked: list[str] = asked) -> int:
            if key == slot_key(newest) and not asked:
                raise KeyNotFoundError(key)
            return int(size(key))

        store.backend.get, store.backend.size = goes_on, not_yet  # type: ignore[method-assign]
        view = store.view()
        assert asked
        assert view.damage == ((newest - 1,) if forever else ())
        assert ((2, 5) in view.catalog.checkpoints) is not forever


class Stopped(LocalFileSystem):
    """Files made in parts, and a process that is stopped in the middle of a slot until the test continues it."""

    protocol = "stopped"
    link = None
    meanwhile: Callable[[], object] | None = None

    def _open(self, path: str, mode: str = "rb", **more: Any) -> Any:
        file = super()._open(path, mode, **more)
        meanwhile = type(self).meanwhile
        if "x" in mode and "/log/" in path and meanwhile is not None:
            type(self).meanwhile = None
            write = file.write

            def stopped(data: bytes) -> int:
                first: int = write(data[:20])
                file.flush()
                meanwhile()
                return first + int(write(data[20:]))

            file.write = stopped
        return file


def on_parts(folder: Path) -> ckptstore.Store:
    return ckptstore.open(str(folder), filesystem=Stopped(skip_instance_cache=True))


@damaged
def test_a_commit_over_which_a_term_was_opened_is_not_acknowledged(tmp_path: Path) -> None:
    """The next term, and every fold of it, lacks the slot's record. So its writer must not report it as committed."""
    store = on_parts(tmp_path / "run")
    other = ckptstore.open(tmp_path / "run")
    with store.writer(poll_seconds=None) as writer:
        writer.save({"w": 1}, step=1)
        opened: list[ckptstore.Writer] = []
        Stopped.meanwhile = lambda: opened.append(other.writer(parent="1", poll_seconds=None))
        with pytest.raises(ckptstore.CommitUnknownError, match=r"slot 2 took longer .* opened a term after it"):
            writer.save({"w": 2}, step=2)
        with pytest.raises(ckptstore.CommitUnknownError):
            writer.save({"w": 3}, step=3)
    with opened[0] as successor:
        successor.save({"w": 4}, step=4)
    assert store.latest_step() == 4


def test_a_commit_that_was_slow_and_that_nobody_opened_over_is_acknowledged(tmp_path: Path) -> None:
    store = on_parts(tmp_path / "run")
    with store.writer(poll_seconds=None) as writer:
        Stopped.meanwhile = lambda: None
        writer.save({"w": 1}, step=1)
        writer.save({"w": 2}, step=2)
    assert [info.step for info in store.checkpoints()] == [1, 2]


def test_a_commit_that_was_whole_at_once_is_acknowledged_although_a_term_is_opened_after_it(tmp_path: Path) -> None:
    store, other = (ckptstore.open(tmp_path / "run") for _ in range(2))
    create = store.backend.create
    opened: list[ckptstore.Writer] = []

    def followed(key: str, data: bytes) -> None:
        create(key, data)
        if key.startswith("log/"):
            opened.append(other.writer(poll_seconds=None))

    writer = store.writer(poll_seconds=None)
    store.backend.create = followed  # type: ignore[method-assign]
    assert writer.save({"w": 1}, step=1).step == 1
    with pytest.raises(ckptstore.FencedError):
        writer.save({"w": 2}, step=2)
    writer.close()
    with opened[0] as successor:
        assert successor.parent is not None
        assert successor.parent.step == 1


def test_a_commit_is_in_doubt_where_nobody_can_say_whether_it_was_opened_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = on_parts(tmp_path / "run")
    with store.writer(poll_seconds=None) as writer:
        writer.save({"w": 1}, step=1)
        asked = 0

        def fails(self: Any, key: str) -> int:
            nonlocal asked
            if key == slot_key(3):
                asked += 1
                if asked < 3 or broken:
                    raise ckptstore.StorageError(5, "the network is down", key)
            return size(self, key)

        size = type(store.backend).size
        monkeypatch.setattr(type(store.backend), "size", fails)
        monkeypatch.setattr(Patience, "pause", lambda _self, _done: None)
        broken = False
        writer.save({"w": 2}, step=2)
        assert asked == 3, "tried again"
        monkeypatch.setattr(type(store.backend), "size", size)
    with store.writer(poll_seconds=None) as writer:
        size = type(store.backend).size
        end, broken = store.view().end, True

        def down(self: Any, key: str) -> int:
            if key == slot_key(end + 1):
                raise ckptstore.StorageError(5, "the network is down", key)
            return size(self, key)

        monkeypatch.setattr(type(store.backend), "size", down)
        with pytest.raises(ckptstore.CommitUnknownError, match="may or may not be committed"):
            writer.save({"w": 3}, step=3)


def test_a_copy_over_which_somebody_went_on_is_not_acknowledged(tmp_path: Path) -> None:
    source = ckptstore.open(tmp_path / "run")
    filled(source)
    target = on_parts(tmp_path / "copy")

    copy(source.journal, ckptstore.open(tmp_path / "first").backend)
    last = ckptstore.open(tmp_path / "first").view().end - 1

    def somebody() -> None:
        if (tmp_path / "copy" / slot_key(last)).exists():
            (tmp_path / "copy" / slot_key(last + 1)).write_bytes(b"{")
        else:
            Stopped.meanwhile = somebody

    Stopped.meanwhile = somebody
    with pytest.raises(ckptstore.UsageError, match=f"slot {last + 1} of the copy that is there is damaged"):
        copy(source.journal, target.backend)


# ------------------------------------------------------------------------------------------------ how long


def run_of(*found: bytes) -> tuple[list[float], bytes]:
    """The pauses, and the result; the last look is repeated again and again."""
    left, pauses = list(found), list[float]()
    data = read_when_complete(lambda: left.pop(0) if len(left) > 1 else left[0], torn, sleep=pauses.append)
    return pauses, data


def test_pauses_grow_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_objects, "STILL", STILL_FOR_USERS)
    whole = seal({"a": 1})
    assert run_of(whole) == ([], whole)
    assert run_of(whole[:3], whole) == ([0.001], whole)
    pauses, data = run_of(whole[:3])
    assert data == whole[:3]
    assert pauses == sorted(pauses)
    assert pauses[-1] <= 0.25
    assert partial_objects.STILL <= sum(pauses) < partial_objects.STILL + 0.25
    pauses, data = run_of(*(whole[: n // 2] for n in range(2 * len(whole))), whole)
    assert data == whole, "it grows, so it is waited for"
    growing = (b"{" + b"x" * n for n in range(10**6))
    waited: list[float] = []
    assert torn(read_when_complete(lambda: next(growing), torn, sleep=waited.append))
    assert LONGEST <= sum(waited) < LONGEST + 1


def test_a_successor_makes_it_damage_at_once_unless_it_is_whole_by_then() -> None:
    whole = seal({"a": 1})
    for second in (whole, whole[:5]):
        left, pauses = [whole[:5], second], list[float]()
        assert read_when_complete(lambda left=left: left.pop(0), torn, lambda: True, pauses.append) == second
        assert (left, pauses) == ([], [])


def test_torn_texts() -> None:
    text = seal({"text": "a", "more": [1, 2, "ü\n\0"]})
    assert all(torn(text[:length]) for length in range(len(text)))
    assert not torn(text)
    assert torn(bytes(100))
    assert torn(text[:10] + bytes(len(text) - 10))
    assert not torn(text.replace(b"1", b"3"))
    assert not torn(b"garbage")
    assert not torn(text + b"x")


# ------------------------------------------------------------------------------------------------ a real file


class Torn(LocalFileSystem):
    """Files that are written in visible pieces, as on most file systems."""

    protocol = "torn"
    link = None

    def _open(self, path: str, mode: str = "rb", **more: Any) -> Any:
        file = super()._open(path, mode, **more)
        if "x" in mode:
            time.sleep(0.0005)
        return file


@pytest.mark.parametrize("kind", [LocalFileSystem, Torn])
def test_readers_beside_a_writer_never_see_damage(
    tmp_path: Path, kind: type[LocalFileSystem], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partial_objects, "STILL", STILL_FOR_USERS)
    store = ckptstore.open(str(tmp_path / "run"), filesystem=kind(skip_instance_cache=True))
    done = threading.Event()
    failures: list[BaseException] = []
    counts = [0, 0]

    def look(number: int) -> None:
        while not done.is_set():
            try:
                store.latest_step()
            except BaseException as error:  # noqa: BLE001 - whatever it is fails the test
                failures.append(error)
            counts[number] += 1

    with store.writer(poll_seconds=None) as writer:
        readers = [threading.Thread(target=look, args=(number,)) for number in range(2)]
        for reader in readers:
            reader.start()
        for step in itertools.count():
            if step >= short_or(100, 200) and min(counts) > 10:  # on a busy machine readers may come late
                break
            writer.save({"w": step}, step=step)
        done.set()
        for reader in readers:
            reader.join()
    assert failures == []
    assert store.verify().ok
