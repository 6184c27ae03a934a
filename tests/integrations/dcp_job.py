"""Ranks that save and load through torch.distributed.checkpoint, as processes of one gloo group.

    python -m tests.integrations.dcp_job PORT RANK SIZE FOLDER SCENARIO [SCENARIO ...]

A scenario asserts its own expectations; files for later checks are left in FOLDER.
"""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.utils import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ckptstore
from ckptstore import DiffOptions
from ckptstore.integrations.dcp import CkptstoreReader, CkptstoreWriter
from ckptstore.training import OptimizerStep

STEPS = 3
PLACEMENTS: tuple[Any, ...] = ([Shard(0)], [Shard(1)], [Replicate()])
GRIDS: tuple[Any, ...] = (
    [Replicate(), Replicate()],
    [Replicate(), Shard(0)],
    [Shard(0), Replicate()],
    [Shard(0), Shard(1)],
    [Shard(1), Shard(0)],
)


class Net(nn.Module):
    """Rows that the ranks do not divide, and fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 37)
        self.norm = nn.BatchNorm1d(37)
        self.last = nn.Linear(37, 1)

    def forward(self, x: Any) -> Any:
        return self.last(self.norm(self.first(x)))


class Script:
    """A model in shards and its optimizer, as a DCP script has them."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Net()
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.loss = 0.0

    def train(self, step: int, *, zero_grad: bool = True) -> None:
        inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        loss = self.model(inputs).square().mean()
        loss.backward()
        self.optimizer.step()
        if zero_grad:
            self.optimizer.zero_grad()
        self.loss = float(loss)

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "losses": [self.loss, None], "note": "x"}

    def load(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def same(one: Any, other: Any, path: str = "") -> None:
    """Assert that two nested states are equal, bit for bit."""
    if isinstance(one, Mapping):
        assert one.keys() == other.keys(), path
        for key in one:
            same(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, torch.Tensor):
        assert torch.equal(local(one), local(other)), path
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), path
        for number, (mine, its) in enumerate(zip(one, other, strict=True)):
            same(mine, its, f"{path}.{number}")
    else:
        assert one == other, path


def whole(state: Mapping[str, Any]) -> dict[str, Any]:
    """Every tensor in full, by name."""
    return {name: (one.full_tensor() if isinstance(one, DTensor) else one).clone() for name, one in state.items()}


def saved(folder: Path) -> None:
    """Three saves: fulls and deltas of one term; each loads as it was."""
    script, states = Script(), []
    for step in range(1, STEPS + 1):
        script.train(step)
        writer = CkptstoreWriter(folder / "saved", step, deltas=2, keep=[])
        dcp.save(script.state(), storage_writer=writer)
        assert writer.saved is not None
        states.append(whole(script.state()["model"]))
    if dist.get_rank() == 0:
        torch.save(states, folder / "saved.pt")
        store = ckptstore.open(folder / "saved")
        infos = store.checkpoints()
        assert [info.kind for info in infos] == ["full", "delta", "full"], infos
        assert len({info.term for info in infos}) == 1
        assert store.verify(deep=True).ok
    dist.barrier()
    other = Script()
    other.train(9)
    found = other.state()
    dcp.load(found, storage_reader=CkptstoreReader(folder / "saved"))
    other.load(found)
    same(other.state()["model"], script.state()["model"])
    same(other.state()["optimizer"], script.state()["optimizer"])
    assert found["losses"] == [script.loss, None]
    script.train(10)
    other.train(10)
    assert script.loss == other.loss


def loaded(folder: Path) -> None:
    """Any number of ranks reads what two ranks saved."""
    states = torch.load(folder / "saved.pt")
    for step in range(1, STEPS + 1):
        script = Script()
        script.train(9)  # its optimizer has states
        found = script.state()
        dcp.load(found, checkpoint_id=f"{folder}/saved/step-{step}", storage_reader=CkptstoreReader())
        same(whole(found["model"]), states[step - 1])


def stepped(folder: Path) -> None:
    """Step diffs of each rank's shards, by `dcp.save` and by `async_save`, whatever training does to the tensors."""
    beside = dist.new_group(backend="gloo")
    stored = []
    for place, group in (("stepped", dist.group.WORLD), ("stepped-later", beside)):
        script, states = Script(), {}
        for step in range(1, STEPS + 2):
            script.train(step, zero_grad=False)
            updates = OptimizerStep(script.optimizer)
            options: dict[str, Any] = {"diffs": DiffOptions(full_every=100), "group": group}
            writer = CkptstoreWriter(folder / place, step, updates=updates, **options)
            states[step] = whole(script.state()["model"])
            if group is not beside:
                dcp.save(script.state(), storage_writer=writer)
            else:
                pending: Any = dcp.async_save(script.state(), storage_writer=writer, process_group=group)
                _disturbed(script.model, pending.result)
            script.optimizer.zero_grad()
        store = ckptstore.open(folder / place)
        assert [one.kind for one in store.checkpoints()] == ["full", *["gradient"] * STEPS]
        stored.append([one.stored for one in store.checkpoints()])
        found = script.state()
        for step, wanted in states.items():
            dcp.load(found, storage_reader=CkptstoreReader(folder / place, step))
            same(whole(found["model"]), wanted)
    assert stored[0] == stored[1], "async_save did not find the updates, or not the gradients"


@torch.no_grad()
def _disturbed(model: nn.Module, wait: Callable[[], object]) -> None:
    """Wait while parameters and gradients have other values."""
    before = [one.clone() for one in model.parameters()]
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.fill_(7.0)
        parameter.add_(1.0)
    wait()
    for parameter, value in zip(model.parameters(), before, strict=True):
        parameter.copy_(value)


def placed(folder: Path) -> None:
    """A tensor saved in one placement loads into every other, on a line and on a grid of ranks."""
    size = dist.get_world_size()
    meshes = [(init_device_mesh("cpu", (size,)), PLACEMENTS)]
    if size >= 4:
        meshes.append((init_device_mesh("cpu", (2, size // 2)), GRIDS))
    tensor, number = torch.arange(7 * 9, dtype=torch.float32).view(7, 9), 0
    for mesh, placements in meshes:
        for before in placements:
            number += 1
            state = {"t": distribute_tensor(tensor, mesh, before), "n": number}
            dcp.save(state, storage_writer=CkptstoreWriter(folder / "placed", number))
            for other, later in meshes:
                for after in later:
                    found = {"t": distribute_tensor(torch.zeros(7, 9), other, after), "n": 0}
                    dcp.load(found, storage_reader=CkptstoreReader(folder / "placed", number))
                    assert torch.equal(found["t"].full_tensor(), tensor), (before, after)
                    assert found["n"] == number


def pieces(folder: Path) -> None:
    """Ranks whose boxes are not one box together: the first and last rows of rank 0."""
    rank, size = dist.get_rank(), dist.get_world_size()
    places = [f"rank:{one}" for one in (*range(size), *reversed(range(size)))]
    spec = ChunkShardingSpec(dim=0, placements=places)
    chance = torch.Generator().manual_seed(rank)
    saved = sharded_tensor.empty(spec, 13, 5)
    for shard in saved.local_shards():
        shard.tensor.copy_(torch.randn(shard.tensor.shape, generator=chance))
    dcp.save({"t": saved, "n": 1}, storage_writer=CkptstoreWriter(folder / "pieces", 1))
    whole = torch.zeros(13, 5)
    dcp.load({"t": whole}, storage_reader=CkptstoreReader(folder / "pieces"))
    for shard in saved.local_shards():
        first, rows = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
        assert torch.equal(whole[first : first + rows], shard.tensor)
    other = sharded_tensor.zeros(ChunkShardingSpec(dim=1, placements=places[:size]), 13, 5)
    dcp.load({"t": other}, storage_reader=CkptstoreReader(folder / "pieces"))
    for shard in other.local_shards():
        first, columns = shard.metadata.shard_offsets[1], shard.metadata.shard_sizes[1]
        assert torch.equal(whole[:, first : first + columns], shard.tensor)


def asynchronous(folder: Path) -> None:
    """async_save by a thread and by a process: the state of the call is saved, whatever training does then.

    DCP's collectives need a group of their own, because training's run at the same time.
    """
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType  # not in torch 2.6

    beside = dist.new_group(backend="gloo")
    for number, kind in enumerate((AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS)):
        group: Any = {"group": beside} if kind is AsyncCheckpointerType.THREAD else {}  # a process makes its own
        script = Script()
        script.train(1)
        before = whole(script.state()["model"])
        pending: Any = dcp.async_save(
            script.state(),
            storage_writer=CkptstoreWriter(folder / f"later-{number}", 5, **group),
            process_group=beside,
            async_checkpointer_type=kind,
        )
        script.train(2)
        pending.result()
        found = script.state()
        dcp.load(found, storage_reader=CkptstoreReader(folder / f"later-{number}"))
        same(whole(found["model"]), before)


def grown(folder: Path) -> None:
    """Tensors that appear and go in the plan of one rank alone: DCP gives each to the rank with the fewest bytes."""
    script = Script()
    script.train(1)
    for step, names in enumerate(([], ["a"], ["a", "b"], ["b"], []), 1):
        state = {**script.state(), "more": {name: torch.full((50,), float(step)) for name in names}}
        dcp.save(state, storage_writer=CkptstoreWriter(folder / "grown", step))
        found = {"more": {name: torch.zeros(50) for name in names}}
        dcp.load(found, storage_reader=CkptstoreReader(folder / "grown", step))
        same(found["more"], state["more"])


def cached(folder: Path) -> None:
    """Plans that the planner keeps between saves."""
    script = Script()
    for step in range(1, 4):
        script.train(step)
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(script.state(), planner=planner, storage_writer=CkptstoreWriter(folder / "cached", step))
        found = script.state()
        dcp.load(found, storage_reader=CkptstoreReader(folder / "cached"))
        same(whole(found["model"]), whole(script.state()["model"]))


class _Failing(DefaultSavePlanner):
    """Fails as it resolves a value on the last rank."""

    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == dist.get_world_size() - 1:
            raise ValueError("no memory for that")
        return super().resolve_data(write_item)


def failing(folder: Path) -> None:
    """A rank whose planner fails: an exception on every rank, no checkpoint, and the next save works."""
    script = Script()
    script.train(1)
    with pytest.raises(CheckpointException, match="no memory for that"):
        dcp.save(script.state(), planner=_Failing(), storage_writer=CkptstoreWriter(folder / "failing", 1))
    assert ckptstore.open(folder / "failing").latest_step() is None
    dcp.save(script.state(), storage_writer=CkptstoreWriter(folder / "failing", 2))
    assert ckptstore.open(folder / "failing").latest_step() == 2


def blobs(folder: Path) -> None:
    """What a state cannot hold is a pickle of DCP's, which only a reader that asks for it gets."""
    state = {"io": io.BytesIO(b"abc"), "odd": [complex], "t": torch.ones(3)}
    dcp.save(state, storage_writer=CkptstoreWriter(folder / "blobs", 1))
    found: dict[str, Any] = {"t": torch.zeros(3)}
    dcp.load(found, storage_reader=CkptstoreReader(folder / "blobs"))
    assert torch.equal(found["t"], state["t"])
    found = {"io": io.BytesIO(), "odd": None, "t": torch.zeros(3)}
    with pytest.raises(CheckpointException, match="unpickle=True"):
        dcp.load(found, storage_reader=CkptstoreReader(folder / "blobs"))
    dcp.load(found, storage_reader=CkptstoreReader(folder / "blobs", unpickle=True))
    assert found["io"].getvalue() == b"abc"
    assert found["odd"] == [complex]


def foreign(folder: Path) -> None:
    """torch's own writer: tensors in boxes of rows and columns, and replicated ones."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(7 * 4, dtype=torch.float32).view(7, 4)
    places = {"rows": Shard(0), "columns": Shard(1), "copy": Replicate()}
    state = {name: distribute_tensor(whole, mesh, [place]) for name, place in places.items()}
    dcp.save({**state, "one": torch.ones(3), "n": 5}, checkpoint_id=folder / "foreign")


def exported(folder: Path) -> None:
    """A checkpoint of the ranks as a folder of DCP: torch's own reader fills models in shards, in any placement."""
    script = Script()
    script.train(1)
    script.train(2)
    before = script.state()
    dcp.save(before, storage_writer=CkptstoreWriter(folder / "exporting", 2))
    mesh, size = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_world_size()
    grid = torch.arange(7 * 9, dtype=torch.float32).view(7, 9)
    spec = ChunkShardingSpec(dim=0, placements=[f"rank:{one}" for one in (*range(size), *reversed(range(size)))])
    pieced = sharded_tensor.empty(spec, 13, 5)
    for shard in pieced.local_shards():
        shard.tensor.copy_(torch.arange(float(shard.tensor.numel())).view_as(shard.tensor) + dist.get_rank())
    state = {"rows": distribute_tensor(grid, mesh, [Shard(0)]), "columns": distribute_tensor(grid, mesh, [Shard(1)])}
    state |= {"copy": distribute_tensor(grid, mesh, [Replicate()]), "pieced": pieced, "odd": [complex], "n": 5}
    dcp.save(state, storage_writer=CkptstoreWriter(folder / "placing", 1))
    with ckptstore.open(folder / "native").writer(group=dist.group.WORLD) as writer:
        writer.save({"model": before["model"], "step": 3}, 3)
    if dist.get_rank() == 0:
        for name in ("exporting", "placing", "native"):
            ckptstore.open(folder / name).export("latest", folder / f"{name}-dcp", format="dcp")
        described = dcp.FileSystemReader(folder / "placing-dcp").read_metadata().state_dict_metadata
        chunks = {name: len(one.chunks) for name, one in described.items() if hasattr(one, "chunks")}
        assert chunks == {"rows": size, "columns": size, "copy": 1, "pieced": 2 * size}, chunks
        described = dcp.FileSystemReader(folder / "native-dcp").read_metadata().state_dict_metadata
        assert len(described["model.first.weight"].chunks) == size
    dist.barrier()
    other = Script()
    other.train(9)
    found = other.state()
    dcp.load(found, storage_reader=dcp.FileSystemReader(folder / "exporting-dcp"))
    same(found, before)
    native: dict[str, Any] = {"model": Script().state()["model"], "step": 0}
    dcp.load(native, storage_reader=dcp.FileSystemReader(folder / "native-dcp"))
    same(native, {"model": before["model"], "step": 3})
    other.load(found)
    script.train(10)
    other.train(10)
    assert script.loss == other.loss
    placed: dict[str, Any] = {name: distribute_tensor(torch.zeros(7, 9), mesh, [Shard(1)]) for name in ("rows", "copy")}
    placed |= {"columns": torch.zeros(7, 9), "pieced": torch.zeros(13, 5), "odd": None, "n": 0}
    dcp.load(placed, storage_reader=dcp.FileSystemReader(folder / "placing-dcp"))
    for name in ("rows", "copy"):
        assert torch.equal(placed[name].full_tensor(), grid)
    assert torch.equal(placed["columns"], grid)
    assert (placed["odd"], placed["n"]) == ([complex], 5)
    for shard in pieced.local_shards():
        first, rows = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
        assert torch.equal(placed["pieced"][first : first + rows], shard.tensor)


def returned(folder: Path) -> None:
    """A folder that torch's own writer made, imported and exported: model, optimizer and the next loss are the same."""
    script = Script()
    script.train(1)
    script.train(2)
    dcp.save(script.state(), checkpoint_id=folder / "step-2")
    if dist.get_rank() == 0:
        store = ckptstore.open(folder / "returning")
        store.import_files([folder / "step-2"])
        store.export(2, folder / "returned", format="dcp")
    dist.barrier()
    other = Script()
    other.train(9)
    found = other.state()
    dcp.load(found, storage_reader=dcp.FileSystemReader(folder / "returned"))
    same(found, script.state())
    other.load(found)
    script.train(3)
    other.train(3)
    assert script.loss == other.loss


def consolidated(folder: Path) -> None:
    """A model of transformers in shards, saved by the ranks through DCP."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=101, n_positions=16))
    if dist.get_rank() == 0:
        model.save_pretrained(folder / "pretrained")
        torch.save(model.state_dict(), folder / "pretrained.pt")
    fully_shard(model)
    dcp.save({"model": get_state_dict(model, [])[0], "step": 1}, storage_writer=CkptstoreWriter(folder / "hf", 1))
    dcp.save({"model": get_state_dict(model, [])[0], "step": 1}, checkpoint_id=folder / "hf-1")


def main() -> None:
    port, rank, size, folder, *names = sys.argv[1:]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=rank, WORLD_SIZE=size)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    warnings.simplefilter("error", ckptstore.UnexplainedStepWarning)
    dist.init_process_group("gloo", rank=int(rank), world_size=int(size))
    listed = (
        saved,
        loaded,
        stepped,
        placed,
        asynchronous,
        cached,
        failing,
        blobs,
        foreign,
        pieces,
        grown,
        exported,
        returned,
        consolidated,
    )
    scenarios: dict[str, Callable[[Path], None]] = {one.__name__: one for one in listed}
    for name in names:
        scenarios[name](Path(folder))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
