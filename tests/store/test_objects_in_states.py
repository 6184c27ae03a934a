"""States with objects through everything that a store does: loads, deltas, step diffs, ranks, the command, exports."""

from __future__ import annotations

import argparse
import datetime
import enum
from collections import defaultdict, deque, namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import ckptstore
from ckptstore.cli.main import cli
from ckptstore.errors import UnsupportedStateError
from ckptstore.exchange.import_files import import_files
from ckptstore.formats.states.registered_types import forget
from ckptstore.write.policy.delta_options import DeltaOptions
from tests.write.rank_threads import as_ranks

Pair = namedtuple("Pair", "left right")
pytestmark = pytest.mark.filterwarnings("ignore:Sparse")


class Phase(enum.Enum):
    WARM = "warm"


class Scaled:
    def __init__(self, tensor: torch.Tensor, scale: float) -> None:
        self.tensor, self.scale = tensor, scale


class Halves(torch.Tensor):
    """A tensor made of others, as those of torchao."""

    low: torch.Tensor
    high: torch.Tensor

    @classmethod
    def of(cls, low: torch.Tensor, high: torch.Tensor) -> Halves:
        made = torch.empty(low.shape).as_subclass(cls)
        made.low, made.high = low, high
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["low", "high"], {"why": "test", "dtype": torch.float32}

    @classmethod
    def __tensor_unflatten__(cls, tensors: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Halves:
        assert (context, size, stride) == ({"why": "test", "dtype": torch.float32}, (3,), (1,))
        return cls.of(tensors["low"], tensors["high"])


@pytest.fixture(autouse=True)
def unregistered() -> Iterator[None]:
    yield
    for one in (Scaled, Halves, Phase):
        forget(one)


def state_at(step: int) -> dict[str, Any]:
    rng = torch.Generator().manual_seed(step)
    dense = torch.randn(40, 40, generator=rng)
    dense[dense < 1.5] = 0
    return {
        "args": argparse.Namespace(lr=0.1, step=step, out=Path("/out"), when=datetime.datetime(2026, 1, 1, step)),
        "weights": torch.arange(50_000, dtype=torch.float32) + step * 1e-3,
        "history": deque([torch.full((300,), float(step)), step], 4),
        "pair": Pair(torch.ones(2000) * step, None),
        "counts": defaultdict(int, {"a": step}),
        "coo": dense.to_sparse().coalesce(),
        "csr": dense.to_sparse_csr(),
        "bsr": dense.to_sparse_bsr((4, 4)),
        "csc": dense.to_sparse_csc(),
        "bsc": dense.to_sparse_bsc((4, 4)),
        "torch": rng,
        "numpy": np.random.default_rng(step),
        "old": np.random.RandomState(step),
        "words": np.array(["a", "bc" * step]),
        "phase": Phase.WARM,
    }


def check(found: dict[str, Any], step: int) -> None:
    wanted = state_at(step)
    assert list(found) == list(wanted)
    assert found["args"] == wanted["args"]
    assert torch.equal(found["weights"], wanted["weights"])
    assert found["history"].maxlen == 4
    assert torch.equal(found["history"][0], wanted["history"][0])
    assert torch.equal(found["pair"].left, wanted["pair"].left)
    assert found["counts"] == wanted["counts"]
    assert found["counts"]["new"] == 0
    for name in ("coo", "csr", "bsr", "csc", "bsc"):
        assert found[name].layout is wanted[name].layout
        assert torch.equal(found[name].to_dense(), wanted[name].to_dense())
    assert torch.equal(torch.rand(9, generator=found["torch"]), torch.rand(9, generator=wanted["torch"]))
    assert found["numpy"].random(9).tolist() == wanted["numpy"].random(9).tolist()
    assert found["old"].normal(size=9).tolist() == wanted["old"].normal(size=9).tolist()
    assert found["words"].dtype == wanted["words"].dtype
    assert found["words"].tolist() == wanted["words"].tolist()
    assert found["phase"].value == "warm"


@pytest.mark.parametrize("deltas", [None, DeltaOptions(interval=3)])
def test_every_kind_through_fulls_and_deltas(tmp_path: Path, deltas: Any) -> None:
    store = ckptstore.open(tmp_path / "run")
    with store.writer(deltas=deltas) as writer:
        for step in range(1, 6):
            writer.save(state_at(step), step=step)
    if deltas:
        assert {one.kind for one in store.checkpoints()} == {"full", "delta"}
    for step in range(1, 6):
        check(store.load(step), step)
    assert store.verify().ok


def test_loaded_and_saved_again_the_state_hash_is_the_same(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "run")
    with store.writer() as writer:
        writer.save(state_at(1), step=1)
        writer.save(store.load(1), step=2)
    assert store.checkpoint(1).state == store.checkpoint(2).state


def test_with_numpy_what_needs_torch_is_parts(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "run")
    with store.writer() as writer:
        writer.save(state_at(1), step=1)
    found = store.load(framework="numpy")
    assert found["coo"].kind == "torch.sparse"
    assert found["torch"].kind == "torch.generator"
    assert found["numpy"].random() == state_at(1)["numpy"].random()
    with store.writer(parent="latest") as writer:
        writer.save({name: found[name] for name in ("numpy", "words", "args")}, step=2)
    assert store.load(2)["args"] == state_at(1)["args"]


def test_selections_and_into(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "run")
    with store.writer() as writer:
        writer.save(state_at(1), step=1)
    found = store.load(select=["weights", "pair.*", "coo.values"])
    assert torch.equal(found["pair"].left, state_at(1)["pair"].left)
    assert list(found["coo"]) == ["size", "values"]
    assert not {"csr", "torch", "old", "words"} & found.keys()
    target = state_at(2)
    target["csr"] = target["csc"] = target["bsr"] = target["bsc"] = target["coo"] = 0
    small = {name: one for name, one in state_at(1).items() if name not in ("csr", "csc", "bsr", "bsc", "coo", "words")}
    with store.writer(parent="latest") as writer:
        writer.save(small, step=2)
    into = {name: one for name, one in state_at(2).items() if name in small}
    found = store.load(2, into=into)
    assert found["history"][0] is into["history"][0]
    assert into["pair"].left.tolist() == small["pair"].left.tolist()
    assert torch.equal(torch.rand(5, generator=found["torch"]), torch.rand(5, generator=state_at(1)["torch"]))


def test_ranks_save_objects_together(tmp_path: Path) -> None:
    url = tmp_path / "run"

    def work(group: Any) -> None:
        with ckptstore.open(url).writer(group=group) as writer:
            state = {"args": argparse.Namespace(lr=0.1, rank=group.rank), "rng": np.random.default_rng(group.rank)}
            writer.save({"w": np.arange(9), "seen": deque([group.rank]), **state}, step=1)

    for error in as_ranks(2, work):
        assert error is None
    store = ckptstore.open(url)
    for rank in (0, 1):
        found = store.load(1, rank=rank)
        assert found["args"] == argparse.Namespace(lr=0.1, rank=rank)
        assert found["seen"] == deque([rank])
        assert found["rng"].random() == np.random.default_rng(rank).random()
    assert store.load(1)["args"].rank == 0
    assert store.verify().ok


def test_registered_types_and_tensor_subclasses(tmp_path: Path) -> None:
    ckptstore.register(Scaled, lambda one: [one.tensor, one.scale], lambda parts: Scaled(*parts), name="Scaled")
    ckptstore.register(Halves, name="Halves")
    store = ckptstore.open(tmp_path / "run")
    with store.writer() as writer:
        writer.save({"a": Scaled(torch.ones(4), 0.5), "b": Halves.of(torch.zeros(3), torch.ones(3))}, step=1)
    found = store.load()
    assert (found["a"].scale, found["a"].tensor.tolist()) == (0.5, [1.0] * 4)
    assert type(found["b"]) is Halves
    assert found["b"].high.tolist() == [1.0] * 3
    assert store.load(framework="numpy", select="b.*")["b"].kind == "registered"
    forget(Scaled)
    forget(Halves)
    with pytest.raises(UnsupportedStateError, match=r"'Scaled'.*ckptstore\.register"):
        store.load()
    parts = store.load(keep_foreign=True)
    assert parts["a"].name == "Scaled"
    with store.writer(parent="latest") as writer:
        writer.save(parts, step=2)
    assert store.checkpoint(1).state == store.checkpoint(2).state
    assert store.verify().ok
    shown = CliRunner().invoke(cli, ["diff", str(tmp_path / "run"), "1", "2"])
    assert shown.exit_code == 0
    with (
        pytest.raises(UnsupportedStateError, match=r"state\['b'\]: .*ckptstore\.register"),
        store.writer(parent="latest") as writer,
    ):
        writer.save({"b": Halves.of(torch.zeros(3), torch.ones(3))}, step=3)


def test_exports_keep_the_values_or_name_what_they_cannot(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "run")
    with store.writer() as writer:
        writer.save(state_at(1), step=1)
    store.export("latest", tmp_path / "step_1.safetensors")
    again = ckptstore.open(tmp_path / "again")
    import_files(again.journal, [tmp_path / "step_1.safetensors"])
    assert again.checkpoint(1).state == store.checkpoint(1).state
    check(again.load(1), 1)
    result = store.export("latest", tmp_path / "step_1.pt")
    assert {"args", "history", "coo", "numpy", "phase"} <= set(result.converted)
    found = torch.load(tmp_path / "step_1.pt", weights_only=True)
    assert found["args"]["lr"] == 0.1
    assert found["history"][1] == 1
    assert found["phase"] == "warm"


def test_the_command_prints_objects_readably(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "run")
    with store.writer() as writer:
        for step in (1, 2):
            writer.save(state_at(step), step=step)
    shown = CliRunner().invoke(cli, ["diff", str(tmp_path / "run"), "1", "2"]).output
    assert "args.step: 1 -> 2" in shown
    assert "datetime.datetime(2026, 1, 1, 1, 0) -> datetime.datetime(2026, 1, 1, 2, 0)" in shown
    assert "counts.a: 1 -> 2" in shown


def test_hostile_parts_of_torch_objects() -> None:
    from ckptstore.errors import FormatError
    from ckptstore.formats.states.state import unflatten
    from ckptstore.frameworks import bridge

    tensors = {"i": torch.tensor([[5]]), "u": torch.tensor([[1, 0]]), "v": torch.ones(1), "w": torch.ones(2)}
    tensors |= {"c": torch.tensor([0, 9]), "g": torch.zeros(9, dtype=torch.uint8), "s": torch.full((5056,), 255).byte()}

    def sparse(indices: str, values: str, name: str = "coo", size: Any = (3,)) -> Any:
        parts = {"size": list(size), "indices": {"$t": indices}, "values": {"$t": values}}
        return {"$object": ["torch.sparse", parts, name]}

    compressed = {"size": [1, 3], "outer": {"$t": "c"}, "inner": {"$t": "c"}, "values": {"$t": "w"}}
    trees = [
        sparse("i", "v"),
        sparse("u", "w"),  # not in order, so not coalesced
        sparse("i", "w"),
        sparse("i", "v", "csr"),
        sparse("i", "v", "os"),
        sparse("i", "v", size=(-1,)),
        sparse("i", "v", size=("a",)),
        {"$object": ["torch.sparse", compressed, "csr"]},
        {"$object": ["torch.sparse", [], "coo"]},
        {"$object": ["torch.generator", {"$t": "g"}, "cpu"]},
        {"$object": ["torch.generator", {"$t": "s"}, "cpu"]},
        {"$object": ["torch.generator", {"$t": "v"}, "cpu"]},
    ]
    make = bridge.object_maker(to_torch=True)
    for tree in trees:
        with pytest.raises(FormatError):
            unflatten(tree, lambda name, _: tensors[name], None, make)


def test_a_generator_of_a_device_that_is_not_here(tmp_path: Path) -> None:
    from ckptstore.formats.states.state import unflatten
    from ckptstore.frameworks import bridge

    for device in ("cuda:77", "abacus"):
        tree = {"$object": ["torch.generator", {"$t": "g"}, device]}
        found = unflatten(tree, lambda _name, _: torch.zeros(16), None, bridge.object_maker(to_torch=True))
        assert isinstance(found, ckptstore.Foreign)
