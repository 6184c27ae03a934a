"""If a checkpoint has two encodings, damage of one costs a warning: load continues with the other, bit for bit."""

from __future__ import annotations

import errno
import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import ckptstore
from ckptstore import CorruptSegmentError, FallbackWarning, StorageError
from ckptstore.backends.base import SegmentSource
from ckptstore.backends.local_disk.local import LocalBackend
from ckptstore.formats import codecs
from ckptstore.formats.checksums import chunk_hash
from ckptstore.formats.history.records import segment_key
from ckptstore.restore.alternatives import MOST_WAYS
from tests.restore.twofold import state, stored_again, twofold
from tests.store.states import same
from tools.golden.by_hand import Entry, Hand, Made, Step, entry

Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fallback") / "store"
    twofold(root)
    return root


@pytest.fixture
def root(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "store"))


def planned(root: Path) -> Path:
    """The segment from which 3@1 itself is restored."""
    store = ckptstore.open(root)
    plan = store.plan("3@1")
    return root / store.view().catalog.segments[plan.encodings[-1].segments[0]].key


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 4
    path.write_bytes(data)


def header(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


DAMAGES: dict[str, Damage] = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "header": lambda path: flip(path, 200),
    "chunk": lambda path: flip(path, header(path) + 3),
    "last chunk": lambda path: flip(path, header(path) + 200_000),
    "foreign": lambda path: path.write_bytes(bytes(path.stat().st_size)),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_load_continues_with_the_other(root: Path, how: str) -> None:
    """Found when it is opened (headers), or when half of the state was read (chunks)."""
    path = planned(root)
    assert len(ckptstore.open(root).plan("3@1").encodings) == 1  # the full is cheaper than its chain
    DAMAGES[how](path)
    store = ckptstore.open(root)
    with pytest.warns(FallbackWarning, match=rf"{path.name}.*3@1 is restored by another.*full and delta") as told:
        loaded = store.load("3@1", framework="numpy")
    same(state(3), loaded)
    assert len(told) == 1
    assert told[0].filename == __file__
    report = store.verify(deep=True)
    assert [damage.key for damage in report.damage] == [str(path.relative_to(root))] * len(report.damage) != []
    assert (report.lost, set(report.restorable)) == ((), {f"{step}@1" for step in range(1, 5)})
    assert not store.verify("3@1").ok
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same(state(4), store.load("4@1", framework="numpy"))


def test_the_other_way_round(root: Path) -> None:
    """The delta, which is not in the plan, is damaged: only verify reports it."""
    store = ckptstore.open(root)
    (delta,) = [edge for edge in store.view().catalog.encodings[1, 3] if edge.base is not None]
    flip(root / store.view().catalog.segments[delta.segments[0]].key, -5)
    same(state(3), store.load("3@1", framework="numpy"))
    report = store.verify()
    assert len(report.damage) == 1
    assert report.lost == ()


def test_both_damaged(root: Path) -> None:
    store = ckptstore.open(root)
    first = planned(root)
    for edge in store.view().catalog.encodings[1, 3]:
        path = root / store.view().catalog.segments[edge.segments[0]].key
        flip(path, header(path) + 3)
    with pytest.warns(FallbackWarning), pytest.raises(CorruptSegmentError, match="checksum") as raised:
        store.load("3@1")
    assert first.name not in str(raised.value)  # the one that was tried last
    assert store.verify().lost == ("3@1",)


def test_a_base_that_is_stored_twice(tmp_path: Path) -> None:
    """Checkpoints that build on 1@1 are restored whichever of its two fulls is intact."""
    store = twofold(tmp_path / "store", "1@1")
    path = tmp_path / "store" / store.view().catalog.segments[store.plan("4@1").encodings[0].segments[0]].key
    flip(path, header(path) + 3)
    with pytest.warns(FallbackWarning, match="4@1 is restored by another"):
        same(state(4), store.load("4@1", framework="numpy"))


def test_three_of_them(root: Path) -> None:
    store = ckptstore.open(root)
    stored_again(store, "3@1")
    fulls = [edge for edge in store.view().catalog.encodings[1, 3] if edge.base is None]
    assert len(fulls) == 2
    for edge in fulls:
        path = root / store.view().catalog.segments[edge.segments[0]].key
        flip(path, header(path) + 3)
    with pytest.warns(FallbackWarning) as told:
        same(state(3), store.load("3@1", framework="numpy"))
    assert len(told) == 2


def test_into_holds_the_right_bits_or_the_call_raises(root: Path) -> None:
    path = planned(root)
    flip(path, header(path) + 200_000)
    wanted = state(3)
    arrays = {name: np.zeros_like(one) if isinstance(one, np.ndarray) else 0 for name, one in wanted.items()}
    with pytest.warns(FallbackWarning):
        loaded = ckptstore.open(root).load("3@1", into=arrays, framework="numpy")
    same(wanted, loaded)
    assert loaded["w"] is arrays["w"]


def test_mapped(root: Path, tmp_path: Path) -> None:
    """If the other encoding is not a plain full, it cannot be mapped: the damage is raised, not another error."""
    more = Path(shutil.copytree(root, tmp_path / "more"))
    stored_again(ckptstore.open(more), "3@1")
    for folder in (root, more):
        path = planned(folder)
        flip(path, header(path) + 3)
    with pytest.warns(FallbackWarning), pytest.raises(CorruptSegmentError, match="checksum mismatch"):
        ckptstore.open(root).load("3@1", mmap=True)
    with pytest.warns(FallbackWarning, match=r"\(full\)"):
        same(state(3), ckptstore.open(more).load("3@1", mmap=True, framework="numpy"))


@pytest.mark.parametrize("how", ["missing", "last chunk"])
def test_one_tensor_and_streams_and_files(root: Path, tmp_path: Path, how: str) -> None:
    DAMAGES[how](planned(root))
    store, weight = ckptstore.open(root), state(3)["w"]
    assert isinstance(weight, np.ndarray)
    with pytest.warns(FallbackWarning):
        assert store.read_tensor("3@1", "w").tobytes() == weight.tobytes()
    with pytest.warns(FallbackWarning):
        assert dict(store.read_tensors("3@1"))["w"].tobytes() == weight.tobytes()
    with pytest.warns(FallbackWarning):
        assert b"".join(bytes(data) for _, data in store.chunks("3@1", "w")) == weight.tobytes()
    with pytest.warns(FallbackWarning):
        store.export("3@1", tmp_path / "out.safetensors")
    from safetensors.numpy import load_file

    assert load_file(tmp_path / "out.safetensors")["w"].tobytes() == weight.tobytes()
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["out.safetensors"]


def test_a_stream_continues_where_it_was(tmp_path: Path) -> None:
    """The first chunk was already yielded when the second one turns out to be damaged: nothing is yielded twice."""
    store = ckptstore.open(tmp_path / "store")
    weight = np.arange(5_000_000, dtype="f4")
    with store.writer(poll_seconds=None) as writer:
        writer.save({"w": weight}, 1)
    stored_again(store, "1@1")
    plan = store.plan("1@1")
    flip(tmp_path / "store" / store.view().catalog.segments[plan.segments[0]].key, -4)
    found = []
    with pytest.warns(FallbackWarning, match="restored by another"):
        found += [(start, bytes(data)) for start, data in store.chunks("1@1", "w")]
    assert [start for start, _ in found] == [0, 16 << 20]
    assert b"".join(data for _, data in found) == weight.tobytes()


class BadMedium(SegmentSource):
    """A segment in which one place cannot be read."""

    def __init__(self, source: SegmentSource, key: str, number: int) -> None:
        self.source, self.key, self.number, self.size = source, key, number, source.size

    def read_into(self, offset: int, out: memoryview) -> None:
        if offset >= 4096:
            raise StorageError(self.number, f"cannot read: {os.strerror(self.number)}", self.key)
        self.source.read_into(offset, out)

    def close(self) -> None:
        self.source.close()


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOMEM], ids=["EIO", "ENOMEM"])
def test_a_bad_sector_is_damage_and_want_of_memory_is_none(
    root: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    bad, real = planned(root).name, LocalBackend.open_source

    def open_source(self: LocalBackend, key: str) -> SegmentSource:
        found = real(self, key)
        return BadMedium(found, key, number) if key.endswith(bad) else found

    monkeypatch.setattr(LocalBackend, "open_source", open_source)
    store = ckptstore.open(root)
    if number == errno.ENOMEM:
        with pytest.raises(StorageError, match="memory"):
            store.load("3@1")
        return
    with pytest.warns(FallbackWarning, match="Input/output error"):
        same(state(3), store.load("3@1", framework="numpy"))


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOMEM], ids=["EIO", "ENOMEM"])
def test_bad_sectors_in_both_encodings_lose_it_and_want_of_memory_does_not(
    root: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    store = ckptstore.open(root)
    bad = {segment for edge in store.view().catalog.encodings[1, 3] for segment in edge.segments}
    real = LocalBackend.open_source

    def open_source(self: LocalBackend, key: str) -> SegmentSource:
        found = real(self, key)
        return BadMedium(found, key, number) if any(segment in key for segment in bad) else found

    monkeypatch.setattr(LocalBackend, "open_source", open_source)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        with pytest.raises(StorageError):
            store.load("3@1")
    report = store.verify()
    if number == errno.EIO:
        assert (report.lost, report.unknown) == (("3@1",), ())
    else:
        assert (report.lost, "3@1" in report.unknown) == ((), True)


@pytest.mark.parametrize("how", ["missing", "header", "chunk"])
def test_an_error_names_the_nearest_that_is_whole(tmp_path: Path, how: str) -> None:
    """Across terms, and past checkpoints that build on the same damage."""
    store = ckptstore.open(tmp_path / "store")
    with store.writer() as writer:
        writer.save(state(1), 1)
    with store.writer(deltas=1, poll_seconds=None) as writer:
        for step in (2, 3, 4):
            writer.save(state(step), step)
    (first,) = (tmp_path / "store" / segment.key for segment, _ in store.describe("2@2")[:1])
    DAMAGES[how](first)
    with pytest.raises(CorruptSegmentError) as raised:
        store.load(framework="numpy")
    assert [note.split()[:5] for note in raised.value.__notes__] == [["1@1", "is", "the", "nearest", "before"]]
    same(state(1), store.load("1@1", framework="numpy"))
    (only,) = (tmp_path / "store" / segment.key for segment, _ in store.describe("1@1"))
    only.unlink()
    with pytest.raises(CorruptSegmentError) as raised:  # there is no earlier one
        store.load("1@1", framework="numpy")
    assert not getattr(raised.value, "__notes__", [])


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("other", ["absent", "of another shape"])
def test_an_encoding_of_the_base_without_a_tensor_that_no_tree_names(tmp_path: Path, other: str, verify: bool) -> None:
    """All encodings of a checkpoint have the tensors of its tree. One of them may lack another tensor, on which a delta
    builds."""
    words = np.arange(40, dtype="<u4")
    tree = {"words": {"$a": "words"}}
    lacking = [entry("words", words)] + [entry("aside", words[:3])] * (other != "absent")
    hand = Hand(tmp_path / "store")
    hand.open()
    made = hand.segment({1: Step(lacking, tree)})
    again = hand.segment({1: Step([entry("words", words), entry("aside", words)], tree)})
    hand.promise(made)
    hand.commit(again, encodings=[again.encoding(1)])
    delta = [entry("words", words + 1, codecs.Sub(4), words), entry("aside", words + 2, codecs.Xor(4), words)]
    hand.promise(hand.segment({2: Step(delta, {"aside": {"$a": "aside"}, **tree}, made.identity(1))}))
    store = ckptstore.open(hand.folder)
    same({"aside": words + 2, "words": words + 1}, store.load(2, framework="numpy", verify=verify))


WORDS = np.arange(40, dtype="<u4")
TREE = {"words": {"$a": "words"}}


def full(shift: int, *, told: int | None = None) -> list[Entry]:
    """`WORDS` and further tensors; `told`: a recorded hash of the decoded bytes that differs from the real one."""
    wrong = {} if told is None else {"decoded_hash": chunk_hash((WORDS + told).tobytes())}
    return [entry("words", WORDS + shift, codecs.Planes(4), **wrong)]


def on(shift: int, base: int) -> list[Entry]:
    """A delta."""
    return [entry("words", WORDS + shift, codecs.Sub(4), WORDS + base)]


def added(hand: Hand, made: Made, step: int) -> None:
    """One more encoding of an existing checkpoint."""
    hand.commit(made, encodings=[made.encoding(step)])


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("between", [0, 2])
def test_a_base_that_is_decoded_to_wrong_bytes(tmp_path: Path, first: bool, between: int) -> None:
    """Its stored hashes are right, so the error shows in checkpoints that build on it: then the base's other encoding
    is tried."""
    hand = Hand(tmp_path / "store")
    hand.open()
    wrong, right = hand.segment({1: Step(full(9, told=0), TREE)}), hand.segment({1: Step(full(0), TREE)})
    assert wrong.identity(1) == right.identity(1)
    hand.promise(wrong if first else right)
    added(hand, right if first else wrong, 1)
    below = right.identity(1)
    for step in range(2, 3 + between):
        made = hand.segment({step: Step(on(step - 1, step - 2), TREE, below)})
        hand.promise(made)
        below = made.identity(step)
    store = ckptstore.open(hand.folder)
    # The wrongly decoded one is the cheaper one in one of the two orders.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        for step in range(1, 3 + between):
            assert store.load(step, framework="numpy")["words"].tobytes() == (WORDS + step - 1).tobytes()
    report = store.verify(deep=True)
    assert (report.lost, len(report.damage)) == ((), 1)


def test_a_chunk_that_one_way_needs_and_another_does_not(tmp_path: Path) -> None:
    """Both lead through the same encoding of the base, in which one tensor is damaged."""
    hand = Hand(tmp_path / "store")
    hand.open()
    both = {"words": {"$a": "words"}, "more": {"$a": "more"}}
    base = hand.segment({1: Step([*full(0), entry("more", WORDS)], both)})
    hand.promise(base)
    delta = [entry("words", WORDS + 1, codecs.Sub(4), WORDS), entry("more", WORDS + 1, codecs.Sub(4), WORDS)]
    half = [entry("words", WORDS + 1, codecs.Sub(4), WORDS), entry("more", WORDS + 1)]
    made = hand.segment({2: Step(delta, both, base.identity(1))})
    hand.promise(made)
    added(hand, hand.segment({2: Step(half, both, base.identity(1))}), 2)
    path = hand.folder / segment_key(1, base.entry["id"])
    data = path.read_bytes()
    at = data.index(WORDS.tobytes())
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    store = ckptstore.open(hand.folder)
    with pytest.warns(FallbackWarning):
        same({"words": WORDS + 1, "more": WORDS + 1}, store.load(2, framework="numpy"))
    assert store.verify().lost == ("1@1",)


def test_an_encoding_that_needs_nothing_of_its_missing_base_is_a_way(tmp_path: Path) -> None:
    """Whether an encoding needs its base shows when it is opened: until then an unreadable way counts as a way."""
    hand = Hand(tmp_path / "store")
    hand.open()
    base = hand.segment({1: Step(full(0), TREE)})
    hand.promise(base)
    delta = hand.segment({2: Step(on(1, 0), TREE, base.identity(1))})
    hand.promise(delta)
    whole = hand.segment({2: Step(full(1), TREE, base.identity(1))})
    added(hand, whole, 2)
    (hand.folder / segment_key(1, base.entry["id"])).unlink()
    store = ckptstore.open(hand.folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        same({"words": WORDS + 1}, store.load(2, framework="numpy"))
    assert store.verify().lost == ("1@1",)
    mended = ckptstore.repair(hand.folder, tmp_path / "mended")
    assert (mended.kept, tuple(mended.lost), mended.rewritten) == (("2@1",), ("1@1",), ("2@1",))
    same({"words": WORDS + 1}, ckptstore.open(tmp_path / "mended").load(2, framework="numpy"))


def test_a_circle_in_which_something_is_damaged_ends(tmp_path: Path) -> None:
    """Two checkpoints that build on each other, one of them with a damaged full: it is tried, and reported."""
    hand = Hand(tmp_path / "store")
    hand.open()
    one = hand.segment({1: Step(full(0), TREE)})
    hand.promise(one)
    two = hand.segment({2: Step(on(1, 0), TREE, one.identity(1))})
    hand.promise(two)
    added(hand, hand.segment({1: Step(on(0, 1), TREE, two.identity(2))}), 1)
    path = hand.folder / segment_key(1, one.entry["id"])
    flip(path, header(path) + 3)
    store = ckptstore.open(hand.folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        for step in (1, 2):
            with pytest.raises(CorruptSegmentError, match="checksum mismatch"):
                store.load(step)
    assert store.verify().lost == ("1@1", "2@1")


def test_a_long_chain_of_bad_ways_is_given_up(tmp_path: Path) -> None:
    """Twenty checkpoints with two encodings each are a million ways; the newest is itself wrong."""
    hand = Hand(tmp_path / "store")
    hand.open()
    below = hand.segment({1: Step(full(0), TREE)})
    hand.promise(below)
    for step in range(2, 22):
        wrong = 1 if step == 21 else 0
        pair = []
        for _ in range(2):
            delta = entry("words", WORDS + step - 1 + wrong, codecs.Sub(4), WORDS + step - 2)
            chunk = replace(delta[0].chunks[0], decoded_hash=chunk_hash((WORDS + step - 1).tobytes()))
            told = (replace(delta[0], chunks=(chunk,)), delta[1])
            pair.append(hand.segment({step: Step([told], TREE, below.identity(step - 1))}))
        hand.promise(pair[0])
        added(hand, pair[1], step)
        below = pair[0]
    store = ckptstore.open(hand.folder)
    same({"words": WORDS + 19}, store.load(20, framework="numpy"))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with pytest.raises(CorruptSegmentError, match="other bytes"):
            store.load(21)
    assert len(told) == MOST_WAYS - 1
