"""Slots of saves in flight: a fixed number, and an unreported failure is raised before a slot is taken."""

from __future__ import annotations

import threading
import time

import pytest

from ckptstore.errors import StorageError
from ckptstore.write.saves.in_flight import Place, Places
from ckptstore.write.saves.ledger import Failures
from tests.waiting import until, until_it_waits


def taking(places: Places) -> tuple[threading.Thread, list[float]]:
    """A thread that waits for a slot, and the seconds that it has waited, once it has one."""
    waited: list[float] = []
    thread = threading.Thread(target=lambda: waited.append(places.take()[1]), daemon=True)
    thread.start()
    until_it_waits(thread, "Places.take")
    return thread, waited


def taken(places: Places) -> Place:
    """A slot, if one is free."""
    found: list[Place] = []
    threading.Thread(target=lambda: found.append(places.take()[0]), daemon=True).start()
    until(lambda: found, "no slot is free")
    return found[0]


def test_one_beyond_the_limit_waits_until_another_leaves() -> None:
    places = Places(2, Failures())
    assert places.limit == 2
    first, waited = places.take()
    assert waited < 5
    places.take()
    thread, found = taking(places)
    time.sleep(0.05)
    assert found == []
    first.leave()
    first.leave()  # which does nothing
    thread.join(120)
    assert found[0] >= 0.05
    taking(places)  # waits: a place that is left twice is one place


def test_an_unreported_failure_is_raised_and_takes_no_slot() -> None:
    failures = Failures()
    places = Places(1, failures)
    for step in (1, 2):
        failures.add(1, step, StorageError("full"))
        with pytest.raises(StorageError, match="full"):
            places.take()
    taken(places)


def test_a_failure_while_a_save_waits_for_its_place() -> None:
    failures = Failures()
    places = Places(1, failures)
    first, _ = places.take()
    found: list[BaseException] = []

    def work() -> None:
        try:
            places.take()
        except StorageError as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    until_it_waits(thread, "Places.take")
    failures.add(1, 1, failed := StorageError("full"))
    first.leave()
    thread.join(120)
    assert found == [failed]
    taken(places)
