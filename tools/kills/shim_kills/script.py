"""The script of a training run with every supported part: one process, or one rank of several.

It reports its progress on standard output, one line each: ``resumed STEP``, ``agent PID``, ``loss STEP BITS``, ``given
STEP`` (the writer has accepted it), ``durable STEP``, ``end DIGEST``. Warnings and the log of ckptstore go to standard
error, with the time.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import random
import signal
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np

from tools.kills.shim_kills.broken import BROKEN
from tools.kills.shim_kills.digests import digest

__all__ = ["LONGEST", "STEPS"]

STEPS: Final = 24
LONGEST: Final = 300
"""Timeout of a life in seconds: long, because the machine may be busy."""
_RANK_TIMEOUT: Final = 60.0
_LINGER: Final = 120.0


def tell(line: str) -> None:
    """Print one line and flush it."""
    os.write(1, f"{line}\n".encode())


def train(asked: argparse.Namespace) -> None:
    """Train to the last step."""
    import torch

    from ckptstore.training import Checkpointer, TopKHook

    torch.set_num_threads(1)
    random.seed(asked.rank)
    np.random.seed(asked.rank)
    torch.manual_seed(0)
    bare, model, ema = models(asked)
    optimizer = torch.optim.AdamW(bare.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=STEPS + 1)
    data = torch.utils.data.TensorDataset(torch.randn(80, 48, generator=torch.Generator().manual_seed(asked.rank)))
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    hook = TopKHook(0.05) if asked.compressed else None
    if hook is not None and asked.ranks > 1:
        hook.register(model)
    with Checkpointer(
        asked.store,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        loader=loader,
        strategy=asked.strategy,
        extra={"ema": ema},
        compressor=hook,
        full_every=8,
        rank_timeout=_RANK_TIMEOUT,
        agent=asked.agent,
        linger_seconds=_LINGER,
    ) as checkpointer:
        start = checkpointer.resume()
        tell(f"resumed {start}")
        if asked.agent:
            tell(f"agent {checkpointer.agent_pid}")
        batches = endless(checkpointer.loader)
        for step in range(start, STEPS):
            (x,) = next(batches)
            loss = (model(x + 0.1 * np.random.random()) - x * random.random()).square().mean()
            loss.backward()
            if hook is not None and asked.ranks == 1:
                hook.compress(bare.parameters())
            torch.nn.utils.clip_grad_norm_(bare.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            ema.update_parameters(bare)
            tell(f"loss {step} {loss.item().hex()}")
            pending = checkpointer.step(metrics={"loss": loss})
            assert pending is not None or asked.strategy == "replica"  # the agent has it in memory
            tell(f"given {step + 1}")
            if asked.agent:
                tell(f"agent {checkpointer.agent_pid}")
            if pending is not None:
                pending.when_done(lambda durable, step=step: tell(f"durable {step + 1}") if durable else None)
        checkpointer.wait()
        parts = [bare.state_dict(), optimizer.state_dict(), scheduler.state_dict(), ema.state_dict()]
        parts += [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()]
        if hook is not None:
            parts.append([*hook.state_dict()["residuals"].values()])
        last = digest(parts)
    tell(f"end {last}")
    if asked.ranks > 1:
        torch.distributed.destroy_process_group()


def models(asked: argparse.Namespace) -> tuple[Any, Any, Any]:
    """(the model, the wrapped model that is called, its moving average); with ranks, in their group."""
    import torch

    hidden = 193 if asked.sharded else 96  # an agent does not compute shards of less than 16 KiB
    bare = torch.nn.Sequential(
        torch.nn.Linear(48, hidden), torch.nn.BatchNorm1d(hidden), torch.nn.Dropout(0.1), torch.nn.Linear(hidden, 48)
    )
    model: Any = bare
    ema = torch.optim.swa_utils.AveragedModel(bare, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    if asked.ranks > 1:
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{asked.port}",
            rank=asked.rank,
            world_size=asked.ranks,
            timeout=timedelta(seconds=_RANK_TIMEOUT),
        )
        torch.manual_seed(asked.rank)
        if asked.sharded:
            import torch.distributed.fsdp

            for one in (bare[3], bare, ema.module):
                torch.distributed.fsdp.fully_shard(one)
        else:
            model = torch.nn.parallel.DistributedDataParallel(model, broadcast_buffers=True)
    return bare, model, ema


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--strategy", required=True)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--agent", action="store_true")
    parser.add_argument("--sharded", action="store_true")
    parser.add_argument("--compressed", action="store_true")
    parser.add_argument("--broken", choices=sorted(BROKEN), help="a checkpointer that is wrong")
    asked = parser.parse_args()
    signal.alarm(LONGEST + 20)  # even if the harness dies
    faulthandler.register(signal.SIGUSR2, all_threads=True)  # print the stacks of a hanging process
    logging.basicConfig(format=f"%(asctime)s {os.getpid()} %(name)s %(levelname)s: %(message)s")
    logging.captureWarnings(capture=True)
    logging.getLogger("ckptstore").setLevel(logging.DEBUG)
    if asked.broken is not None:
        BROKEN[asked.broken]()
    train(asked)


if __name__ == "__main__":
    main()
