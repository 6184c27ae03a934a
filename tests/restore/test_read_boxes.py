"""`Store.read_boxes`: many boxes in one open of a checkpoint, each chunk once, into memory of the caller or new."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptstore
from ckptstore.errors import CheckpointNotFoundError, CorruptSegmentError, TensorNotFoundError, UsageError
from ckptstore.formats import codecs
from ckptstore.restore import box_reads
from ckptstore.segments import segment_reader
from tests.forms import short_or
from tests.restore.test_fallback import flip, header
from tests.restore.test_shards import DTYPES, SHAPES, numbers, same, small_chunks
from tools.golden.shard_stores import Array, ShardStore, by_rank, cut, divided, rows


def some_box(chance: random.Random, shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """A box of an array, sometimes empty, often the whole of a dimension."""
    found = []
    for length in shape:
        start, stop = sorted((chance.randint(0, length), chance.randint(0, length)))
        found.append(chance.choice([(start, stop), (0, length)]))
    return found


def part_of(whole: Array, box: list[tuple[int, int]] | None) -> Array:
    return whole if box is None else whole[tuple(slice(*bounds) for bounds in box)]


@settings(max_examples=short_or(40, 150), deadline=None)
@given(SHAPES, st.sampled_from(DTYPES), st.integers(0, 2**32), st.sampled_from([64, 1 << 24]))
def test_any_boxes_of_shards_of_a_full(shape: tuple[int, ...], dtype: str, seed: int, chunk: int) -> None:
    chance = random.Random(seed)
    whole = numbers(shape, dtype, seed)
    boxes = [None, *(some_box(chance, shape) for _ in range(6))]
    with small_chunks(chunk):
        made = ShardStore()
        made.commit(1, by_rank(cut("w", whole, divided(chance, shape))))
        found = made.store.read_boxes(1, [("w", box) for box in boxes], framework="numpy")
        for box, array in zip(boxes, found, strict=True):
            same(array, part_of(whole, box))
        buffer = np.zeros((len(boxes), 2, *(2 * length for length in shape)), dtype)  # every box in a view with gaps
        views = [
            buffer[number, 0][tuple(slice(0, 2 * size, 2) for size in part_of(whole, box).shape)]
            for number, box in enumerate(boxes)
        ]
        assert all(
            one is other
            for one, other in zip(
                made.store.read_boxes(1, [("w", box) for box in boxes], out=views), views, strict=True
            )
        )
        for box, view in zip(boxes, views, strict=True):
            same(view.copy(), part_of(whole, box))
            view[...] = 0
        assert not buffer.any()


@settings(max_examples=short_or(16, 60), deadline=None)
@given(SHAPES, st.integers(0, 2**32), st.sampled_from([64, 1 << 24]))
def test_any_boxes_of_a_chain_of_deltas(shape: tuple[int, ...], seed: int, chunk: int) -> None:
    chance = random.Random(seed)
    cuts = divided(chance, shape)
    states = [numbers(shape, "<f4", seed + step) for step in range(3)]
    boxes = [None, *(some_box(chance, shape) for _ in range(6))]
    with small_chunks(chunk):
        made = ShardStore()
        made.commit(1, by_rank(cut("w", states[0], cuts)))
        made.commit(2, by_rank(cut("w", states[1], cuts, codec=codecs.Xor(4), base=states[0])), base=1)
        made.commit(3, by_rank(cut("w", states[2], cuts, codec=codecs.Sub(4), base=states[1])), base=2)
        for step, whole in enumerate(states, 1):
            found = made.store.read_boxes(step, [("w", box) for box in boxes], framework="numpy")
            for box, array in zip(boxes, found, strict=True):
                same(array, part_of(whole, box))


def saved(place: Path, state: dict[str, Any], **options: Any) -> ckptstore.Store:
    store = ckptstore.open(place)
    with store.writer(**options) as writer:
        writer.save(state, 1)
    return store


def test_a_chunk_that_many_boxes_need_is_read_and_checked_once(tmp_path: Path) -> None:
    whole = numbers((300, 40))
    store = saved(tmp_path / "store", {"w": whole, "v": whole[:3].copy()})
    boxes = [("w", [(row, row + 1), (0, 40)]) for row in range(300)] + [("v", None)]
    real, checked = segment_reader.check_chunk, Counter[str]()

    def counted(where: str, tensor: Any, *rest: Any) -> None:
        checked[tensor.name] += 1
        real(where, tensor, *rest)

    with mock.patch.object(segment_reader, "check_chunk", counted):
        found = store.read_boxes(1, boxes, framework="numpy")
    assert checked == {"w": 1, "v": 1}
    same(np.concatenate(found[:-1]), whole)
    same(found[-1], whole[:3])


def test_chunks_without_a_wanted_element_are_not_read() -> None:
    with small_chunks(64):
        made = ShardStore()
        whole = numbers((16, 16))  # a row fills a chunk
        made.commit(1, by_rank(cut("w", whole, rows((16, 16), 2))))
        with mock.patch.object(box_reads, "copy_jobs", wraps=box_reads.copy_jobs) as asked:
            found = made.store.read_boxes(
                1, [("w", [(3, 4), (2, 5)]), ("w", [(3, 4), (0, 1)]), ("w", [(12, 13), (0, 16)])], framework="numpy"
            )
    pieces = [piece.start for call in asked.call_args_list for extent in call.args[1] for piece in extent]
    assert sorted(pieces) == [3 * 64, 4 * 64]  # row 3 of the first shard, row 4 of the second
    for array, index in zip(found, (np.s_[3:4, 2:5], np.s_[3:4, :1], np.s_[12:13, :]), strict=True):
        same(array, whole[index])


def test_large_tensors_are_read_straight_to_their_place(tmp_path: Path) -> None:
    whole = numbers((600, 1024))
    store = saved(tmp_path / "store", {"w": whole})
    with mock.patch.object(box_reads, "copy_jobs", side_effect=AssertionError("through other memory")):
        (found,) = store.read_boxes(1, [("w", None)], framework="numpy")
        same(store.read_tensor(1, "w").view("<f4").reshape(whole.shape), whole)
    same(found, whole)


def test_boxes_of_tied_tensors_are_found_at_every_place(tmp_path: Path) -> None:
    whole = numbers((4, 4))
    store = saved(tmp_path / "store", {"a": whole, "b": {"c": whole}})
    first, second = store.read_boxes(1, [("a", [(0, 1), (0, 4)]), ("b.c", [(1, 2), (0, 4)])], framework="numpy")
    same(first, whole[:1])
    same(second, whole[1:2])


def test_torch_tensors_new_and_in_place(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    whole = torch.arange(24, dtype=torch.bfloat16).reshape(4, 6)
    store = saved(tmp_path / "store", {"w": whole, "c": torch.tensor([1 + 2j])})
    (new,) = store.read_boxes(1, [("w", [(1, 3), (2, 4)])])
    assert torch.equal(new, whole[1:3, 2:4])
    mine = torch.zeros(6, 4, dtype=torch.bfloat16, requires_grad=True)
    conjugated = torch.zeros(1, dtype=torch.complex64).conj()
    out = [mine.T[1:3, 2:4], conjugated]
    found = store.read_boxes(1, [("w", [(1, 3), (2, 4)]), ("c", None)], out=out)
    assert found[0] is out[0]
    assert torch.equal(mine[2:4, 1:3].T, whole[1:3, 2:4])
    assert torch.count_nonzero(mine.detach()) == 4
    assert conjugated.tolist() == [1 + 2j]
    with pytest.raises(UsageError, match="several of its elements share memory"):
        store.read_boxes(1, [("w", None)], out=[torch.zeros(6, dtype=torch.bfloat16).expand(4, 6)])


WRONG: dict[str, tuple[list[Any], list[Any] | None, str]] = {
    "another number": ([("w", None)], [], "out= has 0 tensors for 1 boxes"),
    "a shape": ([("w", [(0, 2), (0, 3)])], [np.zeros((2, 2), "<f4")], r"out\[0\], .*'w' \[0:2, 0:3\], is F32 \[2, 2\]"),
    "a dtype": ([("w", None)], [np.zeros((4, 3), "<f8")], r"is F64 \[4, 3\]; it takes F32 \[4, 3\]"),
    "no tensor": ([("w", None)], [[1.0]], r"is a builtins\.list; it takes a tensor"),
    "read-only": ([("w", None)], [np.broadcast_to(np.float32(0), (4, 3))], "read-only"),
    "outside": ([("w", [(0, 5), (0, 3)])], None, r"'w': box \[\(0, 5\), \(0, 3\)\] is not in its shape \[4, 3\]"),
    "backwards": ([("w", [(2, 1), (0, 3)])], None, r"not in its shape \[4, 3\]"),
    "dimensions": ([("w", [(0, 1)])], None, r"not in its shape \[4, 3\].* each of 2 dimensions"),
    "negative": ([("w", [(-1, 2), (0, 3)])], None, "a bound of the box .* of tensor 'w': -1"),
    "no box": ([("w", [1, 2])], None, "is not a box: it takes"),
    "no pair": (["weight"], None, "pairs of a tensor's name and a box"),
    "no name": ([(3, None)], None, "3 is not the name of a tensor"),
}


@pytest.mark.parametrize("case", list(WRONG))
def test_what_does_not_fit_is_refused_before_a_byte_is_written(tmp_path: Path, case: str) -> None:
    requests, out, said = WRONG[case]
    store = saved(tmp_path / "store", {"w": numbers((4, 3)), "n": numbers((2,))})
    first = np.zeros(2, "<f4")
    # A first request that fits shows that nothing was written; the number in the message is then one higher.
    outs = None if out is None else [first, *out]
    said = said.replace(r"out\[0\]", r"out\[1\]").replace("0 tensors for 1", "1 tensors for 2")
    with pytest.raises(UsageError, match=said):
        store.read_boxes(1, [("n", None), *requests], out=outs)
    assert not first.any()
    if outs is not None and case != "another number":
        with pytest.raises(TensorNotFoundError, match="close: w"):
            store.read_boxes(1, [("n", None), ("ww", None)], out=outs)
        assert not first.any()


def test_errors_of_read_tensor_name_tensor_and_shape(tmp_path: Path) -> None:
    store = saved(tmp_path / "store", {"layer": {"weight": numbers((4, 3))}})
    with pytest.raises(UsageError, match=r"tensor 'layer\.weight': box= has 3 slices, .* of shape \[4, 3\]"):
        store.read_tensor(1, "layer.weight", box=np.s_[:, :, :])
    for call in (store.read_tensor, store.chunks, lambda ref, name: list(store.read_tensors(ref, [name]))):
        with pytest.raises(TensorNotFoundError, match=r"no tensor is named 'layer\.wieght'; close: layer\.weight"):
            list(call(1, "layer.wieght"))


def test_boxes_that_share_memory_of_the_caller_are_refused(tmp_path: Path) -> None:
    store = saved(tmp_path / "store", {"w": numbers((4, 4))})
    mine = np.zeros((4, 4), "<f4")
    with pytest.raises(UsageError, match=r"out\[0\] and out\[2\] share memory"):
        store.read_boxes(
            1,
            [("w", [(0, 2), (0, 4)]), ("w", [(2, 4), (0, 4)]), ("w", [(1, 3), (0, 1)])],
            out=[mine[:2], mine[2:], mine[1:3, :1]],
        )
    assert not mine.any()
    store.read_boxes(1, [("w", [(0, 4), (0, 2)]), ("w", [(0, 4), (2, 4)])], out=[mine[:, :2], mine[:, 2:]])
    same(mine, numbers((4, 4)))


def test_damage_writes_nothing_of_the_damaged_chunk(tmp_path: Path) -> None:
    whole = numbers((64, 64))
    store = saved(tmp_path / "store", {"w": whole})
    (segment,) = (tmp_path / "store" / one.key for one in store.view().catalog.segments.values())
    flip(segment, header(segment) + 100)
    mine = np.zeros((2, 64), "<f4")
    with pytest.raises(CorruptSegmentError, match="tensor 'w': checksum mismatch"):
        store.read_boxes(1, [("w", [(3, 5), (0, 64)])], out=[mine])
    assert not mine.any()
    store.read_boxes(1, [("w", [(3, 5), (0, 64)])], out=[mine], verify=False)
    same(mine, whole[3:5])
    with pytest.raises(CheckpointNotFoundError):
        store.read_boxes(2, [("w", None)])


def test_no_boxes_and_options(tmp_path: Path) -> None:
    store = saved(tmp_path / "store", {"w": numbers((4, 4)), "e": np.zeros((0, 3), "<f4"), "s": np.array(3, "<f4")})
    assert store.read_boxes(1, []) == []
    done: list[tuple[int, int]] = []
    empty, scalar, none = store.read_boxes(
        1, [("e", None), ("s", []), ("w", [(2, 2), (0, 4)])], framework="numpy", progress=lambda *at: done.append(at)
    )
    assert (empty.shape, scalar.shape, float(scalar), none.shape) == ((0, 3), (), 3.0, (0, 4))
    assert done[-1] == (4, 4)
    with pytest.raises(UsageError, match="framework="):
        store.read_boxes(1, [], framework="jax")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="out= already says"):
        store.read_boxes(1, [], out=[], framework="numpy")
    with pytest.raises(UsageError, match="threads"):
        store.read_boxes(1, [], threads=0)
