"""LightCheck, Fig. 11 to 13: metadata apart from a contiguous region of tensors, against both mixed in a dictionary.

Shared memory stands for PM. *Mixed*: a dictionary is written as it comes, each tensor behind its pickled name, type and
shape, at whatever byte follows. *Separated*: metadata were written once; tensors lie at fixed places in the order of
access, small ones packed, others aligned to 128 bytes. Beside the time it counts the blocks of 128 bytes that are
written in part: over PCIe each is a request of its own, and on PM a read and a write of a whole line.
"""

from __future__ import annotations

import mmap
import pickle
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from tools.papers.result import Asked, Cell, Claim, Compared, Figure, Result, Table

__all__ = ["parted", "run"]

LINE: Final = 128
MODELS: Final[dict[str, list[tuple[int, ...]]]] = {
    "many small tensors": [(64,)] * 3000 + [(64, 64)] * 300,
    "a transformer": [
        part for _ in range(12) for part in ((256,), (256,), (768, 256), (256, 256), (1024, 256), (256, 1024))
    ],
    "a few large tensors": [(1 << 21,)] * 6,
}
"""Shapes of the tensors, of fp32."""


def run(asked: Asked) -> Result:
    """Run the experiment."""
    rounds = asked.pick(1, 7, 21)
    rows: list[tuple[Cell, ...]] = []
    equal, gains = 0, {}
    for name, shapes in MODELS.items():
        state = {f"layer{n}.tensor": torch.randn(shape) for n, shape in enumerate(shapes)}
        mixed, separated = _Mixed(state), _Separated(state)
        seconds: dict[str, list[float]] = {"mixed": [], "separated": []}
        for _ in range(rounds):
            for label, layout in (("mixed", mixed), ("separated", separated)):
                began = time.perf_counter()
                layout.write(state)
                seconds[label].append(time.perf_counter() - began)
        equal += all(
            np.array_equal(layout.read(key), one.numpy().reshape(-1))
            for layout in (mixed, separated)
            for key, one in state.items()
        )
        best = {label: min(found) for label, found in seconds.items()}
        gains[name] = best["mixed"] / best["separated"]
        rows.append(
            (
                *(name, len(state), sum(one.nbytes for one in state.values()) / 1e6, best["mixed"] * 1e3),
                *(best["separated"] * 1e3, "2.1-2.8x", gains[name], parted(mixed.spans), parted(separated.spans)),
            )
        )
        asked.told(f"{name}: {best['mixed'] * 1e3:.1f} ms mixed, {best['separated'] * 1e3:.1f} ms separated")
        mixed.close()
        separated.close()
    columns = (
        *("state", "tensors", "MB", "mixed ms", "separated ms", "paper", "faster"),
        *("lines written in part, mixed", "separated"),
    )
    formats = {"MB": ".1f", "mixed ms": ".2f", "separated ms": ".2f", "faster": ".2f"}
    return Result(
        tables=[Table("One checkpoint into mapped memory", columns, rows, formats)],
        claims=[
            Claim(
                "separated storage is 2.1 to 2.8 times faster",
                "2.1-2.8x",
                ", ".join(f"{name} {gain:.1f}x" for name, gain in gains.items()),
                max(gains.values()) >= 2.1,
                "the medium here is DRAM, written by a processor: there is no PCIe request to split and no line of PM "
                "to rewrite. The count of partly written lines shows what PM and PCIe would save",
                "large tensors gain nothing; small ones gain the pickling that is left out",
            ),
            Claim(
                "write amplification stays at 1 (separated)",
                "1x",
                ", ".join(f"{row[0]}: {row[8]} lines in part instead of {row[7]}" for row in rows),
                all(int(row[8] or 0) < int(row[7] or 0) for row in rows),
                "a tensor's last line is written in part if its size is no multiple of 128",
            ),
            Claim(
                "GPU writes reach 3.5 GB/s with DDIO, 11.5 GB/s without; DDIO amplifies 2.6 to 3 times (Fig. 12, 13)",
                "3.5, 11.5 GB/s",
                "-",
                None,
                "it needs a GPU that writes to PM over PCIe. The processor's counterpart, cached stores that are "
                "flushed against non-temporal ones, is in docs/benchmarks.md (`make bench-pmem`)",
            ),
        ],
        figures=[
            Figure(
                "Time of a checkpoint",
                "bars",
                list(MODELS),
                {"mixed": [float(row[3] or 0) for row in rows], "separated": [float(row[4] or 0) for row in rows]},
                y="ms",
            ),
            Figure(
                "Lines of 128 bytes written in part",
                "bars",
                list(MODELS),
                {"mixed": [float(row[7] or 0) for row in rows], "separated": [float(row[8] or 0) for row in rows]},
            ),
        ],
        compared=[Compared("states read back from both layouts", len(MODELS), equal)],
        settings={"rounds": rounds, "line": LINE},
    )


class _Region:
    """Mapped shared memory, and where each tensor is: (place, length)."""

    def __init__(self, nbytes: int) -> None:
        path = Path("/dev/shm")
        self._map = mmap.mmap(-1, nbytes) if not path.is_dir() else mmap.mmap(-1, nbytes, flags=mmap.MAP_SHARED)
        self.memory = np.frombuffer(self._map, np.uint8)
        self.memory[:] = 0  # touched
        self.spans: dict[str, tuple[int, int]] = {}

    def read(self, name: str) -> Any:
        """The numbers of a tensor."""
        at, length = self.spans[name]
        return np.frombuffer(self.memory[at : at + length].tobytes(), np.float32)

    def put(self, at: int, tensor: torch.Tensor) -> None:
        """Write a tensor's bytes."""
        data = tensor.numpy().reshape(-1).view(np.uint8)
        self.memory[at : at + len(data)] = data

    def close(self) -> None:
        """Unmap it."""
        del self.memory
        self._map.close()


class _Mixed(_Region):
    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        super().__init__(sum(one.nbytes + 512 for one in state.values()))

    def write(self, state: dict[str, torch.Tensor]) -> None:
        at = 0
        for name, tensor in state.items():
            head = pickle.dumps({"name": name, "dtype": str(tensor.dtype), "shape": tuple(tensor.shape)})
            self.memory[at : at + len(head)] = np.frombuffer(head, np.uint8)
            at += len(head)
            self.put(at, tensor)
            self.spans[name] = at, tensor.nbytes
            at += tensor.nbytes


class _Separated(_Region):
    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        super().__init__(sum(one.nbytes + LINE for one in state.values()))
        at = 0
        for name, tensor in state.items():
            if tensor.nbytes > LINE:
                at = -(-at // LINE) * LINE
            self.spans[name] = at, tensor.nbytes
            at += tensor.nbytes

    def write(self, state: dict[str, torch.Tensor]) -> None:
        for name, tensor in state.items():
            self.put(self.spans[name][0], tensor)


def parted(spans: dict[str, tuple[int, int]]) -> int:
    """How many lines are written in part: by a tensor that begins or ends inside of one."""
    found = 0
    for at, length in spans.values():
        found += (at % LINE > 0) + ((at + length) % LINE > 0)
    return found
