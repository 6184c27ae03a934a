"""Saving a small state after every step, beside ``torch.save`` + fsync + rename.

    python -m tools.bench.training.small

A linear layer of 64 x 64 with AdamW (59 kB). All ways take turns, step by step, each with its own model that takes the
same steps, so that other load affects all of them. Milliseconds a step: ``loop`` is the time between the end of
``optimizer.step()`` and the return of the save's call (``torch.save`` returns when its file is durable; a
`Checkpointer`, when the state may change), ``cpu`` the processor time of the whole process until everything was
durable. At the end each stored state is loaded and compared, bit for bit.

``calls`` are the system calls alone by which ``full`` makes a checkpoint durable (SPEC.md 10, COMMIT), with the same
number of bytes: the least processor time that any implementation of this protocol takes on this disk.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import shutil
import statistics
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import click
import torch

import ckptstore
from ckptstore.training import Checkpointer

__all__ = ["WAYS", "Row", "main", "measure"]

STRATEGIES: Final = ("full", "delta", "gradient")
WAYS: Final = ("torch.save", "calls", *STRATEGIES)
_SEGMENT: Final = 15 * 4096
_HEADER: Final = 4096
_RECORD: Final = 654
_KEPT: Final = 10


@dataclass(frozen=True, slots=True)
class Row:
    """One way. Milliseconds a step; ``ratio`` is to torch.save's `loop` in the same step, the median of it."""

    way: str
    loop: float
    cpu: float
    ratio: float
    threads: int


class _Way:
    """A model that is saved in one way."""

    def __init__(self, way: str, folder: Path) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(64, 64)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.path = folder / way
        self.checkpointer: Checkpointer | None = None
        threads = threading.active_count()
        if way in STRATEGIES:
            self.checkpointer = Checkpointer(
                self.path, model=self.model, optimizer=self.optimizer, strategy=way, keep=["last:10"]
            )
            self.checkpointer.resume()
        else:
            self.path.mkdir()
        self.train(0)
        self.save()
        self.wait()
        self.threads = threading.active_count() - threads

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def train(self, step: int) -> None:
        self.optimizer.zero_grad()
        inputs = torch.randn(16, 64, generator=torch.Generator().manual_seed(step))
        self.model(inputs).square().mean().backward()
        self.optimizer.step()

    def save(self) -> None:
        if self.checkpointer is not None:
            self.checkpointer.step()
            return
        with open(self.path / "new.pt", "wb") as file:
            torch.save(self.state(), file)
            file.flush()
            os.fsync(file.fileno())
        (self.path / "new.pt").replace(self.path / "state.pt")
        folder = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def wait(self) -> None:
        if self.checkpointer is not None:
            self.checkpointer.wait()

    def check(self) -> None:
        """Raise `AssertionError` unless the stored state equals the model's."""
        if self.checkpointer is None:
            stored = torch.load(self.path / "state.pt", weights_only=True)["model"]
        else:
            self.checkpointer.close()
            with ckptstore.open(self.path) as store:
                stored = store.load()["model"]
        for name, one in self.model.state_dict().items():
            assert torch.equal(one, torch.as_tensor(stored[name])), f"{self.path.name}: {name} differs"


class _Calls(_Way):
    """The system calls of fulls, of which the newest are kept."""

    def __init__(self, folder: Path) -> None:
        self._segments: list[str] = []
        self._count = 0
        super().__init__("calls", folder)

    def save(self) -> None:
        if not self._count:
            for name in ("seg", "log"):
                (self.path / name).mkdir()
            self._folders = [os.open(self.path / name, os.O_RDONLY) for name in ("seg", "log")]
            self._memory = mmap.mmap(-1, _HEADER + _SEGMENT)  # aligned, for O_DIRECT
            self._memory.write(os.urandom(len(self._memory)))
        self._count += 1
        seg, log = self._folders
        name, view = f"{self._count:032x}.safetensors", memoryview(self._memory)
        # COMMIT step 1: the segment, its header last, is durable with its name.
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, dir_fd=seg)
        direct = _opened_direct(name, seg)
        os.posix_fallocate(file, 0, len(view))
        os.pwrite(direct, view[_HEADER:], _HEADER)
        os.pwrite(direct, view[:_HEADER], 0)
        os.fdatasync(file)
        os.close(direct)
        os.close(file)
        os.fsync(seg)
        # Step 2: the slot is created if absent, and durable with its name.
        file = os.open(".tmp", os.O_WRONLY | os.O_CREAT | os.O_EXCL, dir_fd=log)
        os.pwrite(file, view[:_RECORD], 0)
        os.fsync(file)
        os.close(file)
        os.link(".tmp", f"{self._count:020}", src_dir_fd=log, dst_dir_fd=log)
        os.fsync(log)
        os.unlink(".tmp", dir_fd=log)
        self._segments.append(name)
        if len(self._segments) > _KEPT:
            os.unlink(self._segments.pop(0), dir_fd=seg)

    def check(self) -> None:
        """Release what the calls need. They store no state."""
        for folder in self._folders:
            os.close(folder)
        self._memory.close()


def _opened_direct(name: str, folder: int) -> int:
    try:
        return os.open(name, os.O_WRONLY | os.O_DIRECT, dir_fd=folder)
    except OSError:  # a file system without it
        return os.open(name, os.O_WRONLY, dir_fd=folder)


def measure(folder: Path, steps: int, *, back_to_back: bool = False) -> list[Row]:
    """Save every way in turns, `steps` times.

    Args:
        back_to_back: the next step begins at once; otherwise once the previous one is durable.
    """
    torch.set_num_threads(1)  # OpenMP's threads spin after a step, and that would count as processor time of the save
    ways = {way: _Calls(folder) if way == "calls" else _Way(way, folder) for way in WAYS}
    loop: dict[str, list[float]] = {way: [] for way in WAYS}
    cpu: dict[str, list[float]] = {way: [] for way in WAYS}
    for step in range(1, steps + 1):
        for way, one in ways.items():
            one.train(step)
            began, used = time.perf_counter(), time.process_time()
            one.save()
            loop[way].append((time.perf_counter() - began) * 1e3)
            if not back_to_back:
                one.wait()
            cpu[way].append((time.process_time() - used) * 1e3)
    for one in ways.values():
        one.check()
    return [
        Row(
            way,
            statistics.median(loop[way]),
            statistics.median(cpu[way]),
            statistics.median(mine / its for mine, its in zip(loop[way], loop["torch.save"], strict=True)),
            one.threads,
        )
        for way, one in ways.items()
    ]


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path), required=False)
@click.option("--steps", type=click.IntRange(2), default=200)
@click.option("--back-to-back", is_flag=True, help="wait for no save between steps")
@click.option("--json", "as_json", is_flag=True)
def main(folder: Path | None, steps: int, back_to_back: bool, as_json: bool) -> None:
    """Run the command: see the module."""
    logging.basicConfig(level=logging.ERROR)
    place = Path(tempfile.mkdtemp(prefix="bench-small-", dir=folder))
    try:
        rows = measure(place, steps, back_to_back=back_to_back)
    finally:
        shutil.rmtree(place)
    if as_json:
        click.echo(json.dumps([asdict(row) for row in rows], indent=2))
        return
    click.echo(f"{'way':12}{'loop ms':>10}{'ratio':>8}{'cpu ms':>10}{'threads':>9}")
    for row in rows:
        click.echo(f"{row.way:12}{row.loop:10.2f}{row.ratio:8.2f}{row.cpu:10.2f}{row.threads:9}")


if __name__ == "__main__":
    main()
