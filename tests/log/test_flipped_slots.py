"""Every byte of every slot of small stores is flipped, every slot is deleted: `latest` is as before, or an error.

The stores have a term that goes back, one whose parent is retired, and commits that ended out of order.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import ckptstore
from ckptstore.errors import CorruptLogError
from ckptstore.formats.history.commit_checks import check_commit
from ckptstore.formats.history.records import CommitRecord, slot_key
from ckptstore.log.log_reader import read
from ckptstore.log.term import Term, open_term
from tests.formats.test_latest_damage import save
from tests.forms import short_or


def _commits(term: Term, *records: CommitRecord) -> None:
    for record in records:
        check_commit(term.catalog, record)
        term.commit(record)


def _going_back(store: ckptstore.Store) -> None:
    term = open_term(store.journal, None)
    _commits(term, save(1, 1), save(1, 2), save(1, 3), save(1, 4))
    term = open_term(store.journal, term.catalog.checkpoints[1, 3].id)
    _commits(term, CommitRecord(2, retires=((1, 3),)))


def _back_twice(store: ckptstore.Store) -> None:
    term = open_term(store.journal, None)
    _commits(term, save(1, 1), save(1, 2))
    term = open_term(store.journal, term.catalog.checkpoints[1, 2].id)
    _commits(term, save(2, 3), save(2, 4))
    term = open_term(store.journal, term.catalog.checkpoints[2, 4].id)
    _commits(term, CommitRecord(3, retires=((2, 4), (2, 3))))


def _out_of_order(store: ckptstore.Store) -> None:
    _commits(open_term(store.journal, None), save(1, 10), save(1, 30), save(1, 20))


def _retired_newest(store: ckptstore.Store) -> None:
    _commits(
        open_term(store.journal, None),
        *(save(1, 10), save(1, 30), save(1, 20, 50)),
        CommitRecord(1, retires=((1, 50),)),
    )


STORES: dict[str, Callable[[ckptstore.Store], None]] = {
    "going back": _going_back,
    "back twice": _back_twice,
    "out of order": _out_of_order,
    "retired newest": _retired_newest,
}


def latest(folder: Path) -> str | None:
    found = read(ckptstore.open(folder).journal).catalog.latest()
    return None if found is None else found.ref


@pytest.mark.parametrize("name", STORES)
def test_no_damaged_slot_makes_an_older_step_the_latest(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    STORES[name](ckptstore.open(folder, create=True))
    whole = latest(folder)
    errors = 0
    slots = sorted((folder / "log").iterdir())
    for path in slots:
        data = path.read_bytes()
        for place in range(0, len(data), short_or(37, 1)):
            flipped = bytearray(data)
            flipped[place] ^= 1 << place % 8
            path.write_bytes(flipped)
            try:
                assert latest(folder) == whole, (path.name, place)
            except CorruptLogError:
                errors += 1
        path.unlink()
        if path != slots[-1]:  # nothing proves that the last one existed
            try:
                assert latest(folder) == whole, path.name
            except CorruptLogError:
                errors += 1
        path.write_bytes(data)
    assert errors
    assert latest(folder) == whole


def test_a_store_of_the_conformance_set(tmp_path: Path) -> None:
    """The store in which a flipped byte once made an older step the latest."""
    folder = shutil.copytree(Path(__file__).parents[1] / "golden" / "conformance" / "back", tmp_path / "store")
    path = folder / slot_key(2)
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptLogError, match="slot 2 is damaged"):
        latest(folder)
