"""Slots of saves in flight: a fixed number, and an unreported failure is raised before a slot is taken."""

from __future__ import annotations

import threading

import pytest

from ckptstore.errors import StorageError
from ckptstore.write.saves.in_flight import Place, Places
from ckptstore.write.saves.ledger import Failures


def taken(places: Places) -> Place | None:
    """A slot, or None if none is free."""
    found: list[Place] = []
    thread = threading.Thread(target=lambda: found.append(places.take()[0]), daemon=True)
    thread.start()
    thread.join(0.1)
    return found[0] if found else None


def test_one_beyond_the_limit_waits_until_another_leaves() -> None:
    places = Places(2, Failures())
    assert places.limit == 2
    first, waited = places.take()
    assert waited < 5
    places.take()
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.append(places.take()[1]))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    first.leave()
    first.leave()  # which does nothing
    thread.join(10)
    assert not thread.is_alive()
    assert found[0] >= 0.05
    assert taken(places) is None, "a place that is left twice is one place"


def test_an_unreported_failure_is_raised_and_takes_no_slot() -> None:
    failures = Failures()
    places = Places(1, failures)
    for step in (1, 2):
        failures.add(1, step, StorageError("full"))
        with pytest.raises(StorageError, match="full"):
            places.take()
    assert taken(places) is not None


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
    thread.join(0.05)
    failures.add(1, 1, failed := StorageError("full"))
    first.leave()
    thread.join(10)
    assert found == [failed]
    assert taken(places) is not None
