"""A job of torch ranks as processes: each runs the named scenarios in one process group.

    python -m tests.write.rank_job PORT RANK SIZE FOLDER SCENARIO [SCENARIO ...]

A scenario asserts its own expectations; files for later loads in one process are left in FOLDER.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ckptstore
from ckptstore import DivergedReplicasError, RankOptions, UnsupportedStateError, Update
from ckptstore.formats import optim
from ckptstore.formats.sources import NumpySource
from ckptstore.training import OptimizerStep

OPTIONS = RankOptions(timeout=60, per_rank="rng")


def model(seed: int = 0) -> nn.Sequential:
    """Tensor parallelism needs the 36; four ranks do not divide the 7."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(13, 36), nn.ReLU(), nn.Linear(36, 7, bias=False), nn.LayerNorm(7))


def trained(net: nn.Module, steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A few steps of AdamW, so that there is optimizer state."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for step in range(steps):
        torch.manual_seed(100 + step)
        net(torch.randn(5, 13)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer


def state_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """As a script would save it."""
    torch.manual_seed(dist.get_rank())
    return {
        "model": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng": torch.get_rng_state(),
        "rank": dist.get_rank(),
    }


def plain(value: Any) -> Any:
    """The same state with whole tensors. Every rank has to call this."""
    if isinstance(value, dict):
        return {key: plain(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(plain(member) for member in value)
    return value.full_tensor() if isinstance(value, DTensor) else value


def save_and_expect(folder: Path, name: str, state: dict[str, Any], **how: Any) -> None:
    """Save twice, the second time in the background beside collectives; keep the expected result of a load."""
    store = ckptstore.open(folder / name)
    with store.writer(group=dist.group.WORLD, ranks=OPTIONS, **how) as writer:
        assert writer.save(state, 1).step == 1
        pending = writer.save_async(state, 2)
        for _ in range(20):
            dist.all_reduce(torch.ones(10))
        assert pending.result().step == 2
    whole = plain(state)
    torch.save(whole, folder / f"{name}-{dist.get_rank()}.pt")


def ddp(folder: Path) -> None:
    """Replicas, wrapped."""
    net, optimizer = trained(nn.parallel.DistributedDataParallel(model()))
    save_and_expect(folder, "ddp", state_of(net, optimizer))


def fsdp(folder: Path) -> None:
    """FSDP2: rows over all ranks, uneven."""
    net = model()
    for layer in (net[0], net[2], net):
        fully_shard(layer)
    save_and_expect(folder, "fsdp", state_of(*trained(net)))


def fsdp_stored_bases(folder: Path) -> None:
    """The second save is a delta against shares that are read back from the store."""
    net = model()
    for layer in (net[0], net[2], net):
        fully_shard(layer)
    options = ckptstore.DeltaOptions(interval=1, memory=0)
    save_and_expect(folder, "fsdp_stored_bases", state_of(*trained(net)), deltas=options)


def hsdp(folder: Path) -> None:
    """Sharded over one dimension of the mesh, replicated over the other."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    net = model()
    fully_shard(net, mesh=mesh)
    save_and_expect(folder, "hsdp", state_of(*trained(net)))


def tensor_parallel(folder: Path) -> None:
    """Columns of one layer, rows of the next."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net = parallelize_module(model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    save_and_expect(folder, "tensor_parallel", state_of(*trained(net)))


def both(folder: Path) -> None:
    """FSDP2 over tensor parallelism: strided shards. Sizes that both divide; others are not boxes."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 8))
    net = parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in (net[0], net[2]):
        fully_shard(layer, mesh=mesh["dp"])
    save_and_expect(folder, "both", state_of(*trained(net)))


def placements(folder: Path) -> None:
    """DTensors by hand: every placement that has a box, and one that has none."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(1)
    whole = torch.randn(7, 5)
    state = {
        "rows": distribute_tensor(whole, mesh, [Shard(0)]),
        "columns": distribute_tensor(whole, mesh, [Shard(1)]),
        "alike": distribute_tensor(whole, mesh, [Replicate()]),
        "few": distribute_tensor(torch.arange(2), mesh, [Shard(0)]),
        "none": distribute_tensor(torch.empty(0, 3), mesh, [Shard(0)]),
        "bits": distribute_tensor(whole.to(torch.bfloat16), mesh, [Shard(0)]),
        "rank": dist.get_rank(),
    }
    save_and_expect(folder, "placements", state)
    partial = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    with (
        ckptstore.open(folder / "placements").writer(group=dist.group.WORLD, ranks=OPTIONS) as writer,
        pytest.raises(UnsupportedStateError, match="sum"),
    ):
        writer.save({"sum": partial}, 3)


def diverged(folder: Path) -> None:
    """One bit of one rank's weights is wrong; then one rank of a replicated shard."""
    net, optimizer = trained(nn.parallel.DistributedDataParallel(model()))
    with ckptstore.open(folder / "diverged").writer(group=dist.group.WORLD, ranks=OPTIONS) as writer:
        writer.save(state_of(net, optimizer), 1)
        if dist.get_rank() == 1:
            with torch.no_grad():
                net.module[2].weight.view(torch.int32)[3, 4] ^= 1 << 20
        pending = writer.save_async(state_of(net, optimizer), 2)
        with pytest.raises(DivergedReplicasError) as met:
            pending.result()
        assert (met.value.tensor, met.value.rank, met.value.step) == ("model.module.2.weight", 1, 2)
    assert ckptstore.open(folder / "diverged").latest_step() == 1


def stepwise(folder: Path, name: str, net: nn.Module) -> None:
    """Train, and save every step as a step diff; keep the expected result of each load."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    diffs = ckptstore.DiffOptions(full_every=6, batch=2)
    with ckptstore.open(folder / name).writer(group=dist.group.WORLD, ranks=OPTIONS, diffs=diffs) as writer:
        for step in range(1, 9):
            torch.manual_seed(step)
            net(torch.randn(5, 13)).square().mean().backward()
            optimizer.step()
            state = state_of(net, optimizer)
            pending = writer.save_async(state, step, updates=OptimizerStep(optimizer))
            whole = plain(state)  # collectives, beside the writer's work
            optimizer.zero_grad()
            if dist.get_rank() == 0:
                torch.save(whole, folder / f"{name}-step-{step}.pt")
        assert pending.result().kind == "gradient"


def ddp_diffs(folder: Path) -> None:
    """Steps of replicas."""
    stepwise(folder, "ddp_diffs", nn.parallel.DistributedDataParallel(model()))


def ddp_sums(folder: Path) -> None:
    """Gradients of replicas, summed up: each rank has those of its share."""
    net = nn.parallel.DistributedDataParallel(model())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    diffs = ckptstore.DiffOptions(batch=3, accumulate="sum", seconds=None)
    with ckptstore.open(folder / "ddp_sums").writer(group=dist.group.WORLD, ranks=OPTIONS, diffs=diffs) as writer:
        pending = []
        for step in range(1, 8):
            torch.manual_seed(step)
            net(torch.randn(5, 13)).square().mean().backward()
            optimizer.step()
            state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
            pending.append(writer.save_async(state, step, updates=OptimizerStep(optimizer)))
            optimizer.zero_grad()
    assert [one.result().step for one in pending] == [1, 4, 4, 4, 7, 7, 7]
    if dist.get_rank() == 0:
        torch.save(net.state_dict(), folder / "ddp_sums.pt")


def fsdp_diffs(folder: Path) -> None:
    """Steps of FSDP2's shards, uneven; then filled into a differently sharded model, and continued."""
    net = model()
    for layer in (net[0], net[2], net):
        fully_shard(layer)
    stepwise(folder, "fsdp_diffs", net)
    half = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    other = model(seed=1)
    fully_shard(other, mesh=half)
    other, optimizer = trained(other)
    store = ckptstore.open(folder / "fsdp_diffs")
    for step in (4, 8):
        state = {"model": other.state_dict(), "optimizer": optimizer.state_dict()}
        store.load(step, into=state, select=["model.*", "optimizer.*"], rank=dist.get_rank())
        found = plain({"model": other.state_dict()})["model"]
        saved = torch.load(folder / f"fsdp_diffs-step-{step}.pt", weights_only=True) if dist.get_rank() == 0 else None
        if saved is not None:
            assert all(torch.equal(found[name], tensor) for name, tensor in saved["model"].items())


def _figure(key: str) -> int:
    """A figure of this process in bytes, as the system counts it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))


def bounded_memory(folder: Path) -> None:
    """The memory of a rank beyond its state of 96 MiB in shards: with a budget of half of that, and without one."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    names = [f"p{number}" for number in range(4)]
    local = {slot: {name: torch.full((2048, 1024), 1e-9) for name in names} for slot in ("w", "m", "v")}
    gradients = {name: torch.randn(2048, 1024) * 1e-3 for name in names}
    state = {
        slot: {name: DTensor.from_local(part, mesh, [Shard(0)]) for name, part in own.items()}
        for slot, own in local.items()
    }

    def moved(step: int) -> list[Update]:
        adam, numbers, updates = optim.AdamW(), optim.Step(count=step, lr=1e-4), []
        for name in names:
            parts, gradient = [local[slot][name].numpy() for slot in ("w", "m", "v")], gradients[name].numpy()
            optim.advance(adam.rule(numbers), parts, gradient)
            slots = (f"w.{name}", f"m.{name}", f"v.{name}")
            updates.append(Update(slots, adam, numbers, NumpySource(gradient)))
        return updates

    # The first is not measured: it includes one-time allocations of the process.
    steps = 0
    for mode, coding in (("plain", {}), ("deltas", {"deltas": 1}), ("diffs", {"diffs": ckptstore.DiffOptions()})):
        told: dict[str, int] = {}
        kinds = [("first", 48 << 20), ("free", None), ("bounded", 48 << 20)]
        for kind, memory in kinds if mode == "plain" else [("bounded", 48 << 20)]:
            how: dict[str, Any] = {"memory": memory, "staging_bytes": 32 << 20, "ranks": OPTIONS, **coding}
            own = _figure("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")
            with ckptstore.open(folder / f"{kind}-{mode}").writer(group=dist.group.WORLD, **how) as writer:
                for _ in range(1 if kind == "first" else 2):
                    steps += 1
                    updates = moved(steps)
                    writer.save_async(state, steps, updates=updates if mode == "diffs" else None)
                    dist.all_reduce(torch.ones(10))  # training's own, beside the data that is copied and written
            told[kind] = _figure("VmHWM") - own
            if kind == "bounded":
                weights = plain(state["w"])
                if dist.get_rank() == 0:
                    torch.save(weights, folder / f"{kind}-{mode}.pt")
                del weights
            else:
                dist.barrier()
                if dist.get_rank() == 0:  # it is not measured, and it is large
                    shutil.rmtree(folder / f"{kind}-{mode}")
        (folder / f"bounded-{mode}-{dist.get_rank()}.json").write_text(json.dumps(told))


SCENARIOS: dict[str, Callable[[Path], None]] = {
    one.__name__: one
    for one in (
        ddp,
        fsdp,
        hsdp,
        tensor_parallel,
        both,
        placements,
        diverged,
        ddp_diffs,
        ddp_sums,
        fsdp_diffs,
        fsdp_stored_bases,
        bounded_memory,
    )
}


def main() -> None:
    """One rank."""
    port, rank, size, folder, *names = sys.argv[1:]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "WORLD_SIZE": size}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for name in names:
        SCENARIOS[name](Path(folder))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
