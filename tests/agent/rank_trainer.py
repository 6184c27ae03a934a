"""A trainer of two ranks, as a process: it saves steps by its agent, says so, and waits to be killed. Without torch.

python -m tests.agent.rank_trainer STORE MAILBOX RANK LAST_STEP OPTIONS
"""

from __future__ import annotations

import json
import socket
import sys
import time
from typing import Any

import numpy as np

import ckptstore.agent
from ckptstore.agent.mailboxes import RemoteMailbox, ServedMailbox
from ckptstore.write.ranks.mailbox import Group
from ckptstore.write.ranks.options import RankOptions
from tests.agent.inside import delivered

__all__ = ["OPTIONS", "state"]

OPTIONS = RankOptions(timeout=60, per_rank="rng")


def state(step: int, rank: int) -> dict[str, Any]:
    """What a rank has after so many steps: alike on all ranks, but for one tensor."""
    chance = np.random.default_rng(step)
    return {"weights": chance.normal(size=(300, 700)), "bias": np.full(9, step), "rng": np.full(3, 100 * rank + step)}


def trainers(path: str, rank: int) -> Group:
    """The group of the trainers: its mailbox is in rank 0's process, and dies with that."""
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
    how = {"linger_seconds": 120, "max_in_flight": 8, **json.loads(options)}
    writer = ckptstore.agent.writer(url, group=group, ranks=OPTIONS, **how)
    for step in range(1, last + 1):
        writer.save_async(state(step, rank), step)
    delivered(writer, last)
    print("delivered", flush=True)
    time.sleep(120)


if __name__ == "__main__":
    main()
