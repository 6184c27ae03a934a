"""The store with PCcheck's settings as strategies: N saves in flight, p threads each, M bytes of memory, PMEM."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Final

from tools.baselines.strategy import Strategy
from tools.bench.training.training_strategies import Store

__all__ = ["PCCHECK"]


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
    **{f"pmem-{number}": _made(_Pmem, f"ckptstore, pmem://, N = {number}", in_flight=number) for number in (1, 2, 4)},
}
"""By name."""
