"""A training loop that saves every step through torch.distributed.checkpoint, in one process.

    python -m tests.integrations.dcp_loop STORE LOSSES WORKERS

Dropout, a shuffled loader, two micro-batches in a step. As with any writer of DCP, the script itself says what is part
of its state: also its generators and the position in the epoch.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from ckptstore.integrations.dcp import CkptstoreReader, CkptstoreWriter

__all__ = ["STEPS", "train"]

STEPS = 24
_ACCUMULATED = 2
_BATCH = 4


def train(store: str, losses: Path, workers: int) -> None:
    """Train from the newest checkpoint, and append each loss in hex before its step is saved."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data: Any = torch.randn(80, 8, generator=torch.Generator().manual_seed(1))
    order = torch.Generator().manual_seed(2)
    loader = torch.utils.data.DataLoader(data, _BATCH, shuffle=True, num_workers=workers, generator=order)

    def state(**more: Any) -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments, "random": torch.get_rng_state(), **more}

    step, at, begun, random = 0, 0, order.get_state(), None
    if Path(store, "FORMAT").exists():
        found = state(step=0, at=0, order=begun)
        dcp.load(found, storage_reader=CkptstoreReader(store), no_dist=True)
        set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
        step, at, random = found["step"], found["at"], found["random"]
        order.set_state(found["order"])
    while step < STEPS:
        begun = order.get_state()
        for number, batch in enumerate(loader, 1):
            if number <= at:
                continue
            if random is not None:
                torch.set_rng_state(random)
                random = None
            loss = (model(batch) - batch).square().mean()
            loss.backward()
            if number % _ACCUMULATED:
                continue
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            with losses.open("a") as file:
                file.write(f"{step} {loss.item().hex()}\n")
            writer = CkptstoreWriter(store, step, deltas=4)
            dcp.save(state(step=step, at=number, order=begun), storage_writer=writer, no_dist=True)
            if step == STEPS:
                return
        at = 0


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    train(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
