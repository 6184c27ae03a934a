"""Arenas: pieces of any length under a budget, never two in one place; memory that is touched beforehand."""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptstore
from ckptstore.host import prefault
from ckptstore.host.arenas import LEAST, ArenaLease, Arenas
from ckptstore.host.buffers import aligned
from ckptstore.host.pages import BLOCK
from ckptstore.host.prefault import Prefault, populate
from tests.forms import short_or

MIB = 1 << 20
UNIT = 16 * MIB + 2 * BLOCK


def place(lease: ArenaLease) -> tuple[int, int]:
    address = lease.memory.__array_interface__["data"][0]
    return address, address + len(lease.memory)


@settings(deadline=None, max_examples=short_or(40, 100))
@given(
    budget=st.one_of(st.none(), st.integers(LEAST, 6 * LEAST)),
    actions=st.lists(
        st.one_of(
            st.tuples(st.just("take"), st.integers(1, UNIT // BLOCK)),
            st.tuples(st.just("free"), st.integers(0, 50)),
            st.tuples(st.just("expect"), st.integers(1, 4 * UNIT // BLOCK)),
        ),
        max_size=60,
    ),
)
def test_pieces_do_not_overlap_and_the_budget_holds(budget: int | None, actions: list[tuple[str, int]]) -> None:
    """Requests that would have to wait are skipped: a piece is available whenever nothing is taken."""
    arenas = Arenas(budget)
    arenas.expect(4 * UNIT, 2)

    class ShortError(Exception):
        pass

    def short() -> None:
        raise ShortError

    leases: list[ArenaLease] = []
    for action, number in actions:
        if action == "expect":
            arenas.expect(number * BLOCK, 2)
        elif action == "free" and leases:
            leases.pop(number % len(leases)).free()
        elif action == "take":
            try:
                leases.append(arenas.take(number * BLOCK, short))
            except ShortError:
                assert leases
        places = sorted(place(lease) for lease in leases)
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(places))
        assert all(begin % BLOCK == 0 for begin, _ in places)
        assert arenas.used == sum(end - begin for begin, end in places)
        assert budget is None or arenas.held <= budget
    for lease in leases:
        lease.free()
        lease.free()
    assert arenas.used == 0
    arenas.take(UNIT, short).free()
    arenas.close()
    assert arenas.held == 0


def test_a_wait_ends_when_memory_is_returned() -> None:
    arenas = Arenas(LEAST)
    arenas.expect(10 * UNIT, 1)
    first = [arenas.take(UNIT) for _ in range(2)]
    found: list[ArenaLease] = []
    asked = threading.Event()
    waiter = threading.Thread(target=lambda: found.append(arenas.take(UNIT, asked.set)))
    waiter.start()
    assert asked.wait(120)
    time.sleep(0.05)
    assert not found
    first[0].free()
    waiter.join(120)
    assert found[0].waited >= 0.05
    assert place(found[0]) == place(first[0])


def test_a_wait_can_be_stopped() -> None:
    """At any time: before it waits, during the wait, or while it requests."""
    arenas = Arenas(LEAST)
    arenas.expect(10 * UNIT, 1)
    held = [arenas.take(UNIT) for _ in range(2)]
    over = threading.Event()
    raised: list[BaseException] = []

    def short() -> None:
        if over.is_set():
            raise ZeroDivisionError

    def wait() -> None:
        try:
            arenas.take(UNIT, short)
        except ZeroDivisionError as error:
            raised.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    time.sleep(0.05)
    over.set()
    arenas.wake()
    waiter.join(120)
    assert not waiter.is_alive()
    assert raised
    assert arenas.used == 2 * UNIT
    assert held


def test_a_stop_just_before_the_wait_is_noticed() -> None:
    """It must not depend on a later wake, which may never come."""
    arenas = Arenas(LEAST)
    arenas.expect(10 * UNIT, 1)
    held = [arenas.take(UNIT) for _ in range(2)]
    over = threading.Event()

    def short() -> None:
        if over.is_set():
            raise ZeroDivisionError
        over.set()
        arenas.wake()

    raised = threading.Event()

    def wait() -> None:
        with contextlib.suppress(ZeroDivisionError):
            arenas.take(UNIT, short)
        raised.set()

    threading.Thread(target=wait, daemon=True).start()
    assert raised.wait(120)
    assert held


def test_holes_are_no_reason_to_take_more_than_the_budget() -> None:
    """Half of it is free, in pieces that are too small: a larger request waits."""
    arenas = Arenas(LEAST)
    arenas.expect(10 * UNIT, 1)
    pieces = [arenas.take(8 * MIB) for _ in range(6)]
    for piece in pieces[::2]:
        piece.free()

    def short() -> None:
        assert arenas.held <= LEAST
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        arenas.take(16 * MIB, short)
    pieces[1].free()
    arenas.take(16 * MIB, short)


def test_memory_of_a_larger_state_is_let_go_of_in_the_end() -> None:
    arenas = Arenas()
    arenas.expect(10 * UNIT, 1)
    for lease in [arenas.take(UNIT) for _ in range(10)]:
        lease.free()
    assert arenas.held >= 10 * UNIT
    for _ in range(8):
        arenas.expect(BLOCK, 1)
        arenas.take(BLOCK).free()
    assert arenas.held < UNIT


def test_a_state_that_grows_a_little_keeps_its_memory() -> None:
    arenas = Arenas()
    arenas.expect(4 * UNIT, 1)
    first = [arenas.take(UNIT) for _ in range(4)]
    for lease in first:
        lease.free()
    arenas.expect(4 * UNIT + BLOCK, 1)
    again = [arenas.take(UNIT) for _ in range(4)]
    again.append(arenas.take(BLOCK, lambda: pytest.fail("it waits for memory that there may be")))
    assert {place(lease) for lease in first} < {place(lease) for lease in again}


def test_too_small_a_budget() -> None:
    with pytest.raises(ckptstore.UsageError, match="memory: 4096 bytes"):
        Arenas(4096)


def resident() -> int:
    """Resident bytes of this process's anonymous memory."""
    gc.collect()  # otherwise leftovers of other tests may be freed between two looks
    with open("/proc/self/statm") as file:
        _, pages, shared = file.read().split()[:3]
    return (int(pages) - int(shared)) * BLOCK


class TestTouching:
    @pytest.fixture(params=["by the system", "by writing"])
    def how(self, request: pytest.FixtureRequest) -> Any:
        if request.param == "by writing":
            return lambda _memory: False
        if not populate(aligned(BLOCK)):
            pytest.skip("this system has no MADV_POPULATE_WRITE")
        return populate

    def test_every_page_is_there(self, how: Any) -> None:
        memory = aligned(96 * MIB)
        before = resident()
        Prefault(memory, how).run()
        assert resident() - before > 90 * MIB

    def test_nothing_that_is_used_is_changed(self, how: Any) -> None:
        memory = aligned(96 * MIB)
        one = Prefault(memory, how)
        one.use()
        memory[:] = 7
        one.run()
        assert (memory == 7).all()

    def test_used_while_it_is_touched(self, how: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(prefault, "_PIECE", MIB)
        memory = aligned(64 * MIB)
        one = Prefault(memory, how)
        thread = threading.Thread(target=one.run)
        thread.start()
        one.use()
        memory[:] = 7
        thread.join(60)
        assert (memory == 7).all()

    def test_it_can_be_stopped(self, how: Any) -> None:
        one = Prefault(aligned(96 * MIB), how)
        one.stop()
        one.run()
        assert one.touched == 0

    def test_none(self) -> None:
        assert populate(np.empty(0, np.uint8))


def test_arenas_are_touched_once_and_only_as_asked() -> None:
    arenas = Arenas()
    arenas.expect(96 * MIB, 2)
    before = resident()
    (run,) = arenas.touch()
    assert arenas.touch() == []
    run()
    assert 90 * MIB < resident() - before < 110 * MIB
    used = arenas.take(BLOCK)
    (second,) = arenas.touch()  # there is one more than are in use, as many as were expected
    second()
    used_as_well = [arenas.take(UNIT) for _ in range(6)]
    assert arenas.touch() == []
    assert used, used_as_well
    assert resident() - before > 180 * MIB
    arenas.close()
