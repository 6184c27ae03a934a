"""Ranks that train until they are killed, and note each step that they have given: one process for each.

python -m tests.write.lost_job PORT RANK SIZE FOLDER JOB
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import ckptstore
from ckptstore.backends.local_disk.local import LocalBackend
from ckptstore.host.arenas import LEAST
from ckptstore.training import Checkpointer

__all__ = ["BATCH", "IN_FLIGHT", "SLOW"]

IN_FLIGHT: Final = 2
BATCH: Final = 3
SLOW: Final = 0.03
"""Seconds for which a medium creates a slot, and so commits."""
_OPTIONS: Final = ckptstore.RankOptions(timeout=60, per_rank="rng")


def slow_medium() -> None:
    """Delay commits in this process."""
    create = LocalBackend.create

    def late(self: LocalBackend, key: str, data: bytes) -> Any:
        time.sleep(SLOW)
        return create(self, key, data)

    LocalBackend.create = late  # type: ignore[method-assign]


def saved(note: Callable[[int], None], store: Path, **how: Any) -> None:
    """A script with its own writer."""
    model = nn.Linear(30, 30)
    with ckptstore.open(store).writer(group=dist.group.WORLD, ranks=_OPTIONS, max_in_flight=IN_FLIGHT, **how) as writer:
        for step in range(1, 10**6):
            writer.save_async({"model": model.state_dict(), "rng": torch.arange(3) + dist.get_rank()}, step)
            note(step)


def trained(note: Callable[[int], None], store: Path, sharded: bool = False, **how: Any) -> None:
    """A script with a `Checkpointer`. It resumes. The model is replicated (DDP), or sharded (FSDP2)."""
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(30, 30)
    if sharded:
        fully_shard(model)
    else:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    with Checkpointer(
        store, model=model, optimizer=optimizer, max_in_flight=IN_FLIGHT, rank_timeout=60.0, **how
    ) as checkpointer:
        for step in range(checkpointer.resume() + 1, 10**6):
            model(torch.ones(2, 30)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step()
            note(step)


_DIFFS: Final = ckptstore.DiffOptions(full_every=20, batch=BATCH, seconds=None)
JOBS: Final[dict[str, Callable[[Callable[[int], None], Path], None]]] = {
    "fulls": saved,
    "bounded": lambda note, store: saved(note, store, memory=LEAST),
    "diffs": lambda note, store: saved(note, store, diffs=_DIFFS),
    "checkpointer": lambda note, store: trained(note, store, strategy="full", save_every=1),
    "batches": lambda note, store: trained(note, store, strategy="gradient", save_every=1, batch=BATCH),
    "sharded": lambda note, store: trained(note, store, True, strategy="full", save_every=1),
    "sharded-batches": lambda note, store: trained(note, store, True, strategy="gradient", save_every=1, batch=BATCH),
}


def main() -> None:
    """One rank. It ends when it is killed."""
    port, rank, size, folder, job = sys.argv[1:]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "WORLD_SIZE": size}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    slow_medium()
    given = os.open(Path(folder) / f"given-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    JOBS[job](lambda step: os.write(given, f"{step}\n".encode()) and None, Path(folder) / "store")


if __name__ == "__main__":
    main()
