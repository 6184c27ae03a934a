"""Tensors in shards: whole again, in slices, cut in another way, through chains; and refusals."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.errors import CorruptSegmentError, UsageError
from ckptstore.formats import codecs
from ckptstore.formats.segment_files import layout
from ckptstore.formats.segment_files.boxes import Box, gap, overlapping
from ckptstore.formats.segment_files.shards import shard_key
from ckptstore.host.buffers import Staging
from ckptstore.host.threads import workers
from ckptstore.maintenance.verify import deep_verify
from ckptstore.restore import box_reads, shard_streams, stored_base
from ckptstore.restore.box_reads import BoxRead, MemorySink, fill, jobs_of
from ckptstore.restore.chains import chain, replay
from ckptstore.restore.open_checkpoint import opened
from ckptstore.restore.stored_base import open_base
from tests.forms import short_or
from tools.golden.shard_stores import Array, Piece, ShardStore, by_rank, columns, cut, divided, rows

DTYPES = ["<f4", "<f8", "u1", "?", "<i2", "<c16", "<c8"]


def numbers(shape: tuple[int, ...], dtype: str = "<f4", seed: int = 1) -> Array:
    """An array of arbitrary bits."""
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.random.default_rng(seed).integers(0, 2 if dtype == "?" else 256, count, np.uint8)
    return raw.view(dtype).reshape(shape)


def same(found: Any, expected: Array) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert found.tobytes() == expected.tobytes()


@contextmanager
def small_chunks(nbytes: int) -> Iterator[None]:
    """Chunks of a few bytes while a store is written and read, so that every tensor has several of them."""
    modules = [layout, shard_streams, chain, replay, stored_base, deep_verify]
    patches = [mock.patch.object(module, "CHUNK", nbytes) for module in modules]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


# -- whole again


SHAPES = st.lists(st.integers(1, 7), min_size=1, max_size=4).map(tuple)


@settings(max_examples=short_or(60, 150), deadline=None)
@given(SHAPES, st.sampled_from(DTYPES), st.integers(0, 2**32), st.sampled_from([64, 1 << 24]), st.booleans())
def test_any_cut_is_put_together_and_cut_again(
    shape: tuple[int, ...], dtype: str, seed: int, chunk: int, packed: bool
) -> None:
    chance = random.Random(seed)
    whole = numbers(shape, dtype, seed)
    stored, wanted = divided(chance, shape), divided(chance, shape)
    with small_chunks(chunk):
        made = ShardStore()
        made.commit(1, by_rank(cut("w", whole, stored), [Piece("n", np.arange(3))]), packed=packed)
        state = made.store.load(1, framework="numpy")
        same(state["w"], whole)
        same(state["n"], np.arange(3))
        same(made.store.read_tensor(1, "w").view(dtype).reshape(shape), whole)
        streamed = np.concatenate([data.copy() for _, data in made.store.chunks(1, "w")])
        same(streamed.view(dtype).reshape(shape), whole)
        for box in wanted:
            index = box.within(Box.whole(shape))
            found = made.store.read_tensor(1, "w", box=index)
            same(found.view(dtype).reshape(box.shape), whole[index].copy())


@settings(max_examples=short_or(24, 60), deadline=None)
@given(SHAPES, st.integers(0, 2**32), st.sampled_from([64, 1 << 24]))
def test_chains_of_shards_are_put_together_and_cut_again(shape: tuple[int, ...], seed: int, chunk: int) -> None:
    chance = random.Random(seed)
    boxes, wanted = divided(chance, shape), divided(chance, shape)
    states = [numbers(shape, "<f4", seed + step) for step in range(3)]
    with small_chunks(chunk):
        made = ShardStore()
        made.commit(1, by_rank(cut("w", states[0], boxes)))
        made.commit(2, by_rank(cut("w", states[1], boxes, codec=codecs.Xor(4), base=states[0])), base=1)
        made.commit(3, by_rank(cut("w", states[2], boxes[::-1], codec=codecs.Sub(4), base=states[1])), base=2)
        for step, expected in enumerate(states, 1):
            same(made.store.load(step, framework="numpy")["w"], expected)
        streamed = np.concatenate([data.copy() for _, data in made.store.chunks(3, "w")])
        same(streamed.view("<f4").reshape(shape), states[2])
        for box in wanted:
            index = box.within(Box.whole(shape))
            same(made.store.read_tensor(3, "w", box=index).view("<f4").reshape(box.shape), states[2][index].copy())
        into = {"w": np.zeros(shape, "<f4")}
        made.store.load(3, into=into)
        same(into["w"], states[2])
        assert made.store.verify(deep=True).ok


def test_rounded_copies_in_shards_are_made_of_the_same_shards() -> None:
    """Codec `derive` names its master by the tensor's name: for a shard that is the master's shard of the same box."""
    master = np.linspace(-1, 1, 48, dtype="<f4").reshape(8, 6)
    copy = master.astype("<f2")
    codec = codecs.Derive("F16")
    made = ShardStore()
    masters = cut("master", master, columns((8, 6), 2))
    copies = cut("copy", copy, columns((8, 6), 2), codec=codec, base=master, params={"of": "master"})
    made.commit(1, by_rank(masters, copies))
    found = made.store.load(1, framework="numpy")
    same(found["copy"], copy)
    same(made.store.load(1, framework="numpy", select="copy")["copy"], copy)
    assert made.store.verify(deep=True).ok
    made.commit(2, by_rank(cut("master", master, rows((8, 6), 2)), copies))  # its box does not exist
    with pytest.raises(CorruptSegmentError, match=r"tensor 'copy' \[0:8, 0:3\]: derived from 'master'"):
        made.store.load(2)


def test_large_shards_are_read_to_their_places() -> None:
    """Several chunks each, at any phase in their files: rows straight to memory or through staging, columns by box."""
    whole = numbers((1030, 5000), "<f8")
    made = ShardStore()
    odd = [Piece("odd", np.zeros(rank, "u1")) for rank in (4096, 100)]
    pieces = by_rank(cut("rows", whole, rows(whole.shape, 2)), cut("columns", whole, columns(whole.shape, 2)))
    made.commit(1, [[*own, Piece(f"odd.{rank}", odd[rank].data)] for rank, own in enumerate(pieces)])
    for verify in (True, False):
        found = made.store.load(1, framework="numpy", verify=verify)
        assert np.array_equal(found["rows"].view("u8"), whole.view("u8"))
        assert np.array_equal(found["columns"].view("u8"), whole.view("u8"))
    at = 0
    for offset, data in made.store.chunks(1, "columns"):
        assert offset == at
        assert bytes(data) == whole.reshape(-1).view("u1")[at : at + len(data)].tobytes()
        at += len(data)
    assert at == whole.nbytes


def test_large_rows_are_read_straight_into_place(tmp_path: Any) -> None:
    """Ranks that lay out their segments alike, and rows of whole pages: every shard is read straight into its place."""
    whole = numbers((1024, 4096))
    made = ShardStore(str(tmp_path / "store"))
    before = [Piece(f"before.{rank}", np.zeros(128, "u1")) for rank in range(2)]  # so that they begin within a page
    made.commit(1, [[one, shard] for one, shard in zip(before, cut("w", whole, rows(whole.shape, 2)), strict=True)])
    with mock.patch.object(box_reads, "copy_jobs", side_effect=AssertionError("through other memory")):
        same(made.store.load(1, framework="numpy")["w"], whole)
        box = np.s_[512:]
        same(made.store.read_tensor(1, "w", box=box).view("<f4").reshape(512, 4096), whole[box].copy())


# -- reads


def reads_of(made: ShardStore, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """(key, offset, length) of every read of a segment behind its header, as they come."""
    found: list[tuple[str, int, int]] = []
    kind = type(made.backend)
    original = kind.open_source

    def opened_source(backend: Any, key: str) -> Any:
        source = original(backend, key)
        read = source.read_into

        class Counting(type(source)):  # type: ignore[misc]
            def __init__(self) -> None:
                self.__dict__.update(getattr(source, "__dict__", {}))
                self.size = source.size

            def read_into(self, offset: int, out: memoryview) -> None:
                if offset:
                    found.append((key, offset, len(out)))
                read(offset, out)

            def close(self) -> None:
                source.close()

        return Counting()

    monkeypatch.setattr(kind, "open_source", opened_source)
    return found


@pytest.mark.parametrize("cutting", ["whole", "rows", "columns"])
def test_a_slice_reads_only_the_chunks_that_have_it(cutting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = numbers((4096, 4096), "<f4")  # 64 MiB: 4 chunks of 1024 rows
    boxes = {"whole": [Box.whole(whole.shape)], "rows": rows(whole.shape, 2), "columns": columns(whole.shape, 2)}
    pieces = cut("w", whole, boxes[cutting]) if cutting != "whole" else [Piece("w", whole)]
    made = ShardStore()
    made.commit(1, by_rank(pieces))
    reads = reads_of(made, monkeypatch)
    chunk = 16 << 20
    for box, expected in [
        (np.s_[10:20, 100:200], {"whole": chunk, "rows": chunk, "columns": chunk}),
        (np.s_[2040:2056], {"whole": 2 * chunk, "rows": 2 * chunk, "columns": 4 * chunk}),
        (np.s_[:, 5:6], {"whole": 4 * chunk, "rows": 4 * chunk, "columns": 2 * chunk}),
    ]:
        reads.clear()
        found = made.store.read_tensor(1, "w", box=box)
        same(found.view("<f4").reshape(whole[box].shape), whole[box].copy())
        assert sum(length for _, _, length in reads) == expected[cutting]


def test_select_reads_no_other_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ShardStore()
    made.commit(1, by_rank(cut("a", numbers((8, 8)), rows((8, 8), 2)), cut("b", numbers((64, 8)), rows((64, 8), 2))))
    reads = reads_of(made, monkeypatch)
    same(made.store.load(1, framework="numpy", select="a")["a"], numbers((8, 8)))
    assert sum(length for _, _, length in reads) == 8 * 8 * 4


def test_a_box_is_given_by_slices() -> None:
    made = ShardStore()
    made.commit(1, by_rank(cut("w", numbers((4, 4)), rows((4, 4), 2)), [Piece("scalar", np.float32(7).reshape(()))]))
    read = made.store.read_tensor
    same(read(1, "w", box=slice(-2, None)).view("<f4").reshape(2, 4), numbers((4, 4))[-2:])
    assert len(read(1, "w", box=np.s_[3:2, :])) == 0
    assert read(1, "scalar", box=()).view("<f4")[0] == 7
    for wrong in [np.s_[::2], np.s_[:, :, :], (1,)]:
        with pytest.raises(UsageError, match="box="):
            read(1, "w", box=wrong)


# -- into the caller's memory


@settings(max_examples=short_or(24, 60), deadline=None)
@given(SHAPES, st.sampled_from(DTYPES), st.integers(0, 2**32), st.booleans())
def test_any_part_of_any_cut_is_filled(shape: tuple[int, ...], dtype: str, seed: int, whole_stored: bool) -> None:
    """The function under `into=` with DTensors: memory, and the box that it holds."""
    chance = random.Random(seed)
    whole = numbers(shape, dtype, seed)
    made = ShardStore()
    pieces = [Piece("w", whole)] if whole_stored else cut("w", whole, divided(chance, shape))
    made.commit(1, by_rank(pieces))
    with opened(made.store.journal, 1) as found, workers(2, "read") as readers:
        for box in divided(chance, shape):
            memory = np.zeros(box.size * whole.itemsize, np.uint8)
            filling = BoxRead(found.stored("w"), MemorySink(memory, box, whole.itemsize))
            fill(jobs_of([filling]), readers, Staging.for_chunks(4))
            same(memory.view(dtype).reshape(box.shape), whole[box.within(Box.whole(shape))].copy())


@pytest.mark.parametrize("order", ["C", "F", "big"])
def test_into_arrays_of_any_layout(order: str) -> None:
    whole = numbers((6, 10))
    made = ShardStore()
    made.commit(1, by_rank(cut("w", whole, columns((6, 10), 3))))
    target = (
        np.zeros((6, 10), ">f4") if order == "big" else np.zeros((6, 10), "<f4", order="F" if order == "F" else "C")
    )
    assert made.store.load(1, into={"w": target})["w"] is target
    assert target.astype("<f4").tobytes() == whole.tobytes()
    with pytest.raises(UsageError, match=r"F32 \[6, 9\], the checkpoint's is F32 \[6, 10\]"):
        made.store.load(1, into={"w": np.zeros((6, 9), "<f4")})


def test_mmap_reads_what_is_in_shards(tmp_path: Any) -> None:
    made = ShardStore(str(tmp_path / "store"))
    made.commit(1, by_rank(cut("w", numbers((4, 4)), rows((4, 4), 2)), [Piece("n", numbers((5,)))]))
    found = made.store.load(1, framework="numpy", mmap=True)
    same(found["w"], numbers((4, 4)))
    same(found["n"], numbers((5,)))


def test_progress_tells_of_every_byte_once() -> None:
    made = ShardStore()
    made.commit(1, by_rank(cut("w", numbers((8, 8)), columns((8, 8), 3)), [Piece("n", numbers((5,)))]))
    told: list[tuple[int, int]] = []
    made.store.load(1, framework="numpy", progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (8 * 8 * 4 + 20, 8 * 8 * 4 + 20)
    told.clear()
    made.store.load(
        1, into={"w": np.zeros((8, 8), "<f4"), "n": np.zeros(5, "<f4")}, progress=lambda *one: told.append(one)
    )
    assert told[-1] == (8 * 8 * 4 + 20, 8 * 8 * 4 + 20)


# -- refusals


W = numbers((4, 3))
HOSTILE = {
    "overlap": (
        [Piece("w", W[:3], (4, 3), (0, 0)), Piece("w", W[2:], (4, 3), (2, 0))],
        r"its shard \[\S+, 0:3\] overlaps",
    ),
    "gap": (
        [Piece("w", W[:1], (4, 3), (0, 0)), Piece("w", W[2:], (4, 3), (2, 0))],
        r"elements \[1:2, 0:3\] of \[4, 3\] are in",
    ),
    "missing": ([Piece("w", W[:2], (4, 3), (0, 0)), Piece("n", W)], r"elements \[2:4, 0:3\] of \[4, 3\] are in none"),
    "other dtype": (
        [Piece("w", W[:2], (4, 3), (0, 0)), Piece("w", W[2:].astype("<f8"), (4, 3), (2, 0))],
        "a shard of F64",
    ),
    "other shape": ([Piece("w", W[:2], (4, 3), (0, 0)), Piece("w", W[2:], (5, 3), (2, 0))], r"a shard of F32 \[5, 3\]"),
    "other rank": ([Piece("w", W[:2], (4, 3), (0, 0)), Piece("w", W[0], (3,), (0,))], r"F32 \[3\]"),
    "empty": ([Piece("w", W, (4, 3), (0, 0)), Piece("w", W[:0], (4, 3), (4, 0))], "without elements"),
    "whole too": ([Piece("w", W), Piece("w", W[2:], (4, 3), (2, 0))], "a shard of a tensor that is whole in"),
    "twice": ([Piece("w", W, (4, 3), (0, 0)), Piece("w", W, (4, 3), (0, 0))], "is in two segments"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_shards_that_make_up_nothing_are_refused(case: str) -> None:
    pieces, message = HOSTILE[case]
    made = ShardStore()
    made.commit(1, [[piece] for piece in pieces])
    for attempt in (
        lambda: made.store.load(1),
        lambda: made.store.read_tensor(1, "w"),
        lambda: made.store.inspect(1),
    ):
        with pytest.raises(CorruptSegmentError, match=message) as raised:
            attempt()
        assert "'w'" in str(raised.value)
        assert "seg/0000000001/" in str(raised.value)
    for deeply in (False, True):
        report = made.store.verify(deep=deeply)
        assert not report.ok
        assert "'w'" in report.damage[0].what
        assert report.restorable == ()


def test_a_delta_builds_on_the_same_shard_alone() -> None:
    old, new = numbers((4, 3)), numbers((4, 3), seed=2)
    made = ShardStore()
    made.commit(1, by_rank(cut("w", old, rows((4, 3), 2))))
    made.commit(2, by_rank(cut("w", new, columns((4, 3), 3), codec=codecs.Xor(4), base=old)), base=1)
    made.commit(3, [[Piece("w", new, codec=codecs.Xor(4), base=old)]], base=1)
    for step in (2, 3):
        with pytest.raises(CorruptSegmentError, match="its base has no such tensor"):
            made.store.load(step)
    report = made.store.verify()
    assert report.restorable == ("1@1",)
    assert len(report.damage) == 2


@pytest.mark.parametrize("verify", [False, True])
def test_damage_in_a_shard_names_it(verify: bool) -> None:
    made = ShardStore()
    made.commit(1, by_rank(cut("w", numbers((4, 3)), rows((4, 3), 2))))
    (entry,) = [one for one, doc in made.store.describe(1) if not doc.trees]
    data = bytearray(made.backend.get(entry.key))
    data[-1] ^= 1
    made.backend.replace(entry.key, bytes(data))
    if verify:
        with pytest.raises(CorruptSegmentError, match=r"tensor 'w' \[2:4, 0:3\]: checksum mismatch"):
            made.store.load(1)
        for deep in (False, True):
            report = made.store.verify(deep=deep)
            assert (report.damage[0].key, report.damage[0].checkpoints) == (entry.key, ("1@1",))
            assert (report.restorable, report.lost) == ((), ("1@1",))
        same(made.store.read_tensor(1, "w", box=np.s_[:2, :]).view("<f4"), numbers((4, 3))[:2].reshape(-1))
    else:
        made.store.load(1, verify=False)


# -- boxes


@settings(max_examples=short_or(80, 200), deadline=None)
@given(SHAPES, st.integers(0, 2**32))
def test_cover_is_decided_as_by_counting(shape: tuple[int, ...], seed: int) -> None:
    chance = random.Random(seed)
    boxes = divided(chance, shape, 8)
    if chance.random() < 0.5:
        boxes.pop(chance.randrange(len(boxes)))
    if chance.random() < 0.5 and boxes:
        boxes[chance.randrange(len(boxes))] = chance.choice(divided(chance, shape, 8))
    counts = np.zeros(shape, int)
    for box in boxes:
        counts[box.within(Box.whole(shape))] += 1
    assert (overlapping(boxes) is None) == (counts.max() <= 1)
    if overlapping(boxes) is None:
        missing = gap(shape, boxes)
        assert (missing is None) == bool(counts.all())
        assert missing is None or not counts[missing.within(Box.whole(shape))].any()


def test_every_cut_is_decided_quickly() -> None:
    grid = [Box((8 * row, column), (8, 1)) for row in range(64) for column in range(64)]
    assert overlapping(grid) is None
    assert gap((512, 64), grid) is None
    assert gap((512, 64), grid[:-1]) == Box((504, 63), (8, 1))


def test_a_run_is_found_where_there_is_one() -> None:
    whole = Box.whole((4, 3, 2))
    assert Box((1, 0, 0), (2, 3, 2)).run(whole) == 6
    assert Box((1, 1, 0), (1, 2, 2)).run(whole) == 8
    assert Box((1, 1, 1), (1, 1, 1)).run(whole) == 9
    assert Box((1, 1, 0), (2, 2, 2)).run(whole) is None
    assert Box((0, 0, 1), (4, 3, 1)).run(whole) is None
    assert Box((), ()).run(Box((), ())) == 0


def test_lookalike_names_are_other_tensors() -> None:
    """A key shows tensor and box in errors, and is not a name that a state could have."""
    made = ShardStore()
    other = numbers((2,))
    made.commit(
        1, by_rank(cut("w", numbers((4,)), rows((4,), 2)), [Piece("w [0:2]", other), Piece("'w' [0:2]", other)])
    )
    found = made.store.load(1, framework="numpy")
    same(found["w"], numbers((4,)))
    same(found["w [0:2]"], other)


def test_many_small_tensors_share_memory() -> None:
    made = ShardStore()
    tensors = {f"t{number}": numbers((4, 3), seed=number) for number in range(300)}
    made.commit(1, by_rank(*(cut(name, whole, rows((4, 3), 2)) for name, whole in tensors.items())))
    with mock.patch("ckptstore.restore.box_reads.aligned", wraps=box_reads.aligned) as asked:
        found = made.store.load(1, framework="numpy")
    assert asked.call_count == 1
    for name, whole in tensors.items():
        same(found[name], whole)


def test_a_base_is_read_back_shard_by_shard() -> None:
    """The base of a rank's deltas: the shard of the same box, by its key."""
    old, new = numbers((6, 4)), numbers((6, 4), seed=2)
    made = ShardStore()
    made.commit(1, by_rank(cut("w", old, rows((6, 4), 2))))
    made.commit(2, by_rank(cut("w", new, rows((6, 4), 2), codec=codecs.Xor(4), base=old)), base=1)
    base = open_base(made.store.journal, made.states[2])
    key = shard_key("w", (3, 4), (6, 4), (3, 0))
    assert base.spec(key) == ("F32", (3, 4))
    assert bytes(base.read(key, 16, 32)) == new[3:].tobytes()[16:48]
    assert base.spec(shard_key("w", (3, 4), (6, 4), (2, 0))) is None
    assert base.spec("w") is None
    base.forget()
