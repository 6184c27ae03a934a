"""`ckptstore.Shard` in a state: parts of tensors, from many ranks or one process, saved, loaded and refused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptstore
from ckptstore import RankMismatchError, RankOptions, Shard, Shards, UnsupportedStateError, UsageError
from ckptstore.formats.segment_files.boxes import Box
from ckptstore.formats.sources import blocks
from ckptstore.formats.states.shard import JoinedSource
from ckptstore.frameworks import bridge
from ckptstore.write.ranks.messages.key_value_store import Group
from tests.forms import short_or
from tests.restore.test_shards import SHAPES, numbers, same
from tests.write.rank_threads import as_ranks
from tools.golden.shard_stores import Array, divided

torch = pytest.importorskip("torch")

PATIENT = RankOptions(timeout=120)
WHOLE = numbers((6, 5))


def part(whole: Array, rows: tuple[int, int], columns: tuple[int, int] = (0, 5), *, zeros: bool = False) -> Shard:
    """A box of a matrix, as memory of its own."""
    data = whole[slice(*rows), slice(*columns)].copy()
    return Shard(np.zeros_like(data) if zeros else data, whole.shape, (rows[0], columns[0]))


def saved_by_ranks(place: Path, states: list[Any], **options: Any) -> list[Any]:
    """The error of each rank, or None."""

    def work(group: Group) -> None:
        with ckptstore.open(place).writer(group=group, ranks=PATIENT) as writer:
            writer.save(states[group.rank], 1)

    return as_ranks(len(states), work, **options)


def test_parts_of_ranks_are_one_tensor_and_fill_other_parts(tmp_path: Path) -> None:
    half = torch.arange(12.0).to(torch.bfloat16).reshape(4, 3)
    states = [
        {"w": part(WHOLE, (0, 2)), "t": Shard(half[:, :1], (4, 3), (0, 0)), "rank": 0},
        {"w": part(WHOLE, (2, 6)), "t": Shard(half[:, 1:], (4, 3), (0, 1)), "rank": 1},
    ]
    assert saved_by_ranks(tmp_path / "store", states) == [None, None]
    store = ckptstore.open(tmp_path / "store")
    found = store.load(1)
    same(found["w"], WHOLE)
    assert torch.equal(found["t"], half)
    assert [store.load(1, rank=rank)["rank"] for rank in (0, 1)] == [0, 1]
    into = {
        "w": part(WHOLE, (1, 5), (2, 4), zeros=True),
        "t": Shard(torch.zeros(2, 3, dtype=half.dtype), (4, 3), (1, 0)),
    }
    back = store.load(1, into={**into, "rank": None}, rank=1)
    assert back["w"] is into["w"]
    assert back["t"] is into["t"]
    same(into["w"].tensor, WHOLE[1:5, 2:4].copy())
    assert torch.equal(into["t"].tensor, half[1:3])
    several = Shards([part(WHOLE, (1, 3), zeros=True), part(WHOLE, (3, 4), zeros=True)])
    assert store.load(1, into={"w": several}, select="w")["w"] is several
    same(np.concatenate([one.tensor for one in several.shards]), WHOLE[1:4])
    assert store.verify(deep=True).ok


def test_several_parts_of_a_rank_are_stored_as_their_box(tmp_path: Path) -> None:
    first = Shards([part(WHOLE, (0, 3), (2, 5)), part(WHOLE, (0, 3), (0, 2))])
    second = Shards([part(WHOLE, (3, 4)), part(WHOLE, (4, 6), (0, 1)), part(WHOLE, (4, 6), (1, 5))])
    assert saved_by_ranks(tmp_path / "store", [{"w": first}, {"w": second}]) == [None, None]
    store = ckptstore.open(tmp_path / "store")
    same(store.load(1, framework="numpy")["w"], WHOLE)
    assert len(store.tensors(1)["w"].shards) == 2  # type: ignore[attr-defined]
    assert store.verify(deep=True).ok


def test_the_same_part_on_several_ranks_is_stored_once_and_compared(tmp_path: Path) -> None:
    top, rest = part(WHOLE, (0, 2)), part(WHOLE, (2, 6))
    states = [{"w": top}, {"w": rest}, {"w": Shards([part(WHOLE, (0, 1)), part(WHOLE, (1, 2))])}]
    assert saved_by_ranks(tmp_path / "store", states) == [None] * 3
    store = ckptstore.open(tmp_path / "store")
    assert store.tensors(1)["w"].stored == WHOLE.nbytes
    same(store.load(1, framework="numpy")["w"], WHOLE)
    other = part(WHOLE, (0, 2))
    other.tensor.view("u4")[1, 1] ^= 1
    found = saved_by_ranks(tmp_path / "other", [{"w": top}, {"w": rest}, {"w": other}])
    assert [type(one) for one in found] == [ckptstore.DivergedReplicasError] * 3


@pytest.mark.parametrize(
    ("rows", "said"),
    [(((0, 2), (3, 6)), "on no rank"), (((0, 3), (2, 6)), "overlap and are not the same")],
)
def test_holes_and_overlaps_of_ranks_are_refused(tmp_path: Path, rows: Any, said: str) -> None:
    found = saved_by_ranks(tmp_path / "store", [{"w": part(WHOLE, one)} for one in rows])
    assert [type(one) for one in found] == [RankMismatchError] * 2
    assert said in str(found[0])
    assert ckptstore.open(tmp_path / "store").latest_step() is None


def test_one_process_stores_the_parts_as_the_whole(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "store")
    state = {
        "w": Shards([part(WHOLE, (4, 6)), part(WHOLE, (0, 4), (0, 3)), part(WHOLE, (0, 4), (3, 5))]),
        "one": part(WHOLE, (0, 6)),
    }
    with store.writer() as writer:
        writer.save(state, 1)
        writer.save_async(state, 2).result()
        with pytest.raises(
            UnsupportedStateError, match=r"tensor 'w' of shape \[6, 5\].* only its elements \[0:5, 0:5\]"
        ):
            writer.save({"w": part(WHOLE, (0, 5))}, 3)
        flat = bridge.flattened({"w": part(WHOLE, (0, 5))}, sharded=True)
        with pytest.raises(UnsupportedStateError, match="only its elements"):
            writer.save(flat, 3)
    for step in (1, 2):
        found = store.load(step, framework="numpy")
        same(found["w"], WHOLE)
        same(found["one"], WHOLE)
    assert not hasattr(store.tensors(1)["w"], "shards")
    into = {"w": Shards([part(WHOLE, (2, 6), zeros=True), part(WHOLE, (0, 2), zeros=True)])}
    store.load(1, into=into, select="w")
    same(into["w"].shards[0].tensor, WHOLE[2:])
    same(into["w"].shards[1].tensor, WHOLE[:2])


@pytest.mark.parametrize("options", [{"deltas": 2}, {"deltas": 2, "memory": 64 << 20}])
def test_deltas_of_parts(tmp_path: Path, options: dict[str, Any]) -> None:
    def states(step: int) -> list[Any]:
        whole = WHOLE.copy()
        whole.view("u4")[::2] += step
        return [
            {"w": part(whole, (0, 2))},
            {"w": Shards([part(whole, (2, 5)), part(whole, (5, 6))])},
        ]

    def work(group: Group) -> None:
        with ckptstore.open(tmp_path).writer(group=group, ranks=PATIENT, **options) as writer:
            for step in range(1, 5):
                writer.save_async(states(step)[group.rank], step)

    assert as_ranks(2, work) == [None, None]
    store = ckptstore.open(tmp_path)
    assert {info.kind for info in store.checkpoints()} == {"full", "delta"}
    for step in range(1, 5):
        whole = WHOLE.copy()
        whole.view("u4")[::2] += step
        same(store.load(step, framework="numpy")["w"], whole)
    assert store.verify(deep=True).ok


def test_step_diffs_of_parts(tmp_path: Path) -> None:
    """The optimizer updates each rank's part; its tensors stand in the state in Shards."""
    from ckptstore.training import OptimizerStep

    def work(group: Group) -> Any:
        weight = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4) + 100 * group.rank)
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
        place = ((6, 4), (3 * group.rank, 0))
        diffs = ckptstore.DiffOptions(full_every=10)
        with ckptstore.open(tmp_path).writer(group=group, ranks=PATIENT, diffs=diffs) as writer:
            for step in range(1, 4):
                weight.grad = torch.full((3, 4), 0.5 + step)
                optimizer.step()
                moment = optimizer.state[weight]["momentum_buffer"]
                state = {"w": Shard(weight, *place), "m": Shard(moment, *place)}
                writer.save(state, step, updates=OptimizerStep(optimizer))
        return weight.detach().clone()

    ends = as_ranks(2, work)
    store = ckptstore.open(tmp_path)
    assert [info.kind for info in store.checkpoints()] == ["full", "gradient", "gradient"]
    assert torch.equal(store.load(3)["w"], torch.cat(ends))
    diff = store.tensors(3)["w"]
    assert diff.stored < diff.nbytes


@settings(max_examples=short_or(60, 300), deadline=None)
@given(SHAPES, st.sampled_from(["<f4", "u1", "<c16"]), st.integers(0, 2**32), st.booleans())
def test_any_parts_are_read_and_filled(shape: tuple[int, ...], dtype: str, seed: int, strided: bool) -> None:
    chance = random.Random(seed)
    whole = numbers(shape, dtype, seed)
    boxes = divided(chance, shape)

    def memory(box: Box) -> Array:
        return np.zeros([2 * length for length in box.shape], dtype)[tuple(slice(0, None, 2) for _ in shape)]

    parts = [memory(box) if strided else np.zeros(box.shape, dtype) for box in boxes]
    for box, data in zip(boxes, parts, strict=True):
        data[...] = whole[box.within(Box.whole(shape))]
    owner = Shards([Shard(data, shape, box.offset) for box, data in zip(boxes, parts, strict=True)])
    source = bridge.source_of(owner)
    assert source is not None
    image = np.frombuffer(whole.tobytes(), np.uint8)
    for _ in range(4):
        start, stop = sorted(chance.randint(0, len(image)) for _ in range(2))
        out = np.zeros(stop - start, np.uint8)
        source.read(start, out)
        assert out.tobytes() == image[start:stop].tobytes()
    if isinstance(source, JoinedSource):
        for data in parts:
            data[...] = 0
        flat = whole.reshape(-1)
        middle = chance.randint(0, flat.size)
        for start, stop in ((0, middle), (middle, flat.size)):
            for one, index, elements in source.split(start, flat[start:stop]):
                one.array[index] = elements  # type: ignore[attr-defined]
        for box, data in zip(boxes, parts, strict=True):
            same(data.copy(), whole[box.within(Box.whole(shape))].copy())
    assert list(blocks(shape, 0, 0)) == []


def test_wrong_parts_are_refused() -> None:
    a = np.zeros((2, 5), "<f4")
    for call, said in (
        (lambda: Shard([1.0], (1,), (0,)), "takes a tensor or an array, not a list"),
        (lambda: Shard(a, (6, 5), (5, 0)), r"shape \[2, 5\] at \[5, 0\] is not inside \[6, 5\]"),
        (lambda: Shard(a, (6, 5), (0,)), "is not inside"),
        (lambda: Shard(a, (6, "x"), (0, 0)), "both take one number for each dimension"),
        (lambda: Shards([]), "at least one Shard"),
        (lambda: Shards([Shard(a, (6, 5), (0, 0)), Shard(a, (7, 5), (2, 0))]), r"of shapes \[6, 5\], \[7, 5\]"),
        (
            lambda: Shards([Shard(a, (6, 5), (0, 0)), Shard(a, (6, 5), (1, 0))]),
            r"\[0:2, 0:5\] and \[1:3, 0:5\] overlap",
        ),
        (
            lambda: Shards([Shard(a, (6, 5), (0, 0)), Shard(a, (6, 5), (4, 0))]),
            r"not a box: \[2:4, 0:5\] of \[0:6, 0:5\] .* give it another part, or each part a name of its own",
        ),
    ):
        with pytest.raises(UsageError, match=said):
            call()  # type: ignore[no-untyped-call]
    one = torch.zeros(2, 5)
    with pytest.raises(UnsupportedStateError, match=r"state\['b'\].*the same memory, and another place"):
        bridge.flattened({"a": Shard(one, (4, 5), (0, 0)), "b": Shard(one, (4, 5), (2, 0))}, sharded=True)
    tied = bridge.flattened({"a": Shard(a, (4, 5), (0, 0)), "b": Shard(a, (4, 5), (2, 0))}, sharded=True)
    assert list(tied.tensors) == ["a", "b"]
    with pytest.raises(UnsupportedStateError, match="different kinds"):
        bridge.source_of(Shards([Shard(a, (4, 5), (0, 0)), Shard(a.astype("<f8"), (4, 5), (2, 0))]))
    memory = np.zeros((2, 5), "<f4")
    store = ckptstore.open("memory://wrong-parts")
    with store.writer() as writer:
        writer.save({"w": np.ones((4, 5), "<f4")}, 1)
    with pytest.raises(UsageError, match="share memory"):
        store.load(1, into={"w": Shards([Shard(memory, (4, 5), (0, 0)), Shard(memory, (4, 5), (2, 0))])})
