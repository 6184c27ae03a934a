"""Host memory and stalls by mode of the writer: ``python -m tools.bench.storage.memory``.

A training loop with AdamW's state (weights, two moments, all fp32) of --size bytes saves after every step with
`Writer.save_async`. Every mode runs in a fresh process: its memory is untouched, and its own high-water mark
(``VmHWM``, reset before the writer is opened) shows how much memory the writer has added to the trainer's. ``first`` is
the first save's stall, ``warm`` the median of later saves that are stored in the same way; ``waited`` is the part of a
stall that was spent waiting for memory or for earlier saves. Every step is loaded again, and compared by the hash of
each of its tensors.

Between two saves the loop waits until the first is durable, or with --busy only computes the next step.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import xxhash
from rich.console import Console
from rich.table import Table

from ckptstore.formats import optim
from ckptstore.formats.sources import NumpySource
from ckptstore.store import open as open_store
from ckptstore.write.policy.delta_options import DeltaOptions
from ckptstore.write.policy.diff_options import DiffOptions
from ckptstore.write.saves.save_metrics import SaveMetrics
from ckptstore.write.steps.updates import Update
from tools.bench import machine
from tools.bench.storage.save_load import parse_size

ADAM = optim.AdamW(beta1=0.9, beta2=0.95, weight_decay=0.1)
MODES = ("fulls", "fulls M", "deltas", "deltas M", "diffs", "diffs M")
_TENSOR = 9 << 20
_FULL_EVERY = 3


@dataclass(frozen=True, slots=True)
class Sample:
    """One process: bytes of memory, seconds, of each step in order.

    Attributes:
        state: bytes of the state.
        own: the trainer's memory, before the writer was opened.
        peak: the most beyond that.
        kinds, stalls, waited, durable: of each save.
        exact: whether every step was restored bit by bit.
    """

    mode: str
    state: int
    own: int
    peak: int
    kinds: list[str]
    stalls: list[float]
    waited: list[float]
    durable: list[float]
    exact: bool

    def warm(self, kind: str | None = None) -> float:
        """The median stall of all saves of a kind but the first; None: of the first save's kind."""
        wanted = self.kinds[0] if kind is None else kind
        later = [stall for one, stall in zip(self.kinds[1:], self.stalls[1:], strict=True) if one == wanted]
        return statistics.median(later) if later else float("nan")


class _Trainer:
    """AdamW on made-up gradients: an embedding of a tenth of the parameters, and matrices of 9 MiB."""

    def __init__(self, nbytes: int) -> None:
        count = nbytes // 12
        rows = {"embedding": count // 10} | {f"w{n}": _TENSOR // 4 for n in range(int(count * 0.9) // (_TENSOR // 4))}
        rows |= {f"b{n}": 768 for n in range(100)}
        self._rng = np.random.default_rng(0)
        table = self._rng.standard_normal(1 << 22).astype("<f4")
        self.weights = {name: np.resize(table, size) * np.float32(0.02) for name, size in rows.items()}
        self.m = {name: np.zeros(size, "<f4") for name, size in rows.items()}
        self.v = {name: np.zeros(size, "<f4") for name, size in rows.items()}
        self.gradients = {name: np.zeros(size, "<f4") for name, size in rows.items()}
        self._table = table * np.float32(1e-3)
        self.step = 0

    @property
    def state(self) -> dict[str, Any]:
        """The saved state."""
        return {"weight": self.weights, "exp_avg": self.m, "exp_avg_sq": self.v, "step": self.step}

    def train(self) -> None:
        """Take one step."""
        self.step += 1
        rule = ADAM.rule(self._numbers())
        for name, gradient in self.gradients.items():
            at = int(self._rng.integers(1 << 21))
            for start in range(0, len(gradient), 1 << 21):
                part = gradient[start : start + (1 << 21)]
                part[:] = self._table[at : at + len(part)]
            optim.advance(rule, [self.weights[name], self.m[name], self.v[name]], gradient)

    def _numbers(self) -> optim.Step:
        return optim.Step(count=self.step, lr=1e-4)

    def updates(self) -> list[Update]:
        """The updates of the last step."""
        return [
            Update((f"weight.{name}", f"exp_avg.{name}", f"exp_avg_sq.{name}"), ADAM, self._numbers(), NumpySource(one))
            for name, one in self.gradients.items()
        ]


def _hashes(state: Mapping[str, Any]) -> dict[str, str]:
    return {
        f"{part}.{name}": xxhash.xxh3_64_hexdigest(array)
        for part in ("weight", "exp_avg", "exp_avg_sq")
        for name, array in state[part].items()
    }


def _status(key: str) -> int:
    """A field of this process's status in bytes: VmRSS, VmHWM."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) << 10
    raise LookupError(key)


def _options(mode: str, memory: int) -> dict[str, Any]:
    kind, _, bounded = mode.partition(" ")
    options: dict[str, Any] = {"memory": memory} if bounded else {}
    if kind == "deltas":
        options["deltas"] = DeltaOptions(interval=1)
    elif kind == "diffs":
        options["diffs"] = DiffOptions(full_every=_FULL_EVERY)
    return options


def run(mode: str, folder: Path, nbytes: int, memory: int, saves: int, busy: bool, ahead: int = 1) -> Sample:
    """Run one mode in this process, which should be a fresh one."""
    trainer = _Trainer(nbytes)
    trainer.train()
    size = sum(array.nbytes for part in (trainer.weights, trainer.m, trainer.v) for array in part.values())
    store = open_store(folder / "store", create=True)
    told: list[SaveMetrics] = []
    truth: dict[int, dict[str, str]] = {}
    own = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    with store.writer(poll_seconds=None, on_metrics=told.append, **_options(mode, memory)) as writer:
        writer.prepare(trainer.state)
        for _ in range(ahead - 1):
            trainer.train()
        for _ in range(saves):
            trainer.train()
            truth[trainer.step] = _hashes(trainer.state)
            updates = trainer.updates() if mode.startswith("diffs") else None
            pending = writer.save_async(trainer.state, trainer.step, updates=updates)
            if not busy:
                pending.result()
    peak = _status("VmHWM") - own
    exact = all(_hashes(store.load(step, framework="numpy")) == hashes for step, hashes in truth.items())
    told.sort(key=lambda one: one.step)
    return Sample(
        mode,
        size,
        own,
        peak,
        [one.kind or "failed" for one in told],
        [one.stall for one in told],
        [one.waited for one in told],
        [one.durable for one in told],
        exact,
    )


def _show(console: Console, samples: list[Sample], memory: int) -> None:
    table = Table(
        title=f"memory above the trainer's own, as multiples of the state; M = {memory / 1e6:.0f} MB; seconds"
    )
    table.add_column("mode")
    for column in ("peak", "peak - M", "first", "warm", "first/warm", "warm coded", "waited", "durable", "exact"):
        table.add_column(column, justify="right")
    for sample in samples:
        coded = next((kind for kind in sample.kinds if kind != "full"), "full")
        beside = sample.peak - (memory if sample.mode.endswith("M") else 0)
        table.add_row(
            sample.mode,
            f"{sample.peak / sample.state:.2f}",
            f"{beside / sample.state:.2f}",
            f"{sample.stalls[0]:.2f}",
            f"{sample.warm():.2f}",
            f"{sample.stalls[0] / sample.warm():.2f}",
            f"{sample.warm(coded):.2f}",
            f"{statistics.median(sample.waited[1:]):.2f}",
            f"{statistics.median(sample.durable[1:]):.2f}",
            "yes" if sample.exact else "NO",
        )
    console.print(table)


@click.command(context_settings={"max_content_width": 110})
@click.option("--size", default="500MB", show_default=True, help="Bytes of the state.")
@click.option("--memory", default="256MB", show_default=True, help="M of the modes that have one.")
@click.option("--saves", default=7, show_default=True, type=click.IntRange(min=4), help="Saves of each process.")
@click.option("--rounds", default=1, show_default=True, type=click.IntRange(min=1), help="Processes of each mode.")
@click.option(
    "--ahead",
    type=click.IntRange(min=1),
    default=1,
    help="Steps between `Writer.prepare` and the first save: memory is touched meanwhile.",
)
@click.option("--busy", is_flag=True, help="Start a save while the previous one is in flight.")
@click.option("--only", multiple=True, metavar="MODE", help=f"One of: {', '.join(MODES)}; repeatable.")
@click.option("--dir", "parent", default=Path("bench-out"), type=click.Path(path_type=Path), help="Where stores are.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON instead of a table.")
@click.option("--here", hidden=True, help="Run this mode in this process, and print its sample.")
def main(
    size: str,
    memory: str,
    saves: int,
    rounds: int,
    busy: bool,
    ahead: int,
    only: tuple[str, ...],
    parent: Path,
    as_json: bool,
    here: str | None,
) -> None:
    """Peak host memory and stalls of each mode of the writer, each in a separate process.

    A process needs about four times --size of memory, and --saves times --size on disk.
    """
    nbytes, budget = parse_size(size), parse_size(memory)
    parent.mkdir(parents=True, exist_ok=True)
    if here is not None:
        folder = Path(tempfile.mkdtemp(prefix="scratch-", dir=parent))
        try:
            click.echo(json.dumps(asdict(run(here, folder, nbytes, budget, saves, busy, ahead))))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return
    modes = only or MODES
    if not set(modes) <= set(MODES):
        raise click.BadParameter(", ".join(MODES), param_hint="--only")
    samples: list[Sample] = []
    began = time.time()
    for turn in range(rounds):
        for number in range(len(modes)):
            mode = modes[(number + turn) % len(modes)]
            command = [
                sys.executable,
                "-m",
                "tools.bench.storage.memory",
                "--here",
                mode,
                "--size",
                size,
                "--memory",
                memory,
            ]
            command += [
                "--saves",
                str(saves),
                "--ahead",
                str(ahead),
                "--dir",
                str(parent),
                *(["--busy"] if busy else []),
            ]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            samples.append(Sample(**json.loads(done.stdout)))
    samples.sort(key=lambda sample: MODES.index(sample.mode))
    if as_json:
        document = {
            "benchmark": "memory",
            "machine": machine.describe(parent),
            "settings": {
                "size": nbytes,
                "memory": budget,
                "saves": saves,
                "rounds": rounds,
                "busy": busy,
                "ahead": ahead,
            },
            "seconds": time.time() - began,
            "results": [asdict(sample) for sample in samples],
        }
        click.echo(json.dumps(document))
    else:
        _show(Console(width=140), samples, budget)
    if not all(sample.exact for sample in samples):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
