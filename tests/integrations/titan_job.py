"""A rank of a job with torchtitan's own checkpoint manager, optimizers and schedulers. The loop is that of its trainer.

    python titan_job.py STORE RANK SIZE PORT LAST MODE PACE

Prints each loss in hex as it is computed. The trainer itself needs an accelerator.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

from ckptstore.integrations.torchtitan import CkptstoreManager


class Data:
    """A loader with a state, as torchtitan's: each rank has its own, in one state dict."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.read = rank, size, 0

    def next(self) -> torch.Tensor:
        chance = torch.Generator().manual_seed(self.read * self.size + self.rank)
        self.read += 1
        return torch.randn(8, 16, generator=chance)

    def state_dict(self) -> dict[str, Any]:
        return {f"dp_rank_{self.rank}": {"read": self.read}, "world_size": self.size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.read = state[f"dp_rank_{self.rank}"]["read"]


class Train:
    """The part of the trainer that is saved as ``train_state``."""

    step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": 128 * self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def main(folder: str, rank: int, size: int, port: int, last: int, mode: str, pace: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
    fully_shard(model)
    groups = [ParamGroupConfig(pattern=r".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2})]
    optimizers = OptimizersContainer.Config(param_groups=groups, implementation="for-loop").build(model_parts=[model])
    schedulers = LRSchedulersContainer.Config(warmup_steps=4).build(optimizers=optimizers, training_steps=40)
    data, train = Data(rank, size), Train()
    manager = CkptstoreManager.Config(
        enable=True, folder=folder, interval=2, async_mode=mode, keep_latest_k=3, last_save_model_only=False
    ).build(
        dataloader=data,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": train},
        sd_adapter=None,
        base_folder="",
    )
    manager.load(step=-1)
    print("from", train.step, flush=True)
    while train.step < last:
        train.step += 1
        loss = model(data.next()).square().mean()
        optimizers.zero_grad()
        loss.backward()
        optimizers.step()
        schedulers.step()
        print(train.step, loss.item().hex(), flush=True)
        manager.save(train.step, last_step=train.step == last)
        time.sleep(pace)
    manager.maybe_wait_for_saving()
    manager.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    place, rank, size, port, last, mode, pace = sys.argv[1:]
    main(place, int(rank), int(size), int(port), int(last), mode, float(pace))
