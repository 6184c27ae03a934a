"""Pins: a reader's claim stays, and only a reader that no longer renews its pin is taken for dead."""

from __future__ import annotations

import errno
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Sequence
from types import FrameType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptstore
from ckptstore.backends.base import OBJECT_LIMIT, Backend
from ckptstore.errors import CheckpointNotFoundError, StorageError
from ckptstore.formats.history.catalog import Catalog
from ckptstore.formats.history.record_text import decode_pin
from ckptstore.formats.history.records import CheckpointId, CommitRecord, pin_key
from ckptstore.log import partial_objects
from ckptstore.log.journal import Journal
from ckptstore.log.pins import Pin, PinWatch, UnpinnedWarning, claim
from ckptstore.log.term import Term, open_term, read
from tests.forms import short_or
from tests.log.log_world import HASTE, Actor, Fate, FaultyBackend, World, save, segments_of

A, B = "a" * 32, "b" * 32


def opened(world: World) -> Term:
    return open_term(world.journal, None, patience=HASTE)


class TestPin:
    def test_it_names_segments_and_goes_when_done(self) -> None:
        world = World()
        with Pin(world, [A, B]) as pin:
            assert world.list("pins/") == [pin.key]
            assert decode_pin(world.get(pin.key), what="p").segments == (A, B)
        assert world.list("pins/") == []

    def test_it_is_renewed_with_a_new_nonce(self) -> None:
        world = World()
        nonces: set[str] = set()
        renewed = threading.Event()

        class Watched(FaultyBackend):
            def replace(self, key: str, data: bytes) -> None:
                nonces.add(decode_pin(data, what=key).nonce)
                super().replace(key, data)
                if len(nonces) > 2:
                    renewed.set()

        with Pin(Watched(world, lambda _operation, _key: "ok"), [A], refresh_every=0.001):
            assert renewed.wait(120)
        assert world.list("pins/") == []

    def test_a_failing_renewal_is_tried_again(self) -> None:
        world = World()
        fates: list[Fate] = ["ok", "error", "error"]
        renewed = threading.Event()

        def fate(operation: str, _key: str) -> Fate:
            if operation == "replace" and not fates:
                renewed.set()
            return fates.pop(0) if fates else "ok"

        with Pin(FaultyBackend(world, fate), [A], refresh_every=0.001):
            assert renewed.wait(120)

    def test_without_write_access_a_reader_goes_unpinned_and_says_so(self) -> None:
        world = World()
        world.read_only = True
        with pytest.warns(UnpinnedWarning, match="unpinned"), Pin(world, [A]):
            assert world.list("pins/") == []

    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
    def test_on_a_full_disk_a_reader_goes_unpinned_and_says_so(
        self, monkeypatch: pytest.MonkeyPatch, number: int
    ) -> None:
        """This is the case in which a checkpoint must be read and taken elsewhere."""

        def full(key: str, _data: bytes) -> None:
            raise StorageError(number, "cannot write: full", key)

        world = World()
        monkeypatch.setattr(world, "replace", full)
        with pytest.warns(UnpinnedWarning, match="unpinned.*full") as told, Pin(world, [A]):
            pass
        assert told[0].filename == __file__  # the caller, not the medium

    def test_another_failure_is_raised(self) -> None:
        failing = FaultyBackend(World(), lambda _operation, _key: "error")
        with pytest.raises(StorageError), Pin(failing, [A]):
            pass

    def test_it_goes_when_the_body_fails(self) -> None:
        world = World()
        with pytest.raises(ZeroDivisionError), Pin(world, [A]):
            raise ZeroDivisionError
        assert world.list("pins/") == []


class Interrupt:
    """Presses Ctrl-C before the `count`-th line that this thread runs in the files of `where`."""

    def __init__(self, count: int, where: Sequence[str]) -> None:
        self.left = count
        self.where = tuple(where)

    def __call__(self, frame: FrameType, event: str, _argument: object) -> Interrupt | None:
        if not frame.f_code.co_filename.endswith(self.where) or _cleaning_up(frame):
            return None
        if event in ("call", "line"):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


def _cleaning_up(frame: FrameType | None) -> bool:
    """Whether this is for an object that nothing references, whose errors nobody receives."""
    while frame is not None and not frame.f_code.co_filename.endswith("weakref.py"):
        frame = frame.f_back
    return frame is not None


@pytest.mark.parametrize("within", ["pin", "load"])
def test_ctrl_c_leaves_no_pin_that_is_renewed(within: str) -> None:
    """Wherever it comes: before every line of the code that makes and removes a pin."""
    store = ckptstore.open(f"memory://{uuid.uuid4().hex}")
    with store.writer(poll_seconds=None) as writer:
        writer.save({"w": np.zeros(9)}, 1)
    count, interrupted = 0, True
    while interrupted:
        count += 1
        interrupt = Interrupt(
            count, ["pins.py"] if within == "pin" else ["pins.py", "restore/load.py", "contextlib.py"]
        )
        interrupted = False
        before = sys.gettrace()
        sys.settrace(interrupt)
        try:
            if within == "pin":
                with Pin(store.backend, [A], refresh_every=0.001):
                    pass
            else:
                store.load(1, framework="numpy")
        except KeyboardInterrupt:
            interrupted = True
        finally:
            sys.settrace(before)
        assert interrupted == (interrupt.left <= 0)
        renewing = [thread for thread in threading.enumerate() if thread.name == "ckptstore-pin"]
        for thread in renewing:
            thread.join(120)
            assert not thread.is_alive(), f"renewed for ever after {count} lines"
        assert store.backend.list("pins/") == []
    assert count > (20 if within == "pin" else 100)
    assert store.load(1, framework="numpy")["w"].tolist() == [0] * 9


def by_latest(catalog: Catalog) -> CheckpointId:
    entry = catalog.latest()
    if entry is None:
        raise CheckpointNotFoundError("nothing")
    return entry.id


class TestClaim:
    def test_the_plan_is_pinned_and_checked_again(self) -> None:
        world = World()
        term = opened(world)
        identity = save(term, 1)
        with claim(world.journal, by_latest, lambda _plan: segments_of(term.catalog, identity.node)) as (
            view,
            plan,
        ):
            assert plan == identity
            assert view.catalog == world.catalog()
            (key,) = world.list("pins/")
            assert decode_pin(world.get(key), what=key).segments == segments_of(term.catalog, identity.node)
        assert world.list("pins/") == []

    def test_a_plan_whose_segment_was_dropped_before_the_pin_is_made_again(self) -> None:
        world = World()
        term = opened(world)
        old = save(term, 1)
        planned: list[CheckpointId] = []
        catalogs: list[Catalog] = []

        def plan(catalog: Catalog) -> CheckpointId:
            catalogs.append(catalog)
            planned.append(by_latest(catalog))
            return planned[-1]

        def segments(chosen: CheckpointId) -> Sequence[str]:
            return segments_of(catalogs[-1], chosen.node)

        def work(backend: Backend) -> None:
            with claim(Journal(backend, world.fmt), plan, segments) as (view, chosen):
                assert chosen == new
                assert set(segments(chosen)) <= set(view.catalog.segments)

        reader = Actor(world, "reader", work)
        while reader.at is not None and reader.at[0] != "replace":
            reader.step()
        new = save(term, 2)
        term.commit(CommitRecord(1, "0" * 32, retires=(old.node,), drops=segments_of(term.catalog, old.node)))
        reader.finish()
        assert reader.error is None
        assert planned == [old, new]
        assert world.list("pins/") == []

    @pytest.mark.parametrize("lost", [0, 1, 2])
    def test_one_dropped_segment_of_several_is_enough_to_plan_again(self, lost: int) -> None:
        """A plan reads all of its segments: if any of them is gone, it cannot be carried out."""
        world = World()
        term = opened(world)
        ids = [save(term, step) for step in (1, 2, 3)]
        planned: list[tuple[str, ...]] = []

        def plan(catalog: Catalog) -> tuple[str, ...]:
            planned.append(tuple(segment for entry in catalog.checkpoints for segment in segments_of(catalog, entry)))
            return planned[-1]

        def work(backend: Backend) -> None:
            with claim(Journal(backend, world.fmt), plan, lambda chosen: chosen) as (view, chosen):
                assert set(chosen) <= set(view.catalog.segments)

        reader = Actor(world, "reader", work)
        while reader.at is not None and reader.at[0] != "replace":
            reader.step()
        drops = segments_of(term.catalog, ids[lost].node)
        term.commit(CommitRecord(1, "0" * 32, retires=(ids[lost].node,), drops=drops))
        reader.finish()
        assert reader.error is None
        assert [len(found) for found in planned] == [3, 2]

    def test_errors_of_the_plan_reach_the_caller(self) -> None:
        world = World()
        with pytest.raises(CheckpointNotFoundError), claim(world.journal, by_latest, lambda _plan: ()):
            pass


class TestWatch:
    def test_a_pin_is_dead_only_after_it_stayed_unchanged_for_the_whole_time(self) -> None:
        world = World()
        now = [1000.0]
        watch = PinWatch(world, dead_after=60, clock=lambda: now[0])
        pin = Pin(world, [A], refresh_every=3600)
        with pin:
            assert watch.survey().segments == {A}
            now[0] += 59
            assert watch.survey().segments == {A}
            pin.renew()
            now[0] += 59
            assert watch.survey().alive == (pin.key,)
            now[0] += 59
            assert watch.survey().alive == (pin.key,)
            now[0] += 1
            survey = watch.survey()
            assert (survey.segments, survey.alive, survey.dead) == (frozenset(), (), (pin.key,))
            pin.renew()  # it is still alive
            assert watch.survey().segments == {A}

    def test_a_new_watch_takes_no_pin_for_dead(self) -> None:
        world = World()
        with Pin(world, [A], refresh_every=3600):
            assert PinWatch(world, dead_after=60, clock=lambda: 1e9).survey().segments == {A}

    def test_a_damaged_pin_lives_too_and_nobody_knows_what_it_claims(self) -> None:
        world = World()
        now = [0.0]
        watch = PinWatch(world, dead_after=60, clock=lambda: now[0])
        with Pin(world, [A], refresh_every=3600) as pin:
            world.damage(pin.key)
            assert watch.survey().unreadable == (pin.key,)
            now[0] = 60
            assert watch.survey().dead == (pin.key,)

    def test_a_torn_pin_is_waited_for_once_and_a_whole_one_never(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of a reader that was killed as it wrote it: every survey of a collector would wait for it."""
        monkeypatch.setattr(partial_objects, "STILL", 0.02)
        world, torn, looks = World(), pin_key("0" * 32), Counter[str]()

        class Counted(FaultyBackend):
            def get(self, key: str, limit: int = OBJECT_LIMIT) -> bytes:
                looks[key] += 1
                return super().get(key, limit)

        with Pin(world, [A], refresh_every=3600) as pin:
            world.replace(torn, world.get(pin.key)[:20])
            watch = PinWatch(Counted(world, lambda _operation, _key: "ok"))
            assert watch.survey().unreadable == (torn,)
            assert looks[torn] > 2
            assert looks[pin.key] == 1
            looks.clear()
            assert watch.survey().unreadable == (torn,)
            assert looks == {torn: 1, pin.key: 1}
            world.replace(torn, world.get(pin.key)[:30])  # it is written after all
            looks.clear()
            watch.survey()
            assert looks[torn] > 2

    def test_a_pin_released_while_the_pins_are_read_claims_nothing(self) -> None:
        world = World()
        world.replace(pin_key("0" * 32), b"")

        class Slow(FaultyBackend):
            def get(self, key: str, limit: int = OBJECT_LIMIT) -> bytes:
                world.delete(key)
                return super().get(key, limit)

        survey = PinWatch(Slow(world, lambda _operation, _key: "ok")).survey()
        assert survey.segments == frozenset()
        assert not survey.unreadable


@given(st.lists(st.sampled_from(["gc", "reader", "drop"]), max_size=60))
@settings(max_examples=short_or(24, 60), deadline=None)
def test_the_collectors_rule_and_the_readers_rule_keep_what_is_read(schedule: list[str]) -> None:
    """Whatever the order of their steps: GC reads the log, then the pins; the reader pins, then reads the log again."""
    world = World(every=1000)
    term = opened(world)
    old = save(term, 1)
    save(term, 2)
    for entry in term.catalog.segments.values():
        world.create(entry.key, b"data")
    doomed = segments_of(term.catalog, old.node)

    def collect(backend: Backend) -> None:
        view = read(Journal(backend, world.fmt), patience=HASTE)
        pinned = PinWatch(backend).survey().segments
        for key in world.list("seg/"):
            if view.catalog.collectable(key) and key.split("/")[2].partition(".")[0] not in pinned:
                backend.delete(key)

    def restore(backend: Backend) -> None:
        def plan(catalog: Catalog) -> Sequence[str]:
            return segments_of(catalog, (1, 1) if (1, 1) in catalog.checkpoints else (1, 2))

        with claim(Journal(backend, world.fmt), plan, lambda chosen: chosen) as (view, chosen):
            for _ in range(3):
                for segment in chosen:
                    backend.size(view.catalog.segments[segment].key)  # fails if it was deleted

    gc, reader = Actor(world, "gc", collect), Actor(world, "reader", restore)
    for turn in schedule:
        actor = gc if turn == "gc" else reader
        if turn == "drop":
            if old.node in term.catalog.checkpoints:
                term.commit(CommitRecord(1, "0" * 32, retires=(old.node,), drops=doomed))
        elif actor.at is not None:
            actor.step()
    for actor in (reader, gc):
        actor.finish()
        assert actor.error is None
