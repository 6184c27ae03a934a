"""A trainer of two ranks, as a process: it saves steps by its agent, reports them, and waits to be killed. Without
torch.

python -m tests.agent.rank_trainer STORE MAILBOX RANK LAST_STEP OPTIONS

OPTIONS are those of the writer, and ``memory``: the agent keeps the steps only in memory, like those of a replica;
``leaves``: the trainer does not wait to be killed, but ends with an exception; ``sharded``: each rank has half of the
rows of ``weights``.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

import ckptstore.agent
from ckptstore.agent.server.socket_mailbox import RemoteMailbox, ServedMailbox
from ckptstore.formats.sources import BoxSource
from ckptstore.formats.states.state import FlatState
from ckptstore.frameworks import bridge
from ckptstore.host.buffers import Bytes
from ckptstore.write.capture.snapshot import copy_jobs
from ckptstore.write.ranks.messages.key_value_store import Group
from ckptstore.write.ranks.rank_options import RankOptions
from ckptstore.write.steps.updates import Update
from tests.agent.inside import delivered

__all__ = ["OPTIONS", "state"]

OPTIONS = RankOptions(timeout=150, per_rank="rng")


def state(step: int, rank: int) -> dict[str, Any]:
    """A rank's state after so many steps: the same on all ranks, except for one tensor."""
    chance = np.random.default_rng(step)
    return {"weights": chance.normal(size=(300, 700)), "bias": np.full(9, step), "rng": np.full(3, 100 * rank + step)}


def save_sharded(writer: ckptstore.agent.AgentWriter, step: int, rank: int) -> None:
    """Save a rank's part of a state: half of the rows of ``weights``, and the other tensors."""
    flat = bridge.flattened(state(step, rank))
    whole = flat.tensors["weights"]
    rows = (whole.shape[0] // 2, *whole.shape[1:])
    shard = BoxSource(whole, rows, rank * whole.nbytes // 2, whole.shape, (rank * rows[0], 0))
    mine = FlatState(flat.tree, {**flat.tensors, "weights": shard})

    def fill(memory: Bytes, offsets: Sequence[int]) -> Sequence[Update]:
        places = zip(mine.tensors.values(), offsets, strict=True)
        for job in copy_jobs([(one, memory[start : start + one.nbytes]) for one, start in places]):
            job()
        return ()

    writer.save_filled(mine, step, fill)


def trainers(path: str, rank: int) -> Group:
    """The group of the trainers: its mailbox is in rank 0's process, and dies with it."""
    connection = socket.socket(socket.AF_UNIX)
    if rank == 0:
        connection.bind(path)
        connection.listen(8)
        return Group(0, 2, ServedMailbox(connection, b"t" * 32, 2, lambda _: None).box)
    while True:
        try:
            connection.connect(path)
            return Group(1, 2, RemoteMailbox(connection, b"t" * 32, 1, lambda _: None))
        except (FileNotFoundError, ConnectionRefusedError):
            time.sleep(0.01)


def main() -> None:
    """One rank."""
    url, path, rank, last, options = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
    group = trainers(path, rank)
    how = {"linger_seconds": 300, "max_in_flight": 8, **json.loads(options)}
    memory, leaves = how.pop("memory", False), how.pop("leaves", False)
    sharded = how.pop("sharded", False)
    apart = how.pop("apart", None)  # the step at which replicas differ
    with ckptstore.agent.writer(url, group=group, ranks=OPTIONS, **how) as writer:
        for step in range(1, last + 1):
            if memory:
                writer.hold(bridge.flattened(state(step, rank)), step)
            elif sharded:
                save_sharded(writer, step, rank)
            else:
                beside = {"bias": np.full(9, step + rank)} if step == apart else {}
                writer.save_async(state(step, rank) | beside, step)
        delivered(writer, last)
        print("delivered", flush=True)
        if leaves:
            raise RuntimeError("as in a script")
        time.sleep(300)


if __name__ == "__main__":
    main()
