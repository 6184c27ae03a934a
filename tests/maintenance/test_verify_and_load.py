"""verify, repair and load agree on the same bytes: a checkpoint is lost if no load restores it, and only then."""

from __future__ import annotations

import json
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import ckptstore
from ckptstore import CkptError, ReadOnlyError, Store
from ckptstore.backends.base import Backend
from ckptstore.formats import codecs
from tests.forms import short_or
from tests.maintenance.stores import grown
from tests.restore.twofold import twofold
from tools.conformance.__main__ import SET
from tools.golden.by_hand import Hand, Step, entry

STORES = json.loads(SET.read_text())["stores"]
ONLY_DEEP = {("hashes", "4@1")}
"""Checkpoints that decode to wrong bytes: a check that does not decode cannot know."""


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def failing(store: Store) -> dict[str, bool]:
    """REF -> whether a load of it fails."""
    found = {}
    for info in store.checkpoints():
        try:
            store.load(info.ref, framework="numpy")
        except CkptError:
            found[info.ref] = True
        else:
            found[info.ref] = False
    return found


def agree(store: Store, *, shallow: bool = True, but: frozenset[str] = frozenset()) -> set[str]:
    """Compare the three; returns the loadable checkpoints."""
    loads = failing(store)
    lost = {ref for ref, fails in loads.items() if fails}
    for deep in (True, False)[: 1 + shallow]:
        report = store.verify(deep=deep)
        assert {*report.lost, *report.restorable} == loads.keys()
        assert not report.unknown
        assert set(report.lost) == (lost if deep else lost - but), (deep, report.damage)
    return loads.keys() - lost


@pytest.mark.parametrize("name", sorted(STORES))
def test_of_the_conformance_set(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    shutil.copytree(SET.parent / name, folder, symlinks=True)
    try:
        store = ckptstore.open(folder)
        store.checkpoints()
    except CkptError:
        assert "refused" in STORES[name]["expected"]
        return
    good = agree(store, but=frozenset(ref for of, ref in ONLY_DEEP if of == name))
    if good:
        try:
            mended = ckptstore.repair(folder, tmp_path / "mended", run=store.run)
        except ReadOnlyError:
            return  # only a newer version writes what this store needs
        assert good <= set(mended.kept), mended.lost
        assert not any(failing(ckptstore.open(tmp_path / "mended")).values())


def small(root: str) -> Store:
    """Fulls and deltas, one of them stored twice."""
    return twofold(root)  # type: ignore[arg-type]  # any place


def branched(root: str) -> Store:
    """Fulls, deltas, batches of step diffs, in four terms."""
    return grown(root)  # type: ignore[arg-type]


WORDS = np.arange(40, dtype="<u4")


def by_hand(root: str) -> Store:
    """Checkpoints that build on auxiliary tensors, on nothing of their base, and on bases that are stored twice."""
    folder = Path(root)
    tree, both = {"words": {"$a": "words"}}, {"words": {"$a": "words"}, "more": {"$a": "more"}}
    hand = Hand(folder)
    hand.open()
    aside = entry("ckptstore/aside", WORDS + 5)
    one = hand.segment({1: Step([entry("words", WORDS), aside], tree)})
    hand.promise(one)
    again = hand.segment({1: Step([entry("words", WORDS, codecs.Planes(4))], tree)})
    hand.commit(again, encodings=[again.encoding(1)])
    raw = entry("words", WORDS + 1)
    two = hand.segment(
        {2: Step([raw, entry("ckptstore/aside", WORDS, codecs.Sub(4), WORDS + 5)], tree, one.identity(1))}
    )
    hand.promise(two)
    delta = entry("words", WORDS + 2, codecs.Sub(4), WORDS + 1)
    three = hand.segment({3: Step([delta], tree, two.identity(2)), 4: Step([raw, entry("more", WORDS)], both)})
    hand.promise(three)
    more = entry("more", WORDS + 9)
    five = hand.segment({5: Step([entry("words", WORDS + 4, codecs.Xor(4), WORDS + 1), more], both, three.identity(4))})
    hand.promise(five)
    alone = hand.segment({6: Step([raw, more], both, five.identity(5))})
    hand.promise(alone)
    seven = hand.segment({7: Step([delta, entry("more", WORDS, codecs.Xor(4), WORDS + 9)], both, alone.identity(6))})
    hand.promise(seven)
    half = hand.segment({7: Step([delta, entry("more", WORDS)], both, alone.identity(6))})
    hand.commit(half, encodings=[half.encoding(7)])
    return ckptstore.open(folder)


def in_memory(made: Store) -> Store:
    """The same store in memory, where a change takes no time."""
    store = ckptstore.open(f"memory://{uuid.uuid4().hex}", create=True)
    put(store.backend, "FORMAT", made.backend.get("FORMAT"))
    for key in made.backend.list(""):
        if key != "FORMAT":
            with made.backend.open_source(key) as source:
                data = bytearray(source.size)
                source.read_into(0, memoryview(data))
            store.backend.create(key, bytes(data))
    return ckptstore.open(store.url)


def put(backend: Backend, key: str, data: bytes) -> None:
    backend.delete(key)
    backend.create(key, data)


def places(store: Store) -> dict[str, list[int]]:
    """Key of a segment -> a byte of its header, one of each chunk, and one of its index."""
    found: dict[str, list[int]] = {}
    for info in store.checkpoints():
        for segment, doc in store.describe(info.ref):
            chunks = (
                chunk for own in doc.tensors.values() for one in own.values() for chunk in one.chunks if chunk.length
            )
            found[segment.key] = sorted({9, segment.size - 1, *(chunk.offset for chunk in chunks)})
    return found


@pytest.mark.parametrize(("make", "every"), [(small, 1), (branched, short_or(29, 7)), (by_hand, 1)])
def test_of_stores_in_which_each_place_is_damaged(make: Callable[[str], Store], every: int, tmp_path: Path) -> None:
    """Of the largest every 29th place (in the long form every seventh), which is another one in each segment."""
    store = in_memory(make(str(tmp_path / "store")))
    where, count = places(store), 0
    for key in sorted(segment.key for segment in store.view().catalog.segments.values()):
        with store.backend.open_source(key) as source:
            data = bytearray(source.size)
            source.read_into(0, memoryview(data))
        store.backend.delete(key)
        kept_of(store)
        for number, at in enumerate(where.get(key, [9, len(data) - 1])):
            count += 1
            if count % every:
                continue
            changed = bytearray(data)
            changed[at] ^= 4
            put(store.backend, key, bytes(changed))
            agree(store, shallow=number % 4 == 0)
        put(store.backend, key, bytes(data))
    assert not any(failing(store).values())


def kept_of(store: Store) -> None:
    """Repair keeps the checkpoints that can be loaded."""
    good = agree(store)
    if not good:
        return
    target = f"memory://{uuid.uuid4().hex}"
    mended = ckptstore.repair(store.url, target)
    assert good == set(mended.kept), mended.lost
    assert not any(failing(ckptstore.open(target)).values())
