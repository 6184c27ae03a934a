"""Units in the queue from copying to writing threads: in order, each freed once, never while it is still copied to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from ckptstore.formats.sources import NumpySource
from ckptstore.host.arenas import ArenaLease, Arenas
from ckptstore.segments.staged_units import DescribedTensor, StagedUnits, copy_now
from tests.waiting import until

PAGE = 4096


@pytest.fixture
def memory() -> Arenas:
    """Memory for four units."""
    found = Arenas()
    found.expect(4 * PAGE, 1)
    return found


def filled(value: int) -> Callable[[Any], Future[None]]:
    def copy(memory: Any) -> Future[None]:
        return copy_now(lambda: memory.fill(value))

    return copy


def values(arrivals: StagedUnits, count: int) -> list[int]:
    found = []
    for _ in range(count):
        lease = arrivals.take()
        found.append(int(lease.memory[0]))
        lease.free()
    return found


def ignored(_: object) -> None: ...


def test_units_come_in_order_and_memory_is_used_again(memory: Arenas) -> None:
    arrivals = StagedUnits()
    waits: list[float] = []
    begun: list[str] = []
    found: list[int] = []
    taking = threading.Thread(target=lambda: found.extend(values(arrivals, 40)))

    def short() -> None:  # like a full, whose lane begins when memory is short
        if not begun:
            begun.append("short")
            assert memory.used == 4 * PAGE
            taking.start()

    arrivals.bring([(PAGE, filled(number)) for number in range(40)], memory, waits.append, short=short)
    taking.join(30)
    assert found == list(range(40))
    assert begun == ["short"]
    assert len(waits) == 40
    assert waits[:4] == [0.0] * 4
    assert waits[4] > 0
    assert memory.used == 0
    assert not arrivals.spoiled


def test_a_failed_copy_is_reported_on_both_sides(memory: Arenas) -> None:
    failed: Future[None] = Future()
    failed.set_exception(OSError("the device is gone"))
    arrivals = StagedUnits()
    with pytest.raises(OSError, match="gone"):
        arrivals.bring([(PAGE, filled(1)), (PAGE, lambda _: failed), (PAGE, filled(3))], memory, ignored)
    assert values(arrivals, 1) == [1]
    assert not arrivals.spoiled
    with pytest.raises(OSError, match="gone"):
        arrivals.take()
    assert arrivals.spoiled
    arrivals.discard()
    assert memory.used == 0


def test_a_copy_that_cannot_begin_leaves_no_memory_behind(memory: Arenas) -> None:
    def none(_: Any) -> Future[None]:
        raise MemoryError("no thread")

    running, going = threading.Event(), threading.Event()
    under_way: Future[None] = Future()
    under_way.set_running_or_notify_cancel()

    def copies() -> Iterator[tuple[int, Callable[[Any], Future[None]]]]:
        yield PAGE, lambda _: under_way
        yield PAGE, none

    told: list[str] = []

    def bring() -> None:
        running.set()
        try:
            arrivals.bring(copies(), memory, ignored)
        except MemoryError as error:
            told.append(f"{error}, {going.is_set()}")

    arrivals = StagedUnits()
    thread = threading.Thread(target=bring)
    thread.start()
    running.wait(120)
    until(lambda: memory.used == PAGE)
    thread.join(0.1)
    assert thread.is_alive(), "what it copies from may be changed when this returns"
    assert memory.used == PAGE
    going.set()
    under_way.set_result(None)
    thread.join(30)
    assert told == ["no thread, True"]
    arrivals.discard()
    assert memory.used == 0


def test_finished_units_are_yielded_before_the_error(memory: Arenas) -> None:
    arrivals = StagedUnits()
    arrivals.bring([(PAGE, filled(5))], memory, ignored)
    arrivals.fail(OSError("first"))
    arrivals.fail(OSError("second"))
    assert values(arrivals, 1) == [5]
    for _ in range(2):
        with pytest.raises(OSError, match="first"):
            arrivals.take()


@pytest.mark.parametrize("how", ["fail", "put"])
def test_a_wait_for_a_unit_raises_the_error(memory: Arenas, how: str) -> None:
    arrivals, asked, told = StagedUnits(), threading.Event(), []

    def take() -> None:
        asked.set()
        try:
            told.append(str(int(arrivals.take().memory[0])))
        except OSError as error:
            told.append(str(error))

    thread = threading.Thread(target=take)
    thread.start()
    asked.wait(30)
    thread.join(0.05)
    assert thread.is_alive()
    if how == "fail":
        arrivals.fail(OSError("no more"))
    else:
        arrivals.bring([(PAGE, filled(9))], memory, ignored)
    thread.join(30)
    assert told == ["no more" if how == "fail" else "9"]


def test_nothing_is_taken_once_it_is_stopped(memory: Arenas) -> None:
    arrivals = StagedUnits(lambda: (_ for _ in ()).throw(InterruptedError("stopped")))
    arrivals.bring([(PAGE, filled(1))], memory, ignored)
    with pytest.raises(InterruptedError):
        arrivals.take()
    arrivals.discard()
    assert memory.used == 0


def test_discarded_memory_waits_for_the_copy_and_is_freed_once(memory: Arenas) -> None:
    """A copy that has not begun never begins; a running copy is waited for; units that were taken are freed as well."""
    arrivals = StagedUnits()
    freed: list[int] = []

    def unit(number: int, copied: Future[None]) -> bool:
        return arrivals.put(ArenaLease(np.zeros(PAGE, np.uint8), lambda: freed.append(number)), copied)

    going, begun = threading.Event(), threading.Event()
    pool = ThreadPoolExecutor(1)
    done = copy_now(lambda: None)

    def run() -> None:
        begun.set()
        going.wait(120)

    running = pool.submit(run)
    begun.wait(30)
    waiting: Future[None] = pool.submit(lambda: freed.append(-1))
    assert unit(0, done)
    assert unit(1, done)
    assert unit(2, waiting)
    assert unit(3, running)
    taken = arrivals.take()
    arrivals.take().free()
    assert freed == [1]
    thread = threading.Thread(target=arrivals.discard)
    thread.start()
    until(waiting.cancelled)
    thread.join(0.05)
    assert thread.is_alive()
    assert freed == [1]
    going.set()
    thread.join(120)
    pool.shutdown()
    assert waiting.cancelled()
    assert freed == [1, 0, 2, 3]
    arrivals.discard()
    taken.free()
    assert freed == [1, 0, 2, 3]
    assert not unit(4, done)
    assert freed == [1, 0, 2, 3], "it stays with who put it"


@pytest.mark.parametrize("raises", [False, True])
def test_unneeded_units_are_not_copied(memory: Arenas, raises: bool) -> None:
    arrivals = StagedUnits()
    begun: list[int] = []
    asked: list[str] = []

    def copies() -> Iterator[tuple[int, Callable[[Any], Future[None]]]]:
        for number in range(4):
            begun.append(number)
            if number == 1:
                arrivals.discard()
            yield PAGE, filled(number)

    def unwanted() -> None:
        asked.append("why")
        if raises:
            raise InterruptedError("given up")

    if raises:
        with pytest.raises(InterruptedError, match="given up"):
            arrivals.bring(copies(), memory, ignored, unwanted=unwanted)
    else:
        arrivals.bring(copies(), memory, ignored, unwanted=unwanted)
    assert (begun, asked) == ([0, 1], ["why"])
    assert memory.used == 0


def test_a_copy_that_was_given_up_before_it_began_is_no_error(memory: Arenas) -> None:
    """The thread that gave it up has reported why; the caller's thread adds no error."""
    arrivals, going, pool = StagedUnits(), threading.Event(), ThreadPoolExecutor(1)
    pool.submit(going.wait, 30)

    def copies() -> Iterator[tuple[int, Callable[[Any], Future[None]]]]:
        yield PAGE, lambda _: pool.submit(lambda: None)
        thread = threading.Thread(target=arrivals.discard)
        thread.start()
        thread.join(0.05)
        going.set()
        thread.join(30)

    arrivals.bring(copies(), memory, ignored)
    pool.shutdown()
    assert memory.used == 0


def test_memory_of_an_unwanted_unit_is_in_use_while_it_is_copied_to(memory: Arenas) -> None:
    arrivals = StagedUnits()
    arrivals.discard()
    running: Future[None] = Future()
    running.set_running_or_notify_cancel()
    thread = threading.Thread(target=arrivals.bring, args=([(PAGE, lambda _: running)], memory, ignored))
    thread.start()
    until(lambda: memory.used == PAGE)
    thread.join(0.05)
    assert thread.is_alive()
    running.set_result(None)
    thread.join(30)
    assert memory.used == 0


def test_a_tensor_that_arrives_is_described_and_cannot_be_read() -> None:
    source = NumpySource(np.zeros((2, 3), np.float32))
    found, other = DescribedTensor(source), DescribedTensor(source)
    for name in ("dtype", "shape", "nbytes", "origin"):
        assert getattr(found, name) == getattr(source, name), name
    assert (found.global_shape, found.offset) == (None, None)
    assert found.identity != other.identity
    with pytest.raises(AssertionError, match="read as units"):
        found.view()
    with pytest.raises(AssertionError, match="read as units: 5 bytes at 3"):
        found.read(3, np.zeros(5, np.uint8))
