"""One rank of three: two save DTensors, three load them, cut in another way. ``python -m ... STORE RANK PORT``."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import ckptstore

SHAPES = {"rows": (7, 3), "columns": (4, 10), "narrow": (2, 5), "half": (6, 4), "copied": (3, 3)}


def whole(name: str) -> torch.Tensor:
    """The whole value of a tensor."""
    made = torch.arange(1, 1 + int(torch.tensor(SHAPES[name]).prod())).reshape(SHAPES[name]) / len(name)
    return made.to(torch.bfloat16) if name == "half" else made


def spread(mesh: DeviceMesh, placements: dict[str, Any], *, empty: bool) -> dict[str, Any]:
    """The tensors as DTensors; `empty`: zeros."""
    made = {name: whole(name) for name in SHAPES}
    return {
        name: distribute_tensor(torch.zeros_like(one) if empty else one, mesh, [placements[name]])
        for name, one in made.items()
    }


SAVED = {"rows": Shard(0), "columns": Shard(1), "narrow": Shard(0), "half": Shard(1), "copied": Replicate()}
LOADED = {"rows": Shard(1), "columns": Shard(1), "narrow": Shard(0), "half": Replicate(), "copied": Shard(0)}


def main(url: str, rank: int, port: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3)
    pair = dist.new_group([0, 1])
    savers, every = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [0, 1, 2])
    if rank < 2:
        state = {"model": spread(savers, SAVED, empty=False), "rank": rank, "step": 5}
        with ckptstore.open(url).writer(group=pair, poll_seconds=None) as writer:
            writer.save(state, 5)
    dist.barrier()
    store = ckptstore.open(url)
    target = {"model": spread(every, LOADED, empty=True), "rank": None, "step": None}
    found = store.load("latest", into=target, rank=rank)
    for name, tensor in target["model"].items():
        assert found["model"][name] is tensor
        assert torch.equal(tensor.full_tensor(), whole(name)), (rank, name)
    assert (found["rank"], found["step"]) == (rank % 2, 5)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
