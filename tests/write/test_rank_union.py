"""A checkpoint of many ranks as a process loads it that is none of them: all of it, in any order of keys."""

from __future__ import annotations

import json
import random
import tempfile
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file

import ckptstore
from ckptstore import DiffOptions, HiddenTensorsWarning, RankOptions, UnsupportedStateError, Update
from ckptstore.cli.main import cli
from ckptstore.errors import CkptError
from ckptstore.formats import optim
from ckptstore.formats.sources import NumpySource
from ckptstore.write.ranks.messages.key_value_store import Group
from tests.forms import short_or
from tests.write.rank_threads import as_ranks
from tools.golden.shard_stores import Piece, ShardStore

OPTIONS = RankOptions(timeout=120, per_rank=["rng", "rng.*"])


def full(value: int) -> np.ndarray[Any, Any]:
    return np.full(3, value, "<f4")


def saved(states: list[Any], url: str | Path | None = None) -> ckptstore.Store:
    """A store with one checkpoint of so many ranks."""
    place = url or f"memory://{uuid.uuid4().hex}"

    def work(group: Group) -> None:
        with ckptstore.open(place).writer(group=group, ranks=OPTIONS) as writer:
            writer.save(states[group.rank], 1)

    assert as_ranks(len(states), work) == [None] * len(states)
    return ckptstore.open(place)


def plain(state: Any) -> Any:
    """Comparable, whatever the order of keys."""
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(plain(element) for element in state)
    return state.tolist() if hasattr(state, "dtype") else state


CASES: dict[str, tuple[list[Any], Any]] = {
    "other order": (
        [{"a": full(1), "b": full(2), "stage0": full(3)}, {"b": full(2), "a": full(1), "stage1": full(4)}],
        {"a": full(1), "b": full(2), "stage0": full(3), "stage1": full(4)},
    ),
    "own before shared": (
        [{"a0": full(0), "b": full(2), "c": full(3)}, {"a1": full(1), "b": full(2), "c": full(3)}],
        {"a0": full(0), "b": full(2), "c": full(3), "a1": full(1)},
    ),
    "own between shared": (
        [{"b": full(2), "a0": full(0), "c": 3}, {"b": full(2), "a1": {"deep": full(1)}, "c": 3}],
        {"b": full(2), "a0": full(0), "a1": {"deep": full(1)}, "c": 3},
    ),
    "integer keys": (
        [{"state": {0: full(0), 1: full(1)}}, {"state": {2: full(2)}}, {"state": {}}],
        {"state": {0: full(0), 1: full(1), 2: full(2)}},
    ),
    "lists": ([{"l": [full(0)]}, {"l": [full(0), full(1)]}, {"l": []}], {"l": [full(0), full(1)]}),
    "tuples in lists": ([[(full(0),)], [(full(0), full(1)), full(2)]], [(full(0), full(1)), full(2)]),
    "none": ([{"head": None, "x": 1}, {"head": full(1), "x": 1}], {"head": full(1), "x": 1}),
    "own tensors": (
        [{"rng": full(0), "a": full(1), "b": 2}, {"b": 2, "a": full(1), "rng": full(9)}],
        {"rng": full(0), "a": full(1), "b": 2},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_way_to_a_state_without_a_rank_has_all_of_it(tmp_path: Path, name: str) -> None:
    states, union = CASES[name]
    store = saved(states, tmp_path / "store")
    assert plain(store.load(1)) == plain(union)
    for rank, state in enumerate(states):
        mine = store.load(1, rank=rank)
        assert plain(mine) == plain(state)
        if isinstance(state, dict):
            assert list(mine) == list(state)
    assert store.verify(deep=True).ok
    names = {one.name for one in store.inspect(1).tensors}
    assert names >= {tensor for tensor in store.tensors(1) if "@" not in tensor}
    store.export(1, tmp_path / "whole.safetensors")
    with safe_open(tmp_path / "whole.safetensors", framework="numpy") as file:
        assert set(file.keys()) == names
    assert {one for one, _ in store.read_tensors(1)} >= names
    for tensor in names:
        assert b"".join(data for _, data in store.chunks(1, tensor)) == store.read_tensor(1, tensor).tobytes()
        store.load(1, select=tensor)
    store.copy(tmp_path / "copy")
    assert plain(ckptstore.open(tmp_path / "copy").load(1)) == plain(union)
    assert {found.name for found in store.compare(1, 1)} == names


def numbers(state: Any) -> Iterator[int]:
    """The number that fills each tensor of a state: no two tensors have the same."""
    for member in state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ():
        yield from numbers(member)
    if hasattr(state, "dtype"):
        (value,) = set(state.tolist())
        yield int(value)


def ckpt(*words: object) -> str:
    """The output of the command."""
    found = CliRunner().invoke(cli, [str(word) for word in words], prog_name="ckpt")
    assert found.exit_code == 0, found.output
    return found.stdout


def exported(store: ckptstore.Store, folder: Path) -> dict[str, Any]:
    """Checkpoint 1 through each way out of the store, in Python and by the command: way -> state."""
    store.export(1, folder / "python.safetensors")
    ckpt("restore", store.url, 1, "--out", folder / "command.safetensors")
    states = {one: load_file(folder / one) for one in ("python.safetensors", "command.safetensors")}
    try:
        import torch
    except ImportError:
        return states
    store.export(1, folder / "python.pt")
    ckpt("restore", store.url, 1, "--out", folder / "command.pt")
    return states | {one: torch.load(folder / one, weights_only=True) for one in ("python.pt", "command.pt")}


@settings(max_examples=short_or(12, 60), deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 3))
def test_any_parts_of_a_state_in_any_order(seed: int, size: int) -> None:
    """Random states, real writers: a process that is not a rank loads, exports and shows the states of all ranks."""
    chance = random.Random(seed)
    unused = iter(range(1, 1000))

    def made(depth: int) -> Any:
        kind = chance.choice(["tensor", "tensor", "value", *(["dict", "integers", "list", "tuple"] if depth else [])])
        if kind == "tensor":
            return full(next(unused))
        if kind == "value":
            return chance.choice([None, 1, "text", 2.5])
        if kind in ("list", "tuple"):
            members = [made(depth - 1) for _ in range(chance.randrange(4))]
            return members if kind == "list" else tuple(members)
        keys = ["a", "b", "c", "stage"] if kind == "dict" else [0, 1, 2, "text"]
        return {key: made(depth - 1) for key in keys[: chance.randrange(5)]}

    def part(state: Any) -> Any:
        if isinstance(state, dict):
            keys = [key for key in state if chance.random() < 0.7]
            chance.shuffle(keys)
            return {key: part(state[key]) for key in keys}
        return type(state)(part(element) for element in state) if isinstance(state, list | tuple) else state

    def together(parts: list[Any]) -> Any:
        if isinstance(parts[0], dict):
            keys = dict.fromkeys(key for one in parts for key in one)
            return {key: together([one[key] for one in parts if key in one]) for key in keys}
        if isinstance(parts[0], list | tuple):
            return type(parts[0])(together(list(column)) for column in zip(*parts, strict=True))
        return parts[0]

    whole = {"always": full(0), **{key: made(3) for key in "xyz"}}
    states = [{"always": full(0)} | part(whole) for _ in range(size)]
    store, union = saved(states), together(states)
    assert plain(store.load(1)) == plain(union)
    for rank, state in enumerate(states):
        assert plain(store.load(1, rank=rank)) == plain(state)
    assert store.verify().ok
    expected = sorted(numbers(union))
    read = [np.frombuffer(store.read_tensor(1, name).tobytes(), "<f4") for name in store.tensors(1)]
    assert sorted(numbers(read)) == expected
    shown = {one["name"] for one in json.loads(ckpt("inspect", store.url, 1, "--json"))["tensors"]}
    assert shown == {one.name for one in store.inspect(1).tensors} == set(store.tensors(1))
    with tempfile.TemporaryDirectory() as folder:
        for way, state in exported(store, Path(folder)).items():
            assert sorted(numbers(state)) == expected, way
            assert set(state) == shown if way.endswith("safetensors") else plain(state) == plain(union), way


def test_values_are_compared_whatever_the_order_of_keys() -> None:
    url = f"memory://{uuid.uuid4().hex}"

    def work(group: Group) -> None:
        with ckptstore.open(url).writer(group=group, ranks=OPTIONS) as writer:
            for step in (1, 2, 3):
                own = {"a": {"lr": 0.1 * step}, "seed": group.rank + (step == 3), f"own{group.rank}": 5}
                keys = list(own) if group.rank == 0 or step == 1 else reversed(own)
                writer.save({key: own[key] for key in keys} | {"w": full(1)}, step)

    assert as_ranks(2, work) == [None] * 2
    store = ckptstore.open(url)
    told = [(one.path, one.status, one.before, one.after) for one in store.compare_state(1, 2)]
    assert told == [("a.lr", "changed", 0.1, 0.2)]
    told = [(one.path, one.status) for one in store.compare_state(2, 3)]
    assert told == [("a.lr", "changed"), ("seed.rank 0", "changed"), ("seed.rank 1", "changed")]


def test_a_tensor_in_whose_place_another_rank_has_another_thing_is_refused(tmp_path: Path) -> None:
    def work(group: Group) -> list[str]:
        found = []
        with ckptstore.open(tmp_path).writer(group=group, ranks=OPTIONS) as writer:
            for step in (1, 2):
                own = full(1) if step == 2 else [{"x": full(1)}, [full(1)]][group.rank]
                try:
                    writer.save({"w": own, "always": full(0)}, step)
                    found.append("saved")
                except (UnsupportedStateError, CkptError) as error:
                    found.append(str(error))
        return found

    (first, *rest), other = as_ranks(2, work)
    assert "tensor 'w.0' of rank 1 is where another rank has something of another kind" in first
    assert "put it under a key of its own" in first
    assert first in other[0]
    assert rest == other[1:] == ["saved"]
    assert [info.step for info in ckptstore.open(tmp_path).checkpoints()] == [2]


def test_a_state_that_no_process_could_load_is_refused(tmp_path: Path) -> None:
    """One tensor cannot be a torch tensor at one place and an array at another."""
    torch = pytest.importorskip("torch")

    def work(group: Group) -> str:
        one = torch.ones(3) if group.rank else np.ones(3, "<f4")
        with ckptstore.open(tmp_path).writer(group=group, ranks=OPTIONS) as writer:
            try:
                writer.save({"a": one, "b": one} if group.rank else {"a": one}, 1)
            except CkptError as error:
                return str(error)
        return "saved"

    for said in as_ranks(2, work):
        assert "the states of the ranks cannot be one state" in said


def test_a_tensor_too_deep_for_the_union_is_refused_also_when_ranks_differ_later(tmp_path: Path) -> None:
    """If all ranks have the same, nothing has to be taken apart, and a state may have 200 levels."""

    def state(seed: int) -> Any:
        node: Any = {1: full(1)}  # three levels
        for _ in range(196):
            node = {"a": node}
        return {"deep": node, "seed": seed}

    def work(group: Group) -> str:
        with ckptstore.open(tmp_path).writer(group=group, ranks=OPTIONS) as writer:
            writer.save(state(0), 1)
            try:
                writer.save(state(group.rank), 2)
            except CkptError as error:
                return str(error)
        return "saved"

    for said in as_ranks(2, work):
        assert "nested 200 deep or deeper in a state that differs over the ranks" in str(said)
    store = ckptstore.open(tmp_path)
    assert [info.step for info in store.checkpoints()] == [1]
    store.load(1)


def test_verify_tells_of_a_tensor_that_no_place_shows() -> None:
    """As earlier writers stored it. Nothing is lost: each rank loads its own."""
    made = ShardStore()
    tree = {"$ranks": [[0, 1], [{"w": {"x": {"$a": "w.x"}}}, {"w": [{"$a": "w.0"}, {"$a": "w.1"}]}]]}
    made.commit(1, [[Piece("w.x", full(1)), Piece("w.0", full(2)), Piece("w.1", full(3))]], tree)
    report = made.store.verify(deep=True)
    (damage,) = report.damage
    assert "checkpoint 1@1: ranks have values of different kinds at tensor 'w.0'" in damage.what
    assert "(as 1 more)" in damage.what
    assert (damage.checkpoints, report.restorable, report.lost) == ((), ("1@1",), ())
    with pytest.warns(HiddenTensorsWarning):
        assert plain(made.store.load(1)) == {"w": {"x": [1.0] * 3}}
    assert plain(made.store.load(1, rank=1)) == {"w": [[2.0] * 3, [3.0] * 3]}
    assert made.store.read_tensor(1, "w.0").tobytes() == full(2).tobytes()


def test_each_way_to_a_state_without_a_rank_warns_of_tensors_that_it_lacks(tmp_path: Path) -> None:
    """A tensor on rank 0, a dict with tensors on rank 1, again a tensor on rank 2: as earlier writers stored them."""
    made = ShardStore()
    tree = {"$ranks": [[0, 1, 0], [{"w": {"$a": "w"}}, {"w": {"a": {"$a": "w.a"}, "b": {"$a": "w.b"}}}]]}
    made.commit(1, [[Piece("w", full(1)), Piece("w.a", full(2)), Piece("w.b", full(3))]], tree)
    store = made.store
    expected = r"checkpoint 1@1: left out, .*: 'w\.a' \(rank 1\), 'w\.b' \(rank 1\)\. load\(rank=\)"
    into = {"w": np.zeros(3, "<f4")}
    for read in (
        lambda: store.load(1),
        lambda: store.load(1, into=into),
        lambda: store.load(1, select="w"),
        lambda: store.inspect(1),
        lambda: store.compare(1, 1),
        lambda: store.export(1, tmp_path / "whole.safetensors"),
    ):
        with pytest.warns(HiddenTensorsWarning, match=expected) as caught:
            read()
        assert {one.filename for one in caught} == {__file__}
    assert into["w"].tobytes() == full(1).tobytes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plain(store.load(1, rank=1)) == {"w": {"a": [2.0] * 3, "b": [3.0] * 3}}
        assert plain(store.load(1, rank=2)) == {"w": [1.0] * 3}
        assert store.read_tensor(1, "w.b").tobytes() == full(3).tobytes()


def test_a_warning_names_five_tensors_and_counts_the_others() -> None:
    made = ShardStore()
    names = [f"w.{number}" for number in range(7)]
    tree = {"$ranks": [[0, 1], [{"w": {"x": {"$a": "w.x"}}}, {"w": [{"$a": name} for name in names]}]]}
    made.commit(1, [[Piece("w.x", full(1)), *(Piece(name, full(2)) for name in names)]], tree)
    with pytest.warns(HiddenTensorsWarning, match=r"'w\.4' \(rank 1\) and 2 more tensors\."):
        made.store.load(1)


@pytest.mark.parametrize("size", [2, 3])
def test_tied_tensors_in_another_order_are_one_tensor(tmp_path: Path, size: int) -> None:
    """Stored once, compared as replicas, and with its optimizer's update."""
    rule = optim.SGD(momentum=0.9)
    states, gradient = [full(1), np.zeros(3, "<f4")], full(2)

    def work(group: Group) -> list[str | None]:
        w, m = (array.copy() for array in states)
        with ckptstore.open(tmp_path).writer(group=group, ranks=OPTIONS, diffs=DiffOptions()) as writer:
            kinds = []
            for step in (1, 2, 3):
                if step > 1:
                    optim.advance(rule.rule(optim.Step(count=step, lr=0.1)), [w, m], gradient)
                named = {"head": w, "emb": w, "rng": (own := full(group.rank)), "alias": own, "m": m}
                keys = list(named) if group.rank == 0 else reversed(named)
                first = "head" if group.rank == 0 else "emb"
                updates = [Update((first, "m"), rule, optim.Step(count=step, lr=0.1), NumpySource(gradient))]
                info = writer.save({key: named[key] for key in keys}, step, updates=updates)
                kinds.append(info.kind)
            return kinds

    assert as_ranks(size, work) == [["full", "gradient", "gradient"]] * size
    store = ckptstore.open(tmp_path)
    for step in (1, 2, 3):
        assert {name.split("@")[0] for name in store.tensors(step)} == {"emb", "m", "rng", "alias"}
        assert len(store.tensors(step)) == 2 + size
        whole = store.load(step)
        assert whole["head"] is whole["emb"]
        assert set(store.load(step, select="head")) == {"head"}
        assert set(store.load(step, select="emb")) == {"emb"}
    held = [doc.tensors[3] for _, doc in store.describe(3) if 3 in doc.tensors]
    assert {entry.name: entry.codec for tensors in held for entry in tensors.values()}["emb"] == "step"
    assert store.verify(deep=True).ok


@pytest.mark.parametrize("tied", [0, 1, 2])
@pytest.mark.parametrize("alike", [True, False])
def test_a_tensor_that_is_tied_on_one_rank_only(tied: int, alike: bool) -> None:
    """Each rank has its own ties and bits again. The others' second tensor is stored beside the tied one, once."""
    one, other = full(1), full(1 if alike else 2)

    def state(rank: int) -> dict[str, Any]:
        return {"emb": one, "head": one if rank == tied else other, "z": full(3)}

    store = saved([state(rank) for rank in range(3)])
    assert set(store.tensors(1)) == {"emb", "head", "z"}
    assert store.verify(deep=True).ok
    for rank in (None, 0, 1, 2):
        found, expected = store.load(1, rank=rank), state(rank or 0)
        assert plain(found) == plain(expected)
        assert (found["head"] is found["emb"]) == ((rank or 0) == tied)
        into = {name: np.zeros(3, "<f4") for name in expected}
        if found["head"] is found["emb"]:
            into["head"] = into["emb"]
        store.load(1, rank=rank, into=into)
        assert plain(into) == plain(expected)
