"""`flat_state` and ``load(layout="flat")``: tensors by the names that the caller chose, and data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import RankOptions, Shard, UnsupportedStateError, UsageError, flat_state
from ckptstore.write.ranks.messages.key_value_store import Group
from tests.write.rank_threads import as_ranks

NAMES = ["layers.0.weight", "a/b", "$x", "100%", "data", "tensors.w", "#1"]
DATA = {"step": 3, "groups": [{"lr": 0.1}], "shape": (2, 3), "none": None}


def arrays() -> dict[str, Any]:
    return {name: np.arange(3 + number, dtype="<f4") for number, name in enumerate(NAMES)}


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(found) == list(expected)
    for name, one in expected.items():
        assert np.array_equal(np.asarray(found[name]), np.asarray(one)), name


def test_names_in_the_store_are_the_given_ones(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path)
    with store.writer(deltas=1) as writer:
        writer.save(flat_state(arrays(), DATA), 1)
        writer.save_async(flat_state({name: one + 1 for name, one in arrays().items()}, DATA), 2).result()
        writer.save(flat_state(arrays()), 3)
    assert list(store.tensors(1)) == NAMES
    for step in (1, 2):
        tensors, data = store.load(step, framework="numpy", layout="flat")
        same(tensors, {name: one + step - 1 for name, one in arrays().items()})
        assert data == DATA
    tensors, data = store.load(3, framework="numpy", layout="flat")
    same(tensors, arrays())
    assert data is None
    same(store.load(3, framework="numpy"), arrays())
    for name, found in zip(
        NAMES, store.read_boxes(2, [(name, None) for name in NAMES], framework="numpy"), strict=True
    ):
        assert np.array_equal(found, arrays()[name] + 1)


def test_tensors_are_filled_in_place(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path)
    with store.writer() as writer:
        writer.save(flat_state(arrays(), DATA), 1)
    mine = {name: np.zeros_like(one) for name, one in arrays().items()}
    tensors, data = store.load(1, into=flat_state(mine), layout="flat")
    assert all(tensors[name] is mine[name] for name in NAMES)
    same(mine, arrays())
    assert data == DATA
    some = {"data": np.zeros(7, "<f4")}
    assert list(store.load(1, into=flat_state(some), select="data", layout="flat")[0]) == ["data"]
    same(some, {"data": arrays()["data"]})


def test_tied_tensors_have_all_their_names(tmp_path: Path) -> None:
    one = np.arange(4.0)
    store = ckptstore.open(tmp_path)
    with store.writer() as writer:
        writer.save(flat_state({"head": one, "embedding": one, "other": one.copy()}), 1)
    assert list(store.tensors(1)) == ["head", "other"]
    tensors, _ = store.load(1, framework="numpy", layout="flat")
    assert list(tensors) == ["head", "embedding", "other"]
    assert tensors["head"] is tensors["embedding"]
    assert store.read_boxes(1, [("embedding", [(1, 2)])], framework="numpy")[0].tolist() == [1.0]


def test_ranks_save_flat_states_with_parts(tmp_path: Path) -> None:
    whole = np.arange(24, dtype="<f4").reshape(6, 4)

    def work(group: Group) -> None:
        first = 3 * group.rank
        parts = [Shard(whole[row : row + 1], (6, 4), (row, 0)) for row in range(first, first + 3)]
        state = flat_state({"w": parts, "own": np.arange(2) + group.rank}, {"rank": group.rank})
        ranks = RankOptions(timeout=120, per_rank="own")
        with ckptstore.open(tmp_path).writer(group=group, ranks=ranks) as writer:
            writer.save(state, 1)

    assert as_ranks(2, work) == [None, None]
    store = ckptstore.open(tmp_path)
    assert list(store.tensors(1)) == ["w", "own@0", "own@1"]
    tensors, data = store.load(1, framework="numpy", layout="flat", rank=1)
    assert np.array_equal(tensors["w"], whole)
    assert data == {"rank": 1}
    column = Shard(np.zeros((6, 1), "<f4"), (6, 4), (0, 2))
    tensors, _ = store.load(1, into=flat_state({"w": column}), select="w", layout="flat")
    assert tensors["w"] is column
    assert np.array_equal(column.tensor, whole[:, 2:3])


def test_any_other_state_is_taken_apart(tmp_path: Path) -> None:
    one = np.arange(4.0)
    state = {"model": {"w": one, "n": 3}, "list": [one, 5, np.ones(1)], "step": 7}
    store = ckptstore.open(tmp_path)
    with store.writer() as writer:
        writer.save(state, 1)
        writer.save(one, 2)
        writer.save({"only": 1}, 3)
    tensors, data = store.load(1, framework="numpy", layout="flat")
    same(tensors, {"model.w": one, "list.0": one, "list.2": np.ones(1)})
    assert tensors["model.w"] is tensors["list.0"]
    assert data == {"model": {"n": 3}, "list": [5], "step": 7}
    tensors, data = store.load(1, framework="numpy", layout="flat", select="model.*")
    same(tensors, {"model.w": one})
    (tensors, data) = store.load(2, framework="numpy", layout="flat")
    assert (len(tensors), data) == (1, None)
    assert store.load(3, layout="flat") == ({}, {"only": 1})


def test_torch_tensors_and_parts(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    store = ckptstore.open(tmp_path)
    with store.writer() as writer:
        writer.save(flat_state({"w": [Shard(torch.ones(2, 3), (2, 3), (0, 0))]}, {"dtype": torch.float32}), 1)
    tensors, data = store.load(1, layout="flat")
    assert torch.equal(tensors["w"], torch.ones(2, 3))
    assert data == {"dtype": torch.float32}


def test_what_cannot_be_in_a_flat_state_is_refused() -> None:
    one = np.ones(2)
    for tensors, data, said in (
        ({"": one}, None, "'' cannot be the name of a tensor"),
        ({"ckptstore/data": one}, None, "reserved"),
        ({"__metadata__": one}, None, "reserved"),
        ({3: one}, None, "3 cannot be the name"),
        ({"w": 1.5}, None, r"tensor 'w' is a builtins\.float: put it into data="),
        ({"w": [one, one]}, None, r"tensor 'w' is a builtins\.list"),
        ({"w": one}, {"state": [one]}, r"data= has a tensor at 'state\.0'"),
    ):
        with pytest.raises(UsageError, match=said):
            flat_state(tensors, data)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedStateError, match="tensor 'w': "):
        flat_state({"w": np.zeros(2, "datetime64[s]")})
    with pytest.raises(UsageError, match="layout='tree'"):
        ckptstore.open("memory://layout").load(layout="tree")  # type: ignore[arg-type]
