"""The store with PCcheck's settings as strategies: N saves in flight, p threads each, M bytes of memory, PMEM."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar, Final

from tools.baselines.strategy import Strategy
from tools.bench.training.training_cases import RANK
from tools.bench.training.training_strategies import Store

__all__ = ["PCCHECK", "Ranked"]


class _Threads(Store):
    threads: ClassVar[int] = 2

    def settings(self) -> dict[str, Any]:
        return {"threads": self.threads}


class _Memory(Store):
    """`part`: of the state's bytes, for copies that are not on the medium yet."""

    in_flight = 4
    part: ClassVar[float] = 2.0

    def settings(self) -> dict[str, Any]:
        return {"memory": int(self.part * 12 * self.trainer.parameters)}


class _Pmem(Store):
    def url(self, folder: Path) -> str:
        return f"pmem://{Path(super().url(folder)).resolve()}"

    def settings(self) -> dict[str, Any]:
        return {"keep": ["last:1"]}  # memory is used again, as in the paper's slots


class Ranked(Store):
    """One of several trainers that save together; all train the same. `RANK` in the environment says which it is."""

    label = "ckptstore, ranks, N = 2"
    in_flight = 2

    def settings(self) -> dict[str, Any]:
        from torch.distributed import TCPStore

        from ckptstore.frameworks.torch_ranks import StoreMailbox
        from ckptstore.write.ranks.messages.key_value_store import Group

        rank, size, port = map(int, os.environ[RANK].split(","))
        server = TCPStore("127.0.0.1", port, size, rank == 0, wait_for_workers=False)
        return {"group": Group(rank, size, StoreMailbox(server))}


def _made(base: type[Store], label: str, **members: Any) -> type[Strategy]:
    return type(label, (base,), {"label": label, **members})


PCCHECK: Final[dict[str, type[Strategy]]] = {
    **{
        f"n{number}-p{threads}": _made(
            _Threads, f"ckptstore, N = {number}, p = {threads}", in_flight=number, threads=threads
        )
        for number in (1, 2, 3, 4)
        for threads in (1, 2, 3)
    },
    **{
        f"memory-{percent}": _made(_Memory, f"ckptstore, M = {percent / 100:g} m", part=percent / 100)
        for percent in (100, 125, 150, 200)
    },
    "ranks": Ranked,
    **{f"pmem-{number}": _made(_Pmem, f"ckptstore, pmem://, N = {number}", in_flight=number) for number in (1, 2, 4)},
}
"""By name."""
